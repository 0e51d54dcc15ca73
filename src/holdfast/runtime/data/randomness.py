"""All randomness of a micro-batch follows from (seed, step, micro-batch), so a repeated one has the same.

Fetching samples and computing with them use separate streams: neither depends on how much the other has drawn.
"""

from __future__ import annotations

import hashlib
import random
import struct

import numpy as np
import torch

from holdfast.runtime.tensors import seed_all

_COMPUTING, _FETCHING = b"hf-stream", b"hf-fetch"


def derive_seed(seed: int, step: int, micro_batch: int, part: int = 0, *, of: bytes = _COMPUTING) -> int:
    """Return the 64-bit seed of a micro-batch's stream, or of one of its parts (layouts).

    Distinct arguments give unrelated streams.
    """
    packed = struct.pack("<QQQ", seed % (1 << 64), step, micro_batch) + (struct.pack("<Q", part) if part else b"")
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8, person=of).digest(), "little")


def seed_micro_batch(seed: int, step: int, micro_batch: int, part: int = 0) -> None:
    """Seed the global generators of torch (all devices), Python and numpy (the legacy one) for a forward pass.

    Args:
        part: the part of the micro-batch's samples, if ranks of a replica group split them.
    """
    _seed(derive_seed(seed, step, micro_batch, part), devices=torch.accelerator.is_available())


def seed_fetch(seed: int, step: int, micro_batch: int, part: int = 0, *, devices: bool) -> None:
    """Seed the global generators of torch, Python and numpy (the legacy one) before a micro-batch is fetched, for the
    data set and the collate function.

    Args:
        part: see `seed_micro_batch`.
        devices: whether to seed torch's generators of all devices too.
    """
    drawn = derive_seed(seed, step, micro_batch, part, of=_FETCHING)
    _seed(drawn, devices=devices and torch.accelerator.is_available())


def _seed(stream: int, *, devices: bool) -> None:
    """Seed the global generators of torch, Python and numpy; of torch's only the host's, or with `devices` all."""
    if devices:
        seed_all(stream)
    else:
        # torch.manual_seed would record its call stack for devices that do not exist: 0.3 ms.
        torch.default_generator.manual_seed(stream)
    random.seed(stream)
    np.random.seed([stream & 0xFFFFFFFF, stream >> 32])
