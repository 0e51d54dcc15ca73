"""Tests of the options of nodes."""

from __future__ import annotations

import pytest

from holdfast.cli.server_options import NodeOptions
from holdfast.errors import BadInputError


@pytest.mark.parametrize("given", ["[fd00::7]", "fd00::7"])
def test_an_ipv6_address_is_accepted_with_or_without_brackets(given: str) -> None:
    assert NodeOptions(advertise=given).advertised("http://192.0.2.1:7077") == "fd00::7"
    assert NodeOptions().advertised("http://127.0.0.1:7077") == "127.0.0.1"


@pytest.mark.parametrize("given", ["a..b", "x" * 64 + ".example", "two words", "a\0b", "10.0.0.1:7077/x", "host,host"])
def test_an_invalid_advertised_address_is_refused(given: str) -> None:
    with pytest.raises(BadInputError, match=r"--advertise is .*: give a host name or an IP address"):
        NodeOptions(advertise=given).check()


@pytest.mark.parametrize("given", ["", "node-7.example.", "node_7", "10.0.0.7", "[fd00::7]", "fe80::1%eth0", "host"])
def test_valid_advertised_addresses_are_accepted(given: str) -> None:
    NodeOptions(advertise=given).check()
