"""Semi-synchronous and elastic recovery against enumeration of all up and down states."""

from __future__ import annotations

from itertools import product
from math import comb

import numpy as np
import pytest

from holdfast.errors import BadInputError
from holdfast.planner.reliability.sparing.recovery import BlockPool, Checkpoint, Elastic, SemiSynchronous, Synchronous

CHECKPOINT = Checkpoint(period_seconds=250.0, save_seconds=0.05, detect_seconds=60.0, restart_seconds=360.0)
Q, ZONES, BLOCKS = 0.2, 3, 6


def pool(group: int = 1) -> BlockPool:
    return BlockPool(
        zones=ZONES,
        blocks=BLOCKS,
        group_blocks=group,
        unavailability=np.array(Q),
        interruptions_per_hour=np.array(0.02),
    )


def down_probability(down: int) -> float:
    return comb(BLOCKS, down) * Q**down * (1 - Q) ** (BLOCKS - down)


@pytest.mark.parametrize("limit", [0, 1, 2, 3])
@pytest.mark.parametrize("spares", [0, 1, 3])
def test_semi_synchronous_beta_counts_the_zones_at_work(limit: int, spares: int) -> None:
    working = 0.0
    for downs in product(range(BLOCKS + 1), repeat=ZONES):
        blocked = sum(down > spares for down in downs)
        if blocked <= limit:
            working += (ZONES - blocked) / ZONES * np.prod([down_probability(down) for down in downs])
    scheme = SemiSynchronous(checkpoint=CHECKPOINT, loss_limit_zones=limit)
    assert scheme.beta(pool(), np.array(spares)) == pytest.approx(1 - working)


def test_semi_synchronous_without_tolerance_blocks_like_the_synchronous_but_rolls_back_less() -> None:
    semi, full = SemiSynchronous(checkpoint=CHECKPOINT, loss_limit_zones=0), Synchronous(checkpoint=CHECKPOINT)
    spares = np.array(2)
    assert semi.beta(pool(), spares) == pytest.approx(float(full.beta(pool(), spares)))
    assert semi.gamma(pool(), spares) < full.gamma(pool(), spares)


@pytest.mark.parametrize(("group", "spares"), [(1, 0), (1, 2), (2, 0), (2, 2), (3, 3)])
def test_elastic_beta_counts_the_groups_that_are_up(group: int, spares: int) -> None:
    planned = (BLOCKS - spares) // group
    up = sum(min(planned, (BLOCKS - down) // group) * down_probability(down) for down in range(BLOCKS + 1))
    scheme = Elastic(down_seconds=300.0)
    assert scheme.beta(pool(group), np.array(spares)) == pytest.approx(1 - up / planned)


def test_elastic_gamma_is_down_time_per_failure() -> None:
    scheme = Elastic(down_seconds=360.0)
    failures_per_hour = 0.02 * BLOCKS * (1 - Q) * ZONES
    assert scheme.gamma(pool(), np.array(0)) == pytest.approx(failures_per_hour * 0.1 / (1 + failures_per_hour * 0.1))


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Elastic(down_seconds=-1.0),
        lambda: SemiSynchronous(checkpoint=CHECKPOINT, loss_limit_zones=-1),
        lambda: Checkpoint(period_seconds=0.0, save_seconds=0.0, detect_seconds=0.0, restart_seconds=0.0),
    ],
)
def test_refuses_negative_times(wrong) -> None:
    with pytest.raises(BadInputError, match="must be"):
        wrong()
