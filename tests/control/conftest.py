"""The helpers beside this file can be imported by all tests below it."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session", autouse=True)
def _share_a_zygote(request: pytest.FixtureRequest) -> None:
    """Servers in processes of their own are forked from it; it is there once one is."""
    import server_bench

    server_bench.commands = lambda: request.getfixturevalue("warm_commands")
