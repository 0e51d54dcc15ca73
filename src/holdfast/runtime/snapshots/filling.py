"""The tensors of a state, as the parts of a snapshot come in; of the experts only those that a worker is to host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import torch

from holdfast.control.link.snapshots.files import CHUNK_BYTES, DamagedPartError, PartReader, read_body
from holdfast.protocol.names import MALFORMED
from holdfast.runtime.dtensor.place import WHOLE_REPLICA, ReplicaPosition
from holdfast.runtime.moe.holding.job_experts import JobExperts
from holdfast.runtime.moe.holding.saving import empty_rows
from holdfast.runtime.moe.holding.shards import LayerSpec
from holdfast.runtime.snapshots.cutting import PartManifest, part_range
from holdfast.runtime.state.state import Manifest, StateMismatchError, TrainingState
from holdfast.runtime.state.wire import FlatState

_Rows = list[dict[tuple[int, str], torch.Tensor]]


class SnapshotReader:
    """One state on its way in."""

    def __init__(
        self,
        state: TrainingState,
        experts: JobExperts | None,
        wanted: Sequence[Sequence[int]],
        place: ReplicaPosition = WHOLE_REPLICA,
    ) -> None:
        """Nothing is here yet.

        Args:
            wanted: the experts of each layer that this worker is to host.
            place: which part of a replica is here; the parts are those of its role.
        """
        self._place = place
        #: what was read so far
        self.nbytes = 0
        self._state, self._experts, self._wanted = state, experts, wanted
        self._encoded = b""
        self._manifest: Manifest | None = None
        self._tensors: list[torch.Tensor] = []
        self._flat: FlatState | None = None
        #: of the part that came first, and of the role's first: they say what the optimizer keeps
        self._specs: tuple[LayerSpec, ...] = ()
        self._rows: _Rows = []
        self._received: set[tuple[int, int]] = set()
        self._scratch = memoryview(bytearray(CHUNK_BYTES))

    def read_part(self, reader: PartReader) -> None:
        """Take a part in; of one of another role only its experts, once one of this role has been taken.

        Raises:
            DamagedPartError: it is not what was written, or does not belong to the others.
            StateMismatchError: it is of another model.
            OSError: it cannot be read.
        """
        snapshot = reader.header.snapshot
        self.nbytes += reader.header.body_bytes
        try:
            said = msgspec.msgpack.decode(reader.manifest, type=PartManifest)
            if snapshot.part not in self._place.role_ranks(snapshot.parts):
                self._read_experts(reader, said)
                return
            flat = self._prepare(said)
        except MALFORMED as error:
            raise DamagedPartError(f"its manifest cannot be read: {error}") from None
        turn, turns = self._place.role_position(snapshot.part, snapshot.parts)
        start, end = part_range(flat.nbytes, turn, turns)
        body = PartBody(flat, (start, end), map_rows(said, self._rows), self._scratch)
        if (said.start, reader.header.body_bytes) != (start, body.nbytes):
            raise DamagedPartError("it is another part of the state than its name says")
        read_body(reader, body.target, body.is_wanted)
        body.copy_staged()
        self._received.update(said.experts)
        if turn == 0:
            self._specs = said.specs

    def _read_experts(self, reader: PartReader, said: PartManifest) -> None:
        """Take in the experts of a part whose beginning is another role's.

        Raises:
            DamagedPartError: it does not belong to the others.
            OSError: it cannot be read.
        """
        assert self._flat is not None
        check_same_rows(said, self._specs)
        beside = sum(row.nbytes for layer, _ in said.experts for row in said.specs[layer].rows)
        dense = reader.header.body_bytes - beside
        if dense < 0:
            raise DamagedPartError("it is shorter than the experts that it names")
        body = PartBody(self._flat, (0, 0), map_rows(said, self._rows), self._scratch, before=dense)
        read_body(reader, body.target, body.is_wanted)
        body.copy_staged()
        self._received.update(said.experts)

    def adopt(self) -> None:
        """All is here: make it the present state.

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

    def _prepare(self, said: PartManifest) -> FlatState:
        """Return the memory for a state with this manifest: the same for all parts."""
        if self._flat is None:
            self._manifest = msgspec.msgpack.decode(said.state, type=Manifest)
            self._tensors = self._state.prepare(self._manifest)
            self._allocate_rows(said.specs)
            self._encoded, self._flat = said.state, FlatState(self._tensors)
        elif said.state != self._encoded:
            raise DamagedPartError("it belongs to another state than the other parts")
        else:
            check_same_rows(said, self._specs)
        return self._flat

    def _allocate_rows(self, specs: tuple[LayerSpec, ...]) -> None:
        """Have memory for the experts that are wanted.

        Raises:
            StateMismatchError: this model has others.
        """
        check_same_experts(self._experts, specs)
        if self._experts is not None:
            self._rows = empty_rows(specs, self._wanted, self._experts.layers[0].experts.device)
        self._specs = specs


def check_same_experts(experts: JobExperts | None, specs: Sequence[LayerSpec]) -> None:
    """Look whether a model has experts like those of a part.

    Raises:
        StateMismatchError: it has others.
    """
    mine = experts.describe_layers() if experts is not None else ()
    if [layer.weights for layer in mine] != [layer.weights for layer in specs]:
        raise StateMismatchError("its MoE layers have other experts")


def check_same_rows(said: PartManifest, specs: Sequence[LayerSpec]) -> None:
    """Look whether a part's experts are of the same state as those of another part, by what is kept of each.

    Raises:
        DamagedPartError: they are not.
    """
    if [spec.rows for spec in said.specs] != [spec.rows for spec in specs]:
        raise DamagedPartError("it belongs to another state than the other parts")


def map_rows(said: PartManifest, rows: Sequence[Mapping[tuple[int, str], torch.Tensor]]) -> list[torch.Tensor | int]:
    """Return where the rows of a part go, in their order: a tensor, or how many bytes are of no use.

    Raises:
        DamagedPartError: it names layers that it does not describe.
    """
    found: list[torch.Tensor | int] = []
    for layer, expert in said.experts:
        if layer >= min(len(said.specs), len(rows)):
            raise DamagedPartError(f"it has experts of MoE layer {layer}, which is none")
        for row in said.specs[layer].rows:
            tensor = rows[layer].get((expert, row.name))
            found.append(tensor if tensor is not None else row.nbytes)
    return found


class PartBody:
    """Where the bytes of one part belong: a range of the dense state, then rows of experts.

    `before`: so many bytes of no use lie in front of both.
    """

    def __init__(
        self,
        flat: FlatState,
        dense: tuple[int, int],
        rows: Sequence[torch.Tensor | int],
        scratch: memoryview,
        before: int = 0,
    ) -> None:
        self._flat, self._start, self._scratch = flat, dense[0], scratch
        self._dense = dense[1] - dense[0]
        #: those rows that are wanted
        self.wanted_rows = [row for row in rows if not isinstance(row, int)]
        self._flat_rows = FlatState(self.wanted_rows)
        #: (offset in the body, bytes, offset among those that are wanted or -1)
        self._pieces: list[tuple[int, int, int]] = [(0, before, -1)] if before else []
        at, inside = self._dense + before, 0
        for row in rows:
            size = row if isinstance(row, int) else row.numel() * row.element_size()
            self._pieces.append((at, size, -1 if isinstance(row, int) else inside))
            at, inside = at + size, inside + (0 if isinstance(row, int) else size)
        self.nbytes = at

    def is_wanted(self, start: int, length: int) -> bool:
        """Tell whether something in a range of the body is of any use."""
        end = start + length
        used = (at < end and start < at + size for at, size, inside in self._pieces if inside >= 0)
        return start < self._dense or any(used)

    def target(self, start: int, length: int) -> list[memoryview]:
        """Return the memory of a chunk."""
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
        """Copy what came into staging to where it belongs."""
        self._flat_rows.copy_staged()
