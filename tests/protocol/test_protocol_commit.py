"""v: lanes are sums, a flag is up where every rank raised it, a wish where any did."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.protocol.commit import (
    LANES,
    MAX_METRIC_NAME,
    MAX_METRICS,
    MAX_METRICS_BYTES,
    Commit,
    Flag,
    Wish,
    commit_from_sums,
    flag_contribution,
    have_same_lanes,
    lane_contribution,
    lanes_of,
    metrics_bytes,
    step_weight,
    with_flags,
)

FLAGS = st.sets(st.sampled_from(Flag)).map(lambda raised: tuple(flag for flag in Flag if flag in raised))
WISHES = st.sets(st.sampled_from(Wish)).map(lambda raised: tuple(wish for wish in Wish if wish in raised))
PARTS = st.builds(
    Commit,
    grad_square=st.integers(0, 2**20).map(float),
    loss_sum=st.integers(-(2**20), 2**20).map(float),
    samples=st.integers(0, 2**40),
    nonfinite=st.integers(0, 2**40),
    sample_hashes=st.integers(0, 2**50),
    place_hashes=st.integers(0, 2**50),
    skipped_samples=st.integers(0, 2**40),
    flags=FLAGS,
    wishes=WISHES,
)


def test_the_fields_of_a_commit_are_encoded_in_their_order() -> None:
    counts = ("samples", "nonfinite", "sample_hashes", "place_hashes", "skipped_samples")
    assert list(LANES) == [("grad_square", float), ("loss_sum", float), *((name, int) for name in counts)]
    part = Commit(
        grad_square=1.5, loss_sum=2.5, samples=3, nonfinite=4, sample_hashes=5, place_hashes=6, skipped_samples=7
    )
    part = msgspec.structs.replace(part, flags=(Flag.SWAP,), wishes=(Wish.SAVE,))
    assert lanes_of(part) == (1.5, 2.5, 3, 4, 5, 6, 7)
    assert lane_contribution(part) == [1.5, 2.5, 3.0, 4.0, 5.0, 6.0, 7.0]
    assert flag_contribution(part.flags, part.wishes) == [1.0, 0.0, 1.0, 0.0, 0.0]


@given(st.lists(PARTS, min_size=1, max_size=6))
def test_numbers_are_summed_flags_need_all_ranks_and_wishes_need_one(parts: list[Commit]) -> None:
    lanes = [sum(column) for column in zip(*map(lane_contribution, parts), strict=True)]
    raised = [sum(column) for column in zip(*(flag_contribution(p.flags, p.wishes) for p in parts), strict=True)]
    v = with_flags(commit_from_sums(lanes), raised, len(parts))
    assert have_same_lanes(v, commit_from_sums(lanes))
    for name, kind in LANES:
        assert getattr(v, name) == sum(getattr(part, name) for part in parts)
        assert type(getattr(v, name)) is kind
    assert v.flags == tuple(flag for flag in Flag if all(flag in part.flags for part in parts))
    assert v.wishes == tuple(wish for wish in Wish if any(wish in part.wishes for part in parts))


def test_a_wrong_number_of_sums_is_refused() -> None:
    with pytest.raises(ValueError, match="8 sums are not those of 7 lanes"):
        commit_from_sums([0.0] * (len(LANES) + 1))
    with pytest.raises(ValueError, match="6 sums are not those of 1 flags and 4 wishes"):
        with_flags(v_with({}), [0.0] * (len(Flag) + len(Wish) + 1), 1)


@pytest.mark.parametrize("sum_", [float("nan"), float("inf"), -float("inf"), 0.5])
def test_an_invalid_count_equals_no_valid_count(sum_: float) -> None:
    """A rank that puts in nonsense must not end all others: they refuse v."""
    v = commit_from_sums([1.0, 1.0, sum_, 0.0, sum_, sum_, 0.0])
    assert (v.samples, v.sample_hashes, v.place_hashes) == (-1, -1, -1)


@pytest.mark.parametrize(("lane", "value"), [("samples", -2), ("samples", (1 << 64) - 1)])
def test_a_commit_with_an_impossible_count_is_refused(lane: str, value: int) -> None:
    """Their sum over some steps would be more than a record can hold, which ended the coordinator."""
    said = {"type": "Commit", "grad_square": 1.0, "loss_sum": 1.0, "samples": 4, "nonfinite": 0, lane: value}
    with pytest.raises(msgspec.ValidationError, match=lane):
        msgspec.msgpack.decode(msgspec.msgpack.encode(said), type=Commit)


def v_with(metrics: dict[str, float]) -> Commit:
    return Commit(grad_square=1.0, loss_sum=2.0, samples=4, nonfinite=0, metrics=metrics)


def test_logged_metrics_are_not_summed_and_are_encoded_exactly() -> None:
    v = v_with({"a": 0.1 + 0.2, "b": float("inf"), "ü" * MAX_METRIC_NAME: float("nan")})
    assert lane_contribution(v) == lane_contribution(v_with({}))
    back = msgspec.msgpack.decode(msgspec.msgpack.encode(v), type=Commit)
    assert repr(back.metrics) == repr(v.metrics)


def test_the_weight_of_a_step_grows_with_its_logged_metrics() -> None:
    few, many = {"loss": 1.0}, {f"{number:020}": 1.0 for number in range(MAX_METRICS_BYTES // 32)}
    assert (step_weight(v_with({})), step_weight(v_with(few)), step_weight(v_with(many))) == (1, 1, 65)
    for metrics in (few, many):
        assert len(msgspec.msgpack.encode(metrics)) <= metrics_bytes(metrics) <= MAX_METRICS_BYTES


@pytest.mark.parametrize(
    "metrics", [{"": 1.0}, {"a" * (MAX_METRIC_NAME + 1): 1.0}, {str(name): 1.0 for name in range(MAX_METRICS + 1)}]
)
def test_a_commit_with_too_many_or_too_long_metrics_is_refused(metrics: dict[str, float]) -> None:
    with pytest.raises(msgspec.ValidationError, match="metrics"):
        msgspec.msgpack.decode(msgspec.msgpack.encode(v_with(metrics)), type=Commit)


def test_commits_of_an_attempt_are_compared_without_flags_and_wishes() -> None:
    one = v_with({"a": float("nan")})
    assert have_same_lanes(one, msgspec.structs.replace(one, flags=(Flag.SWAP,), wishes=(Wish.STOP,)))
    for other in ({"loss_sum": -2.0}, {"sample_hashes": 1}, {"metrics": {"a": 1.0}}, {"grad_square": float("nan")}):
        assert not have_same_lanes(one, msgspec.structs.replace(one, **other))
    assert have_same_lanes(*[msgspec.structs.replace(one, grad_square=float("nan"))] * 2)
