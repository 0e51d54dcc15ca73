"""An etcd of one's own, on loopback, in a folder of its own: for tests and benchmarks."""

from __future__ import annotations

import shutil
import signal
import socket
import ssl
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import httpx


class NoEtcdError(Exception):
    """This machine has none."""

    def __init__(self) -> None:
        super().__init__("there is no etcd on this machine (Debian: apt-get install etcd-server)")


class LocalEtcd:
    """One member; started again it has the same ports and the same data."""

    def __init__(self, folder: Path, options: Sequence[str] = (), trust: ssl.SSLContext | None = None) -> None:
        """Start it.

        Args:
            folder: for its data, a new one. options: of etcd's own. trust: it is reached over TLS, so.

        Raises:
            NoEtcdError: there is none.
        """
        program = shutil.which("etcd")
        if program is None:
            raise NoEtcdError
        first, second = _free_ports()
        client = f"{'http' if trust is None else 'https'}://127.0.0.1:{first}"
        peer = f"http://127.0.0.1:{second}"
        self.address = client
        self.url = f"etcd:{client}"
        self._log = folder.with_suffix(".log")
        self._command = [program, "--data-dir", str(folder), "--listen-client-urls", client]
        self._command += ["--advertise-client-urls", client, "--listen-peer-urls", peer]
        self._command += ["--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}"]
        self._command += ["--heartbeat-interval", "20", "--election-timeout", "200", *options]
        self._verify: ssl.SSLContext | bool = True if trust is None else trust
        self.start()

    def start(self) -> None:
        """Start it, and wait until it answers."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log)
        until = time.monotonic() + 60.0
        while time.monotonic() < until and self._process.poll() is None:
            try:
                if httpx.get(f"{self.address}/health", trust_env=False, verify=self._verify).is_success:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.02)
        self.kill()
        raise AssertionError(f"etcd has not begun:\n{self._log.read_text()[-2000:]}")

    def kill(self) -> None:
        """End it as a crash does."""
        self._process.kill()
        self._process.wait()

    def halt(self) -> None:
        """Have it answer nobody, its connections open."""
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Have it answer again."""
        self._process.send_signal(signal.SIGCONT)


def _free_ports() -> list[int]:
    with socket.socket() as first, socket.socket() as second:
        for one in (first, second):
            one.bind(("127.0.0.1", 0))
        return [first.getsockname()[1], second.getsockname()[1]]
