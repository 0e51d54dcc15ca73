"""The values `S(i, j)` are the same in blocks of rows and in one piece, with and without the next best."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.planning.waf import dividing
from holdfast.planning.waf.dividing import DivisionTable, build_division_table


def chain_in_blocks(block: int, rewards: list[np.ndarray], nodes: int, had: list[int]) -> DivisionTable:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dividing, "_BLOCK", block)
        return build_division_table(rewards, nodes, had, idle=False)


@given(st.data(), st.integers(1, 5), st.integers(1, 20))
def test_blocks_change_nothing(data: st.DataObject, block: int, nodes: int) -> None:
    numbers = st.sampled_from((-np.inf, 0.0, 1.0, 2.0, 2.5, 4.0))
    rewards = [
        np.array(data.draw(st.lists(numbers, min_size=nodes + 1, max_size=nodes + 1)))
        for _ in range(data.draw(st.integers(1, 4)))
    ]
    had = [data.draw(st.integers(0, nodes)) for _ in rewards]
    whole = chain_in_blocks(nodes + 1, rewards, nodes, had)
    parts = chain_in_blocks(block, rewards, nodes, had)
    first = build_division_table(rewards, nodes, had, idle=False, next_best=False)
    assert np.array_equal(parts.best, whole.best)
    assert np.array_equal(parts.best[:, 0], first.best[:, 0])
    possible = parts.best[1:] > -np.inf
    assert np.array_equal(parts.took[possible], whole.took[possible])
    assert np.array_equal(parts.rest[possible], whole.rest[possible])
