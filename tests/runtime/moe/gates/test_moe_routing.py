"""Fixed routing follows from the step, the micro-batch and the position."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from holdfast.errors import BadInputError
from holdfast.runtime.moe.gates.routing import RecordedRouting, routing_from_loads


def test_recorded_routing_depends_only_on_step_micro_batch_and_position() -> None:
    table = [[row % 5, (row + 1) % 5] for row in range(50)]
    routing = RecordedRouting(table, seed=3)
    first = routing.assign(4, 2, 70)
    assert first.shape == (70, 2)
    assert torch.equal(first, routing.assign(4, 2, 70))
    assert torch.equal(first[:20], routing.assign(4, 2, 20))
    assert torch.equal(first[:20], first[50:])
    assert any(not torch.equal(first, routing.assign(4, other, 70)) for other in (0, 1, 3, 4))


@pytest.mark.parametrize("table", [[[0, 0]], [[-1, 0]], [0, 1], [[0.5, 1.0]], []])
def test_invalid_recorded_routing_is_refused(table: list) -> None:  # type: ignore[type-arg]
    with pytest.raises(BadInputError, match="recorded routing"):
        RecordedRouting(table)


def test_routing_from_loads_follows_the_loads() -> None:
    loads = np.array([500.0, 100.0, 0.0, 400.0])
    ids = routing_from_loads(loads, 1, rows=8000, seed=1).assign(1, 0, 8000)
    shares = torch.bincount(ids.reshape(-1), minlength=4).numpy() / 8000
    # Binomial: five standard deviations of 8000 draws are 0.028 at most.
    assert np.abs(shares - loads / 1000).max() < 0.028
    assert shares[2] == 0.0
    pairs = routing_from_loads(loads, 2, seed=1).assign(1, 0, 100)
    assert (pairs[:, 0] != pairs[:, 1]).all()


@pytest.mark.parametrize("loads", [[1.0], [1.0, -1.0], [1.0, float("nan")], [[1.0, 2.0]]])
def test_routing_from_loads_refuses_bad_loads(loads: list) -> None:  # type: ignore[type-arg]
    with pytest.raises(BadInputError, match="loads"):
        routing_from_loads(loads, 2)
