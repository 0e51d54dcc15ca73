"""A passed step changes the state only once the state before it is no longer being sent."""

from __future__ import annotations

import queue
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.control.link.progress_page import NoProgress
from holdfast.coordination.worker.machine import WorkerMachine
from holdfast.protocol.commit import Commit
from holdfast.protocol.messages import any_side as msg
from holdfast.protocol.messages.progress import Activity
from holdfast.protocol.plan import Decision, DecisionKind, GenerationPlan, Member
from holdfast.runtime.generation.resources import Generations, SharedContext
from holdfast.runtime.session.applying import StepApplier
from holdfast.step_samples import StepSamples

DEADLINE_S = 60.0
ME, PEER = "a/0/a", "b/0/b"
SAMPLES = StepSamples(seed=0, micro_batches=1, micro_batch=1)
V = Commit(grad_square=1.0, loss_sum=1.0, samples=1, nonfinite=0, sample_hashes=SAMPLES.expected(1))
PLAN = GenerationPlan(
    term=1, generation=1, members=tuple(Member(worker=worker, host="127.0.0.1", state_port=1) for worker in (ME, PEER))
)


class Passed:
    """A worker with a passed first step, which is sending its state to a joining worker."""

    def __init__(self, transfer: str) -> None:
        self.happened: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.transfer = SimpleNamespace(sent=False, abort=lambda: None)
        machine = WorkerMachine(ME, samples=SAMPLES)
        machine.on_order(msg.Begin(plan=PLAN, decision=Decision(kind=DecisionKind.START, applied=0)))
        machine.finish_entering()
        for micro_batch in machine.share:
            assert machine.begin_micro_batch(micro_batch)
        assert machine.begin_reduction()
        machine.finish_reduction(V)
        assert machine.begin_vote()
        machine.pass_vote(V)
        self.shared = SharedContext(
            changed=threading.Condition(threading.RLock()),
            machine=machine,
            resources=Generations(lambda generation, keys: None),
            execute=lambda instructions: None,
            progress=self._progress(),
        )
        resources = self.shared.resources.of(1)
        assert resources is not None
        setattr(resources, transfer, self.transfer)
        workload: Any = SimpleNamespace(
            apply=lambda commit: self.happened.put("applied"),
            state=SimpleNamespace(watch=SimpleNamespace(record=lambda: None)),
            loader=SimpleNamespace(last_step=None),
        )
        faults: Any = SimpleNamespace(strike_at=lambda *_: None)
        evaluating: Any = SimpleNamespace(on_state_replaced=lambda: None)
        options: dict[str, Any] = dict.fromkeys(("experts", "saver", "snapshots", "after_apply"))
        self.applying = StepApplier(
            self.shared,
            workload,
            faults,
            **options,
            on_after_apply_error=pytest.fail,
            verify_state=0,
            evaluator=evaluating,
        )
        self.thread = threading.Thread(target=self._apply, daemon=True)
        self.thread.start()

    def next(self) -> str:
        return self.happened.get(timeout=DEADLINE_S)

    def _apply(self) -> None:
        self.happened.put(f"returned {self.applying.apply_step(1, 1, V)}")

    def _progress(self) -> NoProgress:
        happened = self.happened

        class Progress(NoProgress):
            def start_activity(self, activity: Activity, *_: Any, **__: Any) -> None:
                if activity is Activity.AWAITING:
                    happened.put("waits")

        return Progress()


@pytest.mark.parametrize("transfer", ["push", "parcels"])
def test_a_step_is_applied_once_the_whole_state_is_sent(transfer: str) -> None:
    passed = Passed(transfer)
    assert passed.next() == "waits"
    passed.shared.notify()
    assert passed.happened.empty()
    passed.transfer.sent = True
    passed.shared.notify()
    assert [passed.next(), passed.next()] == ["applied", "returned True"]


def test_a_stop_order_ends_the_wait_without_applying_the_step() -> None:
    passed = Passed("push")
    assert passed.next() == "waits"
    with passed.shared.changed:
        passed.shared.machine.on_order(msg.Stop(term=1, generation=1))
    passed.shared.notify()
    assert passed.next() == "returned False"
    assert passed.happened.empty()
