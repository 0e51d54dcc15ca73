"""Check that the job does not go back behind a stashed state while nodes have all of it."""

from __future__ import annotations

from collections.abc import Collection

from holdfast.coordination.experts.blobs import find_lost_experts
from holdfast.protocol.events import SnapshotRejected
from holdfast.protocol.plan import Decision, ExpertShape
from holdfast.protocol.record import Record
from holdfast.protocol.state import SnapshotKey, SnapshotSource
from tests.simulation.world import World


class StatesPutAway:
    """The newest stashed state that a record relies on."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._kept: SnapshotKey | None = None
        self._parts = 0
        #: the experts that each member has stashed, if the model has experts
        self._experts: tuple[bytes, ...] = ()
        self._shape: ExpertShape | None = None

    def decided(self, record: Record, decision: Decision, nodes: Collection[str]) -> str:
        """Record a decision; return which stashed state of connected nodes it loses, "" for nothing.

        Return the missing experts instead if the decision leads to a snapshot without all experts.
        """
        source, shape = decision.source, record.expert_shape
        if isinstance(source, SnapshotSource) and source.experts and shape is not None:
            there = [blob for number, blob in enumerate(source.experts, source.dense) if source.parts[number]]
            if lacking := find_lost_experts(shape, there):
                return f"{decision} leads to a state without {lacking}"
        kept, step = self._kept, decision.applied
        change = record.change
        if change is not None and change.kept is not None and change.kept != kept:
            self._kept, self._parts = change.kept, change.before.places
            self._experts, self._shape = change.experts, record.expert_shape
        elif kept is not None and step > kept[2]:
            self._kept = None
        elif kept is not None and step < kept[2] and (whole := self._whole(kept, nodes)):
            return f"{decision} although {whole} have the stashed state of step {kept[2]}"
        return ""

    def lost(self, nodes: Collection[str]) -> str:
        """Return which nodes have all of the last stashed state, in words; "" for none."""
        whole = self._whole(self._kept, nodes) if self._kept is not None else []
        return f"a stashed state on {', '.join(whole)}" if whole else ""

    def _whole(self, kept: SnapshotKey, nodes: Collection[str]) -> list[str]:
        """Return which of these nodes have all dense parts of a stashed state.

        Return [] if these nodes do not have all experts together, or if a part was rejected.
        """
        rejected = (event for event in self._world.journal.events if isinstance(event, SnapshotRejected))
        if any(event.step == kept[2] for event in rejected):
            return []
        found: list[str] = []
        experts: set[int] = set()
        for name in nodes:
            parts = self._world.memory(name).parts
            here = [part for part, held in parts.items() if part.everywhere and part.key == kept and not held.damaged]
            found += [name] * (len([part for part in here if part.part < self._parts]) == self._parts)
            experts |= {part.part - self._parts for part in here if part.part >= self._parts}
        if self._shape is not None and find_lost_experts(self._shape, [self._experts[number] for number in experts]):
            return []
        return found
