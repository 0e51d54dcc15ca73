"""The interface of a simulated worker process to its parts, and its messages about itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

from holdfast.coordination.worker.machine import WorkerMachine
from holdfast.coordination.worker.tasks import WorkerInstruction
from holdfast.protocol.messages.worker import Attach, Raised, ScriptError, WorkerMessage
from tests.simulation.durable import HandedPart
from tests.simulation.faults.plans import layout_of
from tests.simulation.invariants import Checker
from tests.simulation.machines.experts.stored import StoredExperts
from tests.simulation.process import SimPage
from tests.simulation.world import Peer, World


class PartWriter(Protocol):
    """Writes the checkpoint parts of a node's workers."""

    def busy(self, worker: str) -> bool: ...

    def write_part(self, handed: HandedPart) -> None: ...


class NodeHost(Protocol):
    """The agent of a worker process, as its parts see it."""

    @property
    def writer(self) -> PartWriter: ...


class WorkerHost(Peer, Protocol):
    """A worker process, as its parts see it."""

    node: str
    world: World
    checker: Checker
    machine: WorkerMachine
    #: Whether the training thread hangs.
    hung: bool

    @property
    def agent(self) -> NodeHost: ...

    @property
    def page(self) -> SimPage: ...

    @property
    def busy(self) -> str: ...

    @busy.setter
    def busy(self, what: str) -> None: ...

    def deliver(self, action: Callable[..., object], *args: Any) -> None: ...

    def send(self, message: WorkerMessage) -> None: ...

    def obey(self, instructions: Iterable[WorkerInstruction]) -> None: ...

    def issue(
        self, kind: str, payload: Any, combine: Callable[[Iterable[Any]], Any], *, step: int | None = None
    ) -> None: ...

    def raised(self) -> None: ...

    def saved(self) -> None: ...


def attachment(world: World, worker: str, pid: int, experts: StoredExperts | None, places: int) -> Attach:
    """Return a worker's attach message; `places` is the size of its replica group."""
    plan = world.plan
    return Attach(
        worker=worker,
        pid=pid,
        host="10.0.0.1",
        state_port=1,
        config={"model": "m"},
        global_batch=plan.micro_batches * plan.micro_batch,
        micro_batches=plan.micro_batches,
        seed=world.samples.seed,
        expert_shape=experts.shape if experts else None,
        saves=plan.checkpoint_every > 0,
        saves_in_time=plan.saves_in_time,
        layout=layout_of(places),
        layouts=plan.listed,
    )


def raised_message(
    machine: WorkerMachine, place: str, micro_batch: int | None = None, *, looped: bool = True
) -> Raised:
    """Return the report of an exception that a script raised inside or outside its loop."""
    step = machine.step if looped else None
    error = ScriptError(place=place, step=step, micro_batch=micro_batch, phase=machine.phase)
    generation, detail = machine.generation, f"ValueError: {place}"
    return Raised(worker=machine.worker, generation=generation, detail=detail, error=error, exit_code=1)
