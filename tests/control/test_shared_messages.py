"""Decoding identical message bytes once for all receivers."""

from __future__ import annotations

import msgspec
import pytest

from holdfast.protocol.messages.agent import Committed, Refused
from tests.simulation.fakes.shared_messages import SharedMessages


def test_identical_large_messages_are_decoded_once() -> None:
    shared, encode = SharedMessages(), msgspec.msgpack.encode
    large, small = Refused(why="x" * 1000, exit_code=1), Committed(term=1, step=2)
    assert shared.decode(encode(large)) == large
    assert shared.decode(encode(large)) is shared.decode(encode(large))
    assert shared.decode(encode(small)) == small
    for number in range(100):  # Decode enough other messages that the cache drops the first one.
        shared.decode(encode(Refused(why=f"{number} {'y' * 1000}", exit_code=1)))
    assert shared.decode(encode(large)) == large


def test_an_invalid_message_is_not_cached() -> None:
    for _ in range(2):
        with pytest.raises(msgspec.DecodeError):
            SharedMessages().decode(b"\xc1" * 1000)
