"""What was put away for another layout: as long as nodes have all of it, the job does not go back behind it."""

from __future__ import annotations

from collections.abc import Collection

from holdfast.coordination.experts.blobs import find_lost_experts
from holdfast.protocol.events import SnapshotRejected
from holdfast.protocol.plan import Decision, ExpertShape
from holdfast.protocol.record import Record
from holdfast.protocol.state import SnapshotKey, SnapshotSource
from tests.simulation.world import World


class StatesPutAway:
    """The newest state that a record has counted on."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._kept: SnapshotKey | None = None
        self._parts = 0
        #: the experts that each member has stashed, if the model has experts
        self._experts: tuple[bytes, ...] = ()
        self._shape: ExpertShape | None = None

    def decided(self, record: Record, decision: Decision, nodes: Collection[str]) -> str:
        """Record a decision; return which data of connected nodes it loses, "" for nothing.

        Also return the experts that the decided state lacks.
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
            return f"{decision} although {whole} have step {kept[2]}, as it was put away"
        return ""

    def lost(self, nodes: Collection[str]) -> str:
        """Return which nodes have all that was put away last, in words; "" for none."""
        whole = self._whole(self._kept, nodes) if self._kept is not None else []
        return f"what was put away on {', '.join(whole)}" if whole else ""

    def _whole(self, kept: SnapshotKey, nodes: Collection[str]) -> list[str]:
        """Return which of these nodes have all of it but experts; none where these have not all experts among them.

        None either where some of it was found to be of no use.
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
