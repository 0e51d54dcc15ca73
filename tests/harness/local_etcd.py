"""A private etcd on the loopback interface with its own folder, for tests and benchmarks."""

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
    """etcd is not installed on this machine."""

    def __init__(self) -> None:
        super().__init__("there is no etcd on this machine (Debian: apt-get install etcd-server)")


class LocalEtcd:
    """An etcd cluster of one member; after a restart it has the same ports and the same data."""

    def __init__(self, folder: Path, options: Sequence[str] = (), trust: ssl.SSLContext | None = None) -> None:
        """Start etcd.

        Args:
            folder: a new folder for its data.
            options: further options of etcd.
            trust: the TLS context of clients, if etcd is reached over TLS.

        Raises:
            NoEtcdError: etcd is not installed.
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
        """Start the process, and wait until it answers."""
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
        """Kill the process, as in a crash."""
        self._process.kill()
        self._process.wait()

    def halt(self) -> None:
        """Stop the process with SIGSTOP: its connections stay open, but it does not answer."""
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Continue the stopped process."""
        self._process.send_signal(signal.SIGCONT)


def _free_ports() -> list[int]:
    with socket.socket() as first, socket.socket() as second:
        for one in (first, second):
            one.bind(("127.0.0.1", 0))
        return [first.getsockname()[1], second.getsockname()[1]]
