"""Reads a snapshot's parts into the tensors of a state; of the experts only those to be hosted here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import torch

from holdfast.control.link.snapshots.files import CHUNK_BYTES, DamagedPartError, PartReader, read_body
from holdfast.protocol.names import MALFORMED
from holdfast.runtime.dtensor.replica_position import WHOLE_REPLICA, ReplicaPosition
from holdfast.runtime.moe.expert_shards.job_experts import JobExperts
from holdfast.runtime.moe.expert_shards.saving import empty_rows
from holdfast.runtime.moe.expert_shards.shards import LayerSpec
from holdfast.runtime.snapshots.cutting import PartManifest, part_range
from holdfast.runtime.state.state import Manifest, StateMismatchError, TrainingState
from holdfast.runtime.state.wire import FlatState

_Rows = list[dict[tuple[int, str], torch.Tensor]]


class SnapshotReader:
    """Reads one state from the parts of a snapshot."""

    def __init__(
        self,
        state: TrainingState,
        experts: JobExperts | None,
        wanted: Sequence[Sequence[int]],
        position: ReplicaPosition = WHOLE_REPLICA,
    ) -> None:
        """Start without parts.

        Args:
            wanted: the experts of each layer that this worker will host.
            position: the part of a replica on this worker; only parts of its role contain its dense state.
        """
        self._position = position
        #: bytes read so far
        self.nbytes = 0
        self._state = state
        self._experts = experts
        self._wanted = wanted
        self._encoded = b""
        self._manifest: Manifest | None = None
        self._tensors: list[torch.Tensor] = []
        self._flat: FlatState | None = None
        #: the experts' tensors and optimizer values, from the first part that was read or the role's first part
        self._specs: tuple[LayerSpec, ...] = ()
        self._rows: _Rows = []
        self._received: set[tuple[int, int]] = set()
        self._scratch = memoryview(bytearray(CHUNK_BYTES))

    def read_part(self, reader: PartReader) -> None:
        """Read a part's bytes into the tensors, and the rows of wanted experts. Of a part of another role (local rank)
        only the experts are read, and only after a part of this role.

        Raises:
            DamagedPartError: its content was damaged, or does not match the other parts.
            StateMismatchError: it is of another model.
            OSError: it cannot be read.
        """
        snapshot = reader.header.snapshot
        self.nbytes += reader.header.body_bytes
        try:
            manifest = msgspec.msgpack.decode(reader.manifest, type=PartManifest)
            if snapshot.part not in self._position.role_ranks(snapshot.parts):
                self._read_experts(reader, manifest)
                return
            flat = self._prepare(manifest)
        except MALFORMED as error:
            raise DamagedPartError(f"its manifest cannot be read: {error}") from None
        turn, turns = self._position.role_position(snapshot.part, snapshot.parts)
        start, end = part_range(flat.nbytes, turn, turns)
        body = PartBody(flat, (start, end), map_rows(manifest, self._rows), self._scratch)
        if (manifest.start, reader.header.body_bytes) != (start, body.nbytes):
            raise DamagedPartError("its content is not the part of the state that its name says")
        read_body(reader, body.target, body.is_wanted)
        body.copy_staged()
        self._received.update(manifest.experts)
        if turn == 0:
            self._specs = manifest.specs

    def _read_experts(self, reader: PartReader, manifest: PartManifest) -> None:
        """Read the wanted experts of a part of another role (local rank), and skip its dense state.

        Raises:
            DamagedPartError: it was damaged, or does not match the other parts.
            OSError: it cannot be read.
        """
        assert self._flat is not None
        check_same_rows(manifest, self._specs)
        expert_bytes = sum(row.nbytes for layer, _ in manifest.experts for row in manifest.specs[layer].rows)
        dense = reader.header.body_bytes - expert_bytes
        if dense < 0:
            raise DamagedPartError("it is shorter than the experts that it names")
        body = PartBody(self._flat, (0, 0), map_rows(manifest, self._rows), self._scratch, before=dense)
        read_body(reader, body.target, body.is_wanted)
        body.copy_staged()
        self._received.update(manifest.experts)

    def adopt(self) -> None:
        """Make the received state the present one, after all parts were read: the dense state and the experts that this
        worker will host.

        Raises:
            StateMismatchError: its values do not fit the objects, or an expert is in none of the parts.
        """
        assert self._flat is not None
        assert self._manifest is not None
        wanted = {(layer, expert) for layer, experts in enumerate(self._wanted) for expert in experts}
        if lacking := sorted(wanted - self._received):
            raise StateMismatchError(f"expert {lacking[0][1]} of MoE layer {lacking[0][0]} is in none of its parts")
        self._flat.copy_staged()
        self._state.adopt(self._manifest, self._tensors)
        if self._experts is not None:
            self._experts.adopt(self._wanted, self._specs, self._rows)

    def _prepare(self, manifest: PartManifest) -> FlatState:
        """Return the memory for a state with this manifest. The first part allocates it, and memory for the wanted
        experts.

        Raises:
            DamagedPartError: the part belongs to another state than the first one.
            StateMismatchError: the state is of another model.
        """
        if self._flat is None:
            self._manifest = msgspec.msgpack.decode(manifest.state, type=Manifest)
            self._tensors = self._state.prepare(self._manifest)
            self._allocate_rows(manifest.specs)
            self._encoded = manifest.state
            self._flat = FlatState(self._tensors)
        elif manifest.state != self._encoded:
            raise DamagedPartError("it belongs to another state than the other parts")
        else:
            check_same_rows(manifest, self._specs)
        return self._flat

    def _allocate_rows(self, specs: tuple[LayerSpec, ...]) -> None:
        """Allocate memory for the experts that this worker will host, and keep `specs`, which describe the tensors of
        each layer's experts in the part. Without experts here, nothing is allocated.

        Raises:
            StateMismatchError: this model has other experts.
        """
        check_same_experts(self._experts, specs)
        if self._experts is not None:
            self._rows = empty_rows(specs, self._wanted, self._experts.layers[0].experts.device)
        self._specs = specs


def check_same_experts(experts: JobExperts | None, specs: Sequence[LayerSpec]) -> None:
    """Check that the experts of a model and of a part have the same weights: names, shapes and dtypes in each layer.

    Args:
        experts: None: the model has none, so the part must have none.
        specs: the part's.

    Raises:
        StateMismatchError: they differ.
    """
    mine = experts.describe_layers() if experts is not None else ()
    if [layer.weights for layer in mine] != [layer.weights for layer in specs]:
        raise StateMismatchError("its MoE layers have other experts")


def check_same_rows(manifest: PartManifest, specs: Sequence[LayerSpec]) -> None:
    """Check that the experts of two parts have the same tensors.

    Raises:
        DamagedPartError: they do not.
    """
    if [spec.rows for spec in manifest.specs] != [spec.rows for spec in specs]:
        raise DamagedPartError("it belongs to another state than the other parts")


def map_rows(
    manifest: PartManifest, rows: Sequence[Mapping[tuple[int, str], torch.Tensor]]
) -> list[torch.Tensor | int]:
    """Return the target of each row in a part, in order: a tensor, or the number of bytes to ignore if the expert is
    not wanted.

    Args:
        manifest: of the part.
        rows: the wanted rows of each layer, by expert and name.

    Raises:
        DamagedPartError: it has experts of a layer that it does not describe, or that `rows` does not have.
    """
    found: list[torch.Tensor | int] = []
    for layer, expert in manifest.experts:
        if layer >= min(len(manifest.specs), len(rows)):
            raise DamagedPartError(f"it has experts of MoE layer {layer}, which does not exist")
        for row in manifest.specs[layer].rows:
            tensor = rows[layer].get((expert, row.name))
            found.append(tensor if tensor is not None else row.nbytes)
    return found


class PartBody:
    """The targets of one part's bytes: a range of the dense state, then rows of experts.

    Args:
        flat: the dense state.
        dense: start and end of the part's range in the dense state.
        rows: from `map_rows`.
        scratch: memory for ignored bytes.
        before: number of ignored bytes before the range.
    """

    def __init__(
        self,
        flat: FlatState,
        dense: tuple[int, int],
        rows: Sequence[torch.Tensor | int],
        scratch: memoryview,
        before: int = 0,
    ) -> None:
        self._flat = flat
        self._start = dense[0]
        self._scratch = scratch
        self._dense = dense[1] - dense[0]
        #: the rows that are needed
        self.wanted_rows = [row for row in rows if not isinstance(row, int)]
        self._flat_rows = FlatState(self.wanted_rows)
        #: (offset in the body, bytes, offset in the needed rows or -1)
        self._pieces: list[tuple[int, int, int]] = [(0, before, -1)] if before else []
        at, inside = self._dense + before, 0
        for row in rows:
            size = row if isinstance(row, int) else row.numel() * row.element_size()
            self._pieces.append((at, size, -1 if isinstance(row, int) else inside))
            at, inside = at + size, inside + (0 if isinstance(row, int) else size)
        self.nbytes = at

    def is_wanted(self, start: int, length: int) -> bool:
        """Return whether any byte in a range of the body is needed: one of the dense state, or of a wanted expert."""
        end = start + length
        used = (at < end and start < at + size for at, size, inside in self._pieces if inside >= 0)
        return start < self._dense or any(used)

    def target(self, start: int, length: int) -> list[memoryview]:
        """Return where to store `length` bytes of the body from offset `start`: views of memory, in the order of the
        bytes. They belong to the dense state, to rows of wanted experts, or, for bytes to ignore, to the scratch
        memory.
        """
        end = start + length
        found: list[memoryview] = []
        if start < self._dense:
            found += self._flat.pieces(self._start + start, min(end, self._dense) - start)
        for at, size, inside in self._pieces:
            first, last = max(start, at), min(end, at + size)
            if first < last and inside >= 0:
                found += self._flat_rows.pieces(inside + first - at, last - first)
            elif first < last:
                found.append(self._scratch[first - start : last - start])
        return found

    def copy_staged(self) -> None:
        """Copy received bytes from staging copies into their tensors."""
        self._flat_rows.copy_staged()
