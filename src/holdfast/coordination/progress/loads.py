"""The loads of the experts, from which placements are computed.

Each report is complete: it contains weighted sums over all steps so far. Every worker has them, and rank 0 reports
them. So the coordinator does not store loads: agents keep the newest report and send it to a restarted coordinator. On
the wire, loads are one blob: tokens per step as little-endian 32-bit floats, layer by layer.

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
        ValueError: The blob has the wrong size, or contains a value that is not a load.
    """
    tokens = np.frombuffer(blob, dtype=_TOKENS).astype(np.float64)
    if tokens.size != shape.layers * shape.experts or not (np.isfinite(tokens) & (tokens >= 0)).all():
        raise ValueError(f"{len(blob)} bytes are not the loads of {shape.experts} experts in {shape.layers} layers")
    return tokens.reshape(shape.layers, shape.experts)


class LoadBook:
    """The newest expert loads that a member has reported."""

    def __init__(self, transaction: Transaction) -> None:
        self._transaction = transaction
        self._version = (0, 0)
        #: tokens per step `(L, E)`, or None before the first report
        self.tokens: FloatArray | None = None
        #: bytes of parameters and optimizer state of one expert of one layer
        self.expert_bytes = 0
        #: seconds of one expert's work for one token, forward and backward
        self.token_s = 0.0

    def on_loads(self, message: Loads) -> bool:
        """Store a member's report of the experts' loads; return False if it is invalid.

        One that is not newer than the known one is ignored, as are all of a model without experts.
        """
        shape, version = self._transaction.record.expert_shape, (message.generation, message.step)
        if shape is None or version <= self._version:
            return True
        if not isfinite(message.token_s):
            return False
        try:
            tokens = decode_loads(message.tokens, shape)
        except ValueError:
            return False
        self.tokens, self.expert_bytes, self.token_s = tokens, message.expert_bytes, message.token_s
        self._version = version
        return True
