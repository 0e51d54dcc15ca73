"""Forms a worker's replica group in `holdfast.init()`, through its agent."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from holdfast.control.link.replica_group.page import MappedProposals
from holdfast.control.link.worker_link import WorkerLink
from holdfast.errors import BadInputError, HoldfastError
from holdfast.protocol.job_spec import AUTO, Backend
from holdfast.protocol.layouts.group_messages import (
    JoinUnit,
    UnitAnswer,
    UnitAwaits,
    UnitFormed,
    UnitPost,
    UnitPosted,
    UnitRefused,
)
from holdfast.protocol.layouts.layout import Layout
from holdfast.protocol.layouts.layout_list import Layouts
from holdfast.runtime.groups.communicator import Communicator
from holdfast.runtime.groups.rendezvous import Board
from holdfast.runtime.session.replica_group.groups import BUILD_S, build_groups

logger = logging.getLogger(__name__)

#: after this many seconds of waiting, a warning names the missing workers
_WARN_AFTER_S = 10.0


@dataclass(frozen=True, kw_only=True)
class ReplicaGroup:
    """A worker's replica group, as long as its process lives."""

    #: never used by an earlier replica group
    name: str
    layout: Layout
    #: this worker's local rank
    local_rank: int
    #: by the dimension's name; groups of one rank are left out
    groups: Mapping[str, Communicator]
    #: where the ranks agree on their work; for the training thread
    proposals: MappedProposals


class JoinResult(NamedTuple):
    """The result of `holdfast.init()` for a worker."""

    #: the layout in force
    layout: Layout
    #: the replica group; None if it has one rank
    replica_group: ReplicaGroup | None
    #: the agent's folder for the state, if another layout may come into force; else ""
    snapshots: str = ""


def join_replica_group(
    link: WorkerLink, worker: str, layouts: Layouts, device: torch.device, *, backend: Backend = AUTO
) -> JoinResult:
    """Ask the agent which of these layouts is in force, and join this worker's replica group under it. Blocks.

    If a replica has one rank in that layout, there is no group to build. The result also has the agent's folder for the
    state, if another layout may follow.

    Raises:
        BadInputError, HoldfastError: see `form_replica_group`.
    """
    meeting = _Meeting()
    link.listen_for_unit(meeting.on_answer, meeting.on_agent_lost)
    link.send(JoinUnit(worker=worker, layouts=layouts))
    formed = meeting.await_formed()
    layout = formed.layout
    unit = (
        _build_replica_group(link, meeting, formed, worker, layout, device, backend, BUILD_S)
        if layout.places > 1
        else None
    )
    return JoinResult(layout, unit, formed.snapshots)


def form_replica_group(
    link: WorkerLink,
    worker: str,
    layout: Layout,
    device: torch.device,
    *,
    backend: Backend = AUTO,
    build_timeout_s: float = BUILD_S,
) -> ReplicaGroup:
    """Join this worker's replica group through its agent, and build its groups. Blocks.

    The agent limits how long a worker may take to join, and ends workers that do not.

    Args:
        link: the connection to the agent, without a listener.
        build_timeout_s: how long to build groups once all workers have joined, in seconds.

    Raises:
        BadInputError: the replica group is not possible.
        HoldfastError: the agent is gone, or a rank hangs; the message names it.
    """
    meeting = _Meeting()
    link.listen_for_unit(meeting.on_answer, meeting.on_agent_lost)
    link.send(JoinUnit(worker=worker, layout=layout))
    return _build_replica_group(link, meeting, meeting.await_formed(), worker, layout, device, backend, build_timeout_s)


def _build_replica_group(
    link: WorkerLink,
    meeting: _Meeting,
    formed: UnitFormed,
    worker: str,
    layout: Layout,
    device: torch.device,
    backend: Backend,
    build_timeout_s: float,
) -> ReplicaGroup:
    """Open the shared memory of a replica group that the agent has formed, and build its groups with the other ranks.

    Raises:
        HoldfastError: the shared memory cannot be opened, or a rank does not join.
    """
    place = formed.workers.index(worker)
    try:
        proposals = MappedProposals(formed.page, place=place, places=layout.places)
    except OSError as error:
        raise HoldfastError(f"the shared memory of a replica group cannot be opened: {error}") from None
    board = meeting.open_board(lambda keys: link.send(UnitPost(worker=worker, unit=formed.unit, keys=keys)))
    groups = build_groups(board, layout, place, device, backend=backend, timeout_s=build_timeout_s)
    return ReplicaGroup(name=formed.unit, layout=layout, local_rank=place, groups=groups, proposals=proposals)


class _Meeting:
    """The agent's answers so far. The link's thread adds them, the script's thread waits for them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._formed: UnitFormed | None = None
        self._refused = ""
        self._missing: tuple[int, ...] = ()
        self._lost = False
        #: keys that arrived before the board was opened
        self._early: list[UnitPosted] = []
        self._board: Board | None = None

    def on_answer(self, answer: UnitAnswer) -> None:
        """Record an answer of the agent: who is missing, a refusal, the formed replica group, or keys of another rank.

        Wakes the waiting thread. Keys go to the board, or are kept until it is opened.
        """
        with self._changed:
            match answer:
                case UnitAwaits(missing=missing):
                    self._missing = missing
                case UnitRefused(why=why):
                    self._refused = why
                case UnitFormed():
                    self._formed = answer
                case UnitPosted():
                    self._early.append(answer)
                    self._deliver_posted()
            self._changed.notify_all()

    def on_agent_lost(self) -> None:
        """Close the board and wake the waiting thread, because the agent is gone."""
        with self._changed:
            self._lost = True
            if self._board is not None:
                self._board.close()
            self._changed.notify_all()

    def await_formed(self) -> UnitFormed:
        """Wait until the replica group is formed, and return its description. After 10 s, log the missing workers.

        Raises:
            BadInputError: the agent refused it.
            HoldfastError: the agent is gone.
        """
        with self._changed:
            if not self._changed.wait_for(self._is_decided, _WARN_AFTER_S):
                missing = ", ".join(map(str, self._missing)) or "its agent"
                logger.warning("holdfast.init() waits for worker %s of this node, of the same replica group", missing)
                self._changed.wait_for(self._is_decided)
            if self._refused:
                raise BadInputError(self._refused)
            if self._formed is None:
                raise HoldfastError("the agent is gone, so the ranks of a replica group cannot meet")
            return self._formed

    def open_board(self, post: Callable[[dict[str, bytes]], None]) -> Board:
        """Create the board of the rendezvous, with the keys that have arrived; it is closed if the agent is gone.

        Args:
            post: sends this rank's keys to the other ranks.
        """
        with self._changed:
            self._board = Board(0, post)
            if self._lost:
                self._board.close()
            self._deliver_posted()
            return self._board

    def _deliver_posted(self) -> None:
        """Put the keys that have arrived on the board, if it is open; drop those of other replica groups."""
        if self._board is not None and self._formed is not None:
            for posted in self._early:
                if posted.unit == self._formed.unit:
                    self._board.put(posted.keys)
            self._early.clear()

    def _is_decided(self) -> bool:
        return self._formed is not None or bool(self._refused) or self._lost
