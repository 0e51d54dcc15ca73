"""Local ranks that keep a state and receive a newer one adopt it once all of them have it, or not at all."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.control.link.progress_page import NoProgress
from holdfast.control.link.replica_group.proposals import ProposalTable, count_words
from holdfast.coordination.worker import tasks
from holdfast.coordination.worker.machine import WorkerMachine
from holdfast.protocol.layouts.proposals import Proposal
from holdfast.protocol.messages import any_side as msg
from holdfast.protocol.messages.progress import Activity
from holdfast.protocol.plan import Decision, DecisionKind, Role
from holdfast.protocol.state import LiveSource
from holdfast.runtime.generation.resources import Resources, SharedContext
from holdfast.runtime.groups.rendezvous import Board
from holdfast.runtime.session.entering import GenerationEntry
from holdfast.runtime.state.step_settings import StepSettings
from holdfast.step_samples import StepSamples

LONG = 30.0
UNIT, OTHERS = ("n0/0/a", "n0/1/a"), ("n1/0/a", "n1/1/a")


def plan_of(generation: int, *, sent: bool = False) -> msg.GenerationPlan:
    members = tuple(
        msg.Member(worker=worker, host="h", state_port=1, role=Role(place=rank % 2))
        for rank, worker in enumerate((*UNIT, *OTHERS))
    )
    sources: dict[str, msg.StateSource] = {
        place: LiveSource(members=(other,)) for place, other in zip(UNIT, OTHERS, strict=True)
    }
    return msg.GenerationPlan(term=1, generation=generation, members=members, sources=sources if sent else {})


class Page(ProposalTable):
    """A replica group's page as seen by one local rank, which signals its proposals."""

    def __init__(self, words: list[int], lock: threading.Lock, *, place: int) -> None:
        super().__init__(words, lock, place=place, places=2)
        self.lies = threading.Event()

    def propose(self, proposal: Proposal) -> bool:
        try:
            return super().propose(proposal)
        finally:
            self.lies.set()


class Progress(NoProgress):
    """Records a rank's reported activity."""

    about = Activity.STARTING

    def start_activity(self, activity: Activity, micro_batch: int = -1) -> None:
        """Record this activity."""
        self.about = activity


class Place:
    """One local rank: its machine, and an inbox that receives step 1 next to the state of step 0."""

    def __init__(self, worker: str, page: Page, changed: threading.Condition, *, keeps: bool) -> None:
        self.machine = WorkerMachine(worker, samples=StepSamples(seed=1, micro_batches=4, micro_batch=6))
        self.machine.on_order(msg.Begin(plan=plan_of(1), decision=Decision(kind=DecisionKind.START, applied=0)))
        self.machine.on_order(msg.Stop(term=1, generation=1))
        if not keeps:
            self.machine._copy.mark_void()  # pyright: ignore[reportPrivateUsage]
        decision = Decision(kind=DecisionKind.REDO, applied=1)
        self.machine.on_order(msg.Begin(plan=plan_of(2, sent=True), decision=decision))
        self.page = page
        self.changed, self.reports, self.adopted, self.let_go = changed, list[msg.Report](), 0, 0
        generations: Any = SimpleNamespace(of=lambda _: self.resources, retire_before=lambda _: None)
        self.resources = Resources(generation=2, board=Board(2, lambda _: None))
        self.resources.groups = SimpleNamespace()  # pyright: ignore[reportAttributeAccessIssue]
        self.progress, self.adopted_at = Progress(), Activity.STARTING
        shared = SharedContext(
            changed=changed,
            machine=self.machine,
            resources=generations,
            execute=self._carry_out,
            proposals=page,
            progress=self.progress,
        )
        workload = SimpleNamespace(state=SimpleNamespace(adopt=self._adopt, settings=StepSettings((), ())))
        applying = SimpleNamespace(on_state_replaced=lambda: None)
        made: Callable[..., GenerationEntry] = GenerationEntry
        more = {"experts": None, "saver": None, "snapshots": None}
        self.entrance = made(shared, workload, None, applying, None, **more)
        self.thread = threading.Thread(target=self._enter, daemon=True)
        self.thread.start()

    def comes(self) -> None:
        """Mark this rank's incoming state as complete."""
        with self.changed:
            assert self.machine.accept_push(2)
            header = SimpleNamespace(manifest=None, passed=(), step=1)
            receipt: Any = SimpleNamespace(
                has_ended=True, result=lambda: header, tensors=[], release_tensors=self._let_go
            )
            self.resources.receipt = receipt
            self.changed.notify_all()

    def stop(self) -> None:
        with self.changed:
            self._carry_out(self.machine.on_order(msg.Stop(term=1, generation=2)))
            self.changed.notify_all()

    def _enter(self) -> None:
        task = self.machine.task
        assert task == tasks.Receive(plan_of(2, sent=True), together=True)
        self.entrance.execute(task)

    def _adopt(self, *_: object) -> None:
        self.adopted += 1
        self.adopted_at = self.progress.about

    def _let_go(self) -> None:
        self.let_go += 1

    def _carry_out(self, instructions: list[tasks.WorkerInstruction]) -> None:
        outgoing = [one.message for one in instructions if isinstance(one, tasks.SendToCoordinator)]
        self.reports += [message for message in outgoing if isinstance(message, msg.Report)]
        self.changed.notify_all()


@pytest.fixture
def unit(request: pytest.FixtureRequest) -> Iterator[list[Place]]:
    changed, lock, words = threading.Condition(), threading.Lock(), [0] * count_words(2)
    keeping: tuple[bool, ...] = getattr(request, "param", (True, True))
    pages = [Page(words, lock, place=number) for number in range(2)]
    places = [
        Place(worker, page, changed, keeps=keeps) for worker, page, keeps in zip(UNIT, pages, keeping, strict=True)
    ]
    yield places
    for place in places:
        place.stop()
        place.thread.join(LONG)
        assert not place.thread.is_alive()


def test_ranks_adopt_a_received_state_once_all_have_it(unit: list[Place]) -> None:
    first, second = unit
    first.comes()
    assert first.page.lies.wait(LONG)
    first.thread.join(0.05)
    assert first.thread.is_alive(), "a rank must not continue alone"
    assert not first.adopted
    second.comes()
    for place in unit:
        place.thread.join(LONG)
        assert place.adopted == 1
        assert place.adopted_at is Activity.RECEIVING, "a hang here must not be reported as waiting for others"
        assert (place.machine.applied, place.machine.keeps) == (1, False)


def test_no_rank_adopts_a_state_if_the_generation_ends_first(unit: list[Place]) -> None:
    first, second = unit
    first.comes()
    assert first.page.lies.wait(LONG)
    first.stop()
    second.stop()
    for place in unit:
        place.thread.join(LONG)
        assert not place.adopted
        assert [(report.applied, report.generation) for report in place.reports] == [(0, 2)]
    assert first.machine.keeps
    assert (first.let_go, second.let_go) == (1, 0), "a received state that cannot be adopted must be freed"


@pytest.mark.parametrize("unit", [(True, False)], indirect=True)
def test_a_rank_without_a_state_adopts_it_before_its_replica_group(unit: list[Place]) -> None:
    keeper, void = unit
    void.comes()
    with void.changed:
        assert void.changed.wait_for(lambda: void.machine.applied == 1, LONG)
    assert void.page.lies.wait(LONG)
    void.thread.join(0.05)
    assert void.thread.is_alive(), "a rank must wait for its replica group"
    keeper.comes()
    for place in unit:
        place.thread.join(LONG)
        assert (place.adopted, place.machine.applied) == (1, 1)
