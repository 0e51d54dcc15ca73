"""A worker's part in its unit: which place of it it is, through which groups and which page it meets the others."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from holdfast.control.link.unit.page import Proposals
from holdfast.control.link.worker_link import WorkerLink
from holdfast.errors import BadInputError, HoldfastError
from holdfast.protocol.job_spec import AUTO, Backend
from holdfast.protocol.layouts.layout import Layout
from holdfast.protocol.layouts.several import Layouts
from holdfast.protocol.layouts.unit_words import (
    JoinUnit,
    UnitAnswer,
    UnitAwaits,
    UnitFormed,
    UnitPost,
    UnitPosted,
    UnitRefused,
)
from holdfast.runtime.groups.communicator import Communicator
from holdfast.runtime.groups.rendezvous import Board
from holdfast.runtime.session.unit.groups import BUILD_S, build_groups

logger = logging.getLogger(__name__)

#: who waits so long for another place says for which
_WARN_AFTER_S = 10.0


@dataclass(frozen=True, kw_only=True)
class ReplicaGroup:
    """What a place has of its unit, for as long as its process lives.

    name: of this unit and no earlier one. groups: by the dimension's name; one that this place would be alone in is
    left out. proposals: for the training thread.
    """

    name: str
    layout: Layout
    place: int
    groups: Mapping[str, Communicator]
    proposals: Proposals


class Joined(NamedTuple):
    """What a worker comes out of `holdfast.init()` with: the layout in force, its unit, None where it is alone in it.

    `snapshots`: the agent's folder for the state, where another layout may be in force later.
    """

    layout: Layout
    unit: ReplicaGroup | None
    snapshots: str = ""


def join_replica_group(
    link: WorkerLink, worker: str, layouts: Layouts, device: torch.device, *, backend: Backend = AUTO
) -> Joined:
    """Meet the other places of this worker's unit under that of these layouts which is in force; blocks.

    Raises:
        BadInputError, HoldfastError: as `form_replica_group`.
    """
    meeting = _Meeting()
    link.meet(meeting.on_answer, meeting.on_agent_lost)
    link.send(JoinUnit(worker=worker, layouts=layouts))
    formed = meeting.await_formed()
    layout = formed.layout
    unit = (
        _build_replica_group(link, meeting, formed, worker, layout, device, backend, BUILD_S)
        if layout.places > 1
        else None
    )
    return Joined(layout, unit, formed.snapshots)


def form_replica_group(
    link: WorkerLink,
    worker: str,
    layout: Layout,
    device: torch.device,
    *,
    backend: Backend = AUTO,
    build_timeout_s: float = BUILD_S,
) -> ReplicaGroup:
    """Meet the other places of this worker's unit, through its agent, and build the unit's groups; blocks.

    How long a place may take to come is for the agent to say, which ends one that does not.

    Args:
        link: to the agent, which nobody listens to yet.
        build_timeout_s: how long to wait for the others once all have come.

    Raises:
        BadInputError: there can be no such unit.
        HoldfastError: the agent is gone, or a place is stuck on its way; the message says which.
    """
    meeting = _Meeting()
    link.meet(meeting.on_answer, meeting.on_agent_lost)
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
    """Build the groups of a unit that is formed."""
    place = formed.workers.index(worker)
    try:
        proposals = Proposals(formed.page, place=place, places=layout.places)
    except OSError as error:
        raise HoldfastError(f"the memory for a unit's proposals cannot be opened: {error}") from None
    board = meeting.open_board(lambda keys: link.send(UnitPost(worker=worker, unit=formed.unit, keys=keys)))
    groups = build_groups(board, layout, place, device, backend=backend, timeout_s=build_timeout_s)
    return ReplicaGroup(name=formed.unit, layout=layout, place=place, groups=groups, proposals=proposals)


class _Meeting:
    """What the agent has said so far; heard by the link's thread, waited for by the script's."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._formed: UnitFormed | None = None
        self._refused = ""
        self._missing: tuple[int, ...] = ()
        self._lost = False
        #: keys that came before the board was there
        self._early: list[UnitPosted] = []
        self._board: Board | None = None

    def on_answer(self, answer: UnitAnswer) -> None:
        """The agent says something."""
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
        """The agent is gone."""
        with self._changed:
            self._lost = True
            if self._board is not None:
                self._board.close()
            self._changed.notify_all()

    def await_formed(self) -> UnitFormed:
        """Wait until the unit is formed."""
        with self._changed:
            if not self._changed.wait_for(self._is_decided, _WARN_AFTER_S):
                missing = ", ".join(map(str, self._missing)) or "its agent"
                logger.warning("holdfast.init() waits for others of this unit: worker %s of this node", missing)
                self._changed.wait_for(self._is_decided)
            if self._refused:
                raise BadInputError(self._refused)
            if self._formed is None:
                raise HoldfastError("the agent is gone, through which a unit's places meet")
            return self._formed

    def open_board(self, post: Callable[[dict[str, bytes]], None]) -> Board:
        """Return the board of the unit's rendezvous, with what has come already."""
        with self._changed:
            self._board = Board(0, post)
            if self._lost:
                self._board.close()
            self._deliver_posted()
            return self._board

    def _deliver_posted(self) -> None:
        if self._board is not None and self._formed is not None:
            for posted in self._early:
                if posted.unit == self._formed.unit:
                    self._board.put(posted.keys)
            self._early.clear()

    def _is_decided(self) -> bool:
        return self._formed is not None or bool(self._refused) or self._lost
