"""The best R against a search over every R, for all schemes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.planner.reliability.sparing.recovery import (
    BlockPool,
    Checkpoint,
    Elastic,
    RecoveryScheme,
    SemiSynchronous,
    Synchronous,
)
from holdfast.planner.reliability.sparing.spare_search import best_placed_spare_blocks, best_spare_blocks

CHECKPOINT = Checkpoint(period_seconds=250.0, save_seconds=5.0, detect_seconds=60.0, restart_seconds=360.0)
SCHEMES: dict[str, RecoveryScheme] = {
    "synchronous": Synchronous(checkpoint=CHECKPOINT),
    "semi": SemiSynchronous(checkpoint=CHECKPOINT, loss_limit_zones=1),
    "semi, all": SemiSynchronous(checkpoint=CHECKPOINT, loss_limit_zones=3),
    "elastic": Elastic(down_seconds=300.0),
}


def log_cett(scheme: RecoveryScheme, pool: BlockPool, spares: np.ndarray) -> np.ndarray:
    return np.log(pool.blocks - spares) + scheme.log_yield(pool, spares)


@pytest.mark.parametrize("name", SCHEMES)
@given(
    blocks=st.integers(1, 60),
    q=st.floats(1e-6, 0.9),
    rate=st.floats(1e-6, 1.0),
    group=st.integers(1, 7),
    zones=st.integers(1, 4),
)
def test_finds_the_best_of_all(name: str, blocks: int, q: float, rate: float, group: int, zones: int) -> None:
    scheme = SCHEMES[name]
    if isinstance(scheme, SemiSynchronous):
        zones = 3
    group = min(group, blocks)

    def pool(group_blocks: int) -> BlockPool:
        return BlockPool(
            zones=zones,
            blocks=blocks,
            group_blocks=group_blocks,
            unavailability=np.array([q]),
            interruptions_per_hour=np.array([rate]),
        )

    every = np.arange(blocks)
    best = best_spare_blocks(scheme, pool(1))
    assert log_cett(scheme, pool(1), best) == pytest.approx(log_cett(scheme, pool(1), every).max(), rel=1e-9, abs=1e-12)
    placed = best_placed_spare_blocks(scheme, pool(group), best)
    allowed = every[(blocks - every) % group == 0]
    assert (blocks - placed) % group == 0
    reached = log_cett(scheme, pool(group), placed)
    assert reached == pytest.approx(log_cett(scheme, pool(group), allowed).max(), rel=1e-9, abs=1e-12)
