"""Tests of a layout change: announced, stashed, in force; and of failures at each point."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from changing_job import LISTED, SETTLE_S, TWO, Changing, w
from machinery import attach, hello

from holdfast.coordination.inputs import Drain, MoveNodes, Shutdown
from holdfast.errors import EXIT_INTERRUPTED, RefusedError
from holdfast.protocol import events as ev
from holdfast.protocol.failures import FailureKind
from holdfast.protocol.job_spec import JobSpec, RecoverySpec
from holdfast.protocol.layouts.layout import WHOLE
from holdfast.protocol.layouts.layout_list import ListedLayout
from holdfast.protocol.messages import any_side as msg
from holdfast.protocol.plan import DecisionKind, ExpertShape
from holdfast.protocol.record import KnownCheckpoint
from holdfast.protocol.state import SnapshotSource


def test_a_layout_changes_once_every_node_has_stashed_the_state() -> None:
    job = Changing().begin().shrink()
    change = job.machine.record.change
    assert change is not None
    assert (change.before, change.after, change.nodes, change.kept) == (WHOLE, TWO, 2, None)
    parts = {"n0": job.put("n0")}
    assert [(part.part, part.parts) for part in parts["n0"]] == [(0, 1)], "one replica group of a node stashes it"
    assert job.machine.record.layout == WHOLE
    parts["n1"] = job.put("n1")
    assert job.machine.record.layout == WHOLE, "not all have entered with the decided state"
    job.enter(3)
    record = job.machine.record
    assert (record.layout, record.plan, record.change and record.change.kept) == (TWO, None, parts["n0"][0].key)
    assert [type(one) for one in job.sent(msg.Refused)] == [msg.Refused] * 2, "all workers are replaced"
    for node in ("n0", "n1"):
        job.up(node, TWO, "b", parts[node])
    assert job.plan.places == 2
    decision = job.machine.record.decision
    assert decision is not None
    assert (decision.kind, decision.applied) == (DecisionKind.ROLLBACK, 3)
    assert isinstance(decision.source, SnapshotSource)
    assert decision.source.everywhere
    assert [len(keepers) for keepers in decision.source.parts] == [2]
    assert not [event for event in job.events if isinstance(event, ev.RolledBack)], "no step is undone"
    job.enter(3)
    job.done(4, 1.0)
    (changed,) = [event for event in job.events if isinstance(event, ev.LayoutChanged)]
    assert (changed.from_layout, changed.to_layout, changed.nodes, changed.step) == ("one place", "shard 2", 2, 3)
    assert changed.down_s == pytest.approx(1.0)
    assert job.machine.record.change is None
    dropped = {part for one in job.sent(msg.DropSnapshots) for part in one.parts}
    assert dropped == {part for held in parts.values() for part in held}, "their memory is given back"


def test_experts_are_stashed_by_all_workers_that_host_them() -> None:
    """Four experts in six slots: some are on only one of the two nodes."""
    job = Changing(experts=ExpertShape(layers=1, experts=4, slots=3)).begin().shrink()
    job.enter(3)
    placed = job.plan.expert_plan
    assert placed is not None
    job.put("n0", experts=False)
    parts = {"n1": job.put("n1")}
    assert job.machine.record.layout == WHOLE, "the experts of n0 are not there"
    parts["n0"] = job.put("n0")
    assert [(part.part, part.parts) for part in parts["n1"]] == [(0, 5), (3, 5), (4, 5)]
    record = job.machine.record
    assert (record.layout, record.change and record.change.experts) == (TWO, placed.placement)
    for node in ("n0", "n1"):
        job.up(node, TWO, "b", parts[node])
    source, anew = job.machine.record.decision and job.machine.record.decision.source, job.plan.expert_plan
    assert isinstance(source, SnapshotSource)
    assert (source.dense, [len(keepers) for keepers in source.parts]) == (1, [2, 1, 1, 1, 1])
    assert source.experts == placed.placement
    assert anew is not None
    assert (anew.moves, set(anew.held)) == (0, {b""}), "they are loaded in the new placement"
    job.enter(3)
    job.done(4, 1.0)
    assert job.machine.record.change is None


@pytest.mark.parametrize(("slots", "enough"), [(4, True), (3, False)])
def test_the_stash_of_one_node_suffices_if_it_has_all_experts(slots: int, enough: bool) -> None:
    job = Changing(experts=ExpertShape(layers=1, experts=4, slots=slots)).begin().shrink()
    job.enter(3)
    parts = [job.put(node) for node in ("n0", "n1")]
    assert job.machine.record.layout == TWO
    job.up("n1", TWO, "b", parts[1])
    assert job.machine.record.plan is None, "n0 may come back"
    assert (job.machine.context.snapshots.find_newest(3) is not None) == enough
    job.up("n0", TWO, "b", parts[0])
    source = job.machine.record.decision and job.machine.record.decision.source
    assert isinstance(source, SnapshotSource)
    assert len(source.keepers) == 2


def test_a_node_with_unique_experts_is_awaited_longer_than_its_lease() -> None:
    """Starting many processes may block a machine, so a late node is not lost yet."""
    job = Changing(experts=ExpertShape(layers=1, experts=4, slots=3)).begin().shrink()
    parts = job.changed()
    job.up("n1", TWO, "b", parts["n1"])
    job.up("n3", TWO, "b")  # with this node there is room for all experts
    for _ in range(20):
        job.tick(1.0)
        for node in ("n1", "n3"):
            job.deliver_from(node, msg.Heartbeat())
    assert not [event for event in job.events if isinstance(event, ev.JobFailed | ev.RolledBack)]
    job.up("n0", TWO, "b", parts["n0"])
    assert {msg.node_of(worker) for worker in job.plan.workers} == {"n0", "n1", "n3"}
    assert job.machine.record.decision is not None
    assert job.machine.record.decision.applied == 3


@pytest.mark.parametrize("loading", [False, True])
def test_experts_lost_with_a_node_are_named_in_the_failure(*, loading: bool) -> None:
    """Only n0 has some of four experts in six slots. It is lost before or while the stash is loaded."""
    job = Changing(experts=ExpertShape(layers=1, experts=4, slots=3)).begin().shrink()
    parts = job.changed()
    for node in ("n1", "n0") if loading else ("n1",):
        job.up(node, TWO, "b", parts[node])
    job.up("n3", TWO, "b")  # with this node there is room for all experts
    if loading:
        job.lose("n0")
        stop = job.machine.context.interruption.stop
        assert stop is not None
        known = {"term": stop.term, "generation": stop.generation, "phase": msg.Phase.COMPUTE}
        for index in range(2):
            job.deliver(msg.Report(worker=w("n1", index, "b"), applied=None, step=4, **known))
    for _ in range(9 if loading else 40):
        job.tick(1.0)
        for node in ("n1", "n3"):
            job.deliver_from(node, msg.Heartbeat())
    (failed,) = [event for event in job.events if isinstance(event, ev.JobFailed)]
    assert "then expert 2 of MoE layer 0 of step 3 have no live copy and there is no checkpoint" in failed.why


def test_a_damaged_expert_part_with_a_copy_does_not_stop_the_job() -> None:
    job = Changing(experts=ExpertShape(layers=1, experts=4, slots=4)).begin().shrink()
    job.enter(3)
    parts = {node: job.put(node) for node in ("n0", "n1")}
    for node in ("n0", "n1"):
        job.up(node, TWO, "b", parts[node])
    known = {"worker": w("n0", 0, "b"), "generation": job.plan.generation, "why": "cut short"}
    job.deliver(msg.SnapshotDamaged(**known, snapshot=parts["n0"][1], node="n0"))
    assert job.machine.context.interruption.stop is None, "the worker that reported it reads another part"
    job.deliver(msg.SnapshotDamaged(**known, snapshot=parts["n0"][0], node=""))
    assert job.machine.record.layout == WHOLE, "no part has the experts that it needs"
    for node in ("n0", "n1"):
        job.up(node, WHOLE, "c", parts[node])
    known |= {"worker": w("n0", 0, "c"), "generation": job.plan.generation}
    job.deliver(msg.SnapshotDamaged(**known, snapshot=parts["n0"][0], node=""))
    assert job.machine.context.interruption.stop is not None, "the same holds under the previous layout"
    assert job.machine.context.snapshots.find_newest(3) is None


def test_snapshots_of_the_previous_layout_are_not_used() -> None:
    job = Changing().begin()
    usual = job.plan.snapshot_part(0, 1)
    job.shrink()
    job.deliver_from("n0", msg.NodeSnapshots(host="h", port=1, parts=(usual,)))
    assert job.sent(msg.DropSnapshots) == []
    job.enter(3)
    parts = [job.put(node) for node in ("n0", "n1")]
    job.up("n0", TWO, "b", (*parts[0], usual))
    assert job.machine.record.plan is None
    held = job.machine.members.nodes["n0"].snapshots
    assert held is not None
    assert held.parts == parts[0]


def test_the_stash_of_one_node_suffices_if_the_other_node_is_lost() -> None:
    job = Changing().begin().shrink()
    job.enter(3)
    parts = [job.put(node) for node in ("n0", "n1")]
    job.up("n1", TWO, "b", parts[1])
    for _ in range(5):
        assert job.machine.record.plan is None, "n0 may come back"
        job.tick(1.0)
        job.deliver_from("n1", msg.Heartbeat())
        if job.machine.record.plan is not None:
            break
    decision = job.machine.record.decision
    assert job.plan.workers == (w("n1", 0, "b"), w("n1", 1, "b"))
    assert decision is not None
    assert isinstance(decision.source, SnapshotSource)
    assert (decision.applied, [keeper.node for keeper in decision.source.keepers]) == (3, ["n1"])


def test_drains_and_moves_are_refused_while_all_workers_are_replaced() -> None:
    job = Changing().begin().shrink()
    job.changed()
    for request in (Drain(("n1",)), MoveNodes(("n1",))):
        with pytest.raises(RefusedError, match="all workers are being replaced: ask again once they are here"):
            job.feed(request)


def test_lost_nodes_are_also_awaited_during_a_layout_change() -> None:
    """The drain of n2 changes the layout; then n1 is lost."""
    spec = JobSpec(name="job", max_nodes=4, workers_per_node=2, recovery=RecoverySpec(on_node_failure="wait"))
    job = Changing(spec=spec).begin()
    job.feed(Drain(("n2",)))
    job.done(1)
    job.all_report(1)
    job.enter(1)
    job.done(2)
    job.done(3, SETTLE_S)
    job.all_report(3)
    parts = job.changed()
    job.up("n0", TWO, "b", parts["n0"])
    for _ in range(9):
        job.tick(1.0)
        job.deliver_from("n0", msg.Heartbeat())
    assert job.machine.record.plan is None
    (waiting,) = [event for event in job.events if isinstance(event, ev.JobWaiting)]
    assert (waiting.nodes, waiting.why) == (1, "it goes on with as many nodes as before")
    job.up("n4", TWO, "b")
    assert {msg.node_of(worker) for worker in job.plan.workers} == {"n0", "n4"}


def test_a_failure_before_the_state_is_stashed_keeps_the_layout() -> None:
    job = Changing().begin().shrink()
    job.enter(3)
    parts = job.put("n0")
    job.lose("n1")
    job.all_report(3)
    assert job.machine.record.layout == WHOLE
    assert job.machine.record.change is None
    assert not job.plan.puts_away
    (kept,) = [event for event in job.events if isinstance(event, ev.LayoutKept)]
    assert "another change came first" in kept.why
    assert job.machine.context.snapshots.find_newest(3) is None, "it was never certain that all had that state"
    job.enter(3)
    job.done(4)
    assert parts[0] not in (job.machine.members.nodes["n0"].snapshots or msg.NodeSnapshots(host="h", port=1)).parts


def test_training_continues_if_there_is_no_memory_for_the_stash() -> None:
    job = Changing().begin().shrink()
    job.enter(3)
    worker = job.plan.workers[0]
    job.deliver(msg.SnapshotLeftOut(worker=worker, generation=job.plan.generation, step=3, why="no room for 9 bytes"))
    job.all_report(3)
    assert not job.plan.puts_away
    assert job.machine.record.layout == WHOLE
    (kept,) = [event for event in job.events if isinstance(event, ev.LayoutKept)]
    assert kept.why == "shard 2 is tried later: node n0: no room for 9 bytes"
    job.enter(3)
    job.done(4, SETTLE_S)
    job.done(5, SETTLE_S)
    assert job.machine.context.interruption.stop is None, "it is not tried again at once"


def test_a_layout_blocked_by_the_script_is_reported_once_per_node_count() -> None:
    """A late average cannot be distributed, so stopping all workers for it each minute would be useless."""
    job = Changing().begin().shrink()

    def refused(at: int) -> None:
        job.enter(at)
        known: dict[str, Any] = {"worker": job.plan.workers[0], "generation": job.plan.generation, "step": at}
        job.deliver(msg.SnapshotLeftOut(**known, why="extra['ema'] was made late", lasting=True))
        job.all_report(at)
        job.enter(at)

    refused(3)
    (kept,) = [event for event in job.events if isinstance(event, ev.LayoutKept)]
    assert kept.why == "shard 2 is not tried again with 2 nodes: node n0: extra['ema'] was made late"
    for step in range(4, 9):
        job.done(step, 61.0)
        assert job.machine.context.interruption.stop is None, "nothing has changed"
    job.lose("n1")
    job.all_report(8)
    job.enter(8)
    job.done(9)
    job.done(10, SETTLE_S)
    job.all_report(10)
    assert job.plan.puts_away, "with another number of nodes it is tried once"
    refused(10)
    told = [event.nodes for event in job.events if isinstance(event, ev.LayoutKept)]
    assert told == [2, 1]


def test_a_new_coordinator_continues_a_layout_change() -> None:
    job = Changing().begin().shrink()
    job.enter(3)
    job.put("n0")
    before = job.plan
    job.boot(takeover=True)
    for node in ("n0", "n1"):
        workers = [one for one in before.workers if msg.node_of(one) == node]
        kept = [msgspec.structs.replace(attach(one), layout=WHOLE, layouts=LISTED) for one in workers]
        entered = [msg.Entered(worker=one, generation=before.generation, applied=3) for one in workers]
        held = tuple(part for rank in range(4) if (part := before.stash_part(rank, 3)) is not None)
        came = msgspec.structs.replace(hello(node, (*kept, *entered)), workers=2)
        job.connect(msgspec.structs.replace(came, snapshots=msg.NodeSnapshots(host="h", port=1, parts=held[:1])))
    assert job.machine.record.layout == TWO


def test_workers_that_attach_with_another_layout_are_replaced() -> None:
    job = Changing().begin()
    known = msgspec.structs.replace(hello("n9"), workers=2)
    job.connect(msgspec.structs.replace(known, snapshots=msg.NodeSnapshots(host="h", port=1)))
    job.deliver(msgspec.structs.replace(attach(w("n9", 0)), layout=TWO, layouts=LISTED))
    (refused,) = job.sent(msg.Refused)
    assert refused.retry
    assert "the layout in force is one place" in refused.why


def test_workers_with_another_list_of_layouts_are_refused() -> None:
    job = Changing().begin()
    job.connect(msgspec.structs.replace(hello("n9"), workers=2))
    job.deliver(msgspec.structs.replace(attach(w("n9", 0)), layout=WHOLE, layouts=LISTED[::-1]))
    (end,) = job.sent(msg.EndNode)
    assert "the first of the layouts that differs is one place from 3 nodes on" in end.why
    assert end.exit_code == 2


FASTEST = (ListedLayout(layout=WHOLE), ListedLayout(layout=TWO))


def raises(job: Changing, worker: str, place: str) -> None:
    error = msg.ScriptError(place=place, step=1, micro_batch=0)
    job.deliver(msg.Raised(worker=worker, generation=job.plan.generation, detail=place, error=error, exit_code=1))


def test_a_layout_that_exceeds_memory_before_the_first_step_is_replaced() -> None:
    job = Changing(listed=FASTEST).begin()
    raises(job, w("n1", 0), "OutOfMemoryError (train.py, line 3)")
    record = job.machine.record
    assert (record.layout, record.too_large, record.plan) == (TWO, (WHOLE,), None)
    assert len(job.sent(msg.Refused)) == 3
    for node in ("n0", "n1", "n2"):
        job.up(node, TWO, "b")
    decision = job.machine.record.decision
    assert (job.plan.places, decision and decision.kind) == (2, DecisionKind.START)
    job.enter(0)
    for step in range(1, 4):
        job.done(step, SETTLE_S)
    assert job.machine.context.interruption.stop is None, "the larger one is not tried again"


def test_a_layout_that_exceeds_memory_later_is_replaced_after_a_save() -> None:
    """After some steps, a longer sequence exhausts the memory of any worker, so the job cannot keep this layout."""
    job = Changing(listed=FASTEST, saves=True).begin()
    job.done(1)
    job.done(2)
    for node in ("n1", "n2"):
        error = msg.ScriptError(place="OutOfMemoryError (train.py, line 3)", step=3, micro_batch=0)
        known = {"generation": job.plan.generation, "detail": "OutOfMemoryError", "error": error, "exit_code": 1}
        job.deliver(msg.Raised(worker=w(node, 0), **known))
    job.all_report(2)
    assert job.plan.last, "the state of all is saved first"
    job.enter(2)
    checkpoint = KnownCheckpoint(step=2, name="step-2", term=1, generation=job.plan.generation)
    job.machine.transaction.change(checkpoints=(checkpoint,))
    for worker in job.plan.workers:
        job.deliver(msg.Finished(worker=worker, generation=job.plan.generation, step=2))
    assert (job.machine.over, job.machine.record.layout, job.machine.record.plan) == (None, TWO, None)
    (changed,) = [event for event in job.events if isinstance(event, ev.LayoutChanged)]
    assert changed.why.startswith("one place has not fitted memory")
    for node in ("n0", "n1", "n2"):
        job.up(node, TWO, "b")
    decision = job.machine.record.decision
    assert decision is not None
    assert (job.plan.places, decision.kind, decision.applied) == (2, DecisionKind.ROLLBACK, 2)


def test_a_resumed_job_replaces_a_layout_that_exceeds_memory_at_start() -> None:
    job = Changing(listed=FASTEST, saves=True).begin()
    job.done(1)
    job.done(2)
    job.machine.transaction.change(
        checkpoints=(KnownCheckpoint(step=2, name="step-2", term=1, generation=1),), plan=None
    )
    job.records.append(job.machine.record)
    job.boot()
    for node in ("n0", "n1", "n2"):
        known = msgspec.structs.replace(hello(node, session="b" * 8), workers=2)
        job.connect(msgspec.structs.replace(known, snapshots=msg.NodeSnapshots(host="h", port=1)))
    error = msg.ScriptError(place="OutOfMemoryError (train.py, line 3)")
    known = {"kind": FailureKind.EXCEPTION, "detail": "OutOfMemoryError", "exit_code": 1}
    job.deliver_from("n1", msg.WorkerDown(worker=w("n1", 0, "b"), error=error, **known))
    assert job.machine.record.layout == TWO
    for node in ("n0", "n1", "n2"):
        job.up(node, TWO, "c")
    decision = job.machine.record.decision
    assert decision is not None
    assert (job.plan.places, decision.kind, decision.applied) == (2, DecisionKind.ROLLBACK, 2)


def test_other_exceptions_do_not_change_the_layout() -> None:
    job = Changing(listed=FASTEST).begin()
    raises(job, w("n1", 0), "ValueError (train.py, line 3)")
    assert job.machine.record.layout == WHOLE
    assert job.machine.record.plan is not None
    told = Changing().begin()
    raises(told, w("n1", 0), "OutOfMemoryError (train.py, line 3)")
    assert told.machine.record.layout == WHOLE, "the layout named by the script is used"


SAVED = Shutdown(EXIT_INTERRUPTED, "Ctrl-C", save=True)


def all_saved(job: Changing) -> None:
    """Check that the last generation begins with the state of step 3, and that the job ends once it is saved."""
    decision = job.machine.record.decision
    assert decision is not None
    assert (job.plan.last, decision.applied) == (True, 3)
    assert [event.reason for event in job.events if isinstance(event, ev.GenerationStarted)][-1] == "save"
    job.enter(3)
    for worker in job.plan.workers:
        job.deliver(msg.Finished(worker=worker, generation=job.plan.generation, step=3))
    assert job.machine.over is not None
    (finished,) = [event for event in job.events if isinstance(event, ev.JobFinished)]
    assert (finished.resumable, finished.why) == (True, "Ctrl-C")


def test_a_job_being_shut_down_saves_a_state_that_is_only_stashed() -> None:
    job = Changing(saves=True).begin().shrink()
    parts = job.changed()
    job.feed(SAVED)
    assert job.machine.over is None, "no worker has saved the stash"
    job.tick(job.machine.config.save_timeout_s + 1)
    assert job.machine.over is None, "workers need time to start"
    for node in parts:
        job.up(node, TWO, "b", parts[node])
    all_saved(job)


def test_a_new_coordinator_also_saves_a_state_that_is_only_stashed() -> None:
    job = Changing(saves=True).begin().shrink()
    parts = job.changed()
    job.feed(SAVED)
    job.boot(takeover=True)
    for node in parts:
        job.up(node, TWO, "b", parts[node])
    all_saved(job)


@pytest.mark.parametrize("loaded", [True, False])
def test_a_job_shut_down_while_it_loads_the_stash_saves_that_state(*, loaded: bool) -> None:
    job = Changing(saves=True).begin().shrink()
    parts = job.changed()
    for node in parts:
        job.up(node, TWO, "b", parts[node])
    job.feed(SAVED)
    stop = job.machine.context.interruption.stop
    assert stop is not None
    for worker in job.plan.workers:
        at = 3 if loaded and msg.node_of(worker) == "n0" else None
        known: dict[str, Any] = {"term": stop.term, "generation": stop.generation, "phase": msg.Phase.COMPUTE}
        job.deliver(msg.Report(worker=worker, applied=at, step=4, **known))
    all_saved(job)


def test_a_shutdown_stops_waiting_for_the_stash_after_a_timeout() -> None:
    job = Changing(saves=True).begin().shrink()
    job.changed()
    job.feed(SAVED)
    for _ in range(200):
        job.tick(1.0)
    assert job.machine.over is not None
    (finished,) = [event for event in job.events if isinstance(event, ev.JobFinished)]
    assert finished.why == "Ctrl-C; nothing could be saved: step 3 was in the memory of n0, n1 alone"


def test_a_draining_node_stays_while_it_may_have_unique_experts() -> None:
    listed = (ListedLayout(layout=TWO, nodes=1), ListedLayout(layout=WHOLE, nodes=4))
    job = Changing(nodes=4, listed=listed, experts=ExpertShape(layers=1, experts=4, slots=2)).begin().shrink()
    job.feed(Drain(("n1",)))
    parts = job.changed()
    assert "n1" in job.machine.record.stash_nodes
    job.up("n1", TWO, "b", parts["n1"])
    assert "n1" in job.machine.members.nodes, "some experts are only in its memory"
    job.up("n0", TWO, "b", parts["n0"])
    job.up("n3", TWO, "b", parts["n3"])
    assert {msg.node_of(worker) for worker in job.plan.workers} == {"n0", "n1", "n3"}
    job.enter(3)
    job.done(4, 1.0)
    assert job.machine.record.stash_nodes == ()
    assert [one.node for one in job.machine.record.leaving] == ["n1"], "it leaves at the end of a later step"
