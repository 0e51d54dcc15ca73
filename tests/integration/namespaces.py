"""Nodes with a network of their own: network namespaces of this machine, joined by a bridge."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

_NOBODY = "02:00:00:00:00:fe"


class Network:
    """Namespaces `hub` and `node-0`, `node-1`, ...; see `joined`."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix

    def address(self, name: str) -> str:
        """Return the address of a namespace."""
        return f"10.77.0.{1 if name == 'hub' else 2 + int(name.removeprefix('node-'))}"

    def inside(self, name: str) -> list[str]:
        """Return what stands before a command that is to run in a namespace."""
        return ["ip", "netns", "exec", self._space(name)]

    def cut(self, one: str, other: str) -> None:
        """From now on nothing comes through between two nodes, without a word: each sends to nobody's card."""
        for here, there in ((one, other), (other, one)):
            _ip(*f"-n {self._space(here)} neigh replace {self.address(there)} lladdr {_NOBODY} dev eth0".split())

    def add(self, name: str) -> None:
        """Make a namespace, joined to the hub's bridge."""
        space, hub = self._space(name), self._space("hub")
        _ip("netns", "add", space)
        _ip(*f"-n {space} link set lo up".split())
        if name == "hub":
            _ip(*f"-n {space} link add eth0 type bridge".split())
        else:
            port = f"port{self.address(name).rsplit('.', 1)[1]}"
            _ip(*f"-n {hub} link add {port} type veth peer name eth0 netns {space}".split())
            _ip(*f"-n {hub} link set {port} master eth0 up".split())
        _ip(*f"-n {space} address add {self.address(name)}/24 dev eth0".split())
        _ip(*f"-n {space} link set eth0 up".split())

    def remove(self, name: str) -> None:
        """Remove a namespace, and its end of the bridge with it."""
        subprocess.run(["ip", "netns", "delete", self._space(name)], check=False, capture_output=True)

    def _space(self, name: str) -> str:
        return f"{self._prefix}-{name}"


@contextmanager
def joined(nodes: int) -> Iterator[Network]:
    """A network of so many nodes around a hub; the test is skipped where this process may not make one."""
    if shutil.which("ip") is None:
        pytest.skip("network namespaces need iproute2's `ip`")
    network = Network(f"holdfast-{os.getpid()}")
    with ExitStack() as stack:
        try:
            for name in ("hub", *(f"node-{index}" for index in range(nodes))):
                stack.callback(network.remove, name)
                network.add(name)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces are not permitted here: {error.stderr.decode().strip()}")
        yield network


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
