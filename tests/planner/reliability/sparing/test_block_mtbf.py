"""Eq. 3 against its printed sum and against the chain's linear system."""

from __future__ import annotations

from itertools import combinations
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import BadInputError
from holdfast.planner.reliability.sparing.block_mtbf import RepairChain, block_mtbf, interruption_rate


def hitting_time(trays: int, spares: int, mtbf: float, mttr: float, chain: RepairChain) -> float:
    """Return the mean time to lose spares + 1 trays, from the generator matrix of Appendix A."""
    generator = np.zeros((spares + 1, spares + 1))
    for n in range(spares + 1):
        failing = (trays - n) / mtbf
        back = 0.0 if n == 0 else (1 if chain is RepairChain.TOGETHER else n) / mttr
        generator[n, n] = -failing - back
        if n < spares:
            generator[n, n + 1] = failing
        if n > 0:
            generator[n, 0 if chain is RepairChain.TOGETHER else n - 1] += back
    return float(np.linalg.solve(generator, -np.ones(spares + 1))[0])


@given(
    trays=st.integers(5, 40),
    spares=st.integers(0, 4),
    mtbf=st.floats(500, 5_000),
    mttr=st.floats(20, 500),
    chain=st.sampled_from(RepairChain),
)
def test_equals_the_chains_linear_system(trays: int, spares: int, mtbf: float, mttr: float, chain: RepairChain) -> None:
    ours = block_mtbf(mtbf_tray=mtbf, mtbf_rack=np.inf, mttr=mttr, trays=trays, spare_trays=spares, repair_chain=chain)
    # The linear system loses digits as (mtbf / mttr)**spares grows. The ranges above leave it enough of them.
    assert ours == pytest.approx(hitting_time(trays, spares, mtbf, mttr, chain), rel=1e-6)


@pytest.mark.parametrize("spares", [0, 1, 2, 4])
def test_equals_the_printed_double_sum(spares: int) -> None:
    trays, mtbf, mttr = 36, 20_000.0, 24.0
    printed = mtbf * sum(
        (mtbf / mttr) ** k / prod(chosen)
        for k in range(spares + 1)
        for chosen in combinations(range(trays - spares, trays + 1), k + 1)
    )
    ours = block_mtbf(mtbf_tray=mtbf, mtbf_rack=np.inf, mttr=mttr, trays=trays, spare_trays=spares)
    assert ours == pytest.approx(printed, rel=1e-12)


def test_without_spares_rates_add() -> None:
    ours = block_mtbf(mtbf_tray=20_000.0, mtbf_rack=10_000.0, mttr=24.0, trays=36, spare_trays=0)
    assert 1.0 / ours == pytest.approx(36 / 20_000 + 1 / 10_000)


def test_arguments_broadcast() -> None:
    mtbf, spares = np.array([[1e3], [1e5]]), np.array([0, 1, 4])
    ours = block_mtbf(mtbf_tray=mtbf, mtbf_rack=1e4, mttr=24.0, trays=36, spare_trays=spares)
    assert ours.shape == (2, 3)
    for i, j in np.ndindex(2, 3):
        one = block_mtbf(mtbf_tray=float(mtbf[i, 0]), mtbf_rack=1e4, mttr=24.0, trays=36, spare_trays=int(spares[j]))
        assert ours[i, j] == pytest.approx(float(one), rel=1e-12)


def test_many_spares_never_run_out_rather_than_overflow() -> None:
    ours = block_mtbf(mtbf_tray=1e30, mtbf_rack=1e4, mttr=1e-30, trays=36, spare_trays=30)
    assert ours == pytest.approx(1e4)


def test_interruptions_are_charged_per_block_or_per_rack() -> None:
    once = interruption_rate(mtbf_tray=20_000.0, mtbf_rack=10_000.0, working_trays=18, blocks_sharing_rack_failures=2)
    each = interruption_rate(mtbf_tray=20_000.0, mtbf_rack=10_000.0, working_trays=18)
    assert each - once == pytest.approx(0.5 / 10_000)


@pytest.mark.parametrize(
    ("argument", "value"),
    [("mtbf_tray", 0.0), ("mtbf_rack", -1.0), ("mttr", 0.0), ("spare_trays", 36), ("mttr", np.nan)],
)
def test_invalid_arguments_are_refused(argument: str, value: float) -> None:
    arguments = {"mtbf_tray": 2e4, "mtbf_rack": 1e4, "mttr": 24.0, "trays": 36, "spare_trays": 4, argument: value}
    with pytest.raises(BadInputError, match=argument):
        block_mtbf(**arguments)
