"""A state that is put away for another layout: in terms of whole tensors, one part for each place of a unit.

Each node has all parts, so that nothing is lost as long as one of them is left. Whoever reads it takes of every part
the boxes of what it has itself of each tensor, under whatever layout.
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
    PartFile,
    PartReader,
    chunks,
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
from holdfast.runtime.dtensor.place import ReplicaPosition
from holdfast.runtime.state.state import Manifest, StateMismatchError, TrainingState


class StashManifest(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What a part's body is: pieces of tensors, as `header` says, of the whole state that `state` says."""

    state: bytes
    header: bytes


def stash_state(state: TrainingState, place: ReplicaPosition, folder: Path, job: str, part: SnapshotPart) -> int:
    """Write a place's part of the state, which must not change meanwhile; return its bytes.

    Raises:
        OSError, RuntimeError: there is no room for it.
        BadInputError: of some of it nobody could say under another layout which part belongs where.
    """
    if late := state.find_late_tensor():
        raise BadInputError(f"{late} was made after job.protect(), so another layout cannot spread it: make it before")
    view = state.capture()
    laid = lay_out(view, 0, 1, place=place)
    file = PartFile(folder, laid.nbytes)
    try:
        if laid.nbytes:
            laid.copy_pieces(torch.frombuffer(file.body, dtype=torch.uint8))
        manifest = StashManifest(state=encode_manifest(view.manifest), header=laid.header)
        return file.finish(job, part, msgspec.msgpack.encode(manifest))
    except BaseException:
        file.abandon()
        raise


class StashReader:
    """A state that was put away, on its way into what is here of each tensor."""

    def __init__(self, state: TrainingState, place: ReplicaPosition) -> None:
        """Nothing is here yet. `place`: which part of a replica is here."""
        self._state, self._place = state, place
        #: what was read so far
        self.nbytes = 0
        self._encoded = b""
        self._manifest: Manifest | None = None
        self._tensors: list[torch.Tensor] = []
        self._filling: BoxReader | None = None

    def read_part(self, reader: PartReader) -> None:
        """Take of a part what belongs here.

        Raises:
            DamagedPartError: it is not what was written, or does not belong to the others.
            StateMismatchError: it is of another model.
            OSError: it cannot be read.
        """
        called, size = reader.header.snapshot.name, reader.header.body_bytes
        try:
            said = msgspec.msgpack.decode(reader.manifest, type=StashManifest)
            filling = self._prepare(said.state)
            pieces, _ = read_header(io.BytesIO(said.header), len(said.header) + size, called)
            body = _Chunks(reader, filling.byte_ranges(called, pieces))
            self.nbytes += body.nbytes
            filling.read_pieces(body, called, pieces, 0)
        except MALFORMED as error:
            raise DamagedPartError(f"its manifest cannot be read: {error}") from None
        except DamagedCheckpointError as error:
            raise DamagedPartError(str(error)) from None

    def adopt(self) -> None:
        """All is here: make it the present state.

        Raises:
            StateMismatchError: its values do not fit the objects, or a piece of a tensor is in none of the parts.
        """
        assert self._manifest is not None
        assert self._filling is not None
        if lacking := self._filling.missing_tensor:
            raise StateMismatchError(f"its parts do not hold all of {lacking}, once")
        self._state.adopt(self._manifest, self._tensors)

    def _prepare(self, encoded: bytes) -> BoxReader:
        if self._filling is None:
            manifest, parts = localize_manifest(self._state, decode_manifest(encoded), self._place)
            self._tensors = self._state.prepare(manifest)
            names = stored_names(manifest)
            wanted = {names[number]: part for number, part in parts.items()}
            self._filling = BoxReader(dict(zip(names, self._tensors, strict=True)), wanted)
            self._manifest, self._encoded = manifest, encoded
        elif encoded != self._encoded:
            raise DamagedPartError("it belongs to another state than the other parts")
        return self._filling


class _Chunks:
    """Those chunks of a part's body in which some ranges lie, compared with their checksums."""

    def __init__(self, reader: PartReader, ranges: Sequence[tuple[int, int]]) -> None:
        self._at = 0
        wanted = {place for start, length in ranges for place in _chunk_numbers(start, length)}
        sizes = dict(enumerate(chunks(reader.header.body_bytes)))
        #: by their numbers
        self._data = {place: bytearray(sizes[place][1]) for place in sorted(wanted) if place in sizes}
        self.nbytes = sum(map(len, self._data.values()))
        read_body(
            reader,
            lambda start, _: [memoryview(self._data[start // CHUNK_BYTES])],
            lambda start, _: start // CHUNK_BYTES in self._data,
        )

    def seek(self, offset: int, /) -> int:
        """Go on reading there."""
        self._at = offset
        return offset

    def read(self, size: int, /) -> bytes:
        """Return so many bytes, fewer where they lie in no chunk that is here."""
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
