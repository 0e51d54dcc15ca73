"""Experts stashed for a change of layout: each worker stashes the experts that it hosts, by layer and expert.

So a node's memory contains the experts that the node hosted, and each expert is on as many nodes as before. A reader
takes the experts that it will host under the new layout, from its own node's parts first.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch

from holdfast.control.link.snapshots.files import CHUNK_BYTES, DamagedPartError, PartReader, PartWriter, read_body
from holdfast.protocol.names import MALFORMED
from holdfast.protocol.state import SnapshotPart
from holdfast.runtime.moe.expert_shards.job_experts import JobExperts
from holdfast.runtime.moe.expert_shards.saving import empty_rows
from holdfast.runtime.moe.expert_shards.shards import LayerSpec
from holdfast.runtime.snapshots.cutting import PartManifest, copy_range
from holdfast.runtime.snapshots.filling import PartBody, check_same_experts, check_same_rows, map_rows
from holdfast.runtime.state.state import StateMismatchError
from holdfast.runtime.state.wire import FlatState


def stash_experts(
    experts: JobExperts, names: Sequence[Sequence[int]], folder: Path, job: str, part: SnapshotPart
) -> int:
    """Write these experts of each layer into a new part in memory; they must not change meanwhile. Return the size of
    its file in bytes.

    Args:
        names: the numbers of the experts of each layer.
        folder: the agent's, in memory.
        part: the description of the part.

    Raises:
        OSError, RuntimeError: there is not enough memory.
    """
    pairs = tuple((layer, expert) for layer, these in enumerate(names) for expert in these)
    rows = experts.rows_of_pairs(pairs)
    file = PartWriter(folder, sum(row.nbytes for row in rows))
    try:
        if len(file.body):
            copy_range(rows, 0, torch.frombuffer(file.body, dtype=torch.uint8))
        manifest = PartManifest(state=b"", start=0, specs=experts.describe_layers(), experts=pairs)
        return file.finish(job, part, msgspec.msgpack.encode(manifest))
    except BaseException:
        file.abandon()
        raise


class StashedExpertReader:
    """Reads stashed experts that a worker will host."""

    def __init__(self, experts: JobExperts, wanted: Sequence[Sequence[int]]) -> None:
        """Start without experts.

        Args:
            wanted: the experts of each layer.
        """
        self._experts = experts
        self._wanted = wanted
        #: bytes read so far
        self.nbytes = 0
        self._lacking = {(layer, expert) for layer, these in enumerate(wanted) for expert in these}
        #: the experts' tensors and optimizer values, from the first part that was read
        self._specs: tuple[LayerSpec, ...] = ()
        self._rows: list[dict[tuple[int, str], torch.Tensor]] = []

    def is_needed(self, names: Sequence[Sequence[int]]) -> bool:
        """Return whether a part with these experts of each layer must be read: it has a wanted one that was not read
        yet, or no part was read so far.
        """
        here = {(layer, expert) for layer, these in enumerate(names) for expert in these}
        return not (self._specs and self._lacking.isdisjoint(here))

    def read_part(self, reader: PartReader) -> None:
        """Read the experts of a part that are wanted and not read yet, and skip the others.

        Raises:
            DamagedPartError: its content was damaged, or does not match the other parts.
            StateMismatchError: it is of another model.
            OSError: it cannot be read.
        """
        try:
            manifest = msgspec.msgpack.decode(reader.manifest, type=PartManifest)
        except MALFORMED as error:
            raise DamagedPartError(f"its manifest cannot be read: {error}") from None
        if not self._specs:
            check_same_experts(self._experts, manifest.specs)
            self._rows = empty_rows(manifest.specs, self._wanted, self._experts.layers[0].experts.device)
            self._specs = manifest.specs
        check_same_rows(manifest, self._specs)
        pending = [
            {(expert, name): row for (expert, name), row in rows.items() if (layer, expert) in self._lacking}
            for layer, rows in enumerate(self._rows)
        ]
        body = PartBody(FlatState([]), (0, 0), map_rows(manifest, pending), memoryview(bytearray(CHUNK_BYTES)))
        if body.nbytes != reader.header.body_bytes:
            raise DamagedPartError("its size does not match the experts that it names")
        self.nbytes += sum(row.nbytes for row in body.wanted_rows)
        read_body(reader, body.target, body.is_wanted)
        body.copy_staged()
        self._lacking.difference_update(manifest.experts)

    def adopt(self) -> None:
        """Replace this worker's experts by the received ones.

        Raises:
            StateMismatchError: an expert is in none of the parts, or no part could be read.
        """
        if not self._specs:
            raise StateMismatchError("none of its parts of experts can be read")
        if self._lacking:
            layer, expert = min(self._lacking)
            raise StateMismatchError(f"expert {expert} of MoE layer {layer} is in none of its parts")
        self._experts.adopt(self._wanted, self._specs, self._rows)
