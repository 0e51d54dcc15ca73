"""v: lanes are sums, a flag is up where every rank raised it."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.protocol.commit import LANES, Commit, Flag, from_sums, lanes_of, to_numbers

FLAGS = st.sets(st.sampled_from(Flag)).map(lambda raised: tuple(flag for flag in Flag if flag in raised))
PARTS = st.builds(
    Commit,
    grad_square=st.integers(0, 2**20).map(float),
    loss_sum=st.integers(-(2**20), 2**20).map(float),
    samples=st.integers(0, 2**40),
    nonfinite=st.integers(0, 2**40),
    sample_hashes=st.integers(0, 2**50),
    flags=FLAGS,
)


def test_the_lanes_are_the_fields_of_v_in_the_order_of_the_wire() -> None:
    named = [("grad_square", float), ("loss_sum", float), ("samples", int), ("nonfinite", int), ("sample_hashes", int)]
    assert list(LANES) == named
    part = Commit(grad_square=1.5, loss_sum=2.5, samples=3, nonfinite=4, sample_hashes=5, flags=(Flag.SWAP,))
    assert lanes_of(part) == (1.5, 2.5, 3, 4, 5)
    assert to_numbers(part) == [1.5, 2.5, 3.0, 4.0, 5.0, 1.0]


@given(st.lists(PARTS, min_size=1, max_size=6))
def test_lanes_add_up_and_flags_need_everybody(parts: list[Commit]) -> None:
    v = from_sums([sum(column) for column in zip(*map(to_numbers, parts), strict=True)], len(parts))
    for name, kind in LANES:
        assert getattr(v, name) == sum(getattr(part, name) for part in parts)
        assert type(getattr(v, name)) is kind
    assert v.flags == tuple(flag for flag in Flag if all(flag in part.flags for part in parts))


def test_sums_of_another_version_are_refused() -> None:
    with pytest.raises(ValueError, match="7 sums are not those of 5 lanes and 1 flags"):
        from_sums([0.0] * (len(LANES) + len(Flag) + 1), 1)


@pytest.mark.parametrize("sum_", [float("nan"), float("inf"), -float("inf"), 0.5])
def test_a_count_that_is_none_equals_no_count(sum_: float) -> None:
    """A rank that puts in nonsense must not end all others: they refuse v."""
    v = from_sums([1.0, 1.0, sum_, 0.0, sum_, 1.0], 1)
    assert (v.samples, v.sample_hashes) == (-1, -1)


@pytest.mark.parametrize(("lane", "value"), [("samples", -2), ("samples", (1 << 64) - 1)])
def test_a_message_with_numbers_that_nobody_counts_to_is_refused(lane: str, value: int) -> None:
    """Their sum over some steps would be more than a record can hold, which ended the coordinator."""
    said = {"type": "Commit", "grad_square": 1.0, "loss_sum": 1.0, "samples": 4, "nonfinite": 0, lane: value}
    with pytest.raises(msgspec.ValidationError, match=lane):
        msgspec.msgpack.decode(msgspec.msgpack.encode(said), type=Commit)
