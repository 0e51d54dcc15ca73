"""One worker of a job as a thread: the real machine, workload and attempts around a communicator of threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch
from torch.utils.data import TensorDataset

from holdfast.coordination.worker.machine import WorkerMachine
from holdfast.coordination.worker.tasks import Compute, SendToCoordinator, WorkerInstruction
from holdfast.protocol.commit import Commit
from holdfast.protocol.messages import any_side as msg
from holdfast.protocol.plan import Decision, DecisionKind, GenerationPlan, Member
from holdfast.runtime.data.loading import MicroBatchLoader
from holdfast.runtime.faults.orders import Faults
from holdfast.runtime.generation.resources import Generations, Groups, SharedContext
from holdfast.runtime.gradients.loss_scale import LossScale
from holdfast.runtime.gradients.updates import Updates
from holdfast.runtime.gradients.workload import Workload
from holdfast.runtime.groups.communicator import Communicator
from holdfast.runtime.micro_batch_notes import NoteSource
from holdfast.runtime.session.attempt import Attempt
from holdfast.runtime.state.state import TrainingState

CPU = torch.device("cpu")
MICRO_BATCHES, MICRO_BATCH = 6, 2
X = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(X, X.sum(1, keepdim=True))


class Rank:
    """One worker with the real machine, workload and attempts, but without a coordinator."""

    def __init__(self, comm: Communicator, *, infinite: bool = False, noted: Sequence[NoteSource] = ()) -> None:
        model = torch.nn.Linear(4, 1)
        for parameter in model.parameters():  # Threads share torch's generator.
            torch.nn.init.constant_(parameter, 0.25)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        loader = MicroBatchLoader(
            DATA, device=CPU, seed=7, global_batch=MICRO_BATCHES * MICRO_BATCH, micro_batch=MICRO_BATCH
        )
        self.model, self.infinite = model, infinite
        state = TrainingState(model, optimizer, {})
        self.workload = Workload(
            state=state,
            loader=loader,
            seed=7,
            updates=Updates(state, None, 1.0),
            loss_scale=LossScale(None, model.parameters(), CPU),
            noted=noted,
        )
        self.instructions: list[WorkerInstruction] = []
        self.applied: list[int] = []
        workers = tuple(f"n{rank}/0/a" for rank in range(comm.size))
        self.machine = WorkerMachine(workers[comm.rank], samples=self.workload.samples)
        members = tuple(Member(worker=worker, host="h", state_port=0) for worker in workers)
        plan = GenerationPlan(term=1, generation=1, members=members)
        self.machine.on_order(msg.Begin(plan=plan, decision=Decision(kind=DecisionKind.START, applied=0)))
        self.machine.finish_entering()
        self.shared = SharedContext(
            changed=threading.Condition(threading.RLock()),
            machine=self.machine,
            resources=Generations(lambda generation, keys: None),
            execute=self.instructions.extend,
        )
        resources = self.shared.resources.of(1)
        assert resources is not None
        resources.groups = Groups(world=comm, domain=comm)

    def step(self, wrong: Callable[[Rank, Attempt, int], bool] = lambda rank, attempt, number: False) -> bool:
        """Run a step; if `wrong` returns True for a micro-batch, it has already handled it."""
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
        self.machine.finish_apply()
        self.applied.append(step)
        return True

    @property
    def refusals(self) -> list[msg.VoteRefused]:
        sent = [i.message for i in self.instructions if isinstance(i, SendToCoordinator)]
        return [message for message in sent if isinstance(message, msg.VoteRefused)]
