"""An etcd server for the tests; they are skipped if the machine has no etcd."""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.harness.local_etcd import LocalEtcd, NoEtcdError


class EtcdServer(LocalEtcd):
    """One member, on loopback."""

    def __init__(self, folder: Path, options: Sequence[str] = (), trust: ssl.SSLContext | None = None) -> None:
        try:
            super().__init__(folder, options, trust)
        except NoEtcdError as missing:
            pytest.skip(str(missing))
