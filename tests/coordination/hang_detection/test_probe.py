"""Tests of a stalled job: its coordinator probes all workers and acts on the answers."""

from __future__ import annotations

import msgspec
import pytest
from machinery import Job, w

from holdfast.coordination.hang_detection.pace import PATIENCE_S
from holdfast.coordination.hang_detection.probe import END_AGAIN_S
from holdfast.coordination.hang_detection.stack_dumps import MAX_WORKERS, StackDumps
from holdfast.coordination.instructions import Broadcast, Emit, Send
from holdfast.protocol import events as ev
from holdfast.protocol.failures import FailureKind
from holdfast.protocol.messages import any_side as msg
from holdfast.protocol.messages.progress import (
    Activity,
    Collective,
    EndHung,
    Late,
    Probe,
    ProbeAnswer,
    Stacks,
    TakeStacks,
    ThreadActivity,
    WatchWork,
    WorkerStack,
)

STEP_S = 0.15
NODES = ("n0", "n1", "n2", "n3")


def trained(steps: int = 10) -> Job:
    """Return a job of four nodes that has trained for a while, its coordinator ticking."""
    job = Job(nodes=4).start()
    for step in range(1, steps + 1):
        job.tick(STEP_S / 2)
        job.tick(STEP_S / 2)
        job.step(step)
    return job


def stand(node: str, step: int = 11, **fields: object) -> ThreadActivity:
    """Return the activity of a worker that is late at its third micro-batch."""
    late = ThreadActivity(
        worker=w(node),
        generation=1,
        step=step,
        activity=Activity.COMPUTE,
        for_s=0.6,
        limit_s=0.5,
        micro_batch=3,
    )
    return msgspec.structs.replace(late, **fields)  # pyright: ignore[reportArgumentType]


def waiting_activity(node: str) -> ThreadActivity:
    return stand(node, activity=Activity.REDUCING, for_s=0.01, limit_s=0.3, micro_batch=None, waits=True, waits_s=1.0)


def asked(job: Job) -> Probe:
    """Advance the time until all nodes are probed; return the probe."""
    for _ in range(40):
        job.tick(0.02)
        if probes := job.sent(Probe):
            assert len(probes) == 4
            return probes[0]
    raise AssertionError("nobody was asked")


def answer(job: Job, probe: Probe, *stands: ThreadActivity) -> list[EndHung]:
    """Make the nodes of these workers answer; return the orders to end workers."""
    ended: list[EndHung] = []
    for each in stands:
        job.deliver_from(msg.node_of(each.worker), ProbeAnswer(number=probe.number, stands=(each,)))
        ended += job.sent(EndHung)
    return ended


def down(worker: str, why: str) -> msg.WorkerDown:
    return msg.WorkerDown(worker=worker, kind=FailureKind.HANG, detail=why, exit_code=-9)


def test_no_probe_is_sent_while_steps_are_committed() -> None:
    job = trained()
    assert not any(isinstance(event, ev.FailureDetected) for event in job.events)
    job.tick(STEP_S)
    assert job.sent(Probe) == []


def test_a_late_worker_is_killed_and_reported_with_its_activity() -> None:
    job = trained()
    job.deliver_from("n1", Late(stand=stand("n1")))
    (probe, *_) = job.sent(Probe)
    (end,) = answer(job, probe, stand("n1"), waiting_activity("n0"), waiting_activity("n2"), waiting_activity("n3"))
    assert end.worker == w("n1")
    job.deliver_from("n1", down(w("n1"), end.why))
    (failed,) = job.emitted(ev.FailureDetected)
    assert (failed.node, failed.kind, failed.detector, failed.severity) == ("n1", "hang", "statistics", 2)
    assert (failed.step, failed.phase, failed.micro_batch) == (11, "compute", 3)
    assert "micro-batch 3" in failed.detail
    assert job.orders(msg.Stop).keys() == {w(node) for node in ("n0", "n2", "n3")}


def test_a_kill_at_own_work_is_on_trial_and_all_nodes_watch_that_work() -> None:
    job = trained()
    job.deliver_from("n1", Late(stand=stand("n1")))
    (probe, *_) = job.sent(Probe)
    (end,) = answer(job, probe, stand("n1"), waiting_activity("n0"), waiting_activity("n2"), waiting_activity("n3"))
    assert end.on_trial
    watched = job.sent(WatchWork)
    assert len(watched) == 4
    assert (watched[0].step, watched[0].activity, watched[0].micro_batch) == (11, Activity.COMPUTE, 3)
    assert watched[0].for_s == stand("n1").for_s
    job.deliver_from(
        "n0", Late(stand=stand("n1", for_s=9.0), ended=True)
    )  # a node may not report another node's worker
    job.deliver_from("n0", Late(stand=stand("n0", for_s=9.0), ended=True))
    assert job.sent(Probe) == []


def test_no_worker_is_killed_before_all_nodes_have_answered() -> None:
    job = trained()
    probe = asked(job)
    assert answer(job, probe, stand("n1"), waiting_activity("n0"), waiting_activity("n2")) == []
    job.tick(0.01)
    assert job.sent(EndHung) == [], "the fourth answer may be on its way"
    (end,) = answer(job, probe, waiting_activity("n3"))
    assert end.worker == w("n1")


def test_a_worker_that_becomes_late_after_the_answers_is_killed_at_once() -> None:
    job = trained()
    probe = asked(job)
    assert (
        answer(
            job, probe, stand("n1", for_s=0.4), waiting_activity("n0"), waiting_activity("n2"), waiting_activity("n3")
        )
        == []
    )
    job.deliver_from("n1", Late(stand=stand("n1")))
    assert [end.worker for end in job.sent(EndHung)] == [w("n1")]


def test_an_answer_to_an_earlier_probe_is_ignored() -> None:
    job = trained()
    old = asked(job)
    probe = asked(job)
    assert probe.number != old.number
    assert answer(job, old, stand("n1"), waiting_activity("n0"), waiting_activity("n2"), waiting_activity("n3")) == []


def test_a_node_can_report_only_its_own_workers() -> None:
    job = trained()
    job.deliver_from("n0", Late(stand=stand("n1")))
    assert job.sent(Probe) == []
    probe = asked(job)
    job.deliver_from("n0", ProbeAnswer(number=probe.number, stands=(waiting_activity("n0"), stand("n1"))))
    assert answer(job, probe, waiting_activity("n1"), waiting_activity("n2"), waiting_activity("n3")) == []


def test_the_kill_order_is_repeated_if_the_agent_does_not_obey() -> None:
    job = trained()
    others = [waiting_activity("n0"), waiting_activity("n2"), waiting_activity("n3")]
    assert len(answer(job, asked(job), stand("n1"), *others)) == 1
    assert answer(job, asked(job), stand("n1", for_s=0.9), *others) == []
    until = job.now + END_AGAIN_S
    ended: list[EndHung] = []
    while job.now < until or not ended:
        ended += answer(job, asked(job), stand("n1", for_s=3.0), *others)
    assert len(ended) == 1


def test_a_silent_node_that_others_wait_for_fails_before_its_lease_expires() -> None:
    job = trained()
    begun, probe = job.now, asked(job)
    answer(job, probe, waiting_activity("n0"), waiting_activity("n1"), waiting_activity("n2"))
    while not job.emitted(ev.FailureDetected):
        job.tick(0.05)
        assert job.now < begun + 2.0
        answered = job.sent(Probe)
        if answered and not job.emitted(ev.FailureDetected):
            answer(job, answered[0], waiting_activity("n0"), waiting_activity("n1"), waiting_activity("n2"))
    (failed,) = [event for event in job.events if isinstance(event, ev.FailureDetected)]
    assert (failed.node, failed.kind) == ("n3", "lease_expired")
    assert job.now - begun <= 3 * STEP_S + 0.2 + 0.05


@pytest.mark.parametrize(("took_s", "least_s", "most_s"), [(0.01, 0.2, 0.75), (0.15, 0.45, 0.95)])
def test_a_node_with_slow_answers_has_a_longer_timeout(took_s: float, least_s: float, most_s: float) -> None:
    """The machine of the node is loaded."""
    job, others = trained(), (waiting_activity("n0"), waiting_activity("n1"), waiting_activity("n2"))
    probe = asked(job)
    answer(job, probe, *others)
    job.tick(took_s)
    answer(job, probe, waiting_activity("n3"))
    job.step(11)
    probe = asked(job)
    since = job.now
    answer(job, probe, *others)
    while not job.emitted(ev.FailureDetected):
        job.tick(0.02)
        assert job.now < since + most_s
        if (again := job.sent(Probe)) and not job.emitted(ev.FailureDetected):
            answer(job, again[0], *others)
    assert job.now - since >= least_s


def test_any_message_shows_that_a_node_is_alive() -> None:
    job = trained()
    probe = asked(job)
    answer(job, probe, waiting_activity("n0"), waiting_activity("n1"), waiting_activity("n2"))
    job.tick(PATIENCE_S / 2)
    job.deliver_from("n3", msg.Heartbeat())
    for _ in range(10):
        job.tick(0.05)
    assert not any(isinstance(event, ev.FailureDetected) for event in job.events)


def test_a_late_tick_of_the_coordinator_does_not_fail_a_node() -> None:
    job = trained()
    probe = asked(job)
    answer(job, probe, waiting_activity("n0"), waiting_activity("n1"), waiting_activity("n2"))
    job.tick(1.2)  # because of a slow store, n3's message is still unread
    assert not job.emitted(ev.FailureDetected)


def test_workers_check_their_peers_once_if_all_wait_for_each_other() -> None:
    job = trained()
    looks = 0
    for _ in range(4):
        probe = asked(job)
        answer(job, probe, *map(waiting_activity, NODES))
        looks += len(job.orders(msg.LookAround)) > 0
    assert looks == 1


def test_a_node_unreachable_for_its_peers_fails_after_the_first_check() -> None:
    job = trained()
    while not job.orders(msg.LookAround):
        answer(job, asked(job), *map(waiting_activity, NODES))
    for node, missing in (("n0", "n2"), ("n1", "n2"), ("n2", "n0"), ("n3", "n2")):
        job.deliver(msg.Complaint(worker=w(node), generation=1, detail="they wait", unreachable=(w(missing),)))
    for node in NODES:
        job.report(node, 10, msg.Phase.REDUCING)
    (failed,) = job.emitted(ev.FailureDetected)
    assert failed.node == "n2"


def test_the_same_members_retry_if_all_reach_each_other() -> None:
    job = trained()
    while not job.orders(msg.LookAround):
        answer(job, asked(job), *map(waiting_activity, NODES))
    for node in NODES:
        job.deliver(msg.Complaint(worker=w(node), generation=1, detail="all members wait for each other"))
    for node in NODES:
        job.report(node, 10, msg.Phase.REDUCING)
    (failed,) = job.emitted(ev.FailureDetected)
    assert failed.severity == 3
    assert len(job.orders(msg.Begin)) == 4


def hang_of(job: Job, node: str, others: tuple[str, ...], **fields: object) -> list[EndHung]:
    """Make a worker late while others wait; return the orders to end workers."""
    late = stand(node, **fields)
    job.deliver_from(node, Late(stand=late))
    probes = job.sent(Probe)
    return answer(job, probes[0], late, *map(waiting_activity, others)) if probes else []


def test_a_second_node_late_at_the_same_micro_batch_raises_the_limit() -> None:
    job = trained()
    (end,) = hang_of(job, "n1", ("n0", "n2", "n3"))
    job.deliver_from("n1", down(w("n1"), end.why))
    for node in ("n0", "n2", "n3"):
        job.report(node, 10)
    generation = job.machine.transaction.generation
    for node in ("n0", "n2", "n3"):
        job.deliver(msg.Entered(worker=w(node), generation=generation, applied=10))
    assert hang_of(job, "n2", ("n0", "n3"), generation=generation) == []
    (raised,) = [event for event in job.events if isinstance(event, ev.LimitRaised)]
    assert (raised.node, raised.step, raised.phase, raised.micro_batch) == ("n2", 11, "compute", 3)
    assert "n1" in raised.why
    job.tick(0.3)
    assert hang_of(job, "n2", ("n0", "n3"), generation=generation, for_s=60.0) == []
    assert len([event for event in job.events if isinstance(event, ev.LimitRaised)]) == 1


def test_two_workers_late_at_the_same_activity_raise_the_limit() -> None:
    job = trained()
    script = {"activity": Activity.SCRIPT, "micro_batch": None, "for_s": 5.0}
    both = stand("n0", **script), stand("n1", **script)
    assert answer(job, asked(job), *both, waiting_activity("n2"), waiting_activity("n3")) == []
    assert {event.node for event in job.events if isinstance(event, ev.LimitRaised)} == {"n0", "n1"}


def test_several_late_workers_have_three_times_the_limit() -> None:
    job = trained()
    both = stand("n0", micro_batch=1), stand("n1", micro_batch=2)
    assert answer(job, asked(job), *both, waiting_activity("n2"), waiting_activity("n3")) == []
    far = [msgspec.structs.replace(late, for_s=1.6) for late in both]
    assert len(answer(job, asked(job), *far, waiting_activity("n2"), waiting_activity("n3"))) == 2


def test_a_script_killed_between_steps_has_ten_times_the_limit_the_next_time() -> None:
    job = trained()
    script = {"activity": Activity.SCRIPT, "micro_batch": None}
    assert len(answer(job, asked(job), stand("n1", **script), *map(waiting_activity, ("n0", "n2", "n3")))) == 1
    for for_s, ended in ((0.6, 0), (4.9, 0), (5.1, 1)):
        late = stand("n2", step=12, for_s=for_s, **script)
        assert len(answer(job, asked(job), late, *map(waiting_activity, ("n0", "n1", "n3")))) == ended


def test_a_stopped_member_that_does_not_report_is_killed() -> None:
    job = trained()
    job.lose("n0")
    for node in ("n1", "n2"):
        job.report(node, 10)
    while not (probes := job.sent(Probe)):
        job.tick(0.05)
        assert job.now < 200.0
    assert len(probes) == 3
    (end,) = answer(
        job, probes[0], waiting_activity("n1"), waiting_activity("n2"), stand("n3", for_s=0.1, stopped=True)
    )
    assert end.worker == w("n3")


def test_a_stopped_process_is_killed_after_two_steps() -> None:
    job = trained()
    begin, stopped = job.now, stand("n3", for_s=0.1, stopped=True)
    assert (
        answer(job, asked(job), waiting_activity("n0"), waiting_activity("n1"), waiting_activity("n2"), stopped) == []
    )
    (end,) = answer(job, asked(job), waiting_activity("n0"), waiting_activity("n1"), waiting_activity("n2"), stopped)
    assert end.worker == w("n3")
    assert 2.0 * STEP_S < job.now - begin < 3.0 * STEP_S


def test_a_worker_in_its_optimizer_step_is_not_killed_while_others_wait() -> None:
    job = trained()
    job.lose("n0")
    for node in ("n1", "n2"):
        job.report(node, 10)
    while not (probes := job.sent(Probe)):
        job.tick(0.05)
    applying = stand("n3", activity=Activity.APPLYING, for_s=0.3)
    assert answer(job, probes[0], waiting_activity("n1"), waiting_activity("n2"), applying) == []


def test_a_worker_late_in_the_first_step_is_killed_and_the_limit_grows() -> None:
    job = trained(0)
    for name, at_s, ended in (("n1", 31.0, True), ("n2", 31.0, False), ("n2", 301.0, True)):
        late = stand(name, step=1, for_s=at_s, limit_s=0.0, micro_batch=int(name[1:]))
        job.tick(1.0)
        job.deliver_from(name, Late(stand=late))
        probe = job.sent(Probe)[0]
        others = [msgspec.structs.replace(waiting_activity(node), waits_s=at_s - 1.0) for node in NODES if node != name]
        assert bool(answer(job, probe, late, *others)) == ended


def test_a_first_step_in_which_all_wait_causes_no_peer_check() -> None:
    job = trained(0)
    for _ in range(50):
        job.tick(1.0)
        job.deliver_from("n1", Late(stand=waiting_activity("n1")))
        for probe in job.sent(Probe)[:1]:
            answer(job, probe, *map(waiting_activity, NODES))
            assert job.orders(msg.LookAround) == {}


def test_workers_check_their_peers_if_all_wait_two_minutes_in_the_first_step() -> None:
    job = trained(0)
    probes: list[Probe] = []
    while not probes:
        for node in NODES:
            job.deliver_from(node, msg.Heartbeat())
        job.tick(1.0)
        probes = job.sent(Probe)
    probe = probes[0]
    waiting = [msgspec.structs.replace(waiting_activity(node), waits_s=120.5) for node in NODES]
    answer(job, probe, *waiting)
    assert job.orders(msg.LookAround)


def test_no_probe_is_sent_if_the_setting_is_off() -> None:
    job = Job(nodes=4)
    job.spec = msgspec.structs.replace(job.spec, experiments=msgspec.structs.replace(job.spec.experiments, watch=False))
    job.start()
    for step in range(1, 8):
        job.tick(STEP_S)
        job.step(step)
    for _ in range(20):
        job.tick(0.1)
        assert job.sent(Probe) == []


def story_of(job: Job, **stacks: str) -> ev.StacksTaken:
    """Make nodes report their workers' stacks; return the recorded event."""
    ask = job.sent(TakeStacks)[0]
    for node, text in stacks.items():
        waiting = Collective(what="all_to_all", size=4, bytes=100, began_s=0.5)
        told = WorkerStack(worker=w(node), stack=text, collectives=(waiting,))
        job.deliver_from(node, Stacks(number=ask.number, workers=(told,)))
    (story,) = job.emitted(ev.StacksTaken)
    return story


def test_stacks_of_all_workers_are_recorded_after_a_hang() -> None:
    job = trained()
    answer(job, asked(job), stand("n1"), *map(waiting_activity, ("n0", "n2", "n3")))
    story = story_of(job, n0="in wait\n", n1="in load\nin main\n", n2="in wait\n", n3="in wait\n")
    assert story.of_generation == 1
    assert story.suspects == ("rank 1 on n1",)
    assert [(stack.workers, stack.lines) for stack in story.stacks] == [
        (("rank 1 on n1",), ("in load", "in main")),
        (tuple(f"rank {rank} on n{rank}" for rank in (0, 2, 3)), ("in wait",)),
    ]
    first, *others = story.workers
    assert (first.worker, first.phase, first.micro_batch, first.waits) == ("rank 1 on n1", "compute", 3, False)
    assert [one.waits for one in others] == [True, True, True]
    assert others[0].collectives[0].what == "all_to_all"
    assert story.missing == 0


def test_stacks_are_requested_before_a_worker_is_killed() -> None:
    job = trained()
    answer(job, asked(job), stand("n1"), *map(waiting_activity, ("n0", "n2", "n3")))
    sent = [type(i.message) for i in job.last if isinstance(i, Send | Broadcast)]
    assert sent.index(TakeStacks) < sent.index(EndHung)


def test_stacks_are_recorded_after_a_timeout_without_all_answers() -> None:
    job = trained()
    answer(job, asked(job), stand("n1"), *map(waiting_activity, ("n0", "n2", "n3")))
    job.tick(0.5)
    assert job.emitted(ev.StacksTaken) == []
    job.tick(0.6)
    (story,) = job.emitted(ev.StacksTaken)
    assert story.stacks == ()
    assert len(story.workers) == 4


def test_stacks_of_a_very_large_job_are_limited_and_include_the_suspects() -> None:
    turn = trained().machine.transaction
    stories, stands = StackDumps(turn), {w(f"m{n}"): stand(f"m{n}") for n in range(MAX_WORKERS)}
    stands |= {w(name): stand(name) for name in NODES}
    nodes = turn.members.nodes
    stories.start(list(nodes.values()), stands, [w("n1")])
    asked = [i for i in turn.flush() if isinstance(i, Broadcast) and isinstance(i.message, TakeStacks)]
    assert [list(one.connections) for one in asked] == [[nodes["n1"].connection]]
    for name in ("n2", "n1"):  # n2 was not asked
        stories.on_stacks(nodes[name], Stacks(number=1, workers=(WorkerStack(worker=w(name), stack=f"of {name}"),)))
    (story,) = [i.event for i in turn.flush() if isinstance(i, Emit) and isinstance(i.event, ev.StacksTaken)]
    assert story.workers[0].worker == "rank 1 on n1"
    assert [stack.lines for stack in story.stacks] == [("of n1",)]
    assert (len(story.workers), story.missing) == (MAX_WORKERS, len(NODES))


@pytest.mark.parametrize("nonsense", [float("nan"), float("inf"), -1.0])
def test_invalid_times_are_refused_at_decoding(nonsense: float) -> None:
    late = Late(stand=msgspec.structs.replace(stand("n1"), limit_s=nonsense))
    with pytest.raises(msgspec.ValidationError, match="limit_s"):
        msgspec.msgpack.decode(msgspec.msgpack.encode(late), type=Late)
