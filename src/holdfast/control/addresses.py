"""This host's own addresses: which one reaches a server, and which one others can reach."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from collections.abc import Iterator
from urllib.parse import urlsplit

#: An address that no host has (RFC 5737). A UDP socket that is "connected" to it sends nothing.
_NO_HOST = "192.0.2.1"
_CONNECT_S = 1.0
_SIOCGIFADDR = 0x8915
_DEFAULT_PORTS = {"http": 80, "https": 443}


def advertised_address(server: str) -> str:
    """Return the address of this host at which nodes on other hosts can reach it, as far as it can be known.

    It is the local address of a socket that reaches the server. If that is a loopback address, but the server accepts
    connections at another address of this host as well, other nodes may come from other hosts: then it is that one.

    Args:
        server: the http(s) URL of the coordinator or the pool.

    Raises:
        OSError: there is no route to it.
    """
    host, port = _host_and_port(server)
    local, _ = _find_route(host, port)
    if not ipaddress.ip_address(local).is_loopback:
        return local
    return next((address for address in _outer_addresses() if _accepts(address, port)), local)


def is_on_this_host(server: str) -> bool:
    """Return whether a server runs on this host: connections to it do not leave the host. False if it is not known."""
    try:
        local, peer = _find_route(*_host_and_port(server))
    except OSError:
        return False
    return local == peer or ipaddress.ip_address(local).is_loopback


def _host_and_port(server: str) -> tuple[str, int]:
    parts = urlsplit(server)
    return parts.hostname or "", parts.port or _DEFAULT_PORTS.get(parts.scheme, 80)


def _find_route(host: str, port: int) -> tuple[str, str]:
    """Return the local and the remote address of a socket that reaches a host, without sending anything.

    The first of the host's addresses with a route is used.

    Raises:
        OSError: the name is unknown, or no address has a route.
    """
    problem = OSError(f"no address for {host!r}")
    for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.connect(address)
            except OSError as error:
                problem = error
                continue
            return _plain(probe.getsockname()[0]), _plain(probe.getpeername()[0])
    raise problem


def _plain(address: str) -> str:
    """Return an address without its scope (`fe80::1%eth0`)."""
    return address.partition("%")[0]


def _outer_addresses() -> Iterator[str]:
    """Yield this host's IPv4 addresses once each, without loopback addresses; that of the default route comes first."""
    seen = {""}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((_NO_HOST, 9))
            seen.add(default := probe.getsockname()[0])
            yield default
        except OSError:
            pass  # there is no default route
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # an interface without an IPv4 address
            address = socket.inet_ntoa(answer[20:24])
            if address not in seen and not ipaddress.ip_address(address).is_loopback:
                seen.add(address)
                yield address


def _accepts(address: str, port: int) -> bool:
    """Return whether a TCP connection to an address succeeds within a second."""
    try:
        socket.create_connection((address, port), timeout=_CONNECT_S).close()
    except OSError:
        return False
    return True
