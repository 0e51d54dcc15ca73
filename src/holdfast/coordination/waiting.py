"""A job that stands still for want of nodes says so, and what it waits for."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field

from holdfast.coordination.inputs import CoordinatorConfig
from holdfast.coordination.planner import lacks_slots
from holdfast.coordination.static_experts import ep_size_of
from holdfast.coordination.stopping import Stopping
from holdfast.coordination.turn import Turn
from holdfast.planning import Shortage
from holdfast.protocol.events import JobWaiting


@dataclass(frozen=True, kw_only=True, slots=True)
class Need:
    """What is missing at least: nodes, and (0 without experts) the slots per MoE layer that they must bring."""

    nodes: int
    slots: int
    why: str = field(compare=False)


class Waiting:
    """Tells what is missing, once for each need."""

    def __init__(self, turn: Turn, stopping: Stopping, config: CoordinatorConfig) -> None:
        self.need: Need | None = None
        self._config = config
        self._turn = turn
        self._stopping = stopping

    def tell(self, absent: Set[str], *, restarting: bool = False) -> None:
        """Say what the job waits for, where it does and has not said it yet.

        Args:
            absent: nodes that may still come back with their part of the state: it is them that the job waits for.
            restarting: nodes are about to come back with fresh workers.
        """
        need = None if restarting else self._need(absent)
        if need is not None and need != self.need:
            self._turn.emit(JobWaiting, nodes=need.nodes, slots=need.slots, why=need.why)
        self.need = need

    def _need(self, absent: Set[str]) -> Need | None:
        turn, stopping = self._turn, self._stopping
        record, members = turn.record, turn.members
        if record.epoch == 0 or record.outcome:
            return None  # it has not begun, or is over
        broken = stopping.stop is not None and not stopping.awaited(absent)
        if record.plan is not None and not (broken and lacks_slots(turn, self._config)):
            return None
        why = "too few nodes are left for all experts" if members.nodes else "no node is left"
        if self._config.static_experts:
            return _missing_statically(turn, self._config.ep_size)
        return _missing(turn, why)


def _missing_statically(turn: Turn, ep_size: int) -> Need | None:
    size, nodes = ep_size_of(turn.record.experts, ep_size), len(turn.members.nodes)
    if isinstance(size, Shortage) or nodes >= size:
        return None
    return Need(nodes=size - nodes, slots=0, why=f"one replica of all experts takes {size} nodes")


def _missing(turn: Turn, why: str) -> Need | None:
    """Return what is missing beyond the nodes that are here; their workers may still be starting."""
    shape, nodes = turn.record.experts, turn.members.nodes.values()
    if shape is None:
        return None if nodes else Need(nodes=1, slots=0, why=why)
    slots = 0
    for node in nodes:
        known = [info.attach.experts.slots for info in node.workers.values() if info.attach.experts is not None]
        slots += known[0] if known else shape.slots
    if slots >= shape.experts:
        return None
    missing = shape.experts - slots
    return Need(nodes=-(-missing // shape.slots), slots=missing, why=why)
