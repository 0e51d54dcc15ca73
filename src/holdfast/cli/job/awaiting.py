"""Waiting for what a command has asked for, by what `/status` says."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from holdfast.control.client import CoordinatorClient
from holdfast.errors import RefusedError, UnreachableError
from holdfast.protocol.events import NodeLeft, NodeMoved, NodeStayed, StandbyFailed, StepCommitted

_POLL_S = 0.1
#: nor is asked more often than so, however much happens
_LEAST_S = 0.02
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

    def left(status: dict[str, Any]) -> bool:
        here = {node["node"] for node in (*status["nodes"], *status["leaving"])}  # (one that is lost still leaves)
        return here.isdisjoint(nodes)

    _await(client, left, f"{', '.join(nodes)} had left")


def await_back(client: CoordinatorClient, name: str, after: int) -> bool:
    """Return True once all workers of a node train, or wait if it is a standby; False where it is lost before.

    Args:
        after: number of the newest event before it was let come back.

    Raises:
        RefusedError, UnreachableError: as `await_left`.
    """
    lost = False

    def settled(status: dict[str, Any]) -> bool:
        nonlocal lost
        node = next((node for node in status["nodes"] if node["node"] == name), None)
        if node is None:
            ends = [event.node for event in client.events(after) if isinstance(event, NodeLeft | StandbyFailed)]
            lost = name in ends
            return lost
        generation = status["generation"]
        in_force = [worker["rank"] is not None and worker["generation"] == generation for worker in node["workers"]]
        return bool(in_force) and (bool(node["standby"]) or all(in_force))

    _await(client, settled, f"{name} was back")
    return not lost


def await_moved(
    client: CoordinatorClient, nodes: Sequence[str], after: int, *, say: Callable[[str], None] | None
) -> dict[str, NodeMoved | NodeStayed | None]:
    """Return once no node of these is about to move: who has taken each one's place; None: nobody has.

    Of one that keeps its place, since nobody can take it, that is returned.

    Args:
        after: number of the newest event before it was asked for.
        say: is told what each waits for, whenever that changes.

    Raises:
        RefusedError, UnreachableError: as `await_left`.
    """
    waited: dict[str, str] = {}
    moved: dict[str, NodeMoved | NodeStayed] = {}

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
        moved.update({event.node: event for event in events if isinstance(event, NodeStayed)})
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
    silent_since, status = None, dict[str, Any]()
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
        time.sleep(_LEAST_S)
        if silent_since is None:
            with contextlib.suppress(UnreachableError):  # (so it is heard that the job ends before nobody answers)
                client.await_event(status["events"], _POLL_S)
