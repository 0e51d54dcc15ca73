from __future__ import annotations

import msgspec
import pytest
from machinery import Job, applied, attach, called, commit, hello, kept, w, written

from holdfast.coordination.inputs import SaveState
from holdfast.errors import BadInputError
from holdfast.protocol import events as ev
from holdfast.protocol.checkpoints.names import parse_name
from holdfast.protocol.failures import FailureKind
from holdfast.protocol.messages import any_side as msg
from holdfast.protocol.plan import DecisionKind
from holdfast.protocol.record import KnownCheckpoint


def names(job: Job) -> list[str]:
    return [plain(known.name) for known in job.machine.record.checkpoints]


def plain(name: str) -> str:
    """Return the tests' short name of a checkpoint."""
    return bytes.fromhex(parse_name(name).nonce).decode()


def saves(job: Job, step: int, name: str) -> None:
    """Apply a step and keep a checkpoint of it."""
    job.step(step)
    job.deliver(written("n0", step, f".{name}"))
    assert list(job.orders(msg.AcceptCheckpoint)) == [w("n0")]
    job.deliver(kept("n0", step, name))
    assert [event.step for event in job.emitted(ev.CheckpointSaved)] == [step]


def rolled_back() -> Job:
    """Return a job with a checkpoint of step 1 that lost steps 2 and 3; n1 begins generation 2 from step 1."""
    job = Job(nodes=2).start()
    saves(job, 1, "one")
    for step in (2, 3):
        job.step(step)
    job.lose("n1")
    job.connect(hello("n1", session="11111111"))
    job.deliver(attach(w("n1", "b")))
    job.report("n0", None, msg.Phase.ENTERING)  # its state was partly overwritten
    begin = job.orders(msg.Begin)[w("n0")]
    assert (begin.decision.kind, begin.decision.applied) == (DecisionKind.ROLLBACK, 1)
    return job


def test_superseded_checkpoints_are_pruned_once_the_record_is_written() -> None:
    job = Job(nodes=1).start()
    for step, name in ((1, "one"), (2, "two")):
        saves(job, step, name)
        assert not job.orders(msg.PruneCheckpoints)
    saves(job, 3, "three")
    assert names(job) == ["two", "three"]
    assert [plain(name) for name in job.machine.record.superseded] == ["one"]
    assert job.kinds == ["persist", "CheckpointSaved", "AcceptCheckpoint", "PruneCheckpoints"]
    assert job.orders(msg.PruneCheckpoints) == {w("n0"): msg.PruneCheckpoints(term=1, names=(called(1, "one"),))}


def test_a_failed_checkpoint_is_emitted_and_an_action_only_for_the_first_in_a_row() -> None:
    job = Job(nodes=1).start()
    told: list[int] = []
    for step in (1, 2, 3, 4):
        if step == 3:
            saves(job, step, "three")
            continue
        job.step(step)
        name = called(step, "none")
        job.deliver(msg.CheckpointUnwritten(worker=w("n0"), term=1, generation=1, step=step, name=name, why="no room"))
        (failed,) = job.emitted(ev.CheckpointFailed)
        assert (failed.node, failed.step, failed.why) == ("n0", step, "no room")
        told.append(failed.tries)
        assert len(job.emitted(ev.ActionRequested)) == (failed.tries == 1)
    assert told == [1, 2, 1]


def test_a_prune_order_includes_checkpoints_left_by_a_crash() -> None:
    job = Job(nodes=1).start()
    for step, name in ((1, "one"), (2, "two"), (3, "three")):
        saves(job, step, name)
    job.boot()
    job.connect(hello("n0", kept=(attach(w("n0")), msg.Entered(worker=w("n0"), generation=1, applied=0))))
    saves(job, 4, "four")
    assert job.orders(msg.PruneCheckpoints)[w("n0")].names == (called(1, "one"), called(2, "two"))


def test_a_checkpoint_accepted_before_a_rollback_never_counts() -> None:
    """Reproducer twohop.py: the next loss would roll back to a later step on the abandoned lineage."""
    job = rolled_back()
    job.deliver(kept("n0", 3, "three"))
    assert job.emitted(ev.CheckpointSaved) == []
    assert names(job) == ["one"]
    assert [plain(name) for name in job.machine.record.superseded] == ["three"]
    job.lose("n1")
    job.report("n0", None, msg.Phase.ENTERING)
    assert job.orders(msg.Begin)[w("n0")].decision.source == msg.CheckpointSource(name=called(1, "one"))


def test_a_part_written_before_a_rollback_is_never_accepted() -> None:
    job = rolled_back()
    job.deliver(written("n0", 1, ".abandoned"))
    assert not job.orders(msg.AcceptCheckpoint)
    assert job.orders(msg.PruneCheckpoints) == {w("n0"): msg.PruneCheckpoints(term=1, names=(called(1, "abandoned"),))}


def test_a_checkpoint_of_an_uncommitted_step_is_pruned_by_a_rollback() -> None:
    job = Job(nodes=2).start()
    saves(job, 1, "one")
    job.deliver(written("n0", 2, ".two"))
    job.lose("n1")
    job.report("n0", None, msg.Phase.ENTERING)
    assert job.orders(msg.PruneCheckpoints)[w("n0")].names == (called(2, "two"),)


def test_a_checkpoint_older_than_one_that_counts_is_pruned() -> None:
    job = Job(nodes=2).start()
    for step in (1, 2):
        job.step(step)
    job.deliver(kept("n0", 2, "two"))
    job.deliver(written("n1", 1, ".one"))
    assert job.orders(msg.PruneCheckpoints)[w("n1")].names == (called(1, "one"),)


def test_an_overtaken_checkpoint_does_not_count_for_a_later_coordinator() -> None:
    """It was sealed late and then removed by order, but the next coordinator received only the first message."""
    job = Job(nodes=2).start()
    for step in (1, 2):
        job.step(step)
    job.deliver(written("n1", 1, ".one"))
    job.deliver(kept("n0", 2, "two"))
    assert job.orders(msg.PruneCheckpoints)[w("n1")].names == (called(1, "one"),)
    job.boot()
    late = (attach(w("n1")), msg.Entered(worker=w("n1"), generation=1, applied=0), kept("n1", 1, "one"))
    job.connect(hello("n1", kept=late))
    assert job.emitted(ev.CheckpointSaved) == []
    assert names(job) == ["two"]
    assert [plain(name) for name in job.machine.record.superseded] == ["one"]


def test_a_dropped_checkpoint_does_not_count_although_an_earlier_coordinator_sealed_it() -> None:
    """A simulation (41123026888) found this: the second coordinator did not know that n2 had sealed it."""
    job = Job(nodes=3).start(saves=True)
    job.step(1)
    for part in (2, 0, 1):
        job.deliver(written(f"n{part}", 1, "whole", part=part, parts=3))
    assert list(job.orders(msg.AcceptCheckpoint)) == [w("n2")]
    job.boot(takeover=True)
    entered = [(attach(w(node)), msg.Entered(worker=w(node), generation=1, applied=1)) for node in ("n0", "n1")]
    job.connect(hello("n0", kept=(*entered[0], written("n0", 1, "whole", part=0, parts=3))))
    job.connect(hello("n1", kept=entered[1]))
    job.deliver(msg.Finished(worker=w("n1"), generation=1, step=1))
    assert list(job.orders(msg.PruneCheckpoints)) == [w("n0")], "n1 has ended without a report of its part"
    job.boot(takeover=True)
    late = (attach(w("n2")), msg.Entered(worker=w("n2"), generation=1, applied=1), kept("n2", 1, "whole"))
    job.connect(hello("n2", kept=late))
    assert job.emitted(ev.CheckpointSaved) == []
    assert names(job) == []


@pytest.mark.parametrize("generation", [1, 2])
def test_a_checkpoint_that_a_later_generation_may_have_removed_does_not_count(generation: int) -> None:
    """n1 seals step 1 while n0 seals step 2. n0 then removes unsealed checkpoints of earlier generations."""
    job = Job(nodes=3).start(saves=True)
    job.step(1)
    parts_of(job, 1, "n1", "n0", "n2", parts=3)
    assert list(job.orders(msg.AcceptCheckpoint)) == [w("n1")]
    if generation == 2:
        job.lose("n2")
        for node in ("n0", "n1"):
            job.report(node, 1)
        for node in ("n0", "n1"):
            job.deliver(msg.Entered(worker=w(node), generation=2, applied=1))
    nodes = ("n0", "n1", "n2")[: 4 - generation]
    job.step(2, *nodes, generation=generation)
    parts_of(job, 2, *nodes, parts=len(nodes), generation=generation)
    assert list(job.orders(msg.AcceptCheckpoint)) == [w("n0")]
    job.deliver(kept("n1", 1, "whole"))
    saved = [event.step for event in job.emitted(ev.CheckpointSaved)]
    assert (saved, [*job.orders(msg.PruneCheckpoints)]) == (([1], []) if generation == 1 else ([], [w("n1"), w("n0")]))
    job.deliver(kept("n0", 2, "whole", generation=generation))
    assert len(names(job)) == (2 if generation == 1 else 1)


def test_repeated_reports_of_a_checkpoint_change_nothing() -> None:
    job = Job(nodes=1).start()
    saves(job, 1, "one")
    job.deliver(kept("n0", 1, "one"))
    assert job.kinds == []
    job.deliver(written("n0", 1, ".one"))
    assert job.kinds == ["AcceptCheckpoint"], "workers that wait for it are released"
    assert job.orders(msg.AcceptCheckpoint)[w("n0")].files == ()


def parts_of(job: Job, step: int, *nodes: str, parts: int = 2, generation: int = 1) -> None:
    for part, node in enumerate(nodes):
        job.deliver(written(node, step, "whole", part=part, parts=parts, generation=generation))


def test_a_checkpoint_counts_once_it_has_all_parts_and_a_manifest() -> None:
    job = Job(nodes=2).start()
    job.step(1)
    parts_of(job, 1, "n0")
    assert not job.orders(msg.AcceptCheckpoint)
    job.deliver(written("n1", 1, "whole", part=1, parts=2))
    (order,) = job.orders(msg.AcceptCheckpoint).values()
    assert [file.name for file in order.files] == ["part-0", "part-1"]
    job.deliver(kept("n0", 1, "whole"))
    assert [event.step for event in job.emitted(ev.CheckpointSaved)] == [1]
    settled = job.orders(msg.AcceptCheckpoint)
    assert {worker: order.files for worker, order in settled.items()} == {w("n0"): (), w("n1"): ()}


def test_a_checkpoint_is_sealed_once_the_record_knows_its_step() -> None:
    """A coordinator that takes over must know every step that the directory proves."""
    job = Job(nodes=2).start(saves=True)
    for step in (1, 2, 3):
        job.step(step)
    parts_of(job, 3, "n0", "n1")
    assert job.kinds == ["persist", "AcceptCheckpoint"]
    assert job.records[-1].position.step == 3


def test_a_part_counts_although_its_worker_has_died() -> None:
    job = Job(nodes=2).start()
    job.step(1)
    parts_of(job, 1, "n0")
    job.deliver_from("n1", msg.WorkerDown(worker=w("n1"), kind=FailureKind.PROCESS_EXIT, detail="died", exit_code=1))
    job.report("n0", 1)
    job.deliver(written("n1", 1, "whole", part=1, parts=2))
    assert len(job.orders(msg.AcceptCheckpoint)) == 1


def test_a_lost_node_that_was_to_seal_a_checkpoint_is_replaced() -> None:
    job = Job(nodes=2).start()
    job.step(1)
    parts_of(job, 1, "n0", "n1")
    assert list(job.orders(msg.AcceptCheckpoint)) == [w("n0")]
    job.lose("n0")
    job.report("n1", 1)
    job.tick(0.1)
    assert job.orders(msg.AcceptCheckpoint) == {} or list(job.orders(msg.AcceptCheckpoint)) == [w("n1")]


def test_parts_of_two_generations_make_no_checkpoint() -> None:
    """Some workers applied a FORWARD step in one generation, others in the next."""
    job = Job(nodes=2).start()
    job.step(1)
    parts_of(job, 1, "n0")
    job.deliver(written("n1", 1, "whole", part=1, parts=2, generation=2))
    assert not job.orders(msg.AcceptCheckpoint)


def test_a_part_that_cannot_be_written_is_emitted_and_releases_the_other_workers() -> None:
    job = Job(nodes=2).start()
    job.step(1)
    parts_of(job, 1, "n0")
    name = called(1, "whole")
    job.deliver(msg.CheckpointUnwritten(worker=w("n1"), term=1, generation=1, step=1, name=name, why="full"))
    (event,) = job.emitted(ev.CheckpointFailed)
    assert (event.node, event.step, event.why, event.tries) == ("n1", 1, "full", 1)
    pruned = job.orders(msg.PruneCheckpoints)
    assert {worker: order.names for worker, order in pruned.items()} == {w("n0"): (name,), w("n1"): (name,)}
    assert [order.remove for order in pruned.values()].count(True) == 1, "one worker removes it"
    job.deliver(written("n1", 1, "whole", part=1, parts=2))
    assert list(job.orders(msg.PruneCheckpoints)) == [w("n1")], "the late part is pruned"


def test_a_first_checkpoint_that_cannot_be_sealed_releases_the_workers_that_wait_for_it() -> None:
    """Otherwise a job never ends if its only checkpoint fails."""
    job = Job(nodes=2).start(saves=True)
    job.step(1)
    parts_of(job, 1, "n0", "n1")
    job.deliver(unwritten("n0", 1, "whole"))
    assert {node: order.names for node, order in job.orders(msg.PruneCheckpoints).items()} == {
        w("n0"): (called(1, "whole"),),
        w("n1"): (called(1, "whole"),),
    }


def test_no_worker_waits_for_a_checkpoint_that_no_worker_can_write() -> None:
    """The shared folder is full: at the end of the loop, each worker waits for the result of its own part."""
    job = Job(nodes=3).start()
    job.step(1)
    name = called(1, "whole")
    for node in ("n2", "n0", "n1"):
        job.deliver(msg.CheckpointUnwritten(worker=w(node), term=1, generation=1, step=1, name=name, why="full"))
        assert {worker: order.names for worker, order in job.orders(msg.PruneCheckpoints).items()} == {w(node): (name,)}
        assert len(job.emitted(ev.CheckpointFailed)) == (node == "n2"), "the failure is reported once"


def test_a_checkpoint_is_dropped_if_a_worker_finishes_without_its_part() -> None:
    """A simulation (11694525625) found this: the worker had loaded a checkpoint that others then found damaged."""
    job = Job(nodes=2).start()
    job.step(1)
    job.deliver(written("n0", 1, "one", parts=2))
    assert not job.orders(msg.PruneCheckpoints)
    job.deliver(msg.Finished(worker=w("n1"), generation=1, step=1))
    assert list(job.orders(msg.PruneCheckpoints)) == [w("n0")]


def test_a_checkpoint_is_dropped_if_a_worker_leaves_without_its_part() -> None:
    job = Job(nodes=2).start()
    job.step(1)
    parts_of(job, 1, "n0")
    left = msg.WorkerDown(
        worker=w("n1"), kind=FailureKind.PROCESS_EXIT, detail="left", exit_code=0, final=True, applied=1
    )
    job.deliver_from("n1", left)
    assert w("n0") in job.orders(msg.PruneCheckpoints)


def test_a_part_of_an_expelled_member_never_counts() -> None:
    job = Job(nodes=3).start()
    job.step(1)
    job.deliver(written("n0", 2, ".two", parts=3))
    job.lose("n0")
    for node in ("n1", "n2"):
        job.report(node, 1)
    assert job.machine.record.plan is not None
    job.connect(hello("n0", session="11111111"))
    job.deliver(attach(w("n0", "b")))
    for node in ("n1", "n2"):
        job.deliver(msg.Entered(worker=w(node), generation=2, applied=1))
    job.step(2, "n1", "n2", generation=2)
    assert not job.orders(msg.AcceptCheckpoint)


def test_the_first_term_is_above_the_terms_in_the_checkpoint_directory() -> None:
    """A current writer is newer than every file in the directory, whatever the steps."""
    found = (KnownCheckpoint(step=90, name="ninety", term=4, generation=7),)
    job = Job(nodes=1)
    job.boot(checkpoints=found)
    assert job.machine.record.term == 5
    assert [type(event) for event in job.last_events()] == [ev.JobStarted]


def test_a_job_restarts_from_step_0_after_a_loss_before_its_first_checkpoint() -> None:
    job = Job(nodes=1).start(saves=True)
    for step in (1, 2):
        job.step(step)
    job.lose("n0")
    job.connect(hello("n1"))
    job.deliver(attach(w("n1")))
    assert job.orders(msg.Begin)[w("n1")].decision == msg.Decision(kind=DecisionKind.START, applied=0)
    (back,) = job.emitted(ev.RolledBack)
    assert back.to_step == 0
    assert "no checkpoint is kept yet: the job restarts from step 0" in back.why


def test_a_job_without_readable_checkpoints_fails_instead_of_restarting_from_step_0() -> None:
    job = Job(nodes=1).start(saves=True)
    saves(job, 1, "one")
    job.lose("n0")
    job.connect(hello("n1"))
    job.deliver(attach(w("n1")))
    job.deliver(msg.CheckpointDamaged(worker=w("n1"), generation=2, name=called(1, "one"), why="short"))
    job.step(2, generation=2)
    job.report("n1", None, msg.Phase.ENTERING)
    (failed,) = job.emitted(ev.JobFailed)
    assert "no checkpoint can be read (1 could not)" in failed.why


def test_a_damaged_checkpoint_is_reported_to_nodes_that_could_read_it() -> None:
    """Its state is now the only copy of that step, and it would not have saved it again."""
    job = Job(nodes=2).start(saves=True)
    saves(job, 1, "one")
    for node in ("n0", "n1"):
        job.lose(node)
    for node in ("n2", "n3"):
        job.connect(hello(node))
        job.deliver(attach(w(node)))
    job.deliver(msg.CheckpointDamaged(worker=w("n2"), generation=2, name=called(1, "one"), why="short"))
    order = msg.PruneCheckpoints(term=1, names=(called(1, "one"),), remove=False)
    assert job.orders(msg.PruneCheckpoints) == {w("n2"): order, w("n3"): order}


def test_a_new_coordinator_reports_a_damaged_checkpoint_again() -> None:
    """The previous coordinator recorded it and died before it told a worker; a worker that loaded it relies on it."""
    job = Job(nodes=2).start(saves=True)
    saves(job, 1, "one")
    for node in ("n0", "n1"):
        job.lose(node)
    job.connect(hello("n2"))
    job.deliver(attach(w("n2")))
    job.connect(hello("n3"))
    assert not job.sent(msg.PruneCheckpoints), "all known checkpoints are readable"
    job.deliver(attach(w("n3")))
    job.deliver(msg.CheckpointDamaged(worker=w("n2"), generation=2, name=called(1, "one"), why="short"))
    job.boot(takeover=True)
    begun = msg.Begun(worker=w("n2"), generation=2)
    job.connect(hello("n2", kept=(attach(w("n2")), begun)))
    (again,) = job.sent(msg.PruneCheckpoints)
    assert again == msg.PruneCheckpoints(term=2, names=(called(1, "one"),), remove=False)


def test_a_requested_checkpoint_is_ordered_once_per_generation_until_it_counts() -> None:
    job = Job(nodes=2).start(saves=True)
    saves(job, 1, "one")
    job.feed(SaveState())
    assert job.orders(msg.AskCheckpoint) == {w("n0"): msg.AskCheckpoint()}
    job.step(2)
    assert not job.orders(msg.AskCheckpoint)
    job.lose("n0")
    job.report("n1", 2)
    assert job.orders(msg.AskCheckpoint) == {w("n1"): msg.AskCheckpoint()}
    job.deliver(msg.Entered(worker=w("n1"), generation=2, applied=2))
    job.deliver(msg.Applied(worker=w("n1"), generation=2, step=3, commit=commit(), world=1, witness=True))
    job.deliver(written("n1", 3, ".three", generation=2))
    job.deliver(kept("n1", 3, "three", generation=2))
    job.tick(0.1)
    assert not job.orders(msg.AskCheckpoint)


def slow_job(slow: int, steps: int) -> Job:
    """Make each node save a part after each step; n1 skips parts that are due while it writes one."""
    job, busy = Job(nodes=3).start(saves=True), dict[int, int]()

    def deliver(message: msg.CheckpointWritten) -> None:
        job.deliver(message)
        for order in job.orders(msg.AcceptCheckpoint).values():
            if order.files:
                job.deliver(kept("n0", order.step, "x"))
                break

    for step in range(1, steps + 1):
        job.step(step)
        for part, node in ((0, "n0"), (1, "n2")):
            deliver(written(node, step, "x", part=part, parts=3))
        busy = busy or {step: step + slow}
        for begun, until in list(busy.items()):
            if step >= until:
                busy.clear()
                deliver(written("n1", begun, "x", part=2, parts=3))
    return job


@pytest.mark.parametrize("slow", [0, 1, 7, 8, 9, 20])
def test_one_slow_node_only_makes_checkpoints_less_frequent(slow: int) -> None:
    """Reproducer slow_disk.py: from 8 periods on, no checkpoint was ever complete."""
    job = slow_job(slow, 60)
    saved = [event.step for event in job.events if isinstance(event, ev.CheckpointSaved)]
    assert len(saved) >= 60 // (slow + 2)
    assert not [event for event in job.events if isinstance(event, ev.CheckpointFailed)]
    assert len(job.machine.context.checkpoints._open) <= 9


def still_saving(job: Job, step: int, *more: msg.Wish) -> None:
    """Apply a step with a result that says that part of an earlier checkpoint is still being written."""
    v = msgspec.structs.replace(commit(), wishes=(msg.Wish.STILL_SAVING, *more))
    for node in ("n0", "n1"):
        job.deliver(applied(w(node), 1, step, v, world=2))


def test_left_out_checkpoints_are_emitted_with_the_nodes_that_still_write() -> None:
    job = Job(nodes=2).start(saves=True)
    job.step(1)
    parts_of(job, 1, "n0")
    told: list[ev.CheckpointDelayed] = []
    for step in range(2, 14):
        job.now += 1.0
        still_saving(job, step)
        told += job.emitted(ev.CheckpointDelayed)
        asked = [event.about for event in job.emitted(ev.ActionRequested)]
        assert asked == (["checkpoint_delayed"] if step == 13 else []), "a person is notified once it takes long"
    assert [(event.step, event.left_out, event.nodes) for event in told] == [
        (4, 3, ("n1",)),
        (7, 6, ("n1",)),
        (13, 12, ("n1",)),
    ]
    job.deliver(written("n1", 1, "whole", part=1, parts=2))
    job.deliver(kept("n0", 1, "whole"))
    (event,) = job.emitted(ev.CheckpointSaved)
    assert (event.step, event.left_out) == (1, 12)
    still_saving(job, 14)
    assert not job.emitted(ev.CheckpointDelayed), "an unchanged period is not reported"


def test_with_a_period_in_time_only_requested_checkpoints_count_as_left_out() -> None:
    job = Job(nodes=2).start(saves=True, in_time=True)
    for step in range(1, 10):
        still_saving(job, step)
    assert not [event for event in job.events if isinstance(event, ev.CheckpointDelayed)]
    for step in range(10, 13):
        still_saving(job, step, msg.Wish.SAVE_IF_FREE)
    (event,) = job.emitted(ev.CheckpointDelayed)
    assert (event.left_out, event.nodes) == (3, ("n0", "n1")), "without any part, all nodes may be writing"
    for step in range(13, 20):
        still_saving(job, step, msg.Wish.SAVE_IF_FREE, msg.Wish.SAVE)
        assert not job.emitted(ev.CheckpointDelayed), "all nodes save the requested checkpoint"


def unwritten(node: str, step: int, name: str) -> msg.CheckpointUnwritten:
    return msg.CheckpointUnwritten(
        worker=w(node), term=1, generation=1, step=step, name=called(step, name), why="No such file or directory"
    )


def test_a_part_in_a_folder_that_another_node_pruned_causes_no_failure_event() -> None:
    """A requested save overtakes a slow one; the node that seals it removes older, unfinished checkpoints."""
    job = Job(nodes=2).start(saves=True)
    for step in (1, 2):
        job.step(step)
    parts_of(job, 1, "n0")
    parts_of(job, 2, "n0", "n1")
    job.deliver(unwritten("n1", 1, "whole"))
    assert not job.emitted(ev.CheckpointFailed), "the newer one is being sealed"
    assert list(job.orders(msg.PruneCheckpoints)) == [w("n1"), w("n0")]
    job.deliver(kept("n0", 2, "whole"))
    job.boot(takeover=True)
    job.connect(hello("n1", kept=(attach(w("n1")), msg.Entered(worker=w("n1"), generation=1, applied=2))))
    job.deliver(unwritten("n1", 1, "whole"))
    assert not job.emitted(ev.CheckpointFailed), "a newer checkpoint counts for every coordinator"


def test_a_request_for_a_checkpoint_is_refused_if_the_job_keeps_none() -> None:
    job = Job(nodes=1).start()
    with pytest.raises(BadInputError, match="start it with --checkpoint-dir"):
        job.feed(SaveState())
