"""Waiting for what a command has asked for, by what `/status` says."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from holdfast.control.client import CoordinatorClient
from holdfast.errors import RefusedError, UnreachableError
from holdfast.protocol.events import NodeLeft, NodeMoved, StepCommitted

_POLL_S = 0.1
#: for so long a coordinator that is started again is waited for
_PATIENCE_S = 30.0
#: once a node waits as a standby, who has its place is told with the next step, if anybody has: so many are awaited
_STEPS = 2
_OVER = ("finished", "stopped", "failed")


def await_left(client: CoordinatorClient, nodes: Collection[str]) -> None:
    """Return once none of these nodes is in the job.

    Raises:
        RefusedError: the job is over before that.
        UnreachableError: nobody has answered for half a minute.
    """
    wanted = set(nodes)
    _await(
        client, lambda status: not wanted & {node["node"] for node in status["nodes"]}, f"{', '.join(nodes)} had left"
    )


def await_back(client: CoordinatorClient, name: str) -> None:
    """Return once all workers of a node train, or wait if it is a standby.

    Raises:
        RefusedError, UnreachableError: as `await_left`.
    """

    def trains(status: dict[str, Any]) -> bool:
        node = next((node for node in status["nodes"] if node["node"] == name), None)
        if node is None or not node["workers"]:
            return False
        generation = status["generation"]
        in_force = (worker["rank"] is not None and worker["generation"] == generation for worker in node["workers"])
        return bool(node["standby"]) or all(in_force)

    _await(client, trains, f"{name} was back")


def await_moved(
    client: CoordinatorClient, nodes: Sequence[str], after: int, *, say: Callable[[str], None] | None
) -> dict[str, NodeMoved | None]:
    """Return once no node of these is about to move: who has taken each one's place; None: nobody has.

    Args:
        after: number of the newest event before it was asked for.
        say: is told what each waits for, whenever that changes.

    Raises:
        RefusedError, UnreachableError: as `await_left`.
    """
    waited: dict[str, str] = {}
    moved: dict[str, NodeMoved | None] = {}

    def settled(status: dict[str, Any]) -> bool:
        leaving = {one["node"]: one for one in status["leaving"] if one["node"] in nodes}
        for name, one in leaving.items():
            if waited.get(name) != one["waits_for"]:
                waited[name] = one["waits_for"]
                if say is not None:
                    say(f"{name} waits for {one['waits_for']}")
        if leaving:
            return False
        events = list(client.events(after))
        moved.update({event.from_node: event for event in events if isinstance(event, NodeMoved)})
        # (of one that waits as a standby already it is told with the first step without it)
        waiting = {node["node"] for node in status["nodes"] if node["standby"]}
        steps = [event.seq for event in events if isinstance(event, StepCommitted)][-_STEPS:]
        for event in events:  # (whoever was to have its place was lost before it had trained)
            if isinstance(event, NodeLeft) and len(steps) == _STEPS and event.seq < steps[0]:
                waiting.discard(event.node)
        return all(name in moved or name not in waiting for name in nodes)

    _await(client, settled, f"{', '.join(nodes)} had moved")
    return {name: moved.get(name) for name in nodes}


def _await(client: CoordinatorClient, there: Callable[[dict[str, Any]], bool], what: str) -> None:
    silent_since = None
    while True:
        try:
            status = client.status()
        except UnreachableError:
            silent_since = silent_since or time.monotonic()
            if time.monotonic() - silent_since > _PATIENCE_S:
                raise
        else:
            silent_since = None
            if there(status):
                return
            if status["state"] in _OVER:
                raise RefusedError(f"the job is {status['state']}, before {what}")
        time.sleep(_POLL_S)
