"""What is known of the experts' loads: every placement follows them.

Each report is whole in itself (the weighted sums of all steps so far, kept by every worker, told by rank 0), so nothing
of it is stored: the agents keep the newest one and tell a restarted coordinator. On the wire loads are one blob:
tokens per step as little-endian 32-bit floats, layer by layer.

Axes: L layers, E experts.
"""

from __future__ import annotations

from math import isfinite

import numpy as np

from holdfast.coordination.transaction import Transaction
from holdfast.planning.arrays import FloatArray
from holdfast.protocol.messages.worker import Loads
from holdfast.protocol.plan import ExpertShape

_TOKENS = np.dtype("<f4")


def encode_loads(tokens: FloatArray) -> bytes:
    """Return the blob of tokens per step, layer and expert `(L, E)`."""
    return tokens.astype(_TOKENS).tobytes()


def decode_loads(blob: bytes, shape: ExpertShape) -> FloatArray:
    """Return tokens per step, layer and expert `(L, E)`.

    Raises:
        ValueError: the blob does not fit the shape, or holds what is no load.
    """
    tokens = np.frombuffer(blob, dtype=_TOKENS).astype(np.float64)
    if tokens.size != shape.layers * shape.experts or not (np.isfinite(tokens) & (tokens >= 0)).all():
        raise ValueError(f"{len(blob)} bytes are no loads of {shape.experts} experts in {shape.layers} layers")
    return tokens.reshape(shape.layers, shape.experts)


class LoadBook:
    """The newest loads that a member has told."""

    def __init__(self, transaction: Transaction) -> None:
        self._transaction = transaction
        self._told = (0, 0)
        #: tokens per step `(L, E)`; None: nobody has told any yet
        self.tokens: FloatArray | None = None
        #: what one expert of one layer has in parameters and optimizer state
        self.expert_bytes = 0
        #: seconds that one expert's work for one token takes, forward and backward
        self.token_s = 0.0

    def take(self, message: Loads) -> bool:
        """Take in a member's report, unless it is older than what is known; False where it is no such thing."""
        shape, told = self._transaction.record.expert_shape, (message.generation, message.step)
        if shape is None or told <= self._told:
            return True
        if not isfinite(message.token_s):
            return False
        try:
            tokens = decode_loads(message.tokens, shape)
        except ValueError:
            return False
        self.tokens, self.expert_bytes, self.token_s = tokens, message.expert_bytes, message.token_s
        self._told = told
        return True
