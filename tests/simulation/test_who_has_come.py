"""Schedules that once failed: every node's arrival is reported before the node becomes a member."""

from __future__ import annotations

import pytest

from tests.simulation.cluster import SimCluster
from tests.simulation.schedules.enumeration import plan_of
from tests.simulation.schedules.shrinking import failure


@pytest.mark.parametrize("number", [29_138_771_303])
def test_a_node_that_joins_during_a_full_restart_is_emitted_later(number: int) -> None:
    """Its report waited for others that arrived at the same time, and was dropped with its first connection."""
    assert failure(SimCluster(plan_of(number))) == ""
