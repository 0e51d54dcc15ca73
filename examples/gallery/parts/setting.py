"""The option and the seed that all scripts of the gallery share."""

from __future__ import annotations

import argparse

import torch


def parse_steps(about: str | None, default: int) -> int:
    """Return `--steps` of the command line; `about` is the description in `--help`."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--steps", type=int, default=default)
    return parser.parse_args().steps


def seed_all(seed: int) -> None:
    """Seed torch: all processes that train one model must start with the same weights."""
    torch.manual_seed(seed)  # pyright: ignore[reportUnknownMemberType] - torch leaves it untyped
