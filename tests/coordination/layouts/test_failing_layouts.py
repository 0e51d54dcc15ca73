"""Tests of a layout under which the script fails: the change is undone without loss, and reported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from changing_job import LISTED, SETTLE_S, TWO, Changing, w
from machinery import applied, attach, hello

from holdfast.coordination.inputs import Shutdown
from holdfast.coordination.layouts.changing import RECENT_S
from holdfast.errors import EXIT_BAD_INPUT, EXIT_FAILED, EXIT_INTERRUPTED
from holdfast.protocol import events as ev
from holdfast.protocol.failures import FailureKind
from holdfast.protocol.job_spec import JobSpec, RecoverySpec
from holdfast.protocol.layouts.layout import WHOLE
from holdfast.protocol.messages import any_side as msg
from holdfast.protocol.plan import DecisionKind
from holdfast.protocol.state import SnapshotPart

Parts = dict[str, tuple[SnapshotPart, ...]]
OOPS = msg.ScriptError(place="ValueError (train.py, line 9)")


def changed(**known: Any) -> tuple[Changing, Parts]:
    """Return a job with layout shard 2 on two nodes; only their memory has step 3, and their agents are connected."""
    job = Changing(**known).begin().shrink()
    parts = job.changed()
    for node in parts:
        again(job, node, "b", parts)
    return job, parts


def again(job: Changing, node: str, nonce: str, parts: Parts) -> None:
    """Connect an agent with fresh workers that have not attached yet."""
    held = msg.NodeSnapshots(host="h", port=1, parts=parts[node])
    session = f"{hash((node, nonce)) % 16**8:08x}"
    job.connect(msgspec.structs.replace(hello(node, session=session), workers=2, snapshots=held))


def down(worker: str, **how: Any) -> msg.WorkerDown:
    known: dict[str, Any] = {"kind": FailureKind.EXCEPTION, "detail": "ValueError: no", "exit_code": EXIT_FAILED}
    return msg.WorkerDown(worker=worker, **known | how)


def raise_early(job: Changing, _: Parts) -> None:
    for node in ("n0", "n1"):
        job.deliver_from(node, down(w(node, 0, "b"), error=OOPS))


def bad_input(job: Changing, _: Parts) -> None:
    job.deliver_from("n0", down(w("n0", 0, "b"), exit_code=EXIT_BAD_INPUT))


def leave_with_an_exit_code(job: Changing, _: Parts) -> None:
    job.deliver_from("n0", down(w("n0", 0, "b"), exit_code=3, final=True))


def be_killed_twice(job: Changing, _: Parts) -> None:
    for nonce in "bc":
        job.deliver_from("n0", down(w("n0", 0, nonce), kind=FailureKind.PROCESS_EXIT, exit_code=-9, detail="SIGKILL"))


def be_killed_twice_with_all_of_the_unit(job: Changing, _: Parts) -> None:
    for nonce in "bc":
        job.deliver_from("n0", down(w("n0", 1, nonce), kind=FailureKind.PROCESS_EXIT, exit_code=-9, detail="SIGKILL"))
        assert job.machine.record.layout == TWO or nonce == "c"
        job.deliver_from("n0", down(w("n0", 0, nonce), kind=FailureKind.PROCESS_EXIT, detail="it went with the other"))
    assert "worker 1 of n0: SIGKILL" in job.events[-1].why


def differ(job: Changing, _: Parts) -> None:
    one = msgspec.structs.replace(attach(w("n0", 0, "b")), layout=TWO, layouts=LISTED)
    job.deliver(msgspec.structs.replace(one, global_batch=12))


def raise_in_the_first_step(job: Changing, parts: Parts) -> None:
    reconnect_all(job, TWO, "c", parts)
    job.enter(3)
    for node in ("n0", "n1"):
        known = {"generation": job.plan.generation, "detail": "ValueError: no", "exit_code": EXIT_FAILED}
        at = msgspec.structs.replace(OOPS, step=4, micro_batch=len(node))
        job.deliver(msg.Raised(worker=w(node, 0, "c"), error=at, **known))


def not_fit_what_was_put_away(job: Changing, parts: Parts) -> None:
    reconnect_all(job, TWO, "c", parts)
    known = {"worker": w("n0", 0, "c"), "generation": job.plan.generation, "why": "it does not fit"}
    job.deliver(msg.SnapshotDamaged(**known, snapshot=parts["n0"][0], node=""))


def reconnect_all(job: Changing, layout: Any, nonce: str, parts: Parts) -> None:
    for node, held in parts.items():
        if node in job.machine.members.nodes:
            job.lose(node)
        job.up(node, layout, nonce, held)


WAYS: list[Callable[[Changing, Parts], None]] = [
    raise_early,
    bad_input,
    leave_with_an_exit_code,
    be_killed_twice,
    be_killed_twice_with_all_of_the_unit,
    differ,
    raise_in_the_first_step,
    not_fit_what_was_put_away,
]


@pytest.mark.parametrize("fail", WAYS)
@pytest.mark.parametrize("saves", [False, True])
def test_a_job_that_fails_under_a_new_layout_returns_to_the_previous_one(
    fail: Callable[[Changing, Parts], None], *, saves: bool
) -> None:
    job, parts = changed(saves=saves)
    fail(job, parts)
    record = job.machine.record
    assert (record.layout, record.plan, job.machine.over) == (WHOLE, None, None)
    kept = [event for event in job.events if isinstance(event, ev.LayoutKept)][-1]
    assert kept.layout == "one place"
    assert kept.why.startswith("under shard 2 the job failed before its first step: ")
    assert "to the stashed step 3, and shard 2 is not tried again for 10 minutes" in kept.why
    for node, held in parts.items():
        job.up(node, WHOLE, "d", held)
    decision = job.machine.record.decision
    assert (job.plan.places, job.plan.last, len(job.plan.members)) == (1, False, 4)
    assert decision is not None
    assert (decision.kind, decision.applied) == (DecisionKind.ROLLBACK, 3)
    job.enter(3)
    job.done(4, 1.0)
    assert job.machine.record.change is None
    for event in (ev.LayoutChanged, ev.RolledBack, ev.JobFailed):
        assert not [one for one in job.events if isinstance(one, event)]
    dropped = {part for one in job.sent(msg.DropSnapshots) for part in one.parts}
    assert dropped == {part for held in parts.values() for part in held}, "their memory is given back"
    job.done(5, 2 * SETTLE_S)
    job.done(6, 2 * SETTLE_S)
    assert job.machine.context.interruption.stop is None, "the layout is not tried again soon"
    job.done(7, RECENT_S)
    job.done(8, 2 * SETTLE_S)
    assert job.machine.context.interruption.stop is not None, (
        "it is tried again later, because the cause may have been a full disk"
    )


def test_a_job_that_also_fails_under_the_previous_layout_ends() -> None:
    job, parts = changed()
    bad_input(job, parts)
    for node in parts:
        again(job, node, "d", parts)
        job.deliver_from(node, down(w(node, 0, "d"), exit_code=3, final=True))
    (failed,) = [event for event in job.events if isinstance(event, ev.JobFailed)]
    assert "ValueError: no" in failed.why


def test_a_new_coordinator_ignores_worker_exits_under_the_failed_layout() -> None:
    """The first coordinator wrote that all go back, and died before it told any node."""
    job, parts = changed(saves=True)
    bad_input(job, parts)
    job.boot(takeover=True)
    for node in parts:
        held = msg.NodeSnapshots(host="h", port=1, parts=parts[node])
        known = msgspec.structs.replace(hello(node, (down(w(node, 0, "b"), error=OOPS),)), workers=2)
        job.connect(msgspec.structs.replace(known, snapshots=held))
        assert node not in job.machine.members.nodes, "the node must return with workers of the layout in force"
    assert (job.machine.over, job.machine.state) == (None, "waiting")
    for node, held in parts.items():
        job.up(node, WHOLE, "d", held)
    assert (job.plan.last, job.plan.places) == (False, 1)


def test_failed_layouts_survive_a_takeover_but_not_another_run() -> None:
    job, parts = changed()
    bad_input(job, parts)
    before = job.machine.record.failed_layouts
    job.boot(takeover=True)
    assert job.machine.record.failed_layouts == before
    job.boot()
    assert job.machine.record.failed_layouts == (), "the script may have been fixed"


def test_a_worker_process_that_dies_once_is_restarted_under_the_new_layout() -> None:
    job, parts = changed()
    job.deliver_from("n0", down(w("n0", 0, "b"), kind=FailureKind.PROCESS_EXIT, exit_code=-9))
    job.deliver_from("n1", down(w("n1", 1, "b"), kind=FailureKind.PROCESS_EXIT, exit_code=-9))
    assert job.machine.record.layout == TWO
    reconnect_all(job, TWO, "c", parts)
    assert job.plan.places == 2


def test_exceptions_of_a_whole_replica_group_count_as_one_failure() -> None:
    job, parts = changed()
    reconnect_all(job, TWO, "c", parts)
    job.enter(3)
    for index in (0, 1):
        known = {"generation": job.plan.generation, "detail": "CUDA error", "exit_code": EXIT_FAILED}
        at = msgspec.structs.replace(OOPS, step=4, micro_batch=index)
        job.deliver(msg.Raised(worker=w("n0", index, "c"), error=at, **known))
    job.deliver_from("n0", down(w("n0", 1, "c"), kind=FailureKind.PROCESS_EXIT, detail="it went with the other"))
    assert job.machine.record.layout == TWO


def test_a_failure_after_a_committed_step_does_not_undo_the_layout() -> None:
    job, parts = changed(saves=True)
    reconnect_all(job, TWO, "c", parts)
    job.enter(3)
    job.done(4)
    error = msgspec.structs.replace(OOPS, step=5, micro_batch=0)
    known = {"generation": job.plan.generation, "detail": "no", "error": error, "exit_code": 3, "final": True}
    job.deliver(msg.Raised(worker=w("n0", 0, "c"), **known))
    assert (job.machine.record.layout, job.machine.state) == (TWO, "stopping")


def test_a_failure_after_one_worker_committed_does_not_undo_the_layout() -> None:
    job, parts = changed(saves=True)
    reconnect_all(job, TWO, "c", parts)
    job.enter(3)
    job.deliver(applied(w("n1", 0, "c"), job.plan.generation, 4, world=4))
    error = msgspec.structs.replace(OOPS, step=4)
    known = {"generation": job.plan.generation, "detail": "no", "error": error, "exit_code": 3, "final": True}
    job.deliver(msg.Raised(worker=w("n0", 0, "c"), **known))
    assert (job.machine.record.layout, job.machine.state) == (TWO, "stopping")


def test_the_first_worker_exit_undoes_the_layout_if_restarts_are_disabled() -> None:
    job, parts = changed(spec=JobSpec(max_nodes=4, recovery=RecoverySpec(max_restarts=0)))
    job.deliver_from("n0", down(w("n0", 0, "b"), kind=FailureKind.PROCESS_EXIT, exit_code=-9))
    assert job.machine.record.layout == WHOLE
    job.up("n1", WHOLE, "d", parts["n1"])
    for _ in range(9):
        job.tick(1.0)
        job.deliver_from("n1", msg.Heartbeat())
    assert {msg.node_of(worker) for worker in job.plan.workers} == {"n1"}, "the node itself may be lost"


def test_a_job_being_shut_down_is_saved_under_the_previous_layout() -> None:
    job, parts = changed(saves=True)
    job.feed(Shutdown(EXIT_INTERRUPTED, "Ctrl-C", save=True))
    bad_input(job, parts)
    for node, held in parts.items():
        job.up(node, WHOLE, "d", held)
    assert job.plan.last
    job.enter(3)
    for worker in job.plan.workers:
        job.deliver(msg.Finished(worker=worker, generation=job.plan.generation, step=3))
    (finished,) = [event for event in job.events if isinstance(event, ev.JobFinished)]
    assert (finished.resumable, finished.why) == (True, "Ctrl-C")


def wait(job: Changing, seconds: float, *nodes: str) -> None:
    for _ in range(int(seconds)):
        job.tick(1.0)
        for node in nodes:
            job.deliver_from(node, msg.Heartbeat())


def test_a_layout_is_undone_if_workers_do_not_attach_for_ten_minutes() -> None:
    """Workers may hang before `job.protect()` in different collectives, which no other check detects."""
    job, parts = changed()
    wait(job, 590, "n0", "n1")
    assert job.machine.record.layout == TWO, "loading a large model takes time"
    wait(job, 20, "n0", "n1")
    assert job.machine.record.layout == WHOLE
    kept = [event for event in job.events if isinstance(event, ev.LayoutKept)][-1]
    assert "the workers of node n0 did not come to job.protect() within 600 s" in kept.why
    for node, held in parts.items():
        job.up(node, WHOLE, "d", held)
    assert job.machine.record.decision is not None
    assert job.machine.record.decision.applied == 3


def test_the_attach_timeout_is_longer_if_workers_started_slowly_before() -> None:
    job = Changing().boot()
    assert isinstance(job, Changing)
    for node in ("n0", "n1", "n2"):
        known = msgspec.structs.replace(hello(node), workers=2, snapshots=msg.NodeSnapshots(host="h", port=1))
        job.connect(known)
    wait(job, 400, "n0", "n1", "n2")
    for node in ("n0", "n1", "n2"):
        for index in range(2):
            job.deliver(msgspec.structs.replace(attach(w(node, index)), layout=WHOLE, layouts=LISTED))
    job.enter(0)
    parts = job.shrink().changed()
    for node in parts:
        again(job, node, "b", parts)
    wait(job, 1190, "n0", "n1")
    assert job.machine.record.layout == TWO, "the limit is three times the earlier duration"
    wait(job, 30, "n0", "n1")
    assert job.machine.record.layout == WHOLE


def test_disconnected_nodes_do_not_undo_the_layout() -> None:
    job, _ = changed()
    job.lose("n0")
    job.lose("n1")
    wait(job, 700)
    assert job.machine.record.layout == TWO


def test_a_shutdown_during_a_layout_timeout_is_saved_under_the_previous_one() -> None:
    job, parts = changed(saves=True)
    job.feed(Shutdown(EXIT_INTERRUPTED, "Ctrl-C", save=True))
    wait(job, 125, "n0", "n1")
    assert (job.machine.over, job.machine.record.layout) == (None, WHOLE)
    for node, held in parts.items():
        job.up(node, WHOLE, "d", held)
    assert job.plan.last
