"""The standard library's source as bytes: the data of the gallery's language models."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch.utils.data import Dataset

# T context length
VOCABULARY = 256
TEXT_BYTES = 1 << 20


def read_text() -> torch.Tensor:
    """Return the first MiB of the standard library's source, one number per byte."""
    text = b""
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += file.read_bytes()
        if len(text) >= TEXT_BYTES:
            break
    return torch.frombuffer(bytearray(text[:TEXT_BYTES]), dtype=torch.uint8).long()


class Text(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Consecutive pieces of a text: sample i is (bytes, the bytes that follow each of them), both `(T,)`."""

    def __init__(self, text: torch.Tensor, context: int) -> None:
        self.text = text
        self.context = context

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        piece = self.text[index * self.context : (index + 1) * self.context + 1]
        return piece[:-1], piece[1:]


class LabelledText(Dataset[dict[str, torch.Tensor]]):
    """The same text in the format of transformers' models, which shift the labels themselves."""

    def __init__(self, text: torch.Tensor, context: int) -> None:
        self.pieces = Text(text, context)

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        piece, _ = self.pieces[index]
        return {"input_ids": piece, "labels": piece}
