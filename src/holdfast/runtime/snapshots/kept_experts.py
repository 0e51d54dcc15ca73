"""Experts that are put away for another layout: each worker puts those away that it hosts, by layer and expert.

So a node's memory has of them what the node had, and each is on as many nodes as before. Whoever reads them takes those
that it is to host under the other layout, of its own node's parts first.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch

from holdfast.control.link.snapshots.files import CHUNK_BYTES, DamagedPartError, PartFile, PartReader, read_body
from holdfast.protocol.names import MALFORMED
from holdfast.protocol.state import SnapshotPart
from holdfast.runtime.moe.holding.job_experts import JobExperts
from holdfast.runtime.moe.holding.saving import empty_rows
from holdfast.runtime.moe.holding.shards import LayerSpec
from holdfast.runtime.snapshots.cutting import PartManifest, copy_range
from holdfast.runtime.snapshots.filling import PartBody, check_same_experts, check_same_rows, map_rows
from holdfast.runtime.state.state import StateMismatchError
from holdfast.runtime.state.wire import FlatState


def stash_experts(
    experts: JobExperts, names: Sequence[Sequence[int]], folder: Path, job: str, part: SnapshotPart
) -> int:
    """Write these experts of each layer, which live here and must not change meanwhile; return the bytes.

    Raises:
        OSError, RuntimeError: there is no room for them.
    """
    pairs = tuple((layer, expert) for layer, these in enumerate(names) for expert in these)
    rows = experts.rows_of_pairs(pairs)
    file = PartFile(folder, sum(row.nbytes for row in rows))
    try:
        if len(file.body):
            copy_range(rows, 0, torch.frombuffer(file.body, dtype=torch.uint8))
        manifest = PartManifest(state=b"", start=0, specs=experts.describe_layers(), experts=pairs)
        return file.finish(job, part, msgspec.msgpack.encode(manifest))
    except BaseException:
        file.abandon()
        raise


class StashedExpertReader:
    """Experts that were put away, on their way to a worker that is to host them."""

    def __init__(self, experts: JobExperts, wanted: Sequence[Sequence[int]]) -> None:
        """Nothing is here yet. `wanted`: of each layer."""
        self._experts, self._wanted = experts, wanted
        #: what was read so far
        self.nbytes = 0
        self._lacking = {(layer, expert) for layer, these in enumerate(wanted) for expert in these}
        #: of the part that came first: they say what the optimizer keeps
        self._specs: tuple[LayerSpec, ...] = ()
        self._rows: list[dict[tuple[int, str], torch.Tensor]] = []

    def is_needed(self, names: Sequence[Sequence[int]]) -> bool:
        """Tell whether a part with these experts of each layer is to be read."""
        here = {(layer, expert) for layer, these in enumerate(names) for expert in these}
        return not (self._specs and self._lacking.isdisjoint(here))

    def read_part(self, reader: PartReader) -> None:
        """Take of a part what is wanted, and is not here yet.

        Raises:
            DamagedPartError: it is not what was written, or does not belong to the others.
            StateMismatchError: it is of another model.
            OSError: it cannot be read.
        """
        try:
            said = msgspec.msgpack.decode(reader.manifest, type=PartManifest)
        except MALFORMED as error:
            raise DamagedPartError(f"its manifest cannot be read: {error}") from None
        if not self._specs:
            check_same_experts(self._experts, said.specs)
            self._rows = empty_rows(said.specs, self._wanted, self._experts.layers[0].experts.device)
            self._specs = said.specs
        check_same_rows(said, self._specs)
        pending = [
            {(expert, name): row for (expert, name), row in rows.items() if (layer, expert) in self._lacking}
            for layer, rows in enumerate(self._rows)
        ]
        body = PartBody(FlatState([]), (0, 0), map_rows(said, pending), memoryview(bytearray(CHUNK_BYTES)))
        if body.nbytes != reader.header.body_bytes:
            raise DamagedPartError("it has not as many bytes as the experts that it names")
        self.nbytes += sum(row.nbytes for row in body.wanted_rows)
        read_body(reader, body.target, body.is_wanted)
        body.copy_staged()
        self._lacking.difference_update(said.experts)

    def adopt(self) -> None:
        """All are here: let them live here.

        Raises:
            StateMismatchError: one is in none of the parts, or no part could be read.
        """
        if not self._specs:
            raise StateMismatchError("none of its parts of experts can be read")
        if self._lacking:
            layer, expert = min(self._lacking)
            raise StateMismatchError(f"expert {expert} of MoE layer {layer} is in none of its parts")
        self._experts.adopt(self._wanted, self._specs, self._rows)
