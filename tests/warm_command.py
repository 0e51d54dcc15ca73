"""`holdfast` in a process that was forked with everything imported; what it starts of ours is forked likewise.

Run by a zygote: `run_warm`, `WarmProcess`.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    from warm_children import fork_what_is_ours

    fork_what_is_ours()
    del sys.path[0]  # (this folder; where `python -m` would look first is whatever runs there)
    sys.path.insert(0, "")

    from holdfast.cli import main

    sys.argv[0] = "holdfast"
    main()
