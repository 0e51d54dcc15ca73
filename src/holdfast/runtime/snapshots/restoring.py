"""Restores a state from the parts of a snapshot: from this node's memory first, then from other nodes.

The coordinator names the nodes that keep each part. A copy that cannot be read, or is damaged, is reported, and the
next copy of the same part is read. An intact snapshot is also rejected if a parameter contains a NaN. If no copy of a
part is left, the snapshot is lost, and the coordinator must name another source.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from holdfast.control.link.snapshots.files import DamagedPartError, PartReader, StoredPart, part_path
from holdfast.control.link.snapshots.reading import RemotePart
from holdfast.protocol.names import node_of
from holdfast.protocol.state import Keeper, SnapshotPart, SnapshotSource
from holdfast.runtime.dtensor.replica_position import WHOLE_REPLICA, ReplicaPosition
from holdfast.runtime.moe.expert_shards.job_experts import JobExperts
from holdfast.runtime.snapshots.filling import SnapshotReader
from holdfast.runtime.snapshots.stashed_experts import StashedExpertReader
from holdfast.runtime.snapshots.stashing import StashReader
from holdfast.runtime.state.state import StateMismatchError, TrainingState

logger = logging.getLogger(__name__)

#: called for each copy that cannot be used, with the part, the node ("" for all nodes), and the reason
ReportDamage = Callable[[SnapshotPart, str, str], None]


_Reader = SnapshotReader | StashReader | StashedExpertReader


class SnapshotLostError(Exception):
    """No copy of a part can be used."""


class SnapshotRestorer:
    """Reads the state of one snapshot into a worker's tensors."""

    def __init__(
        self,
        folder: Path,
        job: str,
        worker: str,
        report_damage: ReportDamage,
        position: ReplicaPosition = WHOLE_REPLICA,
    ) -> None:
        """Start without a snapshot.

        Args:
            folder: of this worker's agent.
            report_damage: called for each copy that cannot be used.
            position: the part of a replica on this worker.
        """
        self._position = position
        #: bytes of the last restored state that came from other nodes
        self.moved_bytes = 0
        self._folder = folder
        self._job = job
        self._node = node_of(worker)
        self._report_damage = report_damage

    def restore(
        self,
        source: SnapshotSource,
        state: TrainingState,
        rank: int,
        experts: JobExperts | None = None,
        wanted: Sequence[Sequence[int]] = (),
    ) -> int:
        """Restore the state from a snapshot, and return its step. The present state is lost, even after an error.

        A source that is `everywhere` is a state that was stashed under another layout. Otherwise all parts of this
        worker's role (members with the same local rank) are read, and with experts also those of other roles.

        Args:
            rank: decides with which of its role's parts this member starts, so that members read from different nodes.
            experts: the experts that this worker hosts, or None.
            wanted: the experts of each layer that it will host; only these are read from other roles' parts.

        Raises:
            SnapshotLostError: no node has a readable part, or the snapshot has another layout, does not fit, or
                contains a NaN. The reasons were reported.
        """
        self.moved_bytes = 0
        if source.everywhere:
            self._restore_stash(source, state, rank)
            if experts is not None:
                self._restore_stashed_experts(source, rank, experts, wanted)
            return source.step
        filling = SnapshotReader(state, experts, wanted, self._position)
        mine = self._position.role_ranks(len(source.parts))
        if not mine:
            self._reject(source, f"its {len(source.parts)} parts belong to another layout")
        first = self._position.role_position(rank, len(source.parts))[0] % len(mine)
        for number in (*mine[first:], *mine[:first]):
            self._read_part(number, source, filling)
        if experts is not None:
            for number in (number for number in range(len(source.parts)) if number not in mine):
                self._read_part(number, source, filling)
        try:
            filling.adopt()
        except StateMismatchError as error:
            self._reject(source, f"it does not fit: {error}")
        if name := state.find_nan():
            self._reject(source, f"{name} contains a NaN")
        return source.step

    def _restore_stash(self, source: SnapshotSource, state: TrainingState, rank: int) -> None:
        """Restore the dense part of a state that was stashed under another layout, and make it the present one.

        All dense parts are read, because each may contain pieces for this worker. It is not checked for NaNs: it was a
        live state, and a NaN in it would have been in all replicas. `_restore_stashed_experts` restores the experts.

        Args:
            rank: chooses the part that is read first, so that members read from different nodes.

        Raises:
            SnapshotLostError: no copy of a part can be read, or the state does not fit.
        """
        filling, parts = StashReader(state, self._position), source.dense
        for number in range(parts):
            self._read_part((number + rank) % parts, source, filling)
        try:
            filling.adopt()
        except StateMismatchError as error:
            self._reject(source, f"it does not fit: {error}")

    def _restore_stashed_experts(
        self, source: SnapshotSource, rank: int, experts: JobExperts, wanted: Sequence[Sequence[int]]
    ) -> None:
        """Read the wanted experts from a stash, and make them this worker's. Several parts may have the same expert:
        this node's parts are read first, and parts without a missing expert are skipped. An unreadable part is
        reported, and the next one is tried.

        Args:
            rank: chooses the part that is read first, so that members read from different nodes.
            wanted: the experts of each layer that this worker will host.

        Raises:
            SnapshotLostError: an expert is in none of the readable parts, or they do not fit.
        """
        filling, parts = StashedExpertReader(experts, wanted), len(source.experts)
        numbers = [source.dense + (number + rank) % parts for number in range(parts)]
        here = {place for place, keeper in enumerate(source.keepers) if keeper.node == self._node}
        for number in sorted(numbers, key=lambda number: here.isdisjoint(source.parts[number])):
            if filling.is_needed(experts.decode_experts(source.experts[number - source.dense])):
                self._try_read_part(number, source, filling)
        try:
            filling.adopt()
        except StateMismatchError as error:
            self._reject(source, f"it does not fit: {error}")

    def _read_part(self, number: int, source: SnapshotSource, filling: _Reader) -> None:
        """Read one part from the nearest intact copy into `filling`.

        Raises:
            SnapshotLostError: no copy can be read.
        """
        if not self._try_read_part(number, source, filling):
            raise SnapshotLostError(f"no copy of part {number} of {len(source.parts)} can be read")

    def _try_read_part(self, number: int, source: SnapshotSource, filling: _Reader) -> bool:
        """Read a part from the first intact one of its copies, this node's first. Return False if there is none; each
        copy that cannot be used is reported. Bytes from other nodes are added to `moved_bytes`.

        Raises:
            SnapshotLostError: the part is of another model; the whole snapshot is reported.
        """
        snapshot = source.part(number)
        for keeper in self._nearest_keepers(source, number):
            try:
                reader = self._open(keeper, source.key, snapshot)
                before = filling.nbytes
                try:
                    filling.read_part(reader)
                finally:
                    reader.close()
                    self.moved_bytes += filling.nbytes - before if keeper.node != self._node else 0
            except (OSError, DamagedPartError) as error:
                logger.warning("%s on node %s is of no use: %s", snapshot.name, keeper.node, error)
                self._report_damage(snapshot, keeper.node, str(error) or type(error).__name__)
            except StateMismatchError as error:
                self._reject(source, f"it is not of this model: {error}")
            else:
                return True
        return False

    def _reject(self, source: SnapshotSource, why: str) -> None:
        """Report that the whole snapshot cannot be used, and why.

        Raises:
            SnapshotLostError: always.
        """
        logger.warning("the snapshot of step %d cannot be used: %s", source.step, why)
        self._report_damage(source.part(0), "", why)
        raise SnapshotLostError(why)

    def _nearest_keepers(self, source: SnapshotSource, number: int) -> list[Keeper]:
        """Return the nodes that keep a part, this node first."""
        keepers = [source.keepers[place] for place in source.parts[number] if place < len(source.keepers)]
        return sorted(keepers, key=lambda keeper: keeper.node != self._node)

    def _open(self, keeper: Keeper, key: bytes, snapshot: SnapshotPart) -> PartReader:
        """Open a node's copy of a part: a file of this node, or a connection to the other node, authenticated by `key`.

        Raises:
            DamagedPartError: the copy is damaged, or is another part, e.g. one of another run.
            OSError: it cannot be opened, or the other node cannot be reached or no longer has it.
        """
        if keeper.node != self._node:
            return RemotePart(keeper, key, snapshot, self._job)
        stored = StoredPart(part_path(self._folder, snapshot), self._job)
        if stored.header.snapshot != snapshot:
            stored.close()
            raise DamagedPartError(f"it is {stored.header.snapshot.name} of another run")
        return stored
