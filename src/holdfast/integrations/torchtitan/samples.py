"""Samples in the shape of torchtitan's: windows of tokens by number, or its own data loaders as streams."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch.utils.data import Dataset

from holdfast import BadInputError

#: what torchtitan's data loaders return: what goes into the model, by name, and which tokens are to come out
TokenSample = tuple[dict[str, torch.Tensor], torch.Tensor]


class TokenWindows(Dataset[TokenSample]):
    """A text as windows, sample i from token i * length on: which samples a step has depends on the seed alone."""

    def __init__(self, tokens: Sequence[int] | torch.Tensor, length: int) -> None:
        """Cut it.

        Args:
            tokens: of the whole text, one dimension.
            length: of a window: `training.seq_len`.

        Raises:
            BadInputError: it is too short for one window and the token after it.
        """
        self._tokens = torch.as_tensor(tokens)
        self._length = length
        if length < 1:
            raise BadInputError(f"windows of {length} tokens: give training.seq_len, 1 at least")
        if self._tokens.dim() != 1 or len(self) < 1:
            raise BadInputError(
                f"the tokens are of the shape {tuple(self._tokens.shape)}: one dimension of {length + 1} at least is "
                f"needed for windows of {length}"
            )

    def __len__(self) -> int:
        return (len(self._tokens) - 1) // self._length

    def __getitem__(self, number: int) -> TokenSample:
        window = self._tokens[number * self._length : (number + 1) * self._length + 1].long()
        return {"input": window[:-1], "positions": torch.arange(self._length, dtype=torch.int32)}, window[1:]


class LoaderStreams:
    """A data loader of torchtitan's as streams: one for each micro-batch of a step, each with its own share."""

    def __init__(self, build: Callable[[int, int], Any]) -> None:
        """Build none yet.

        Args:
            build: given which of how many data-parallel ranks it is for, returns a `BaseDataLoader`.
        """
        self._build = build

    def open(self, micro_batch: int, micro_batches: int) -> Iterator[Any]:
        """Return one pass through a micro-batch's stream.

        Not with the loader's own state: torchtitan pickles that, and what another worker says is never unpickled here.
        Where another worker goes on with a stream it is gone through again up to there.
        """
        return iter(cast(Iterator[Any], self._build(micro_batch, micro_batches)))
