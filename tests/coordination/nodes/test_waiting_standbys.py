"""Tests of standbys: they count in no world and are warmed up, and their failures affect no other node."""

from __future__ import annotations

import msgspec
from machinery import Job, attach, hello, w

from holdfast.coordination.nodes.standbys import MAX_TRIES
from holdfast.errors import EXIT_BAD_INPUT, EXIT_FAILED
from holdfast.protocol import events as ev
from holdfast.protocol.failures import FailureKind
from holdfast.protocol.messages import any_side as msg


def standby_hello(name: str = "s0", *kept: msg.WorkerMessage, pid: int = 1, digest: str = "script") -> msg.Hello:
    return msgspec.structs.replace(hello(name, kept=kept), standby=True, agent_pid=pid, digest=digest)


def warmed(name: str = "s0", nonce: str = "a", error: str = "") -> msg.Warmed:
    return msg.Warmed(worker=w(name, nonce), seconds=0.5, error=error)


def down(name: str = "s0", nonce: str = "a", exit_code: int = EXIT_FAILED, detail: str = "it raised") -> msg.WorkerDown:
    return msg.WorkerDown(worker=w(name, nonce), kind=FailureKind.EXCEPTION, detail=detail, exit_code=exit_code)


def with_standby() -> Job:
    """Return a job of three training nodes, with a standby that was told to warm up."""
    job = Job().start()
    job.step(1)
    job.connect(standby_hello())
    job.deliver(attach(w("s0")))
    return job


def test_a_standby_is_not_counted_as_a_member() -> None:
    job = Job().boot()
    job.connect(standby_hello())
    job.deliver(attach(w("s0"), model="other"))
    for name in ("n0", "n1"):
        job.connect(hello(name))
        job.deliver(attach(w(name)))
    assert job.machine.record.plan is None, "the job waits for a third node"
    assert job.machine.record.config == {"model": "small"}, "a standby's config does not set the job's"
    job.connect(hello("n2"))
    job.deliver(attach(w("n2")))
    plan = job.machine.record.plan
    assert plan is not None
    assert plan.workers == (w("n0"), w("n1"), w("n2"))
    assert not [event for event in job.events if isinstance(event, ev.NodesJoined) and "s0" in event.names]


def test_a_standby_warms_up_after_training_starts_and_reports_it_once() -> None:
    job = Job()
    job.boot()
    job.connect(standby_hello())
    job.deliver(attach(w("s0")))
    for index in range(3):
        job.connect(hello(f"n{index}"))
        job.deliver(attach(w(f"n{index}")))
        assert not job.orders(msg.Warm)
    for index in range(3):
        job.deliver(msg.Entered(worker=w(f"n{index}"), generation=1, applied=0))
    assert job.orders(msg.Warm) == {w("s0"): msg.Warm(term=1)}
    assert job.kinds[0] == "persist", "the order is recorded before it is sent"
    job.deliver(warmed())
    (ready,) = job.emitted(ev.StandbyReady)
    assert (ready.node, ready.roles, ready.warm_s) == ("s0", 1, 0.5)
    job.step(1)
    job.boot(takeover=True)
    job.connect(standby_hello("s0", attach(w("s0")), warmed()))
    assert not job.emitted(ev.StandbyReady), "the standby is already known to be warm"
    assert job.machine.context.standbys.ready("s0")
    assert not job.orders(msg.Warm)


def test_a_warm_standby_does_not_join_with_a_new_node() -> None:
    job = with_standby()
    job.deliver(warmed())
    job.connect(hello("n3"))
    job.deliver(attach(w("n3")))
    pending = job.machine.record.pending
    assert pending is not None
    assert pending.workers == (w("n0"), w("n1"), w("n2"), w("n3"))


def test_a_failed_warm_up_is_reported_once_and_retried_up_to_a_limit() -> None:
    job = with_standby()
    for turn in range(MAX_TRIES):
        nonce = "abcdef"[turn]
        assert job.orders(msg.Warm), turn
        job.deliver(warmed(nonce=nonce, error="ValueError: cold"))
        (failed,) = job.emitted(ev.StandbyFailed)
        assert (failed.node, failed.tries, failed.again) == ("s0", turn + 1, turn + 1 < MAX_TRIES)
        job.deliver_from("s0", down(nonce=nonce))
        assert not job.emitted(ev.StandbyFailed)
        job.deliver(attach(w("s0", "abcdef"[turn + 1])))
        assert not job.orders(msg.Warm), "not at once"
        for name in ("n0", "n1", "n2"):
            job.deliver_from(name, msg.Heartbeat())
        job.tick(1.0)
    assert not job.orders(msg.Warm)
    assert not [event for event in job.events if isinstance(event, ev.FailureDetected | ev.NodeLeft)]
    assert job.machine.context.interruption.stop is None


def test_warm_up_tries_survive_a_reconnect_but_not_a_new_agent() -> None:
    job = with_standby()
    job.lose("s0")
    (failed,) = job.emitted(ev.StandbyFailed)
    assert failed.tries == 1
    for tries in (2, MAX_TRIES):
        job.connect(standby_hello("s0", attach(w("s0"))))
        assert job.orders(msg.Warm)
        job.lose("s0")
        assert job.emitted(ev.StandbyFailed)[0].tries == tries
    job.connect(standby_hello("s0", attach(w("s0"))))
    assert not job.orders(msg.Warm)
    job.lose("s0")
    job.connect(standby_hello("s0", attach(w("s0", "b")), pid=9))
    assert job.orders(msg.Warm)


def test_a_standby_with_a_hung_process_is_reported_and_warmed_up_again() -> None:
    """Its agent ends a process that is stopped for longer than a lease, even if no worker waits for it."""
    job = with_standby()
    job.deliver(warmed())
    hangs = msgspec.structs.replace(down(detail="the process was stopped for longer than the lease"), exit_code=-9)
    job.deliver_from("s0", msgspec.structs.replace(hangs, kind=FailureKind.HANG))
    (failed,) = job.emitted(ev.StandbyFailed)
    assert (failed.node, failed.why, failed.again) == ("s0", hangs.detail, True)
    job.deliver(attach(w("s0", "b")))
    for name in ("n0", "n1", "n2", "s0"):
        job.deliver_from(name, msg.Heartbeat())
    job.tick(1.0)
    assert job.orders(msg.Warm) == {w("s0", "b"): msg.Warm(term=1)}
    assert not [event for event in job.events if isinstance(event, ev.FailureDetected)]


def test_a_warm_up_has_a_timeout() -> None:
    job = with_standby()
    limit_s = job.machine.config.warm_timeout_s
    job.now += limit_s
    for node in job.connections:
        job.deliver_from(node, msg.Heartbeat())
    job.tick(0.5)
    assert not job.emitted(ev.StandbyFailed), "the coordinator itself did not run"
    job.tick(0.5)
    (failed,) = job.emitted(ev.StandbyFailed)
    assert f"longer than {limit_s:g} s" in failed.why
    (refused,) = job.sent(msg.Refused)
    assert refused.retry


def test_an_unfit_standby_is_refused_with_the_difference() -> None:
    job = Job().start()
    job.step(1)
    job.connect(standby_hello())
    job.deliver(attach(w("s0"), model="large"))
    (end,) = job.sent(msg.EndNode)
    assert (end.exit_code, end.alone) == (EXIT_BAD_INPUT, True)
    assert "model is large, the job's is small" in end.why
    (failed,) = job.emitted(ev.StandbyFailed)
    assert not failed.again
    job.lose("s0")
    assert not job.emitted(ev.StandbyFailed)
    job.connect(standby_hello(digest="another"))
    (refused,) = job.sent(msg.Refused)
    assert refused.exit_code == EXIT_BAD_INPUT


def test_a_standby_from_before_the_start_is_checked_at_the_start() -> None:
    job = Job().boot()
    job.connect(standby_hello(digest="another"))
    job.deliver(attach(w("s0")))
    for index in range(3):
        job.connect(hello(f"n{index}"))
        assert job.sent(msg.Welcome)
        job.deliver(attach(w(f"n{index}")))
    for index in range(3):
        job.deliver(msg.Entered(worker=w(f"n{index}"), generation=1, applied=0))
    (end,) = job.sent(msg.EndNode)
    assert "script or arguments differ" in end.why
    assert not job.orders(msg.Warm)


def test_the_loss_of_a_standby_does_not_affect_the_job() -> None:
    job = with_standby()
    job.deliver(warmed())
    job.deliver_from("s0", down())
    (failed,) = job.emitted(ev.StandbyFailed)
    assert failed.again
    assert not job.machine.context.standbys.ready("s0")
    job.lose("s0")
    assert job.machine.state == "running"
    assert not [event for event in job.events if isinstance(event, ev.FailureDetected | ev.NodeLeft)]


def test_a_standby_is_released_at_the_end_of_the_job() -> None:
    job = with_standby()
    job.deliver(warmed())
    for name in ("n0", "n1", "n2"):
        job.deliver(msg.Finished(worker=w(name), generation=1, step=1))
    assert w("s0") in job.orders(msg.JobDone)


def test_a_standby_with_another_number_of_workers_is_refused() -> None:
    job = Job().start()
    job.step(1)
    job.connect(msgspec.structs.replace(standby_hello(), workers=2))
    job.deliver(attach(w("s0")))
    (end,) = job.sent(msg.EndNode)
    assert "workers per node are 2, the job's are 1" in end.why


def test_an_unfit_standby_of_a_finished_job_emits_no_event() -> None:
    job = with_standby()
    for name in ("n0", "n1", "n2"):
        job.deliver(msg.Finished(worker=w(name), generation=1, step=1))
    job.connect(msgspec.structs.replace(standby_hello("s1"), workers=2))
    job.deliver(attach(w("s1")))
    assert not job.emitted(ev.StandbyFailed)


def test_a_node_that_returns_as_a_standby_is_not_awaited_as_a_member() -> None:
    job = Job(nodes=2).boot()
    job.connect(hello("n1"))
    job.machine.context.disconnected.replace_workers(["n1"], "the pool has it join")
    job.connect(standby_hello("n1"))
    job.deliver(attach(w("n1")))
    for name in ("n0", "n2"):
        job.connect(hello(name))
        job.deliver(attach(w(name)))
    assert job.machine.record.generation == 1
