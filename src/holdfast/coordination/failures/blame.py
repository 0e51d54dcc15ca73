"""Whether it is the work's own fault that scripts raise: the same exception, wherever the work is done.

Pure: the same exceptions give the same answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from holdfast.coordination.failures.budget import WINDOW_S
from holdfast.protocol.names import node_of
from holdfast.protocol.record import RaisedBefore

#: What raises on so many nodes, wherever they stand, raises everywhere; in a smaller job, on all of them.
ENOUGH = 3


def nodes_that_agree(
    before: Sequence[RaisedBefore], last: RaisedBefore, nodes: int, *, machine: bool, ever: bool = False
) -> list[str]:
    """Return the nodes on which it was the work's fault, in their order; [] where it may be the last one's own.

    It is the work's where another node has met the same exception at the same micro-batch of the same step; or, as far
    as no machine can be to blame for such a thing, where enough nodes have met it anywhere, such as a line that only
    one rank comes to, or one before the first step. A job of one node has no other to compare with: there, twice.

    Args:
        nodes: how many the job has. machine: by its class, it may well be a machine's fault. ever: however long ago it
            was, since nothing has been committed yet.
    """
    until = -inf if ever else last.time - WINDOW_S
    same = [raised for raised in (*before, last) if raised.place == last.place and raised.time > until]
    at = [raised for raised in same if (raised.step, raised.micro_batch) == (last.step, last.micro_batch)]
    here = list(dict.fromkeys(node_of(raised.worker) for raised in at))
    if last.step is not None and len(here) > 1:
        return here
    if nodes < 2 and len(at) > 1:
        return here
    anywhere = list(dict.fromkeys(node_of(raised.worker) for raised in same))
    # (a job that has just shrunk to one node had others to compare with)
    return anywhere if not machine and len(anywhere) >= max(2, min(nodes, ENOUGH)) else []
