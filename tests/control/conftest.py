"""Make the helper modules of this folder importable from all tests below it."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session", autouse=True)
def _share_a_zygote(request: pytest.FixtureRequest) -> None:
    """Fork the server processes of tests from a shared zygote, which starts on first use."""
    import server_bench

    server_bench.commands = lambda: request.getfixturevalue("warm_commands")
