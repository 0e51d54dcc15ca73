"""Messages that many agents in one process are sent, as the same bytes: read once."""

from __future__ import annotations

from collections import OrderedDict

import msgspec

from holdfast.protocol.messages.agent import CoordinatorMessage

#: smaller ones are read as fast as they are looked up
_LEAST_BYTES = 512
_KEPT = 64


class SharedMessages:
    """Makes one message of the same bytes, so that plans made of it can be shared, too (`SharedPlans`)."""

    def __init__(self) -> None:
        self._decoder = msgspec.msgpack.Decoder(CoordinatorMessage)
        self._read: OrderedDict[bytes, CoordinatorMessage] = OrderedDict()

    def decode(self, data: bytes) -> CoordinatorMessage:
        """Return the message in some bytes.

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
