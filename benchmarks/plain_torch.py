"""Typed wrappers of the parts of plain torch that the benchmarks compare with, and that torch ships without types."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed

_dist: Any = torch.distributed


def join_group(store: object, *, rank: int, world: int) -> None:
    """Join the default process group, on gloo."""
    _dist.init_process_group("gloo", store=store, rank=rank, world_size=world)


def file_store(path: Path, world: int) -> object:
    """Return a store in a file that all processes share."""
    return _dist.FileStore(str(path), world)


def tcp_store(host: str, port: int, prefix: str) -> object:
    """Return a store served by another process, under a prefix."""
    return _dist.PrefixStore(prefix, _dist.TCPStore(host, port, is_master=False))


def serve_store() -> tuple[object, int]:
    """Serve a store on this machine for as long as the object exists; return it with its port."""
    store = _dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return store, store.port


def leave_group() -> None:
    """Leave the default process group."""
    _dist.destroy_process_group()


def send(tensor: torch.Tensor, rank: int) -> None:
    """Send a tensor to a rank."""
    _dist.send(tensor, rank)


def receive(tensor: torch.Tensor, rank: int) -> None:
    """Receive a tensor from a rank, in place."""
    _dist.recv(tensor, rank)


def all_reduce(tensor: torch.Tensor) -> None:
    """Sum a tensor over all ranks, in place."""
    _dist.all_reduce(tensor)


def all_to_all(
    out: torch.Tensor, rows: torch.Tensor, receive: list[int] | None = None, send: list[int] | None = None
) -> None:
    """Send rows to each rank and receive rows from each; without counts, the same number for all."""
    _dist.all_to_all_single(out, rows, receive, send)


def barrier() -> None:
    """Wait for all ranks."""
    _dist.barrier()


def adamw(
    parameters: Iterable[torch.nn.Parameter], *, betas: tuple[float, float] = (0.9, 0.999), weight_decay: float = 0.01
) -> torch.optim.Optimizer:
    """Return AdamW with a learning rate of 0.001."""
    return torch.optim.AdamW(parameters, lr=1e-3, betas=betas, weight_decay=weight_decay)
