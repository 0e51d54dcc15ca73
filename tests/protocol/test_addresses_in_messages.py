"""Addresses in messages: any of them can be looked up, and a look-up fails with an OSError."""

from __future__ import annotations

import contextlib
import socket
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from holdfast.protocol.messages.agent import Hello, NodeSnapshots, ProbeAddress
from holdfast.protocol.messages.worker import Attach

BAD = ["a..b", ".a", "x" * 64, "a\0b", "bücher.example", "two words", "\x7f", "x." * 130]
FIELDS: list[tuple[type[msgspec.Struct], str]] = [
    (Hello, "address"),
    (NodeSnapshots, "host"),
    (ProbeAddress, "host"),
    (Attach, "host"),
]


def convert(kind: type[msgspec.Struct], field: str, value: str) -> Any:
    """Check one field by its type, as the decoder does."""
    (found,) = (one for one in msgspec.structs.fields(kind) if one.name == field)
    return msgspec.convert(value, type=found.type)


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize(("kind", "field"), FIELDS)
def test_a_text_that_is_not_an_address_is_not_decoded(kind: type[msgspec.Struct], field: str, value: str) -> None:
    with pytest.raises(msgspec.ValidationError):
        convert(kind, field, value)


@given(st.text("ab.:%_-0[]é\0 ", max_size=12))
@example("a." * 126 + "b")
@example("x" * 63)
def test_looking_up_a_decoded_address_fails_only_with_an_os_error(value: str) -> None:
    with contextlib.suppress(msgspec.ValidationError):
        address = convert(Hello, "address", value)
        with contextlib.suppress(OSError):
            socket.getaddrinfo(address, 9, flags=socket.AI_NUMERICHOST)
