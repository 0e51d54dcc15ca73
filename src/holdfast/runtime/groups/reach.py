"""Whom no connection can be made to: asked once something was waited for until its time was up."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from holdfast.protocol.plan import GenerationPlan, Member

#: How long a connection may take; longer than any network on which training makes sense.
CONNECT_S = 1.0
#: How many are tried at a time.
AT_ONCE = 32


def unreachable(
    plan: GenerationPlan, worker: str, connects: Callable[[str, int], bool] | None = None
) -> tuple[str, ...]:
    """Return the members on other nodes whose state ports take no connection, in rank order.

    Args:
        worker: who asks.
        connects: tries an address; a TCP connection that is closed at once if None.
    """
    own = next((member.node for member in plan.members if member.worker == worker), "")
    others = [member for member in plan.members if member.node != own and member.state_port]
    return _failing(others, connects or _connects)


def _failing(members: Sequence[Member], connects: Callable[[str, int], bool]) -> tuple[str, ...]:
    if not members:
        return ()
    with ThreadPoolExecutor(min(AT_ONCE, len(members)), thread_name_prefix="holdfast-reach") as pool:
        hosts, ports = [member.host for member in members], [member.state_port for member in members]
        answers = list(pool.map(connects, hosts, ports))
    return tuple(member.worker for member, answer in zip(members, answers, strict=True) if not answer)


def _connects(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=CONNECT_S).close()
    except OSError:
        return False
    return True
