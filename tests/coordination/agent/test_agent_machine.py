"""Tests of the agent's state machine: replayed messages, accepted orders, replaced workers and the end of the node."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.coordination.agent.identity import NodeIdentity
from holdfast.coordination.agent.instructions import (
    AgentInstruction,
    EndAgent,
    KillHung,
    Reconnect,
    Replay,
    SendToCoordinator,
    SendToWorkers,
    StartWorker,
)
from holdfast.coordination.agent.machine import TAIL_FAILED, AgentMachine
from holdfast.coordination.generations.plan_delta import change_of
from holdfast.errors import EXIT_BAD_INPUT, EXIT_DONE, EXIT_FAILED
from holdfast.protocol.failures import FailureKind, FailureRule, Severity
from holdfast.protocol.job_spec import MAX_RESTARTS
from holdfast.protocol.messages import any_side as msg
from holdfast.protocol.messages.agent import ClockOffset, GpusRead
from holdfast.protocol.messages.any_side import (
    MAX_KEY_BYTES,
    MAX_MESSAGE_BYTES,
    PAGE_STEPS,
    AgentMessage,
    Applied,
    AppliedSteps,
    Arm,
    AskPlan,
    Attach,
    Begin,
    BeginNode,
    Begun,
    CheckpointWritten,
    Commit,
    Committed,
    Complaint,
    Decision,
    DecisionKind,
    Disarm,
    EndNode,
    Entered,
    Finished,
    FromWorker,
    GenerationPlan,
    Heartbeat,
    Hello,
    JobDone,
    Leave,
    Member,
    NodeOrder,
    Phase,
    Post,
    Posted,
    Posts,
    Prepare,
    Prepared,
    PrepareNode,
    Raised,
    Refused,
    Replace,
    Report,
    ScriptError,
    Stop,
    ToWorker,
    Void,
    VoteRefused,
    Welcome,
    WorkerDown,
    WorkerMessage,
    WorkerOrder,
)
from holdfast.protocol.messages.gpus import GpuFacts
from holdfast.protocol.messages.progress import CountHang, EndHung

COMMIT = Commit(grad_square=1.0, loss_sum=1.0, samples=1, nonfinite=0)
#: the reason with which a stopped worker is killed
STOPPED = "the process was stopped for longer than the lease"


class Bench:
    """A state machine with attached workers and a connection that can be cut."""

    def __init__(self, workers: int = 1, term: int = 1) -> None:
        numbers = itertools.count(1)
        node = NodeIdentity(job="job", node="node-0", workers=workers, digest="d", agent_pid=7)
        self.machine = AgentMachine(node, lambda: f"{next(numbers):08x}")
        self.now = 0.0
        self.machine.start()
        self.connect(term)
        for worker in self.workers:
            self.deliver(attach(worker))

    @property
    def workers(self) -> list[str]:
        return list(self.machine.workers)

    @property
    def worker(self) -> str:
        return self.machine.workers[0]

    def connect(self, term: int = 1, committed: int = 0) -> list[AgentMessage]:
        """Connect or reconnect and receive a welcome; return the messages sent to the coordinator, Hello first."""
        self.machine.on_disconnected()
        out = self.machine.on_connected(self.now)
        return messages_of([*out, *self.receive(welcome(term, committed, self.workers))])

    def receive(self, message: msg.CoordinatorMessage) -> list[AgentInstruction]:
        return self.machine.on_message(message, self.now)

    def order(self, order: WorkerOrder, worker: str = "") -> list[AgentInstruction]:
        """Deliver an order for one worker."""
        return self.receive(ToWorker(worker=worker or self.worker, order=order))

    def deliver(self, *messages: WorkerMessage) -> None:
        for message in messages:
            assert messages_of(self.machine.on_worker_message(message, self.now)) == [FromWorker(message=message)]

    def die(self, worker: str = "", exit_code: int = -9, *, clean: bool = False) -> list[AgentInstruction]:
        return self.machine.on_worker_ended(down(worker or self.worker, exit_code), self.now, clean=clean)

    def kept(self, term: int = 1) -> list[WorkerMessage | AppliedSteps]:
        """Return the messages about workers that a coordinator receives after a reconnection."""
        kept: list[WorkerMessage | AppliedSteps] = []
        for message in self.connect(term):
            kept += message.kept if isinstance(message, Hello) else ()
            kept += [message.message] if isinstance(message, FromWorker) else []
            kept += [message] if isinstance(message, AppliedSteps) else []
        return kept

    def kept_steps(self) -> list[int]:
        pages = [message for message in self.kept() if isinstance(message, AppliedSteps)]
        return [kept.step for page in pages for kept in page.steps]


def messages_of(instructions: list[AgentInstruction]) -> list[AgentMessage]:
    out: list[AgentMessage] = []
    for instruction in instructions:
        if isinstance(instruction, SendToCoordinator):
            out.append(instruction.message)
        elif isinstance(instruction, Replay):
            out += instruction.messages
    return out


def attach(worker: str) -> Attach:
    return Attach(worker=worker, pid=1, host="127.0.0.1", state_port=1, config={}, global_batch=8, micro_batches=4)


def applied(worker: str, step: int, generation: int = 1) -> Applied:
    return Applied(worker=worker, generation=generation, step=step, commit=COMMIT, world=2, witness=True)


def report(worker: str, generation: int) -> Report:
    return Report(worker=worker, term=1, generation=generation, applied=3, step=4, phase=Phase.VOTED)


def welcome(term: int, committed: int = 0, members: Sequence[str] = ()) -> Welcome:
    return Welcome(term=term, lease_s=1.0, heartbeat_s=0.1, committed=committed, members=tuple(members))


def down(worker: str, exit_code: int = -9) -> WorkerDown:
    return WorkerDown(worker=worker, kind=FailureKind.PROCESS_EXIT, detail=f"code {exit_code}", exit_code=exit_code)


def plan(term: int, generation: int, *workers: str) -> GenerationPlan:
    members = tuple(Member(worker=worker, host="h", state_port=1) for worker in workers)
    return GenerationPlan(term=term, generation=generation, members=members)


def begin(term: int, generation: int, *workers: str) -> Begin:
    return Begin(plan=plan(term, generation, *workers), decision=REDO)


def begin_node(term: int, generation: int, *workers: str, base: GenerationPlan | None = None) -> BeginNode:
    return BeginNode(plan=change_of(plan(term, generation, *workers), base), decision=REDO, shares=None)


def prepare_node(term: int, generation: int, *workers: str, base: GenerationPlan | None = None) -> PrepareNode:
    return PrepareNode(plan=change_of(plan(term, generation, *workers), base))


REDO = Decision(kind=DecisionKind.REDO, applied=0)


# ---- kept and replayed messages ----


def test_the_latest_message_of_each_kind_is_replayed_in_lifecycle_order() -> None:
    """A report follows the steps that it mentions, so the coordinator has received all of them when it evaluates it."""
    bench = Bench()
    a = bench.worker
    written = CheckpointWritten(worker=a, term=1, generation=1, step=2, name="n", seconds=0.1)
    bench.deliver(
        Entered(worker=a, generation=1, applied=0),
        applied(a, 1),
        report(a, 2),
        Finished(worker=a, generation=2, step=1),
        written,
    )
    bench.deliver(Entered(worker=a, generation=2, applied=1))
    kept = bench.kept()
    (page,) = [message for message in kept if isinstance(message, AppliedSteps)]
    assert (page.workers, [step.step for step in page.steps]) == ({a: 1}, [1])
    assert kept == [
        attach(a),
        Entered(worker=a, generation=2, applied=1),
        page,
        written,
        report(a, 2),
        Finished(worker=a, generation=2, step=1),
    ]


def test_applied_steps_are_kept_until_they_are_committed() -> None:
    bench = Bench()
    bench.deliver(*(applied(bench.worker, step) for step in range(1, 6)))
    bench.receive(Committed(term=1, step=2))
    assert bench.kept_steps() == [3, 4, 5]
    bench.connect(committed=4)
    assert bench.kept_steps() == [5]
    bench.deliver(applied(bench.worker, 5))  # late
    bench.connect(committed=5)
    bench.deliver(applied(bench.worker, 5))  # too late: it is in the journal
    assert bench.kept_steps() == []


def test_steps_repeated_after_a_rollback_are_kept_again() -> None:
    """The journal had these steps before the rollback. If the coordinator dies now, it has not written the new ones."""
    bench = Bench()
    bench.deliver(*(applied(bench.worker, step) for step in range(1, 11)))
    bench.receive(Committed(term=1, step=10))
    bench.deliver(Entered(worker=bench.worker, generation=2, applied=4))
    bench.deliver(*(applied(bench.worker, step, generation=2) for step in range(5, 8)))
    assert bench.kept_steps() == [5, 6, 7]


@pytest.mark.parametrize("kind", [Prepared, Report, Complaint, VoteRefused, Finished])
def test_messages_about_an_older_generation_are_dropped_when_a_newer_one_is_entered(kind: type) -> None:
    bench = Bench()
    a = bench.worker
    stale = {
        Prepared: Prepared(worker=a, generation=1),
        Report: report(a, 1),
        Complaint: Complaint(worker=a, generation=1, detail="x"),
        VoteRefused: VoteRefused(worker=a, generation=1, step=3, why="x"),
        Finished: Finished(worker=a, generation=1, step=3),
    }
    bench.deliver(stale[kind])
    assert stale[kind] in bench.kept()
    bench.deliver(Entered(worker=a, generation=2, applied=0))
    assert stale[kind] not in bench.kept()


def test_messages_about_the_entered_generation_are_kept() -> None:
    bench = Bench()
    fault = Complaint(worker=bench.worker, generation=2, detail="x")
    bench.deliver(fault, Entered(worker=bench.worker, generation=2, applied=0))
    assert fault in bench.kept()


def test_a_complaint_about_a_pending_generation_keeps_that_about_the_current_one() -> None:
    """A coordinator that takes over receives only the kept messages."""
    bench = Bench()
    broken = Complaint(worker=bench.worker, generation=2, detail="a peer is gone")
    pending = Complaint(worker=bench.worker, generation=3, detail="the group could not be built in time")
    bench.deliver(Entered(worker=bench.worker, generation=2, applied=0), broken, pending)
    assert [one for one in bench.kept() if isinstance(one, Complaint)] == [broken]
    bench.deliver(Entered(worker=bench.worker, generation=3, applied=0), pending)
    assert [one for one in bench.kept() if isinstance(one, Complaint)] == [pending]


def test_only_the_newest_complaint_about_pending_generations_is_kept() -> None:
    bench = Bench()
    bench.deliver(Entered(worker=bench.worker, generation=2, applied=0))
    older, newer = (Complaint(worker=bench.worker, generation=number, detail="too late") for number in (3, 4))
    bench.deliver(older, newer)
    assert [one for one in bench.kept() if isinstance(one, Complaint)] == [newer]


def test_a_step_applied_before_another_worker_enters_its_generation_is_kept() -> None:
    """The second worker's step may arrive before the first worker's entry, although that entry must come first."""
    bench = Bench(workers=2)
    first, second = bench.machine.workers
    bench.deliver(Entered(worker=second, generation=2, applied=5), applied(second, 6, generation=2))
    bench.deliver(Entered(worker=first, generation=2, applied=5))
    (page,) = [message for message in bench.kept() if isinstance(message, AppliedSteps)]
    assert page.workers == {first: 5, second: 6}
    assert [step.step for step in page.steps] == [6]


def post(worker: str, generation: int, *keys: str, value: bytes = b"v") -> Post:
    return Post(worker=worker, generation=generation, keys=dict.fromkeys(keys, value))


def posted(bench: Bench, message: Post) -> list[AgentMessage]:
    return messages_of(bench.machine.on_worker_message(message, bench.now))


def test_the_keys_of_a_node_are_sent_in_one_bundle_after_all_members_posted() -> None:
    bench = Bench(workers=3)
    a, b, c = bench.workers
    bench.receive(begin_node(1, 1, a, b))
    assert posted(bench, post(a, 1)) == []
    assert posted(bench, post(a, 1, "second")) == []
    assert posted(bench, post(c, 1)) == [], "the worker is not a member"
    assert posted(bench, post(b, 1)) == [Posts(posts=(post(a, 1), post(a, 1, "second"), post(b, 1)))]
    assert posted(bench, post(a, 1, "late")) == [Posts(posts=(post(a, 1, "late"),))]


def test_the_bundle_waits_for_a_member_that_posts_no_key() -> None:
    """With NCCL, only rank 0 has a key: each other rank posts that it has none."""
    bench = Bench(workers=2)
    a, b = bench.workers
    bench.receive(begin_node(1, 1, a, b))
    assert posted(bench, post(a, 1, "id")) == []
    assert posted(bench, post(b, 1)) == [Posts(posts=(post(a, 1, "id"), post(b, 1)))]


def test_keys_of_two_generations_do_not_mix() -> None:
    bench = Bench(workers=2)
    a, b = bench.workers
    bench.receive(begin_node(1, 1, a, b))
    bench.receive(prepare_node(1, 2, a, b, base=plan(1, 1, a, b)))
    assert posted(bench, post(a, 1)) == []
    assert posted(bench, post(b, 2)) == []
    assert posted(bench, post(b, 1)) == [Posts(posts=(post(a, 1), post(b, 1)))]
    assert posted(bench, post(a, 2)) == [Posts(posts=(post(b, 2), post(a, 2)))]
    assert posted(bench, post(a, 3)) == [], "no worker was told about that generation"


def test_a_bundle_that_is_larger_than_a_message_is_split() -> None:
    bench = Bench(workers=4)
    bench.receive(begin_node(1, 1, *bench.workers))
    large = [post(worker, 1, "k", value=bytes(MAX_KEY_BYTES)) for worker in bench.workers]
    bundles = [bundle for message in large for bundle in posted(bench, message)]
    assert [message for bundle in bundles if isinstance(bundle, Posts) for message in bundle.posts] == large
    assert len(bundles) == 4
    assert all(len(msgspec.msgpack.encode(bundle)) < MAX_MESSAGE_BYTES for bundle in bundles)


def test_a_worker_that_posts_too_many_bytes_is_killed() -> None:
    bench = Bench()
    (worker,) = bench.workers
    bench.receive(begin_node(1, 1, worker))
    large = post(worker, 1, "k", value=bytes(MAX_KEY_BYTES))
    assert posted(bench, large) == [Posts(posts=(large,))]
    (killed,) = bench.machine.on_worker_message(post(worker, 1, "l", value=bytes(MAX_KEY_BYTES)), bench.now)
    assert isinstance(killed, KillHung)
    assert "bytes of keys" in killed.why


def test_posted_keys_are_passed_to_the_members_of_their_generation() -> None:
    bench = Bench(workers=2)
    a, b = bench.workers
    bench.receive(begin_node(1, 1, a))
    bench.receive(prepare_node(1, 2, a, b, base=plan(1, 1, a)))
    for generation, members in ((1, (a,)), (2, (a, b))):
        bundle = Posted(generation=generation, keys={"k": b"v"})
        assert bench.receive(bundle) == [SendToWorkers(members, bundle)]
    assert bench.receive(Posted(generation=7, keys={})) == []


def test_rendezvous_keys_are_not_replayed() -> None:
    bench = Bench()
    bench.receive(begin_node(1, 1, bench.worker))
    bench.machine.on_worker_message(post(bench.worker, 1), bench.now)
    assert bench.kept() == [attach(bench.worker), Begun(worker=bench.worker, generation=1)]


def test_a_worker_that_was_sent_a_begin_is_no_longer_fresh() -> None:
    """A simulation with slow listeners found this: an expelled worker was accepted again as a fresh one."""
    bench = Bench()
    bench.receive(begin_node(1, 3, bench.worker))
    assert bench.kept() == [attach(bench.worker), Begun(worker=bench.worker, generation=3)]


def test_only_the_end_of_a_dead_worker_is_replayed_until_its_successor_attaches() -> None:
    bench = Bench(workers=2)
    a, other = bench.workers
    bench.deliver(Entered(worker=a, generation=1, applied=0), applied(a, 1))
    out = bench.die(a)
    b = bench.workers[0]
    assert out == [SendToCoordinator(down(a)), StartWorker(b)]
    assert b.rsplit("/", 1)[0] == a.rsplit("/", 1)[0]
    assert b != a
    hello, *rest = bench.connect()
    assert isinstance(hello, Hello)
    assert hello.kept == (down(a), attach(other))
    assert rest == []
    bench.deliver(attach(b))
    hello, *rest = bench.connect()
    assert isinstance(hello, Hello)
    assert hello.kept in ((attach(b), attach(other)), (attach(other), attach(b)))
    assert rest == []


def test_a_worker_end_during_a_disconnection_is_replayed_once() -> None:
    bench = Bench()
    a = bench.worker
    bench.machine.on_disconnected()
    assert bench.die(a) == [StartWorker(bench.worker)]
    b = bench.worker
    assert bench.machine.on_worker_message(attach(b), bench.now) == []
    hello, *rest = bench.connect()
    assert isinstance(hello, Hello)
    assert hello.kept == (down(a), attach(b))
    assert rest == []
    assert bench.kept() == [attach(b)]


def test_all_messages_of_a_worker_that_left_its_loop_are_replayed_until_the_job_ends() -> None:
    """This is not a failure, and its applied steps are not repeated, so every coordinator must know them."""
    bench = Bench()
    left = bench.worker
    entered = Entered(worker=left, generation=1, applied=0)
    bench.deliver(entered, applied(left, 1), applied(left, 2))
    break_ = msgspec.structs.replace(down(left, EXIT_DONE), final=True)
    told = msgspec.structs.replace(break_, applied=2)
    assert bench.machine.on_worker_ended(break_, bench.now, clean=True) == [SendToCoordinator(told)]
    assert bench.workers == [""]
    assert bench.kept_steps() == [1, 2]
    (hello,) = bench.connect(committed=2)
    assert isinstance(hello, Hello)
    assert hello.kept[:2] == (attach(left), entered)
    assert isinstance(hello.kept[2], AppliedSteps)
    assert hello.kept[3:] == (told,)
    (hello,) = bench.connect()
    assert isinstance(hello, Hello)
    assert hello.kept == (attach(left), entered, told)
    assert bench.receive(EndNode(exit_code=EXIT_DONE, why="the job is done")) == [
        EndAgent(EXIT_DONE, "the job is done")
    ]


def test_a_worker_that_left_its_loop_without_a_step_reports_its_entry_state() -> None:
    bench = Bench()
    left = bench.worker
    bench.deliver(Entered(worker=left, generation=3, applied=7))
    break_ = msgspec.structs.replace(down(left, EXIT_DONE), final=True)
    (told,) = messages_of(bench.machine.on_worker_ended(break_, bench.now, clean=True))
    assert isinstance(told, WorkerDown)
    assert told.applied == 7


def test_a_step_applied_only_by_a_dead_worker_is_not_replayed() -> None:
    """The other workers repeat the step, perhaps with another result. That must not look like diverged replicas."""
    bench = Bench(workers=2)
    first, second = bench.workers
    bench.deliver(applied(first, 1), applied(second, 1), applied(first, 2))
    bench.die(first)
    assert bench.kept_steps() == [1]
    bench.die(second)
    bench.deliver(attach(bench.workers[0]), applied(bench.workers[0], 9))
    assert bench.kept_steps() == [9]


def test_messages_of_a_replaced_worker_are_ignored() -> None:
    bench = Bench()
    old = bench.worker
    bench.die()
    assert bench.machine.on_worker_message(applied(old, 1), 0.0) == []
    assert bench.machine.on_worker_ended(down(old), 0.0, clean=False) == []


def test_steps_of_a_long_outage_are_replayed_once_for_all_workers_in_pages() -> None:
    bench = Bench(workers=8)
    for step in range(1, 2001):
        bench.deliver(*(applied(worker, step) for worker in bench.workers))
    bench.deliver(report(bench.worker, 2))
    hello, *rest = bench.connect()
    assert isinstance(hello, Hello)
    assert len(msgspec.msgpack.encode(hello)) < MAX_MESSAGE_BYTES // 4
    assert hello.kept[:8] == tuple(attach(worker) for worker in bench.workers)
    assert rest[-1] == FromWorker(message=report(bench.worker, 2))
    pages = [message for message in (*hello.kept, *rest) if isinstance(message, AppliedSteps)]
    assert [step.step for page in pages for step in page.steps] == list(range(1, 2001))
    assert all(len(page.steps) <= PAGE_STEPS for page in pages)
    assert all(page.workers == dict.fromkeys(bench.workers, 2000) for page in pages)


def test_steps_undone_by_a_newer_generation_are_not_replayed() -> None:
    """This holds for both workers: the second one will also discard its steps."""
    bench = Bench(workers=2)
    for step in range(1, 9):
        bench.deliver(*(applied(worker, step) for worker in bench.workers))
    first, second = bench.workers
    bench.deliver(Entered(worker=first, generation=2, applied=4), applied(first, 5, generation=2))
    (page,) = [message for message in bench.kept() if isinstance(message, AppliedSteps)]
    assert [(step.step, step.generation) for step in page.steps] == [(1, 1), (2, 1), (3, 1), (4, 1), (5, 2)]
    assert page.workers == {first: 5, second: 4}


@given(st.lists(st.tuples(st.sampled_from(["applied", "commit", "down"]), st.integers(1, 30)), max_size=60))
def test_no_uncommitted_step_of_a_live_worker_is_lost(story: list[tuple[str, int]]) -> None:
    bench = Bench()
    expected, committed = set[int](), 0
    for what, step in story:
        if what == "applied" and bench.worker:
            bench.deliver(applied(bench.worker, step))
            expected |= {step} if step > committed else set()
        elif what == "commit":
            bench.receive(Committed(term=1, step=step))
            committed = max(committed, step)
        elif what == "down" and bench.worker:
            bench.die()
            expected = set()
            if not bench.worker:
                return
            bench.deliver(attach(bench.worker))
    assert {step for step in bench.kept_steps() if step > committed} == {step for step in expected if step > committed}


# ---- accepted orders ----


def test_an_older_coordinator_is_refused() -> None:
    bench = Bench(term=3)
    bench.machine.on_disconnected()
    bench.machine.on_connected(0.0)
    (left,) = bench.receive(welcome(2, committed=100))
    assert isinstance(left, Reconnect)
    assert bench.machine.committed == 0
    bench.connect(term=3)
    bench.receive(Committed(term=2, step=100))
    assert bench.machine.committed == 0
    bench.receive(Committed(term=3, step=9))
    assert (bench.machine.term, bench.machine.committed) == (3, 9)


@pytest.mark.parametrize(
    "order",
    [
        begin_node(2, 5, "node-0/0/00000002"),
        prepare_node(2, 5, "node-0/0/00000002"),
        Stop(term=2, generation=1),
        Arm(term=2, generation=1),
        Disarm(term=2, generation=1),
        Void(term=2, generation=1),
    ],
    ids=lambda order: type(order).__name__,
)
def test_orders_of_a_lower_term_are_refused(order: NodeOrder) -> None:
    current, newer = Bench(term=2), Bench(term=3)
    if isinstance(order, Arm | Void):  # these orders concern members of a pending plan
        current.receive(prepare_node(2, 1, current.worker))
    if isinstance(order, Disarm):  # this order concerns members of the plan in force
        current.receive(begin_node(2, 1, current.worker))
    (passed,) = current.receive(order)
    assert isinstance(passed, SendToWorkers)
    assert passed.workers == (current.worker,)
    assert newer.receive(order) == []
    assert newer.receive(JobDone()) == [SendToWorkers((newer.worker,), JobDone())]


def test_an_order_to_a_node_is_sent_to_the_workers_it_concerns() -> None:
    bench = Bench(workers=3)
    a, b, c = bench.workers
    bench.receive(welcome(1, members=()))
    stop = Stop(term=1, generation=1)
    assert bench.receive(stop) == [], "the node is in no plan"
    assert bench.receive(begin_node(1, 1, a)) == [SendToWorkers((a,), begin(1, 1, a))]
    assert bench.receive(stop) == [SendToWorkers((a,), stop)]
    arm, void = Arm(term=1, generation=2), Void(term=1, generation=2)
    assert bench.receive(prepare_node(1, 2, a, b, base=plan(1, 1, a))) == [
        SendToWorkers((a, b), Prepare(plan=plan(1, 2, a, b)))
    ]
    assert bench.receive(arm) == [SendToWorkers((a, b), arm)]
    disarm = Disarm(term=1, generation=2)
    assert bench.receive(disarm) == [SendToWorkers((a,), disarm)], "a joining worker knows no steps yet"
    assert bench.receive(stop) == [SendToWorkers((a, b), stop)]
    assert bench.receive(void) == [SendToWorkers((a, b), void)]
    assert bench.receive(stop) == [SendToWorkers((a,), stop)], "a void plan has no members"
    bench.receive(prepare_node(1, 3, a, b))
    bench.receive(prepare_node(1, 4, a, b, c, base=plan(1, 3, a, b)))  # this implies that generation 3 is in force
    bench.receive(Void(term=1, generation=4))
    assert bench.receive(stop) == [SendToWorkers((a, b), stop)]
    assert bench.receive(JobDone()) == [SendToWorkers((a, b, c), JobDone())]


def test_a_welcome_names_the_members_of_the_node() -> None:
    bench = Bench(workers=2)
    a, b = bench.workers
    bench.receive(begin_node(1, 1, a, b))
    bench.machine.on_disconnected()
    bench.machine.on_connected(0.0)
    bench.receive(welcome(1, members=(b,)))
    assert bench.receive(Stop(term=1, generation=2)) == [SendToWorkers((b,), Stop(term=1, generation=2))]


def test_a_new_coordinator_can_arm_or_void_a_plan_prepared_by_the_previous_one() -> None:
    """The Arm of a later coordinator reached no worker, so joining workers joined only after a stop."""
    bench = Bench(workers=2)
    a, b = bench.workers
    bench.receive(begin_node(1, 1, a))
    bench.receive(prepare_node(1, 2, a, b, base=plan(1, 1, a)))
    bench.machine.on_disconnected()
    bench.machine.on_connected(0.0)
    bench.receive(welcome(2, members=(a,)))
    for order in (Arm(term=2, generation=2), Void(term=2, generation=2)):
        assert bench.receive(order) == [SendToWorkers((a, b), order)]


def test_a_delta_to_an_unknown_plan_is_requested_and_later_orders_wait() -> None:
    bench = Bench()
    a, gone = bench.worker, "n9/0/ab"
    before, stop = plan(1, 4, a, gone), Stop(term=1, generation=5)
    assert bench.receive(begin_node(1, 5, a, base=before)) == [SendToCoordinator(AskPlan(generation=5))]
    assert bench.receive(stop) == []
    assert bench.receive(begin_node(1, 5, a)) == [SendToWorkers((a,), begin(1, 5, a)), SendToWorkers((a,), stop)]
    assert bench.receive(begin_node(1, 6, a, gone, base=plan(1, 5, a))) == [SendToWorkers((a,), begin(1, 6, a, gone))]


def test_a_delta_to_a_different_plan_with_the_same_number_is_requested() -> None:
    """The coordinator died after it had sent one plan, and its successor made another plan with that number."""
    bench = Bench()
    a = bench.worker
    bench.receive(begin_node(1, 4, a))
    assert bench.receive(begin_node(1, 5, a, base=plan(1, 4, a, "n9/0/ab"))) == [
        SendToCoordinator(AskPlan(generation=5))
    ]


def test_a_plan_delta_with_a_wrong_digest_makes_the_agent_request_the_plan() -> None:
    bench = Bench()
    wrong = msgspec.structs.replace(change_of(plan(1, 5, bench.worker), None), digest=bytes(16))
    assert bench.receive(BeginNode(plan=wrong, decision=REDO, shares=None)) == [
        SendToCoordinator(AskPlan(generation=5))
    ]
    assert bench.receive(JobDone()) == [SendToWorkers((bench.worker,), JobDone())], "this message concerns no plan"


def test_orders_do_not_wait_for_a_requested_plan_that_is_void() -> None:
    bench = Bench()
    a = bench.worker
    bench.receive(begin_node(1, 1, a))
    unknown = plan(1, 7, a)
    assert bench.receive(prepare_node(1, 8, a, base=unknown)) == [SendToCoordinator(AskPlan(generation=8))]
    stop = Stop(term=1, generation=8)
    assert bench.receive(Void(term=1, generation=8)) == []
    assert bench.receive(stop) == [SendToWorkers((a,), stop)]


def test_a_newer_plan_replaces_a_requested_one() -> None:
    bench = Bench()
    a = bench.worker
    bench.receive(begin_node(1, 5, a, base=plan(1, 4, a)))
    bench.receive(Stop(term=1, generation=5))
    assert bench.receive(begin_node(1, 6, a)) == [SendToWorkers((a,), begin(1, 6, a))]


def test_a_worker_that_has_not_attached_is_sent_no_order() -> None:
    bench = Bench(workers=2)
    a, b = bench.workers
    bench.die(b)
    assert bench.receive(JobDone()) == [SendToWorkers((a,), JobDone())]
    assert bench.workers[1], "its successor starts, and receives the order when it attaches"
    assert isinstance(bench.order(JobDone(), bench.workers[1])[0], SendToWorkers)


def test_orders_before_the_welcome_or_for_lost_workers_are_dropped() -> None:
    bench = Bench()
    bench.machine.on_disconnected()
    bench.machine.on_connected(0.0)
    assert bench.order(JobDone()) == []
    bench.connect()
    old = bench.worker
    bench.die()
    assert bench.order(JobDone(), old) == []


def test_an_expelled_node_reconnects_with_fresh_workers_and_a_new_session() -> None:
    bench = Bench(workers=2)
    old, session = bench.workers, bench.machine.session
    bench.deliver(applied(old[0], 1))
    out = bench.receive(Refused(why="too late", exit_code=EXIT_FAILED, retry=True))
    assert out[:2] == [StartWorker(worker) for worker in bench.workers]
    assert isinstance(out[2], Reconnect)
    assert out[2].blame
    assert not set(old) & set(bench.workers)
    hello, *rest = bench.connect()
    assert isinstance(hello, Hello)
    assert (hello.kept, rest) == ((), [])
    assert hello.session == bench.machine.session != session


def test_a_refusal_that_only_requires_fresh_workers_carries_no_blame() -> None:
    out = Bench().receive(Refused(why="all are started again", exit_code=EXIT_DONE, retry=True))
    assert [i.blame for i in out if isinstance(i, Reconnect)] == [False]


def test_a_permanent_refusal_and_an_end_order_end_the_agent() -> None:
    assert Bench().receive(Refused(why="another script", exit_code=2)) == [EndAgent(2, "another script")]
    bench = Bench()
    assert bench.receive(EndNode(exit_code=2, why="x", alone=True)) == [EndAgent(2, "x", alone=True)]
    assert bench.receive(EndNode(exit_code=1, why="y")) == []  # the node ends only once
    assert bench.machine.tick(1000.0, set()) == []


def test_after_the_job_is_done_the_agent_waits_until_its_scripts_end() -> None:
    bench = Bench(workers=2)
    for worker in bench.workers:
        bench.order(JobDone(), worker)
    assert bench.receive(EndNode(exit_code=EXIT_DONE, why="done")) == []
    first, second = bench.workers
    assert bench.die(first, 4) == []
    assert bench.die(second, 0, clean=True) == [SendToCoordinator(Leave(reason="finished")), EndAgent(TAIL_FAILED)]


# ---- replaced workers ----


def test_a_worker_that_ends_with_bad_input_is_not_restarted() -> None:
    bench = Bench()
    old = bench.worker
    assert bench.die(exit_code=EXIT_BAD_INPUT) == [SendToCoordinator(down(old, EXIT_BAD_INPUT))]
    assert bench.workers == [""]
    (hello,) = bench.connect()
    assert isinstance(hello, Hello)
    assert hello.kept == (down(old, EXIT_BAD_INPUT),)


def test_a_node_leaves_after_too_many_worker_failures() -> None:
    bench = Bench()
    for _ in range(MAX_RESTARTS):
        assert isinstance(bench.die()[-1], StartWorker)
    told, leave = bench.die()
    assert isinstance(told, SendToCoordinator)
    why = "node node-0: its workers have failed 6 times in 300 s: code -9"
    assert leave == SendToCoordinator(Leave(reason="exhausted", detail=why))
    assert bench.receive(EndNode(exit_code=EXIT_FAILED, why=why)) == [EndAgent(EXIT_FAILED, why)]


def end_hung(bench: Bench, *, on_trial: bool) -> str:
    """End the worker because it hangs; return its name."""
    old, why = bench.worker, "late"
    assert bench.receive(EndHung(worker=old, why=why, on_trial=on_trial)) == [KillHung(old, why)]
    hung = msgspec.structs.replace(down(old), kind=FailureKind.HANG)
    assert isinstance(bench.machine.on_worker_ended(hung, bench.now, clean=False)[-1], StartWorker)
    return old


def test_a_worker_killed_on_trial_counts_as_a_restart_after_the_verdict() -> None:
    """A slow sample once used up the restarts of a healthy node."""
    bench = Bench()
    ended = [end_hung(bench, on_trial=True) for _ in range(2 * MAX_RESTARTS)]
    for worker in ended[:MAX_RESTARTS]:
        assert bench.receive(CountHang(worker=worker, why="late")) == []
        bench.now += 2.0
    (leave,) = bench.receive(CountHang(worker=ended[-1], why="late"))
    why = "node node-0: its workers have failed 6 times in 300 s: late"
    assert leave == SendToCoordinator(Leave(reason="exhausted", detail=why))
    assert bench.receive(CountHang(worker=ended[-2], why="late")) == []


def test_a_worker_killed_without_a_trial_or_that_dies_counts_at_once() -> None:
    bench = Bench()
    for _ in range(MAX_RESTARTS - 1):
        end_hung(bench, on_trial=False)
        bench.now += 2.0
    bench.receive(EndHung(worker=bench.worker, why="late", on_trial=True))
    assert isinstance(bench.die()[-1], StartWorker)
    assert left(bench.die()) == "exhausted"


def test_a_leaving_node_repeats_its_leave_and_starts_no_worker() -> None:
    """A message on a closing connection was lost, and the job waited forever."""
    bench = Bench(workers=2)
    first, second = bench.workers
    died = msgspec.structs.replace(down(first), detail="uncorrectable ECC error")
    leave = bench.machine.on_worker_ended(died, bench.now, clean=False)[-1]
    assert isinstance(leave, SendToCoordinator)
    assert isinstance(leave.message, Leave)
    *_, reconnect = bench.receive(Refused(why="come again", exit_code=EXIT_FAILED, retry=True))
    assert isinstance(reconnect, Reconnect)
    assert bench.connect()[-1] == leave.message
    assert bench.die(second) == [SendToCoordinator(down(second))]
    assert bench.connect()[-1] == leave.message


def test_an_expelled_leaving_node_no_longer_reports_its_workers() -> None:
    """Its workers had been in a generation, so the node was refused repeatedly and could never say why it left."""
    bench = Bench(workers=2)
    first, second = bench.workers
    bench.receive(begin_node(1, 5, first, second))
    bench.machine.on_worker_ended(
        msgspec.structs.replace(down(first), detail="uncorrectable ECC error"), 0.0, clean=False
    )
    killed, reconnect = bench.receive(Refused(why="expelled", exit_code=EXIT_FAILED, retry=True))
    assert isinstance(killed, KillHung)
    assert killed.worker == second
    assert isinstance(reconnect, Reconnect)
    hello, leave = bench.connect()
    assert isinstance(hello, Hello)
    assert hello.kept == ()
    assert isinstance(leave, Leave)
    assert bench.die(second) == [SendToCoordinator(down(second))], "no worker is started in its place"


def test_a_leaving_node_waits_for_a_coordinator_to_report_the_reason() -> None:
    """Agents that started faster than their coordinator left before it could receive the reason."""
    bench = Bench()
    bench.machine.on_disconnected()
    for _ in range(MAX_RESTARTS + 1):
        bench.die()
    assert bench.machine.over is None
    hello, leave = bench.connect()
    assert isinstance(hello, Hello)
    assert [type(kept) for kept in hello.kept] == [WorkerDown]
    assert isinstance(leave, Leave)


def test_a_worker_killed_by_a_hardware_fault_is_not_restarted() -> None:
    bench = Bench()
    detail = "RuntimeError: CUDA error: uncorrectable ECC error encountered"
    died = WorkerDown(worker=bench.worker, kind=FailureKind.EXCEPTION, detail=detail, exit_code=1)
    told, leave = bench.machine.on_worker_ended(died, bench.now, clean=False)
    assert told == SendToCoordinator(died)
    assert leave == SendToCoordinator(Leave(reason="quarantined", detail=f"node node-0: ecc_error: {detail}"))


def left(instructions: list[AgentInstruction]) -> str:
    """Return why the node leaves."""
    (said,) = [
        one.message for one in instructions if isinstance(one, SendToCoordinator) and isinstance(one.message, Leave)
    ]
    return said.reason


def raised(worker: str, detail: str = "ValueError: oops") -> Raised:
    return Raised(worker=worker, generation=1, detail=detail, error=ScriptError(place="x"), exit_code=1)


def test_a_script_error_is_replayed_until_its_worker_is_replaced() -> None:
    bench = Bench()
    old = bench.worker
    bench.deliver(raised(old))
    assert [type(kept) for kept in bench.kept()] == [Attach, Raised]
    assert bench.receive(Replace(worker=old)) == [StartWorker(bench.worker)]
    assert bench.worker != old
    assert bench.receive(Replace(worker=old)) == [], "the message is sent twice"
    bench.deliver(attach(bench.worker))
    assert bench.receive(Replace(worker=bench.worker)) == [], "this worker has not raised"
    assert [type(kept) for kept in bench.kept()] == [Attach]


def test_script_errors_count_as_restarts_and_may_be_hardware_faults() -> None:
    bench, broken = Bench(), Bench()
    for _ in range(MAX_RESTARTS):
        bench.deliver(raised(bench.worker))
        assert isinstance(bench.receive(Replace(worker=bench.worker))[-1], StartWorker)
        bench.deliver(attach(bench.worker))
    bench.deliver(raised(bench.worker))
    assert left(bench.receive(Replace(worker=bench.worker))) == "exhausted"
    broken.deliver(raised(broken.worker, "CUDA error: uncorrectable ECC error encountered"))
    assert left(broken.receive(Replace(worker=broken.worker))) == "quarantined"


def test_the_welcome_sets_the_restart_limit_and_the_failure_rules() -> None:
    strict, sited = Bench(), Bench()
    rule = FailureRule(pattern="code -9", status="bad_fan", severity=Severity.NODE)
    told = (strict, {"max_restarts": 0}, "exhausted"), (sited, {"rules": (rule,)}, "quarantined")
    for bench, changes, reason in told:
        bench.machine.on_disconnected()
        bench.machine.on_connected(bench.now)
        bench.receive(msgspec.structs.replace(welcome(1), **changes))
        assert left(bench.die()) == reason


def test_a_worker_that_is_stopped_for_longer_than_a_lease_is_killed() -> None:
    bench = Bench(workers=2)
    stopped = {bench.workers[1]}
    assert not [i for now in (1.0, 1.9) for i in bench.machine.tick(now, stopped) if isinstance(i, KillHung)]
    assert KillHung(bench.workers[1], STOPPED) in bench.machine.tick(2.1, stopped)
    bench.machine.tick(2.2, set())  # it was continued in time
    assert KillHung(bench.workers[1], STOPPED) not in bench.machine.tick(3.5, stopped)


# ---- heartbeats ----


def test_an_agent_that_just_sent_a_message_sends_no_heartbeat() -> None:
    bench = Bench()
    bench.now = 10.0
    bench.deliver(applied(bench.worker, 1))
    assert bench.machine.tick(10.04, set()) == []
    assert bench.machine.tick(10.06, set()) == [SendToCoordinator(Heartbeat())]
    bench.machine.on_disconnected()
    assert bench.machine.tick(20.0, set()) == []


def test_gpu_facts_are_reported_to_each_new_coordinator() -> None:
    bench, read = Bench(), GpusRead(gpus=(GpuFacts(index=0),))
    bench.machine.on_disconnected()
    assert bench.machine.on_gpus_read(read, 1.0) == []
    for now in (2.0, 4.0):
        bench.machine.on_connected(now)
        assert SendToCoordinator(read) in bench.machine.on_message(welcome(1), now)
        assert bench.machine.on_gpus_read(read, now + 1.0) == [SendToCoordinator(read)]
        bench.machine.on_disconnected()


@pytest.mark.parametrize("ahead_s", [-3.0, 0.0, 120.0])
@pytest.mark.parametrize(("up_s", "down_s"), [(0.01, 0.01), (2.3, 0.1), (0.0, 4.0)])
def test_the_clock_offset_is_accurate_to_half_a_round_trip(ahead_s: float, up_s: float, down_s: float) -> None:
    """One-way delays of a loaded machine were once mistaken for a clock offset."""
    bench = Bench()
    bench.machine.on_connected(50.0, wall=1_000_000.0 + ahead_s)
    welcomed = msgspec.structs.replace(welcome(1), time=1_000_000.0 + up_s)
    told = bench.machine.on_message(welcomed, 50.0 + up_s + down_s)
    (offset,) = [
        one.message for one in told if isinstance(one, SendToCoordinator) and isinstance(one.message, ClockOffset)
    ]
    assert offset.uncertainty_s == pytest.approx((up_s + down_s) / 2)
    assert abs(offset.ahead_s - ahead_s) <= offset.uncertainty_s + 1e-6


def test_no_clock_offset_is_reported_without_a_clock_reading() -> None:
    bench = Bench()
    bench.machine.on_connected(50.0)
    told = bench.machine.on_message(msgspec.structs.replace(welcome(1), time=1.0), 51.0)
    assert not any(isinstance(one, SendToCoordinator) and isinstance(one.message, ClockOffset) for one in told)
