"""Sums with repeated, swapped or stale micro-batches: every rank refuses their step result.

Real attempts with real gradients, reductions and commit operations, with one thread per rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import pytest
from thread_rank import MICRO_BATCHES, Rank
from thread_world import run_threads

from holdfast.coordination.worker.tasks import Compute
from holdfast.protocol.plan import Phase
from holdfast.runtime.faults.orders import Faults
from holdfast.runtime.gradients.workload import LocalSums
from holdfast.runtime.groups.communicator import Communicator
from holdfast.runtime.session.attempt import Attempt


@dataclass(frozen=True)
class Wrong:
    """The error of the second step: its kind, its rank, and its micro-batch."""

    how: str
    rank: int
    place: int
    nodes: int
    workers: int = 1


def misdeed(wrong: Wrong, stale: LocalSums | None = None) -> Callable[[Rank, Attempt, int], bool]:
    """Return a function that computes one micro-batch wrongly."""

    def do(rank: Rank, attempt: Attempt, number: int) -> bool:
        share = rank.machine.share
        if number != share[wrong.place % len(share)]:
            return False
        if wrong.how == "doubled":
            rank.compute(attempt, number)
            rank.compute(attempt, number)
        elif wrong.how == "swapped":
            rank.compute(attempt, number, fetched=(number + 1) % MICRO_BATCHES)
        elif wrong.how == "stale":  # As if the gradient were left from the step before.
            sums = rank.workload.sums
            sums.step -= 1
            rank.compute(attempt, number)
            sums.step += 1
        return True  # "lost": the micro-batch is not computed at all.

    return do


def cases(count: int) -> list[Wrong]:
    rng, found = Random(16), []
    for number in range(count):
        nodes, workers = rng.choice(((1, 1), (2, 1), (3, 1), (4, 1), (2, 2), (5, 1)))
        how = ("doubled", "swapped", "stale")[number % 3]
        found.append(Wrong(how, rng.randrange(nodes * workers), rng.randrange(3), nodes, workers))
    return [*found, Wrong("lost", 1, 0, 3), Wrong("lost", 0, 1, 2)]


def run(wrong: Wrong, number: int, *, infinite: bool = False) -> list[Rank]:
    """Run two steps, the second with an error at one rank; even numbers sum level by level, three at a time."""

    def body(comm: Communicator) -> Rank:
        rank = Rank(comm, infinite=infinite)
        assert rank.step()
        assert not rank.step(misdeed(wrong) if comm.rank == wrong.rank else lambda *_: False)
        return rank

    nodes = [f"n{node}" for node in range(wrong.nodes) for _ in range(wrong.workers)]
    return run_threads(nodes, body, seed=number, flat_up_to=8 if number % 2 else 1, fan_out=3)


@pytest.mark.parametrize("chunk", [0, *(pytest.param(chunk, marks=pytest.mark.soak) for chunk in (1, 2, 3))])
def test_every_rank_refuses_steps_with_wrong_micro_batches(chunk: int) -> None:
    for number, wrong in enumerate(cases(100)):
        if number % 4 == chunk:
            ranks = run(wrong, number)
            assert [rank.applied for rank in ranks] == [[1]] * len(ranks), wrong
            assert [rank.machine.phase for rank in ranks] == [Phase.REFUSED] * len(ranks), wrong
            reasons = {(refusal.generation, refusal.step, refusal.why) for rank in ranks for refusal in rank.refusals}
            assert len(reasons) == 1, f"all ranks must refuse for the same reason: {wrong}"
            states = {tuple(rank.model.weight.flatten().tolist()) for rank in ranks}
            assert len(states) == 1, "no rank's state may change"


def test_samples_are_also_checked_in_steps_skipped_by_the_loss_scale() -> None:
    """The first step has infinite gradients but the right samples, so it counts; the second has wrong samples."""
    ranks = run(Wrong("swapped", 1, 0, 2), 1, infinite=True)
    assert [rank.applied for rank in ranks] == [[1], [1]]
    assert all(rank.refusals for rank in ranks)


def test_kept_micro_batches_keep_their_sample_hashes() -> None:
    """The attempt after an aborted one continues from its sums, and must count their hashes."""

    def body(comm: Communicator) -> Rank:
        rank = Rank(comm)
        kept = rank.machine.share[:2]
        first = Attempt(rank.shared, rank.workload, Faults(lambda: None), rank.apply, Compute(1, kept, ()), 1)
        for number in kept:
            rank.compute(first, number)
        hashes = rank.workload.sums.hashes
        assert hashes == sum(rank.workload.samples.hash_of(1, number) for number in kept)
        task = Compute(1, rank.machine.share, kept)
        second = Attempt(rank.shared, rank.workload, Faults(lambda: None), rank.apply, task, 1)
        assert rank.workload.sums.hashes == hashes
        for number in second.micro_batches():
            rank.compute(second, number)
        assert second.commit()
        return rank

    (rank,) = run_threads(["n0"], body, seed=1, flat_up_to=8, fan_out=3)
    assert rank.applied == [1]
