"""Options of nodes."""

from __future__ import annotations

import pytest

from holdfast.cli.server_options import NodeOptions


@pytest.mark.parametrize("given", ["[fd00::7]", "fd00::7"])
def test_an_ipv6_address_is_advertised_with_or_without_brackets(given: str) -> None:
    assert NodeOptions(advertise=given).advertised("http://192.0.2.1:7077") == "fd00::7"
    assert NodeOptions().advertised("http://127.0.0.1:7077") == "127.0.0.1"
