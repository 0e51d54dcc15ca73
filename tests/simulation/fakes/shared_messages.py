"""Messages that many agents of one process receive as the same bytes: each is decoded once."""

from __future__ import annotations

from collections import OrderedDict

import msgspec

from holdfast.protocol.messages.agent import CoordinatorMessage

#: smaller messages are decoded as fast as they are looked up
_LEAST_BYTES = 512
_KEPT = 64


class SharedMessages:
    """Decodes equal bytes to one message, so that plans made of it can be shared as well (`SharedPlans`)."""

    def __init__(self) -> None:
        self._decoder = msgspec.msgpack.Decoder(CoordinatorMessage)
        self._read: OrderedDict[bytes, CoordinatorMessage] = OrderedDict()

    def decode(self, data: bytes) -> CoordinatorMessage:
        """Return the decoded message.

        Raises:
            DecodeError: The bytes are not a message.
        """
        if len(data) < _LEAST_BYTES:
            return self._decoder.decode(data)
        message = self._read.get(data)
        if message is None:
            message = self._read[data] = self._decoder.decode(data)
            if len(self._read) > _KEPT:
                self._read.popitem(last=False)
        return message
