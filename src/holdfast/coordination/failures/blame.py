"""Decides whether the work itself causes an exception: it occurs on every node that does the work.

Pure: the same exceptions give the same answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from holdfast.coordination.failures.budget import WINDOW_S
from holdfast.protocol.names import node_of
from holdfast.protocol.record import RaisedBefore

#: An exception on this many nodes, at any step, occurs everywhere; in a smaller job it must be all nodes.
ENOUGH_NODES = 3


def find_agreeing_nodes(
    before: Sequence[RaisedBefore], last: RaisedBefore, nodes: int, *, machine: bool, ever: bool = False
) -> list[str]:
    """Return the nodes on which the work itself caused the exception, in their order; [] if the node may be the cause.

    The work is the cause if another node has met the same exception at the same micro-batch of the same step. If no
    machine can cause such an exception, it is also enough that up to 3 nodes (all, in a smaller job) have met it
    anywhere. Examples are a line that only one rank reaches, or one before the first step. A job of one node cannot
    compare: there, twice is enough.

    Args:
        before: earlier exceptions; those older than the window count only with `ever`
        last: the newest exception
        nodes: number of nodes of the job
        machine: whether a machine can cause an exception of this class
        ever: Exceptions count however old they are, because nothing has been committed yet.
    """
    until = -inf if ever else last.time - WINDOW_S
    same = [raised for raised in (*before, last) if raised.place == last.place and raised.time > until]
    at = [raised for raised in same if (raised.step, raised.micro_batch) == (last.step, last.micro_batch)]
    agreeing = list(dict.fromkeys(node_of(raised.worker) for raised in at))
    if last.step is not None and len(agreeing) > 1:
        return agreeing
    if nodes < 2 and len(at) > 1:
        return agreeing
    anywhere = list(dict.fromkeys(node_of(raised.worker) for raised in same))
    # A job that has just shrunk to one node had other nodes to compare with.
    return anywhere if not machine and len(anywhere) >= max(2, min(nodes, ENOUGH_NODES)) else []
