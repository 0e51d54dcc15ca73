"""Options of the whole suite."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fault-seed", type=int, default=None, help="replay exactly this fault schedule")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With --fault-seed nothing but the replay runs."""
    if config.getoption("--fault-seed") is not None:
        items[:] = [item for item in items if item.name == "test_replay"]
