"""A job that stands still for want of nodes says so, and what it waits for."""

from __future__ import annotations

from dataclasses import dataclass, field

from holdfast.coordination.experts.static_experts import ep_size_of
from holdfast.coordination.generations.planner import lacks_slots
from holdfast.coordination.parts import JobParts
from holdfast.coordination.turn import Turn
from holdfast.planning import Shortage
from holdfast.protocol.events import JobWaiting


@dataclass(frozen=True, kw_only=True, slots=True)
class Need:
    """What is missing at least: nodes, and (0 without experts) the expert slots per MoE layer that they must bring."""

    nodes: int
    expert_slots: int
    why: str = field(compare=False)


#: said of nodes that may train on, and come back as they are
UNHEARD = (
    "no node has come to this coordinator, and their workers may train on: the coordinator must listen at the address "
    "that the agents were given"
)


class Waiting:
    """Tells what is missing, once for each need."""

    def __init__(self, parts: JobParts) -> None:
        self.need: Need | None = None
        self._parts = parts

    def tell(self) -> None:
        """Say what the job waits for, where it does and has not said it yet."""
        # Those that are about to come with fresh workers were not lost, and what they bring is known.
        need = None if self._parts.absences.replacing else self._need()
        if need is not None and need != self.need:
            self._parts.turn.emit(JobWaiting, nodes=need.nodes, expert_slots=need.expert_slots, why=need.why)
        self.need = need

    def _need(self) -> Need | None:
        parts, turn = self._parts, self._parts.turn
        record, members, config = turn.record, turn.members, parts.config
        if record.outcome:
            return None
        why = parts.start_probes.unclear if record.plan is None else ""
        if why and members.complete_nodes >= parts.replacing.needed:
            return Need(nodes=1, expert_slots=0, why=why)
        if record.generation == 0 or (turn.begins_again and not members.regular):
            # (that nodes are still to come at the begin is worth no word, unless one came in vain)
            left, out = config.spec.nodes_to_begin - members.complete_nodes, parts.ladder.all_out
            why = parts.misfit or (f"node {out[-1].node} is out: {out[-1].why}" if 0 < left <= len(out) else "")
            return Need(nodes=left, expert_slots=0, why=why) if why and left > 0 else None
        if unheard := parts.absences.unheard(config.lease_s):
            return Need(nodes=unheard, expert_slots=0, why=UNHEARD)
        # Of those that may still come back it is their part of the state that the job waits for.
        broken = parts.stopping.stop is not None and not parts.stopping.awaits(parts.absences.promised)
        if record.plan is not None and broken and (missing := parts.replacing.waits(record.plan)):
            return Need(nodes=missing, expert_slots=0, why="it goes on with as many nodes as before")
        if record.plan is not None and not (broken and lacks_slots(turn, config)):
            return None
        if (away := parts.replacing.needed - members.complete_nodes) > 0 and config.spec.recovery.waits_for_nodes:
            return Need(nodes=away, expert_slots=0, why="it goes on with as many nodes as before")
        why = "too few nodes are left for all experts" if members.regular else "no node is left"
        if config.spec.experiments.static_experts:
            return _missing_statically(turn, config.spec.experiments.ep_size)
        return _missing(turn, why)


def _missing_statically(turn: Turn, ep_size: int) -> Need | None:
    size, nodes = ep_size_of(turn.record.expert_shape, ep_size), len(turn.members.regular)
    if isinstance(size, Shortage) or nodes >= size:
        return None
    return Need(nodes=size - nodes, expert_slots=0, why=f"one replica of all experts takes {size} nodes")


def _missing(turn: Turn, why: str) -> Need | None:
    """Return what is missing beyond the nodes that are here; their workers may still be starting."""
    shape, nodes = turn.record.expert_shape, turn.members.regular
    if shape is None:
        return None if nodes else Need(nodes=1, expert_slots=0, why=why)
    slots = 0
    for node in nodes:
        shapes = [info.attach.expert_shape for info in node.workers.values()]
        known = [own.slots for own in shapes if own is not None]
        slots += known[0] if known else shape.slots
    if slots >= shape.experts:
        return None
    missing = shape.experts - slots
    return Need(nodes=-(-missing // shape.slots), expert_slots=missing, why=why)
