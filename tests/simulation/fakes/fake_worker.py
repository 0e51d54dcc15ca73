"""A worker that trains nothing: the real machine, for which every operation completes at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import StrEnum

from holdfast.coordination.worker.machine import WorkerMachine
from holdfast.coordination.worker.tasks import (
    Build,
    Compute,
    Drop,
    Enter,
    Finish,
    Forward,
    Receive,
    SendToCoordinator,
    WarmUp,
    WorkerInstruction,
)
from holdfast.protocol.commit import Commit
from holdfast.protocol.messages.orders import (
    AcceptCheckpoint,
    AskCheckpoint,
    Inject,
    LookAround,
    Order,
    Posted,
    PruneCheckpoints,
)
from holdfast.protocol.messages.worker import Attach, Post, WorkerMessage
from holdfast.protocol.names import index_of, key_of
from holdfast.protocol.plan import GenerationPlan, Phase
from holdfast.step_samples import StepSamples


class Rendezvous(StrEnum):
    """The library that forms the process group, which determines the keys that its ranks post."""

    NCCL = "nccl"  # rank 0 posts the group's id, 128 bytes
    GLOO = "gloo"  # each rank posts its addresses, 154 bytes and 8 for each rank (measured with torch 2.13)

    def key_of(self, rank: int, world: int) -> bytes | None:
        """Return the key that a rank posts, or None if it posts none."""
        if self is Rendezvous.GLOO:
            return bytes(154 + 8 * world)
        return bytes(128) if rank == 0 else None

    def keys(self, world: int) -> int:
        """Return how many keys a rank waits for, including its own."""
        return world if self is Rendezvous.GLOO else 1


class FakeModel:
    """The work that fake workers report: `micro_batches` micro-batches of one sample per step.

    All workers of a process share one model.
    """

    def __init__(self, micro_batches: int) -> None:
        self.micro_batches = micro_batches
        #: the samples of a step, computed once for all workers
        self.samples = StepSamples(seed=0, micro_batches=micro_batches, micro_batch=1)

    def commit(self, step: int) -> Commit:
        """Return the step result of a step."""
        return Commit(
            grad_square=1.0,
            loss_sum=2.0 * self.micro_batches,
            samples=self.micro_batches,
            nonfinite=0,
            sample_hashes=self.samples.expected(step),
        )


class FakeWorker:
    """One worker.

    `say` sends a message to the agent. `told` is called with each generation that the worker is ordered to begin, and
    `entered` with each one that it has entered.
    """

    def __init__(
        self,
        worker: str,
        model: FakeModel,
        *,
        say: Callable[[WorkerMessage], None],
        told: Callable[[int], None],
        entered: Callable[[int], None],
    ) -> None:
        self.rendezvous = Rendezvous.NCCL
        self.machine = WorkerMachine(worker, samples=model.samples)
        self._worker = worker
        self._model = model
        self._say = say
        self._told = told
        self._entered = entered
        #: the received keys, and the plans of the groups to build, by generation
        self._keys: dict[int, set[str]] = {}
        self._plans: dict[int, GenerationPlan] = {}

    def attach(self) -> None:
        """Attach with a fresh state."""
        batches = self._model.micro_batches
        attach = Attach(
            worker=self._worker,
            pid=1 + index_of(self._worker),
            host="127.0.0.1",
            state_port=1,
            config={"model": "none"},
            global_batch=batches,
            micro_batches=batches,
        )
        self._say(attach)

    def order(self, order: Order) -> None:
        """Handle an order, then all work that is possible after it."""
        match order:
            case Posted():
                self._keys.setdefault(order.generation, set()).update(order.keys)
                self._build(order.generation)
            case AcceptCheckpoint() | PruneCheckpoints() | AskCheckpoint() | Inject() | LookAround():
                return
            case _:
                self._obey(self.machine.on_order(order))
        self._go_on()

    def compute(self) -> None:
        """Compute the first micro-batch of the step in progress."""
        task = self.machine.task
        assert isinstance(task, Compute), f"the task of {self._worker} is {task}"
        for micro_batch in task.micro_batches[:1]:
            self.machine.begin_micro_batch(micro_batch)

    def train(self, step: int) -> None:
        """Compute and apply this step."""
        machine, task = self.machine, self.machine.task
        assert isinstance(task, Compute), f"the task of {self._worker} is {task}"
        assert task.step == step, f"{self._worker} is at step {task.step}, not {step}"
        for micro_batch in task.micro_batches:
            machine.begin_micro_batch(micro_batch)
        v = self._model.commit(step)
        machine.begin_reduction()
        self._obey(machine.finish_reduction(v))
        machine.begin_vote()
        self._obey(machine.pass_vote(v))
        machine.begin_apply()
        self._obey(machine.finish_apply())

    # ---- inside ----

    def _obey(self, instructions: Iterable[WorkerInstruction]) -> None:
        for instruction in instructions:
            match instruction:
                case SendToCoordinator(message):
                    self._say(message)
                case Build(plan, pending):
                    self._begin_to_build(plan, pending)
                case Drop(generation):
                    self._plans.pop(generation, None)
                case _:
                    pass  # no operation is in progress that could be interrupted

    def _begin_to_build(self, plan: GenerationPlan, pending: bool) -> None:
        generation = plan.generation
        for old in [known for known in {*self._plans, *self._keys} if known < self.machine.generation]:
            self._plans.pop(old, None)
            self._keys.pop(old, None)
        self._plans[generation] = plan
        if not pending:
            self._told(generation)
        rank = plan.rank(self._worker)
        assert rank is not None, f"{self._worker} is not a member of generation {generation}, whose group it must build"
        value = self.rendezvous.key_of(rank, len(plan.members))
        own = {key_of(rank, "address"): value} if value is not None else {}
        self._keys.setdefault(generation, set()).update(own)
        self._say(Post(worker=self._worker, generation=generation, keys=own))
        self._build(generation)

    def _build(self, generation: int) -> None:
        if self._stands(generation):
            self._obey(self.machine.on_group_ready(generation))

    def _stands(self, generation: int) -> bool:
        plan = self._plans.get(generation)
        return plan is not None and len(self._keys.get(generation, ())) >= self.rendezvous.keys(len(plan.members))

    def _go_on(self) -> None:
        """Enter the generation as far as possible. State transfers complete at once."""
        machine = self.machine
        if machine.phase is Phase.PASSED and not machine.frozen:
            machine.begin_apply()
            self._obey(machine.finish_apply())
        if isinstance(machine.task, WarmUp) and machine.warming.start():
            self._obey(machine.warming.finish(0.0))
        while self._stands(machine.generation):
            match machine.task:
                case Forward():
                    machine.begin_apply()
                    self._obey(machine.finish_apply())
                case Receive(plan):
                    decision = machine.generations.decision
                    if not (machine.accept_push(plan.generation) and machine.begin_adoption(plan.generation)):
                        return
                    self._obey(machine.finish_receive((), decision.applied if decision else 0))
                case Enter(plan):
                    self._obey(machine.finish_entering())
                    self._entered(plan.generation)
                    return
                case Finish():
                    self._obey(machine.finish())
                    return
                case _:
                    return
