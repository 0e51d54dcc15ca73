"""All randomness of a micro-batch follows from (seed, step, micro-batch), so that a redone one is the same one."""

from __future__ import annotations

import hashlib
import random
import struct

import numpy as np
import torch

from holdfast.runtime.tensors import seed_all


def stream_seed(seed: int, step: int, micro_batch: int) -> int:
    """Return the 64-bit seed of one micro-batch; distinct arguments give unrelated streams."""
    packed = struct.pack("<QQQ", seed % (1 << 64), step, micro_batch)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8, person=b"hf-stream").digest(), "little")


def seed_micro_batch(seed: int, step: int, micro_batch: int) -> None:
    """Seed the global generators of torch (all devices), Python and numpy (the legacy one)."""
    stream = stream_seed(seed, step, micro_batch)
    if torch.accelerator.is_available():
        seed_all(stream)
    else:
        # torch's own would write down where it was called from, for devices that are not there: 0.3 ms.
        torch.default_generator.manual_seed(stream)
    random.seed(stream)
    np.random.seed([stream & 0xFFFFFFFF, stream >> 32])
