"""The samples of a step: hashes of seed, step and micro-batch alone, and sums that reveal any mistake."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.protocol.commit import Commit, commit_from_sums, lane_contribution
from holdfast.step_samples import MAX_MICRO_BATCHES, StepSamples, place_hash

SAMPLES = StepSamples(seed=3, micro_batches=6, micro_batch=4)


def v(step: int, samples: StepSamples = SAMPLES) -> Commit:
    count = samples.micro_batches * samples.micro_batch
    return Commit(grad_square=1.0, loss_sum=1.0, samples=count, nonfinite=0, sample_hashes=samples.expected(step))


def said_of(samples: StepSamples, step: int, commit: Commit) -> str:
    return samples.find_error(step, samples=commit.samples, hashes=commit.sample_hashes)


def test_hashes_are_the_same_as_in_earlier_journals() -> None:
    """Later versions audit old journals, so these numbers must never change."""
    assert [SAMPLES.hash_of(1, 0), SAMPLES.hash_of(1, 5), SAMPLES.hash_of(2, 0)] == [2494103547, 1556455934, 2019686946]
    assert StepSamples(seed=-1, micro_batches=2, micro_batch=1).hash_of(7, 1) == 793580530


def test_a_hash_depends_only_on_seed_step_and_micro_batch() -> None:
    many = StepSamples(seed=3 + (1 << 64), micro_batches=1000, micro_batch=1)
    assert [many.hash_of(5, number) for number in range(6)] == [SAMPLES.hash_of(5, number) for number in range(6)]
    assert many.expected(5) == sum(many.hash_of(5, number) for number in range(1000))
    others = {
        (seed, step): StepSamples(seed=seed, micro_batches=64, micro_batch=1) for seed in (0, 1) for step in (1, 2)
    }
    found = {samples.hash_of(step, number) for (_, step), samples in others.items() for number in range(64)}
    assert len(found) == 4 * 64


@pytest.mark.parametrize(("step", "micro_batch"), [(0, 0), (1, -1), (1, 6)])
def test_an_invalid_micro_batch_is_refused(step: int, micro_batch: int) -> None:
    with pytest.raises(ValueError, match=f"no micro-batch {micro_batch} of step {step}"):
        SAMPLES.hash_of(step, micro_batch)


def test_wrong_samples_of_a_step_are_reported_with_their_counts() -> None:
    assert said_of(SAMPLES, 4, v(4)) == ""
    error = said_of(SAMPLES, 4, v(5))
    assert "step 4 is not made of each of its 6 micro-batches once: 24 samples of 24, sum of hashes 0x" in error


@given(
    step=st.integers(2, 1 << 40),
    world=st.integers(1, 5),
    micro_batches=st.integers(1, 40),
    mistake=st.sampled_from(["none", "doubled", "lost", "swapped", "stale"]),
    at=st.integers(0, 1 << 20),
)
def test_any_mistake_with_one_micro_batch_is_detected(
    step: int, world: int, micro_batches: int, mistake: str, at: int
) -> None:
    samples = StepSamples(seed=11, micro_batches=micro_batches, micro_batch=2)
    struck = at % micro_batches
    joined = {number: [samples.hash_of(step, number)] for number in range(micro_batches)}
    if mistake == "doubled":
        joined[struck] *= 2
    elif mistake == "lost":
        joined[struck] = []
    elif mistake == "swapped":
        joined[struck] = [samples.hash_of(step, (struck + 1) % micro_batches)]
    elif mistake == "stale":
        joined[struck] = [samples.hash_of(step - 1, struck)]
    ranks = [[h for number in range(rank, micro_batches, world) for h in joined[number]] for rank in range(world)]
    parts = [
        Commit(grad_square=0.0, loss_sum=0.0, samples=2 * len(own), nonfinite=0, sample_hashes=sum(own))
        for own in ranks
    ]
    summed = commit_from_sums([sum(column) for column in zip(*map(lane_contribution, parts), strict=True)])
    right = mistake == "none" or (mistake == "swapped" and micro_batches == 1)
    assert (said_of(samples, step, summed) == "") is right


def test_the_largest_step_counted_twice_is_summed_exactly() -> None:
    """Even if every micro-batch is counted twice, all intermediate sums are whole numbers that float64 holds."""
    assert 2 * MAX_MICRO_BATCHES * (2**32 - 1) < 2**53


PLACES = 4


def elsewhere(step: int, joined: dict[int, list[int]]) -> int:
    """Return the sum of place hashes if each place in `joined` has the given micro-batches."""
    return sum(
        place_hash(SAMPLES.hash_of(step, number), place, PLACES, SAMPLES.micro_batches)
        for place, numbers in joined.items()
        for number in numbers
    )


@pytest.mark.parametrize("place", [1, 2, 3])
@pytest.mark.parametrize(
    ("there", "right"),
    [([0, 1, 2, 3, 4, 5], True), ([0, 1, 2, 3, 4], False), ([0, 1, 2, 3, 4, 5, 5], False), ([0, 1, 2, 3, 4, 4], False)],
    ids=["right", "missing", "twice", "another"],
)
def test_a_wrong_micro_batch_at_any_local_rank_is_detected(place: int, there: list[int], right: bool) -> None:
    joined = {one: there if one == place else list(range(6)) for one in range(1, PLACES)}
    sums = {"samples": 24, "hashes": SAMPLES.expected(4), "place_hashes": elsewhere(4, joined)}
    wrong = SAMPLES.find_error(4, places=PLACES, **sums)
    assert (wrong == "") is right
    assert right or "once at each of the 4 places of a replica" in wrong


def test_a_micro_batch_missing_at_one_rank_and_doubled_at_another_is_detected() -> None:
    joined = {1: [0, 1, 2, 3, 4], 2: [0, 1, 2, 3, 4, 5, 5], 3: [0, 1, 2, 3, 4, 5]}
    sums = {"samples": 24, "hashes": SAMPLES.expected(4), "place_hashes": elsewhere(4, joined)}
    assert SAMPLES.find_error(4, places=PLACES, **sums)


@pytest.mark.parametrize(("micro_batches", "places"), [(MAX_MICRO_BATCHES, 1024), (MAX_MICRO_BATCHES, 2), (64, 8)])
def test_sums_over_all_local_ranks_are_exact(micro_batches: int, places: int) -> None:
    largest = max(place_hash((1 << 32) - 1 - low, place, places, micro_batches) for low in (0, 1) for place in (1, 5))
    assert 2 * micro_batches * places * largest < 2**53
    assert largest >= 1 << 20 or places == 1024
