"""Which part of a model replica each member of a generation is; the ranks of one part are its domain."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.protocol.plan import WHOLE_REPLICA, Role


def assign_roles(workers: Sequence[str]) -> dict[str, Role]:
    """Return each worker's role, in the workers' order, which is that of their ranks.

    There is one role so far: each worker has a whole replica of the model.
    """
    return dict.fromkeys(workers, WHOLE_REPLICA)
