"""Samples in torchtitan's format: windows of tokens by index, or torchtitan's own data loaders as streams."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch.utils.data import Dataset

from holdfast import BadInputError

#: a sample of torchtitan's data loaders: inputs of the model by name, and labels
TokenSample = tuple[dict[str, torch.Tensor], torch.Tensor]


class TokenWindows(Dataset[TokenSample]):
    """A text as windows of tokens. Sample i starts at token i * length.

    The samples of a step depend on the seed alone.
    """

    def __init__(self, tokens: Sequence[int] | torch.Tensor, length: int) -> None:
        """Divide a text into windows.

        Args:
            tokens: the tokens of the text, one dimension.
            length: tokens of a window, `training.seq_len`.

        Raises:
            BadInputError: the text is shorter than one window and the token after it, or has more dimensions.
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
    """A data loader of torchtitan as streams: one for each micro-batch of a step, each with its own share."""

    def __init__(self, build: Callable[[int, int], Any]) -> None:
        """Store the builder. No loader is built yet.

        Args:
            build: called with a data-parallel rank and the number of ranks; returns a `BaseDataLoader`.
        """
        self._build = build

    def open(self, micro_batch: int, micro_batches: int) -> Iterator[Any]:
        """Return one pass through a micro-batch's stream.

        The loader's own state is not used: torchtitan pickles it, and data of other workers is never unpickled here. A
        worker that continues another worker's stream therefore reads it again up to that point.
        """
        return iter(cast(Iterator[Any], self._build(micro_batch, micro_batches)))
