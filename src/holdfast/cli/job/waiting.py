"""Wait until a request to a job is carried out, by polling `/status`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from holdfast.control.client import CoordinatorClient
from holdfast.errors import RefusedError, UnreachableError
from holdfast.protocol.events import NodeLeft, NodeMoved, NodeStayed, StandbyFailed, StepCommitted

_POLL_S = 0.1
#: the least time between two requests, in seconds
_LEAST_S = 0.02
#: After this many seconds without an answer, the coordinator counts as gone.
_PATIENCE_S = 30.0
#: The event that names the replacement of a node comes at most this many steps after the node waits as a standby.
_STEPS = 2
_OVER = ("finished", "stopped", "failed")


def await_left(client: CoordinatorClient, nodes: Collection[str]) -> None:
    """Wait until none of these nodes is in the job.

    Raises:
        RefusedError: the job ended first.
        UnreachableError: the coordinator has not answered for half a minute.
    """

    def left(status: dict[str, Any]) -> bool:
        """Return whether none of the nodes is in the job or still draining."""
        here = {node["node"] for node in (*status["nodes"], *status["leaving"])}  # A lost node can still be draining.
        return here.isdisjoint(nodes)

    _await_status(client, left, f"{', '.join(nodes)} had left")


def await_back(client: CoordinatorClient, name: str, after: int) -> bool:
    """Wait until all workers of a node train, or wait as standbys. Return False if the node is lost first.

    Args:
        after: number of the newest event before the request that the node returns.

    Raises:
        RefusedError: the job ended first.
        UnreachableError: the coordinator has not answered for half a minute.
    """
    lost = False

    def settled(status: dict[str, Any]) -> bool:
        """Return whether all workers of the node are in the current generation, or standbys, or the node is lost."""
        nonlocal lost
        node = next((node for node in status["nodes"] if node["node"] == name), None)
        if node is None:
            ends = [event.node for event in client.events(after) if isinstance(event, NodeLeft | StandbyFailed)]
            lost = name in ends
            return lost
        generation = status["generation"]
        in_force = [worker["rank"] is not None and worker["generation"] == generation for worker in node["workers"]]
        return bool(in_force) and (bool(node["standby"]) or all(in_force))

    _await_status(client, settled, f"{name} was back")
    return not lost


def await_moved(
    client: CoordinatorClient, nodes: Sequence[str], after: int, *, print_status: Callable[[str], None] | None
) -> dict[str, NodeMoved | NodeStayed | None]:
    """Wait until none of these nodes waits to be replaced. Return the last event of each, or None if it was lost.

    `NodeMoved` names the replacement of a node. `NodeStayed` says why a node could not be replaced.

    Args:
        after: number of the newest event before the request.
        print_status: prints why each node waits, whenever the reason changes.

    Raises:
        RefusedError: the job ended first.
        UnreachableError: the coordinator has not answered for half a minute.
    """
    waited: dict[str, str] = {}
    moved: dict[str, NodeMoved | NodeStayed] = {}

    def settled(status: dict[str, Any]) -> bool:
        """Report why nodes wait, and return whether each has moved, stayed, or is lost.

        The events of the finished moves are added to `moved`.
        """
        leaving = {one["node"]: one for one in status["leaving"] if one["node"] in nodes}
        for name, one in leaving.items():
            if waited.get(name) != one["waits_for"]:
                waited[name] = one["waits_for"]
                if print_status is not None:
                    print_status(f"{name} waits for {one['waits_for']}")
        if leaving:
            return False
        events = list(client.events(after))
        moved.update({event.node: event for event in events if isinstance(event, NodeStayed)})
        moved.update({event.from_node: event for event in events if isinstance(event, NodeMoved)})
        # If a node already waits as a standby, its event comes with the first step without it.
        waiting = {node["node"] for node in status["nodes"] if node["standby"]}
        steps = [event.seq for event in events if isinstance(event, StepCommitted)][-_STEPS:]
        for event in events:  # Its replacement was lost before it had trained.
            if isinstance(event, NodeLeft) and len(steps) == _STEPS and event.seq < steps[0]:
                waiting.discard(event.node)
        return all(name in moved or name not in waiting for name in nodes)

    _await_status(client, settled, f"{', '.join(nodes)} had moved")
    return {name: moved.get(name) for name in nodes}


def _await_status(client: CoordinatorClient, there: Callable[[dict[str, Any]], bool], what: str) -> None:
    """Poll the job's status until `there` is true of it.

    Args:
        what: what is waited for, for the message.

    Raises:
        RefusedError: the job ended first.
        UnreachableError: the coordinator has not answered for `_PATIENCE_S`.
    """
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
            with contextlib.suppress(UnreachableError):  # So the end of the job is seen before the server goes.
                client.await_event(status["events"], _POLL_S)
