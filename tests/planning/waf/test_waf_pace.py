"""The throughput of a job by its number of nodes, measured or fitted."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import BadInputError
from holdfast.planning.waf.pace import LOSS_PER_DOUBLING, UNSHARED, StepTimes, micro_batch_share


def seconds(nodes: int, rounds_s: float, once_s: float, sum_s: float, micro_batches: int, workers: int) -> float:
    world = nodes * workers
    return rounds_s * -(-micro_batches // world) + once_s + sum_s * (world - 1) / world


@given(
    st.floats(0.01, 10), st.floats(0, 1), st.floats(0, 1), st.integers(8, 256), st.integers(1, 8),
    st.sets(st.integers(1, 16), min_size=4, max_size=8),
)  # fmt: skip
def test_step_times_of_the_model_are_fitted_exactly(
    rounds_s: float, once_s: float, sum_s: float, micro_batches: int, workers: int, sizes: set[int]
) -> None:
    measured = {nodes: seconds(nodes, rounds_s, once_s, sum_s, micro_batches, workers) for nodes in sizes}
    times = StepTimes(step_s=measured, micro_batches=micro_batches, workers=workers, flop=1.0)
    predicted = times.predicted_s(16)
    for nodes, took in measured.items():
        assert predicted[nodes - 1] == pytest.approx(took, rel=1e-6)


def test_one_measured_size_predicts_good_but_limited_scaling() -> None:
    times = StepTimes(step_s={2: 8.0}, micro_batches=16, workers=1, flop=80.0)
    assert times.throughput(2).tolist() == pytest.approx([0.0, 80 / (8 * (2 * (1 - UNSHARED) + UNSHARED)), 10.0])
    assert 4 * times.throughput(16)[2] < times.throughput(16)[16] < 8 * times.throughput(16)[2]


def test_predictions_follow_rounds_and_keep_measured_sizes() -> None:
    times = StepTimes(step_s={1: 16.0, 4: 4.2, 5: 9.0}, micro_batches=16, workers=1, flop=16.0)
    achieved = times.throughput(8)
    assert [achieved[nodes] for nodes in (0, 1, 4, 5)] == pytest.approx([0.0, 1.0, 16 / 4.2, 16 / 9])
    fitted = StepTimes(step_s={1: 16.0, 2: 8.0}, micro_batches=16, workers=1, flop=16.0).throughput(8)
    assert fitted[6] == pytest.approx(fitted[7])  # Both need three rounds; the seventh node is idle.
    assert fitted[8] > fitted[7]


@given(st.dictionaries(st.integers(1, 12), st.floats(1e-3, 1e3), min_size=1, max_size=6), st.integers(1, 64))
def test_no_size_is_predicted_to_take_no_time(step_s: dict[int, float], micro_batches: int) -> None:
    times = StepTimes(step_s=step_s, micro_batches=micro_batches, workers=1, flop=1.0)
    predicted = times.predicted_s(16)
    fastest, size = min((seconds, nodes) for nodes, seconds in step_s.items())
    for nodes in range(1, 17):
        fewer_rounds = -(-micro_batches // nodes) / -(-micro_batches // size)
        assert predicted[nodes - 1] >= fastest * min(1.0, fewer_rounds) * (1 - 1e-9)
    assert np.isfinite(times.throughput(16)).all()


def test_a_step_that_takes_longer_with_each_node_takes_no_less_with_one() -> None:
    times = StepTimes(step_s={2: 1.0, 3: 1.4, 4: 1.6}, micro_batches=1, workers=1, flop=1.0)
    assert times.predicted_s(4)[0] >= 1.0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"step_s": {}}, "no step was measured"),
        ({"step_s": {0: 1.0}}, "a step on 0 nodes took 1 s"),
        ({"step_s": {2: -1.0}}, "a step on 2 nodes took -1 s"),
        ({"step_s": {2: np.nan}}, "a step on 2 nodes took nan s"),
        ({"micro_batches": 0}, "micro_batches is 0"),
        ({"workers": 0}, "workers is 0"),
        ({"flop": -1.0}, "flop is -1"),
    ],
)
def test_impossible_measurements_are_refused(change: dict[str, object], said: str) -> None:
    with pytest.raises(BadInputError, match=said):
        replace(StepTimes(step_s={1: 1.0}, micro_batches=4, workers=1, flop=1.0), **change)  # pyright: ignore


def test_one_more_node_may_save_a_whole_round() -> None:
    """24 micro-batches take four rounds on seven nodes and three on eight, as measured by `make bench-pace`."""
    times = StepTimes(step_s={1: 3.6356, 7: 0.6532}, micro_batches=24, workers=1, flop=1.0)
    assert times.predicted_s(8)[7] == pytest.approx(0.4959, rel=0.1)


def test_replica_groups_are_fewer_and_faster_replicas() -> None:
    """Six micro-batches run on nodes of four workers.

    With 2 local ranks, 3 nodes need one round. With 4 local ranks, 2 nodes need three rounds.
    """
    whole = StepTimes(step_s={1: 2.0}, micro_batches=8, workers=4, flop=1.0).predicted_s(4)
    spread = StepTimes(step_s={1: 2.0}, micro_batches=8, workers=4, flop=1.0, places=(1,)).predicted_s(4)
    assert spread.tolist() == whole.tolist()
    times = StepTimes(step_s={3: 1.0}, micro_batches=6, workers=4, flop=1.0, places=(4, 4, 2))
    rounds = np.array([6 * micro_batch_share(4), 3 * micro_batch_share(4), micro_batch_share(2)])
    expected = rounds / rounds[2] * (1 - UNSHARED) + UNSHARED
    assert times.predicted_s(3).tolist() == pytest.approx(expected.tolist())
    assert times.predicted_s(8)[7] <= times.predicted_s(8)[2], "with more nodes it is as with the last that was said"


def test_each_doubling_of_a_replica_group_loses_a_fixed_share() -> None:
    assert micro_batch_share(1) == 1.0
    assert micro_batch_share(4) == pytest.approx((1 + LOSS_PER_DOUBLING) ** 2 / 4)
