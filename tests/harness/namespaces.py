"""Nodes with separate network stacks: network namespaces of this machine, connected by a bridge."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Self

from holdfast.errors import HoldfastError
from tests.harness.local_job import EventLog

#: The coordinator's port on the hub.
PORT = 7077
#: Time limit in seconds for the end of a job's processes.
END_S = 30.0
#: Largest number of nodes in a network.
_NEIGHBOURS = 16
_NOBODY = "02:00:00:00:00:fe"


class NamespacesRefusedError(HoldfastError):
    """This process may not make network namespaces, or lacks iproute2's `ip`."""


class Network:
    """Namespaces `hub` and `node-0`, `node-1`, ...; see `joined`."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix

    def address(self, name: str) -> str:
        """Return the address of a namespace."""
        return f"10.77.0.{1 if name == 'hub' else 2 + int(name.removeprefix('node-'))}"

    def inside(self, name: str) -> list[str]:
        """Return the command prefix that runs a command in a namespace."""
        return ["ip", "netns", "exec", self._space(name)]

    def cut(self, one: str, other: str) -> None:
        """Silently drop all traffic between two nodes, by sending it to a hardware address that does not exist."""
        for here, there in ((one, other), (other, one)):
            _ip(*f"-n {self._space(here)} neigh replace {self.address(there)} lladdr {_NOBODY} dev eth0".split())

    def deafen(self, name: str) -> None:
        """Silently drop the answers of all nodes to a node; only the coordinator still answers."""
        for other in range(2, 2 + _NEIGHBOURS):
            address = f"10.77.0.{other}"
            if address != self.address(name):
                _ip(*f"-n {self._space(name)} neigh replace {address} lladdr {_NOBODY} dev eth0".split())

    def link_down(self, name: str) -> None:
        """Silently drop all traffic of a node, by taking its end of the bridge down."""
        _ip(*f"-n {self._space('hub')} link set {self._port(name)} down".split())

    def add(self, name: str) -> None:
        """Make a namespace and connect it to the hub's bridge."""
        space, hub = self._space(name), self._space("hub")
        _ip("netns", "add", space)
        _ip(*f"-n {space} link set lo up".split())
        if name == "hub":
            _ip(*f"-n {space} link add eth0 type bridge".split())
        else:
            port = self._port(name)
            _ip(*f"-n {hub} link add {port} type veth peer name eth0 netns {space}".split())
            _ip(*f"-n {hub} link set {port} master eth0 up".split())
        _ip(*f"-n {space} address add {self.address(name)}/24 dev eth0".split())
        _ip(*f"-n {space} link set eth0 up".split())

    def remove(self, name: str) -> None:
        """Remove a namespace together with its end of the bridge."""
        subprocess.run(["ip", "netns", "delete", self._space(name)], check=False, capture_output=True)

    def _port(self, name: str) -> str:
        return f"port{self.address(name).rsplit('.', 1)[1]}"

    def _space(self, name: str) -> str:
        return f"{self._prefix}-{name}"


@contextmanager
def joined(nodes: int) -> Generator[Network]:
    """Yield a network of this many nodes around a hub.

    Raises:
        NamespacesRefusedError: network namespaces are not possible on this machine.
    """
    if shutil.which("ip") is None:
        raise NamespacesRefusedError("network namespaces need iproute2's `ip`")
    network = Network(f"holdfast-{os.getpid()}")
    with ExitStack() as stack:
        try:
            for name in ("hub", *(f"node-{index}" for index in range(nodes))):
                stack.callback(network.remove, name)
                network.add(name)
        except subprocess.CalledProcessError as error:
            why = error.stderr.decode().strip()
            raise NamespacesRefusedError(f"network namespaces are not permitted here: {why}") from None
        yield network


class NetworkJob(EventLog):
    """A coordinator on the hub and an agent on each of the first nodes; a context manager that ends its processes.

    Args:
        network: the network of the job.
        script: the training script.
        args: its arguments.
        nodes: number of nodes at the start.
        folder: for events and output.
        workers: workers of each node.
        environment: variables in addition to those of this process.
    """

    def __init__(
        self,
        network: Network,
        script: Path,
        args: Sequence[str] = (),
        *,
        nodes: int,
        folder: Path,
        workers: int = 1,
        environment: dict[str, str] | None = None,
    ) -> None:
        super().__init__(folder / "events.jsonl", alive=self._runs)
        self.network = network
        self._nodes = nodes
        self._output_file = folder / "output.txt"
        self._environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "XDG_RUNTIME_DIR": str(folder),
            "HOLDFAST_TOKEN": secrets.token_hex(16),
            **(environment or {}),
        }
        self._agent = ("agent", "--address", f"http://{network.address('hub')}:{PORT}")
        self._agent += ("--workers-per-node", str(workers))
        self._script = ("--", str(script), *args)
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        listen = ("--listen", f"{self.network.address('hub')}:{PORT}", "--nodes", str(self._nodes))
        self._start("hub", "coordinator", *listen, "--events", str(self.events_file))
        self.follow()
        for index in range(self._nodes):
            self.add(f"node-{index}")
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.send_signal(signal.SIGTERM)
        for process in self._processes:
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.unfollow()

    def add(self, place: str, node: str = "", *, advertise: str | None = None) -> subprocess.Popen[bytes]:
        """Start an agent in a namespace, by default with the namespace's name.

        Args:
            place: the namespace.
            node: the name of the node.
            advertise: the address that it advertises; "" for none, None for the address of the namespace.
        """
        address = self.network.address(place) if advertise is None else advertise
        options = ("--advertise", address) if address else ()
        return self._start(place, *self._agent, "--node-name", node or place, *options, *self._script)

    def story(self) -> str:
        """Return the last events and the end of the output, for error messages."""
        return f"{super().story()}\n--- output ---\n{self._output_file.read_text(errors='replace')[-6000:]}"

    def _start(self, place: str, *arguments: str) -> subprocess.Popen[bytes]:
        command = [*self.network.inside(place), sys.executable, "-m", "holdfast", *arguments]
        with self._output_file.open("ab") as output:
            process = subprocess.Popen(command, env=self._environment, stdout=output, stderr=subprocess.STDOUT)
        self._processes.append(process)
        return process

    def _runs(self) -> bool:
        return self._processes[0].poll() is None


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
