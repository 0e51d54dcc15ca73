"""Build NCCL groups of one rank, use them next to each other, swap and abort them; with `--device cpu` gloo groups."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from benchmarks.gpu_check.options import Figures, NotPossibleError, Options, require
from holdfast.runtime.groups.abandoned_groups import GroupReaper
from holdfast.runtime.groups.communicator import Communicator
from holdfast.runtime.groups.rendezvous import Board
from holdfast.runtime.groups.transports.gloo import build_gloo
from holdfast.runtime.groups.transports.nccl import build_nccl

T = TypeVar("T")
#: Clock cycles that keep the device busy while a group is aborted: about a second.
BUSY_CYCLES = 2_000_000_000
#: An abort may wait for work enqueued before the operation, but not much longer than that takes.
ABORT_BOUND_S = 10.0


def run(options: Options, figures: Figures) -> None:
    """Build two groups, swap them, and abort the second with an operation enqueued."""
    if options.device == "cuda" and not dist.is_nccl_available():
        raise NotPossibleError("this build of torch has no NCCL")
    device, reaper = torch.device(options.device), GroupReaper()

    def build(generation: int) -> Communicator:
        board = Board(generation, lambda _: None)
        if device.type == "cpu":
            return build_gloo(board, 0, 1, generation=generation, reaper=reaper)
        return build_nccl(
            board,
            0,
            1,
            generation=generation,
            device=torch.device("cuda", 0),
            reaper=reaper,
            build_timeout_s=60.0,
        )

    torch.zeros(1, device=device)  # start CUDA before timing NCCL
    first = _timed(figures, "first_build_s", lambda: build(1))
    _use(first, device)
    second = _timed(figures, "second_build_s", lambda: build(2))
    _use(first, device)
    _timed(figures, "swap_s", lambda: _swap(first, second, device))
    figures["first_group_destroyed"] = reaper.wait_empty(30.0)
    require(figures["first_group_destroyed"], "the group that was swapped out is not destroyed after 30 s")
    _use(second, device)

    numbers = torch.ones(1 << 20, device=device)
    gathered = torch.empty_like(numbers)
    if device.type == "cuda":
        untyped: Any = torch.cuda
        untyped._sleep(BUSY_CYCLES)
    pending = second.start_all_gather(gathered, numbers)
    figures["enqueued"] = not pending.done()
    if device.type == "cuda":
        require(figures["enqueued"], "the operation ended before its group was aborted")
    _timed(figures, "abort_s", second.sever)
    _timed(figures, "retire_s", second.retire)
    _timed(figures, "device_free_s", lambda: _synchronize(device))
    figures["aborted_group_destroyed"] = reaper.wait_empty(30.0)
    require(figures["aborted_group_destroyed"], "the aborted group is not destroyed after 30 s")
    _use(_timed(figures, "third_build_s", lambda: build(3)), device)
    require(figures["abort_s"] < ABORT_BOUND_S, f"an abort took {figures['abort_s']:.1f} s")


def _swap(old: Communicator, new: Communicator, device: torch.device) -> None:
    _use(new, device)
    old.retire(sever=False)


def _use(group: Communicator, device: torch.device) -> None:
    """Gather some numbers and check them."""
    numbers = torch.arange(1000.0, device=device)
    gathered = torch.zeros_like(numbers)
    group.wait(group.start_all_gather(gathered, numbers))
    exchanged = torch.zeros_like(numbers)
    group.wait(group.start_all_to_all(exchanged, numbers))
    require(
        bool((gathered == numbers).all() and (exchanged == numbers).all()),
        "a group of one rank changed the gathered values",
    )


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _timed(figures: Figures, name: str, action: Callable[[], T]) -> T:
    began = time.perf_counter()
    result = action()
    figures[name] = time.perf_counter() - began
    return result
