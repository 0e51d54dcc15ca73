"""The standard library's source as a stream that is read during training and can be sharded."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.utils.data import IterableDataset, get_worker_info

# T context length


class SourceStream(IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    """Consecutive pieces of each file: (bytes, the bytes that follow each of them), both `(T,)`.

    It has the interface of streams in Hugging Face's `datasets`: each worker of a DataLoader reads its own shard, and
    `state_dict()` contains the position of a shard.
    """

    def __init__(self, context: int, num_shards: int = 1, index: int = 0) -> None:
        self.context = context
        self.files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[index::num_shards]
        self._file, self._place = 0, 0

    def shard(self, num_shards: int, index: int) -> SourceStream:
        """Return every n-th file, from its start."""
        return SourceStream(self.context, num_shards, index)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        loader = get_worker_info()
        return self._pieces() if loader is None else self.shard(loader.num_workers, loader.id)._pieces()

    def _pieces(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        while self._file < len(self.files):
            text = torch.frombuffer(bytearray(self.files[self._file].read_bytes() or b"\n"), dtype=torch.uint8).long()
            while self._place + self.context < len(text):
                piece = text[self._place : self._place + self.context + 1]
                self._place += self.context
                yield piece[:-1], piece[1:]
            self._file, self._place = self._file + 1, 0

    def state_dict(self) -> dict[str, int]:
        """Return the position."""
        return {"file": self._file, "place": self._place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue from a position."""
        self._file, self._place = state["file"], state["place"]
