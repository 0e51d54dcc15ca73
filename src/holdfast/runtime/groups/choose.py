"""Which transport carries a generation's group: none, gloo or NCCL."""

from __future__ import annotations

import threading

import torch

from holdfast.runtime.groups.communicator import Communicator, HaltCheck, LocalCommunicator
from holdfast.runtime.groups.gloo import build_gloo
from holdfast.runtime.groups.graveyard import Graveyard
from holdfast.runtime.groups.nccl import build_nccl
from holdfast.runtime.groups.rendezvous import Board


def build_communicator(
    device: torch.device,
    board: Board,
    rank: int,
    size: int,
    *,
    generation: int,
    graveyard: Graveyard,
    host: str = "127.0.0.1",
    timeout_s: float = 120.0,
    build_timeout_s: float = 10.0,
    halt: threading.Event | HaltCheck | None = None,
) -> Communicator:
    """Build the group of a generation on the transport that fits the device; see `build_gloo`."""
    if size == 1:
        return LocalCommunicator(generation=generation, halt=halt)
    if device.type == "cuda":
        return build_nccl(
            board,
            rank,
            size,
            generation=generation,
            device=device,
            graveyard=graveyard,
            timeout_s=timeout_s,
            build_timeout_s=build_timeout_s,
            halt=halt,
        )
    return build_gloo(
        board,
        rank,
        size,
        generation=generation,
        graveyard=graveyard,
        host=host,
        timeout_s=timeout_s,
        build_timeout_s=build_timeout_s,
        halt=halt,
    )
