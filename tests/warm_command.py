"""`holdfast` in a forked process with everything imported; the holdfast processes that it starts are forked too.

A zygote runs it: `run_warm`, `WarmProcess`.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    from warm_children import fork_what_is_ours

    fork_what_is_ours()
    del sys.path[0]  # Remove this folder, because `python -m` would look in the working directory instead.
    sys.path.insert(0, "")

    from holdfast.cli import main

    sys.argv[0] = "holdfast"
    main()
