"""A state stashed for a change of layout: in terms of whole tensors, one part per local rank of a replica group.

Each node has all parts, so that nothing is lost as long as one node is left. Under any layout, a reader takes its own
boxes of each tensor from every part.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch

from holdfast.control.link.snapshots.files import (
    CHUNK_BYTES,
    DamagedPartError,
    PartReader,
    PartWriter,
    iterate_chunks,
    read_body,
)
from holdfast.errors import BadInputError
from holdfast.protocol.checkpoints.directory import DamagedCheckpointError
from holdfast.protocol.checkpoints.tensor_files import read_header
from holdfast.protocol.names import MALFORMED
from holdfast.protocol.state import SnapshotPart
from holdfast.runtime.checkpoints.global_terms import decode_manifest, encode_manifest, localize_manifest
from holdfast.runtime.checkpoints.parts import lay_out, stored_names
from holdfast.runtime.checkpoints.stored_tensors import BoxReader
from holdfast.runtime.dtensor.replica_position import ReplicaPosition
from holdfast.runtime.state.state import Manifest, StateMismatchError, TrainingState


class StashManifest(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The content of a part: pieces of the tensors of a state."""

    #: the encoded manifest, in terms of whole tensors
    state: bytes
    #: the positions of the pieces in the body
    header: bytes


def stash_state(state: TrainingState, position: ReplicaPosition, folder: Path, job: str, part: SnapshotPart) -> int:
    """Write a local rank's part of the state, in terms of whole tensors, into a new part in memory; the state must not
    change meanwhile. Return the size of its file in bytes.

    Args:
        folder: the agent's, in memory.
        part: the description of the part.

    Raises:
        OSError, RuntimeError: there is not enough memory.
        BadInputError: another layout could not place a tensor of the state.
    """
    if late := state.find_late_tensor():
        raise BadInputError(f"{late} was made after job.protect(), so another layout cannot place it: make it before")
    view = state.capture()
    laid = lay_out(view, 0, 1, position=position)
    file = PartWriter(folder, laid.nbytes)
    try:
        if laid.nbytes:
            laid.copy_pieces(torch.frombuffer(file.body, dtype=torch.uint8))
        manifest = StashManifest(state=encode_manifest(view.manifest), header=laid.header)
        return file.finish(job, part, msgspec.msgpack.encode(manifest))
    except BaseException:
        file.abandon()
        raise


class StashReader:
    """Reads the local parts of a stashed state's tensors."""

    def __init__(self, state: TrainingState, position: ReplicaPosition) -> None:
        """Start without parts.

        Args:
            position: the part of a replica on this worker.
        """
        self._state = state
        self._position = position
        #: bytes read so far
        self.nbytes = 0
        self._encoded = b""
        self._manifest: Manifest | None = None
        self._tensors: list[torch.Tensor] = []
        self._filling: BoxReader | None = None

    def read_part(self, reader: PartReader) -> None:
        """Read the pieces of a part that belong to this worker into its tensors.

        Raises:
            DamagedPartError: its content was damaged, or does not match the other parts.
            StateMismatchError: it is of another model.
            OSError: it cannot be read.
        """
        called, size = reader.header.snapshot.name, reader.header.body_bytes
        try:
            manifest = msgspec.msgpack.decode(reader.manifest, type=StashManifest)
            filling = self._prepare(manifest.state)
            pieces, _ = read_header(io.BytesIO(manifest.header), len(manifest.header) + size, called)
            body = _Chunks(reader, filling.byte_ranges(called, pieces))
            self.nbytes += body.nbytes
            filling.read_pieces(body, called, pieces, 0)
        except MALFORMED as error:
            raise DamagedPartError(f"its manifest cannot be read: {error}") from None
        except DamagedCheckpointError as error:
            raise DamagedPartError(str(error)) from None

    def adopt(self) -> None:
        """Make the received state the present one, after all parts were read.

        Raises:
            StateMismatchError: its values do not fit the objects, or elements of a tensor are missing in the parts or
                present twice.
        """
        assert self._manifest is not None
        assert self._filling is not None
        if lacking := self._filling.missing_tensor:
            raise StateMismatchError(f"its parts do not hold all of {lacking}, once")
        self._state.adopt(self._manifest, self._tensors)

    def _prepare(self, encoded: bytes) -> BoxReader:
        """Return the reader of this worker's tensors. The first part's encoded manifest determines and allocates them.

        Raises:
            DamagedPartError: the part belongs to another state than the first one.
            StateMismatchError: the state is of another model, or a placement is unknown.
        """
        if self._filling is None:
            manifest, parts = localize_manifest(self._state, decode_manifest(encoded), self._position)
            self._tensors = self._state.prepare(manifest)
            names = stored_names(manifest)
            wanted = {names[number]: part for number, part in parts.items()}
            self._filling = BoxReader(dict(zip(names, self._tensors, strict=True)), wanted)
            self._manifest = manifest
            self._encoded = encoded
        elif encoded != self._encoded:
            raise DamagedPartError("it belongs to another state than the other parts")
        return self._filling


class _Chunks:
    """The chunks of a part's body that overlap some ranges, after their checksums were verified."""

    def __init__(self, reader: PartReader, ranges: Sequence[tuple[int, int]]) -> None:
        self._at = 0
        wanted = {place for start, length in ranges for place in _chunk_numbers(start, length)}
        sizes = dict(enumerate(iterate_chunks(reader.header.body_bytes)))
        #: the chunks by number
        self._data = {place: bytearray(sizes[place][1]) for place in sorted(wanted) if place in sizes}
        self.nbytes = sum(map(len, self._data.values()))
        read_body(
            reader,
            lambda start, _: [memoryview(self._data[start // CHUNK_BYTES])],
            lambda start, _: start // CHUNK_BYTES in self._data,
        )

    def seek(self, offset: int, /) -> int:
        """Set the position for the next read."""
        self._at = offset
        return offset

    def read(self, size: int, /) -> bytes:
        """Return up to this many bytes from the present position, and advance it; fewer if a chunk is missing."""
        found = bytearray()
        while len(found) < size:
            place, inside = divmod(self._at, CHUNK_BYTES)
            data = self._data.get(place, b"")[inside : inside + size - len(found)]
            if not data:
                break
            found += data
            self._at += len(data)
        return bytes(found)


def _chunk_numbers(start: int, length: int) -> range:
    return range(start // CHUNK_BYTES, -(-(start + length) // CHUNK_BYTES))
