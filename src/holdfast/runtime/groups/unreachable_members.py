"""Finds unreachable members, after a wait timed out."""

from __future__ import annotations

import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from holdfast.protocol.plan import GenerationPlan, Member

#: Seconds that a connection may take; longer than on any network on which training makes sense.
CONNECT_S = 1.0
#: How many members are tried at a time.
AT_ONCE = 32
#: No member is tried after this many seconds, so that the result is reported in time.
LONGEST_S = 5.0


def find_unreachable(
    plan: GenerationPlan,
    worker: str,
    connects: Callable[[str, int], bool] | None = None,
    now: Callable[[], float] = time.monotonic,
) -> tuple[str, ...]:
    """Connect to the state ports of members on other nodes, and return the workers of the members for which that fails,
    in rank order.

    Members without a state port are left out, and members that are not tried within `LONGEST_S`. One worker of each
    node is tried first, starting from this worker's rank, so that each member starts with different ones.

    Args:
        worker: the worker that asks; rank 0 is assumed for one outside the plan.
        connects: tries to connect to an address; None: opens a TCP connection and closes it.
        now: a clock, in seconds.
    """
    rank = plan.rank(worker) or 0
    own = plan.members[rank].node
    seen: Counter[str] = Counter()
    order: list[tuple[int, int, Member]] = []
    for distance, member in enumerate((*plan.members[rank:], *plan.members[:rank])):
        if member.node != own and member.state_port:
            order.append((seen[member.node], distance, member))
            seen[member.node] += 1
    members = [member for _, _, member in sorted(order, key=lambda entry: entry[:2])]
    failing = _find_failing(members, connects or _can_connect, now)
    return tuple(member.worker for member in plan.members if member.worker in failing)


def _find_failing(
    members: Sequence[Member], connects: Callable[[str, int], bool], now: Callable[[], float]
) -> frozenset[str]:
    """Return the worker names of the members to whose state port `connects` fails. Try at most `AT_ONCE` members at a
    time.

    No try begins after `LONGEST_S` seconds, and members without one are left out. Tries in progress are awaited, so
    `connects` needs its own time limit.
    """
    if not members:
        return frozenset()
    until = now() + LONGEST_S

    def fails(member: Member) -> bool:
        return now() < until and not connects(member.host, member.state_port)

    with ThreadPoolExecutor(min(AT_ONCE, len(members)), thread_name_prefix="holdfast-reach") as pool:
        answers = list(pool.map(fails, members))
    return frozenset(member.worker for member, failed in zip(members, answers, strict=True) if failed)


def _can_connect(host: str, port: int) -> bool:
    """Return whether a TCP connection succeeds within `CONNECT_S` seconds; it is closed again."""
    try:
        socket.create_connection((host, port), timeout=CONNECT_S).close()
    except OSError:
        return False
    return True
