"""A hash of every byte of state, to compare replicas in the test mode."""

from __future__ import annotations

import hashlib

import msgspec

from holdfast.runtime.state.memory import host_bytes
from holdfast.runtime.state.state import StateView


def state_hash(view: StateView) -> str:
    """Return a hash of the whole state: tensors, their names and shapes, and all other values."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(msgspec.msgpack.encode(view.manifest))
    for tensor in view.tensors:
        digest.update(host_bytes(tensor))
    return digest.hexdigest()
