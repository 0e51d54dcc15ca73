"""This host's own addresses: the one that reaches a server, and the one that other hosts can reach."""

from __future__ import annotations

import socket

import pytest

from holdfast.control import addresses
from holdfast.control.addresses import advertised_address, is_on_this_host


def listener(host: str) -> socket.socket:
    return socket.create_server((host, 0))


def test_a_loopback_server_is_reached_from_the_loopback_address() -> None:
    with listener("127.0.0.1") as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        assert advertised_address(url) == "127.0.0.1"
        assert is_on_this_host(url)


def test_a_server_on_all_interfaces_gets_an_externally_reachable_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """127.0.0.2 stands for an address of another interface."""
    monkeypatch.setattr(addresses, "_outer_addresses", lambda: iter(["192.0.2.7", "127.0.0.2"]))
    monkeypatch.setattr(addresses, "_CONNECT_S", 0.1)
    with listener("") as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        assert advertised_address(url) == "127.0.0.2"
        assert is_on_this_host(url)


def test_a_server_with_an_unresolvable_name_is_not_on_this_host() -> None:
    assert not is_on_this_host("http://no-such-host.invalid:7000")


def test_outer_addresses_exclude_loopback_addresses() -> None:
    assert not [address for address in addresses._outer_addresses() if address.startswith("127.")]
