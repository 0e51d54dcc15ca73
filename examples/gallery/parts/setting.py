"""What every script of the gallery begins with: its one option and its seed."""

from __future__ import annotations

import argparse

import torch


def parse_steps(about: str | None, default: int) -> int:
    """Return `--steps` of the command line; `about`: what `--help` says of the script."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--steps", type=int, default=default)
    return parser.parse_args().steps


def seed_all(seed: int) -> None:
    """Seed torch: all processes that train one model must begin with the same weights."""
    torch.manual_seed(seed)  # pyright: ignore[reportUnknownMemberType] - torch leaves it untyped
