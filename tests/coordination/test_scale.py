"""Tests that the coordinator's cost per message does not grow with the world size."""

from __future__ import annotations

from collections.abc import Callable

from machinery import Job, applied, calls, hello, w

from holdfast.coordination.config import CoordinatorConfig
from holdfast.coordination.hang_detection.pace import PATIENCE_S
from holdfast.coordination.inputs import Received, Tick
from holdfast.coordination.instructions import Broadcast
from holdfast.protocol import events as ev
from holdfast.protocol.job_spec import JobSpec
from holdfast.protocol.messages import any_side as msg
from holdfast.protocol.messages.progress import Activity, Probe, ProbeAnswer, ThreadActivity
from holdfast.protocol.plan import Phase

SMALL, LARGE = 4, 64


def costs(nodes: int) -> dict[str, int]:
    """Return the function calls for each kind of step message, measured between the first and the last of its kind."""
    job, half = Job(nodes=nodes).start(), nodes // 2
    job.tick(0.01)
    tell = job.machine.handle
    out: dict[str, int] = {}

    def each(name: str, make: Callable[[str], msg.WorkerMessage]) -> None:
        for index in range(nodes):
            worker = w(f"n{index}")
            event = job.received(make(worker))
            out[name] = calls(lambda event=event: tell(event, job.now))
            if index == half:
                break

    each("applied", lambda worker: applied(worker, 1, 1))
    each("finished", lambda worker: msg.Finished(worker=worker, generation=1, step=1))
    out["tick"] = calls(lambda: tell(Tick(), job.now))
    job.lose(f"n{nodes - 1}")
    stop = job.machine.context.interruption.stop
    assert stop is not None
    each(
        "report",
        lambda worker: msg.Report(
            worker=worker, term=1, generation=stop.generation, applied=0, step=1, phase=Phase.COMPUTE
        ),
    )
    return out


def test_the_cost_of_a_message_is_independent_of_world_size() -> None:
    small, large = costs(SMALL), costs(LARGE)
    assert {name: large[name] - small[name] for name in small if large[name] > small[name] + 5} == {}


def test_the_heartbeat_interval_grows_with_the_number_of_agents() -> None:
    def beat_s(nodes: int) -> float:
        job = Job(nodes=nodes).boot()
        job.connect(hello("n0"))
        (welcome,) = job.sent(msg.Welcome)
        assert welcome.heartbeat_s <= welcome.lease_s / 3
        return welcome.heartbeat_s

    assert [beat_s(nodes) for nodes in (1, 500, 800, 5000)] == [0.5, 0.5, 0.8, 1.0]
    # One server receives the heartbeats of all jobs of its pool.
    assert CoordinatorConfig(spec=JobSpec(), pool_nodes=800).beat_s(32) == 0.8


def test_applied_steps_in_heartbeats_are_cheap_and_committed_with_the_last() -> None:
    job = Job(nodes=64).start()
    job.step(1, *(f"n{index}" for index in range(16)))
    stands = msg.Heartbeat(generation=1, applied=(1,))
    cost = 0
    for index in range(16, 63):
        event = Received(job.connections[f"n{index}"], stands)
        cost = calls(lambda event=event: job.record_output(job.machine.handle(event, job.now)))
        assert not job.last
    assert cost < 40  # checking everything that may be due would take four times as many
    job.deliver_from("n63", stands)
    assert [event.step for event in job.emitted(ev.StepCommitted)] == [1]


def test_a_heartbeat_only_renews_the_lease() -> None:
    job = Job(nodes=2).start()
    for _ in range(4):
        job.tick(1.0)
        assert job.deliver_from("n0", msg.Heartbeat()) == []
    assert list(job.machine.members.nodes) == ["n0"]
    assert job.feed(Received(99, msg.Heartbeat())) == []


def test_the_cost_of_a_probe_answer_is_independent_of_world_size() -> None:
    """A thousand answers arrive at once, and each of them may be overdue."""

    def cost(nodes: int) -> int:
        job = Job(nodes=nodes).start()
        late = ThreadActivity(worker=w("n0"), generation=1, step=1, activity=Activity.COMPUTE, for_s=1.0, limit_s=0.5)
        job.deliver_from("n0", msg.Late(stand=late))
        (probe, *_) = job.sent(Probe)
        job.now += 2 * PATIENCE_S
        answers = [job.received(msg.Begun(worker=w(f"n{index}"), generation=1)) for index in range(nodes - 1)]
        told = [Received(event.connection, ProbeAnswer(number=probe.number, stands=())) for event in answers]
        costs = [calls(lambda event=event: job.record_output(job.machine.handle(event, job.now))) for event in told]
        assert all(type(one) is not Broadcast for one in job.last)
        return max(costs[1:])

    assert cost(LARGE) <= cost(SMALL)
