"""Micro-batches that are in a rank's sums twice, in another's place, or of a step before: every rank refuses such a v.

Real attempts with real gradients, reductions and commit operations, a thread per rank.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import pytest
import torch
from thread_world import run_threads
from torch.utils.data import TensorDataset

from holdfast.coordination.worker.machine import WorkerMachine
from holdfast.coordination.worker.tasks import Compute, Tell, WorkerInstruction
from holdfast.protocol.commit import Commit
from holdfast.protocol.messages import any_side as msg
from holdfast.protocol.plan import Decision, DecisionKind, GenerationPlan, Member, Phase
from holdfast.runtime.data.sampling import MicroBatchLoader
from holdfast.runtime.faults.orders import Faults
from holdfast.runtime.gradients.loss_scale import LossScale
from holdfast.runtime.gradients.workload import LocalSums, Workload
from holdfast.runtime.groups.communicator import Communicator
from holdfast.runtime.session.attempt import Attempt
from holdfast.runtime.session.resources import Generations, Groups, Shared
from holdfast.runtime.state.state import TrainingState

CPU = torch.device("cpu")
MICRO_BATCHES, MICRO_BATCH = 6, 2
X = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(X, X.sum(1, keepdim=True))


@dataclass(frozen=True)
class Wrong:
    """What goes wrong in the second step, at which rank, with which of its micro-batches."""

    how: str
    rank: int
    place: int
    nodes: int
    workers: int = 1


class Rank:
    """One worker: the real machine, workload and attempts; what the coordinator would do is left out."""

    def __init__(self, comm: Communicator, *, infinite: bool = False) -> None:
        model = torch.nn.Linear(4, 1)
        for parameter in model.parameters():  # (threads share torch's generator)
            torch.nn.init.constant_(parameter, 0.25)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        loader = MicroBatchLoader(
            DATA, device=CPU, seed=7, global_batch=MICRO_BATCHES * MICRO_BATCH, micro_batch=MICRO_BATCH
        )
        self.model, self.infinite = model, infinite
        self.workload = Workload(
            state=TrainingState(model, optimizer, {}),
            loader=loader,
            seed=7,
            max_grad_norm=1.0,
            loss_scale=LossScale(None, model.parameters(), CPU),
        )
        self.told: list[WorkerInstruction] = []
        self.applied: list[int] = []
        workers = tuple(f"n{rank}/0/a" for rank in range(comm.size))
        self.machine = WorkerMachine(workers[comm.rank], samples=self.workload.samples)
        members = tuple(Member(worker=worker, host="h", state_port=0) for worker in workers)
        plan = GenerationPlan(term=1, generation=1, members=members)
        self.machine.order(msg.Begin(plan=plan, decision=Decision(kind=DecisionKind.START, applied=0)))
        self.machine.entered()
        self.shared = Shared(
            changed=threading.Condition(threading.RLock()),
            machine=self.machine,
            resources=Generations(lambda generation, keys: None),
            carry_out=self.told.extend,
        )
        resources = self.shared.resources.of(1)
        assert resources is not None
        resources.groups = Groups(world=comm, domain=comm)

    def step(self, wrong: Callable[[Rank, Attempt, int], bool] = lambda rank, attempt, number: False) -> bool:
        """Go through a step; `wrong` is asked at each micro-batch, and does it its own way where it returns True."""
        task = self.machine.task
        assert isinstance(task, Compute)
        attempt = Attempt(self.shared, self.workload, Faults(lambda: None), self.apply, task, 1)
        for number in attempt.micro_batches():
            if not wrong(self, attempt, number):
                self.compute(attempt, number)
        return attempt.commit()

    def compute(self, attempt: Attempt, number: int, fetched: int | None = None) -> None:
        x, y = attempt.load(number if fetched is None else fetched)
        loss = torch.nn.functional.mse_loss(self.model(x), y)
        attempt.backward(loss * torch.inf if self.infinite else loss, number)

    def apply(self, generation: int, step: int, commit: Commit) -> bool:
        assert self.machine.begin_apply()
        self.workload.apply(commit)
        self.machine.applied_step()
        self.applied.append(step)
        return True

    @property
    def refusals(self) -> list[msg.VoteRefused]:
        told = [i.message for i in self.told if isinstance(i, Tell)]
        return [message for message in told if isinstance(message, msg.VoteRefused)]


def misdeed(wrong: Wrong, stale: LocalSums | None = None) -> Callable[[Rank, Attempt, int], bool]:
    """Return what does one micro-batch wrongly."""

    def do(rank: Rank, attempt: Attempt, number: int) -> bool:
        share = rank.machine.share
        if number != share[wrong.place % len(share)]:
            return False
        if wrong.how == "doubled":
            rank.compute(attempt, number)
            rank.compute(attempt, number)
        elif wrong.how == "swapped":
            rank.compute(attempt, number, fetched=(number + 1) % MICRO_BATCHES)
        elif wrong.how == "stale":  # as if the gradient had been kept since the step before
            sums = rank.workload.sums
            sums.step -= 1
            rank.compute(attempt, number)
            sums.step += 1
        return True  # (lost: nothing at all)

    return do


def cases(count: int) -> list[Wrong]:
    rng, found = Random(16), []
    for number in range(count):
        nodes, workers = rng.choice(((1, 1), (2, 1), (3, 1), (4, 1), (2, 2), (5, 1)))
        how = ("doubled", "swapped", "stale")[number % 3]
        found.append(Wrong(how, rng.randrange(nodes * workers), rng.randrange(3), nodes, workers))
    return [*found, Wrong("lost", 1, 0, 3), Wrong("lost", 0, 1, 2)]


def run(wrong: Wrong, number: int, *, infinite: bool = False) -> list[Rank]:
    """Two steps, the second one with something wrong at one rank; even numbers meet level by level, three at a time."""

    def body(comm: Communicator) -> Rank:
        rank = Rank(comm, infinite=infinite)
        assert rank.step()
        assert not rank.step(misdeed(wrong) if comm.rank == wrong.rank else lambda *_: False)
        return rank

    nodes = [f"n{node}" for node in range(wrong.nodes) for _ in range(wrong.workers)]
    return run_threads(nodes, body, seed=number, flat_up_to=8 if number % 2 else 1, fan_out=3)


@pytest.mark.parametrize("chunk", range(4))
def test_a_hundred_wrong_micro_batches_are_refused_by_every_rank(chunk: int) -> None:
    for number, wrong in enumerate(cases(100)):
        if number % 4 == chunk:
            ranks = run(wrong, number)
            assert [rank.applied for rank in ranks] == [[1]] * len(ranks), wrong
            assert [rank.machine.phase for rank in ranks] == [Phase.REFUSED] * len(ranks), wrong
            said = {(told.generation, told.step, told.why) for rank in ranks for told in rank.refusals}
            assert len(said) == 1, f"all refuse for the same reason: {wrong}"
            states = {tuple(rank.model.weight.flatten().tolist()) for rank in ranks}
            assert len(states) == 1, "nobody's state has changed"


def test_a_step_that_the_loss_scale_skips_has_its_samples_looked_at_too() -> None:
    """The first one's gradients are infinite and its samples right: it counts. The second one's are wrong as well."""
    ranks = run(Wrong("swapped", 1, 0, 2), 1, infinite=True)
    assert [rank.applied for rank in ranks] == [[1], [1]]
    assert all(rank.refusals for rank in ranks)


def test_what_is_kept_carries_its_own_hashes() -> None:
    """An attempt that is broken off: the next one goes on from the sums, and their hashes count there."""

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
