"""The node agent with real worker processes and a scripted coordinator."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import time
from pathlib import Path

import pytest
from agent_harness import DEADLINE, FakeCoordinator, agent_settings, alive, fake_coordinator, play
from msgspec.structs import replace

from holdfast.clock import SystemClock
from holdfast.control.agent.node_agent import Agent, live
from holdfast.coordination.agent.machine import TAIL_FAILED
from holdfast.protocol.commit import Commit
from holdfast.protocol.failures import FailureKind
from holdfast.protocol.job_spec import MAX_RESTARTS
from holdfast.protocol.messages.agent import (
    AppliedSteps,
    Committed,
    EndNode,
    Heartbeat,
    Leave,
    Refused,
    ToWorker,
    Welcome,
    WorkerDown,
)
from holdfast.protocol.messages.orders import JobDone, Order, Stop
from holdfast.protocol.messages.worker import Applied, Entered

COMMIT = Commit(grad_square=1.0, loss_sum=1.0, samples=8, nonfinite=0)
Running = asyncio.Task[int]


def applied(worker: str, step: int) -> Applied:
    return Applied(worker=worker, generation=1, step=step, commit=COMMIT, world=1, witness=True)


def why(agent: Agent) -> str:
    assert agent.machine.over is not None
    return agent.machine.over.why


async def done(coordinator: FakeCoordinator, *workers: str) -> None:
    for worker in workers:
        await coordinator.send(ToWorker(worker=worker, order=JobDone()))


def test_a_node_attaches_its_workers_and_leaves_when_the_job_is_finished() -> None:
    async def story(coordinator: FakeCoordinator, agent: Agent, running: Running) -> None:
        workers = await coordinator.attach(2)
        hello = coordinator.hellos[0]
        assert (hello.job, hello.node, hello.workers, hello.agent_pid) == ("job", "node-0", 2, os.getpid())
        assert {worker.rsplit("/", 1)[0] for worker in workers} == {"node-0/0", "node-0/1"}
        await coordinator.make_send(workers[1], Entered(worker=workers[1], generation=1, applied=0))
        await coordinator.until(lambda: len(coordinator.of(Heartbeat)) > 3, "heartbeats")
        await done(coordinator, *workers)
        assert await asyncio.wait_for(running, DEADLINE) == 0
        await coordinator.until(lambda: coordinator.of(Leave), "the farewell")
        assert coordinator.of(Leave) == [Leave(reason="finished")]
        assert coordinator.of(WorkerDown) == []

    play(story, workers=2)


def test_a_worker_that_ends_right_after_attaching_is_reported_as_attached(tmp_path: Path) -> None:
    """The worker ends before the agent accepts its socket, because this test blocks the agent's loop."""

    async def story(coordinator: FakeCoordinator, agent: Agent, running: Running) -> None:
        while not (tmp_path / "pid").exists():
            await asyncio.sleep(0.01)
        (tmp_path / "go").touch()
        pid = int((tmp_path / "pid").read_text())
        while Path(f"/proc/{pid}").exists():
            time.sleep(0.01)
        await coordinator.until(lambda: coordinator.of(WorkerDown), "the worker's end")
        assert "before its steps were done" in coordinator.of(WorkerDown)[0].detail
        assert len(coordinator.attached) == 1

    play(story, "hasty.py", str(tmp_path))


class StandingClock:
    """A clock that moves only when the test moves it, and counts how often it is read."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.looks = 0

    def monotonic(self) -> float:
        self.looks += 1
        return self.now

    def time(self) -> float:
        return self.now


def test_an_agent_that_has_just_sent_a_message_sends_no_heartbeat() -> None:
    async def story(coordinator: FakeCoordinator, agent: Agent, running: Running) -> None:
        (worker,) = await coordinator.attach()
        agent.clock = clock = StandingClock()
        await coordinator.make_send(worker, applied(worker, 1))
        heartbeats = len(coordinator.of(Heartbeat))
        looks = clock.looks
        while clock.looks < looks + 5:  # The agent checks five times whether a heartbeat is due.
            await asyncio.sleep(0)
        await coordinator.make_send(worker, applied(worker, 2))
        assert len(coordinator.of(Heartbeat)) == heartbeats
        clock.now += 1.0
        await coordinator.until(lambda: len(coordinator.of(Heartbeat)) > heartbeats, "a heartbeat")

    play(story)


def test_uncommitted_steps_are_replayed_after_a_reconnection() -> None:
    async def story(coordinator: FakeCoordinator, agent: Agent, running: Running) -> None:
        (worker,) = await coordinator.attach()
        entered = Entered(worker=worker, generation=1, applied=0)
        for message in (entered, applied(worker, 1), applied(worker, 2)):
            await coordinator.make_send(worker, message)
        await coordinator.send(Committed(term=1, step=1))
        await coordinator.make_send(worker, applied(worker, 3))
        coordinator.drop()
        await coordinator.until(lambda: len(coordinator.hellos) == 2, "a second Hello")
        hello = coordinator.hellos[1]
        assert hello.session == coordinator.hellos[0].session
        assert hello.term == 1
        assert hello.kept[:2] == (coordinator.attached[0], entered)
        (page,) = hello.kept[2:]
        assert isinstance(page, AppliedSteps)
        assert (page.workers, [kept.step for kept in page.steps]) == ({worker: 3}, [2, 3])

    play(story)


def test_messages_for_a_disconnected_coordinator_arrive_after_it_returns(tmp_path: Path) -> None:
    async def story() -> None:
        async with fake_coordinator() as first:
            agent = Agent(agent_settings(first.url, tmp_path, "obedient.py"), SystemClock())
            running = asyncio.create_task(agent.run())
            (worker,) = await first.attach()
            await first.make_send(worker, applied(worker, 1))
        assert not running.done()
        slot = agent.workforce.places[0]
        agent.on_worker_message(applied(worker, 2))  # As if the worker had sent it now.
        async with fake_coordinator(term=2, port=int(first.url.rsplit(":", 1)[1])) as second:
            await second.until(lambda: second.hellos, "the agent to come back")
            (page,) = [kept for kept in second.hellos[0].kept if isinstance(kept, AppliedSteps)]
            assert [kept.step for kept in page.steps] == [1, 2]
            assert slot.worker == worker
            await second.order(worker, "exit", b"5")
            await second.until(lambda: second.of(WorkerDown), "the exit")
        agent.end(0, "")
        await asyncio.wait_for(running, DEADLINE)

    asyncio.run(asyncio.wait_for(story(), 2 * DEADLINE))


def test_a_worker_is_reported_and_replaced_if_its_script_raises(capfd: pytest.CaptureFixture[str]) -> None:
    async def story(coordinator: FakeCoordinator, agent: Agent, running: Running) -> None:
        (worker,) = await coordinator.attach()
        await coordinator.order(worker, "raise", b"out of luck")
        old, new = await coordinator.attach(2)
        assert old.rsplit("/", 1)[0] == new.rsplit("/", 1)[0]
        assert old != new
        detail = "RuntimeError: out of luck (obedient.py, line 52)"
        (down,) = coordinator.of(WorkerDown)
        assert down.error is not None
        assert (down.error.place, down.error.step) == ("RuntimeError (obedient.py, line 52)", None)
        assert "out of luck" in down.error.traceback
        report = WorkerDown(worker=worker, kind=FailureKind.EXCEPTION, detail=detail, exit_code=1, error=down.error)
        assert down == report

    play(story)
    error = capfd.readouterr().err
    assert "RuntimeError: out of luck" in error
    assert "worker_process.py" not in error  # The traceback begins with the user's script.


@pytest.mark.parametrize(
    ("code", "detail"),
    [
        (7, "the script called sys.exit(7) (obedient.py, line 50)"),
        (0, "the script ended before its steps were done"),
    ],
)
def test_a_worker_is_reported_and_not_replaced_if_its_script_exits(code: int, detail: str) -> None:
    async def story(coordinator: FakeCoordinator, agent: Agent, running: Running) -> None:
        (worker,) = await coordinator.attach()
        await coordinator.order(worker, "exit", str(code).encode())
        await coordinator.until(lambda: coordinator.of(WorkerDown), "the worker's end")
        kind = FailureKind.PROCESS_EXIT
        (down,) = coordinator.of(WorkerDown)
        assert (down.error is not None) == bool(code)
        report = WorkerDown(worker=worker, kind=kind, detail=detail, exit_code=code, final=True, error=down.error)
        assert down == report
        assert agent.machine.workers == ("",)

    play(story)


def test_a_killed_worker_is_reported_with_its_signal() -> None:
    async def story(coordinator: FakeCoordinator, agent: Agent, running: Running) -> None:
        await coordinator.attach()
        os.kill(coordinator.attached[0].pid, signal.SIGKILL)
        await coordinator.attach(2)
        (down,) = coordinator.of(WorkerDown)
        assert (down.kind, down.detail, down.exit_code) == ("process_exit", "SIGKILL", -9)

    play(story)


def test_the_end_of_a_worker_is_reported_again_until_it_is_replaced() -> None:
    async def story(coordinator: FakeCoordinator, agent: Agent, running: Running) -> None:
        (worker,) = await coordinator.attach()
        down = WorkerDown(worker=worker, kind=FailureKind.PROCESS_EXIT, detail="a wrong batch", exit_code=2)
        await coordinator.order(worker, "bad-input", b"a wrong batch")  # No other process is started.
        await coordinator.until(lambda: coordinator.of(WorkerDown), "the exit")
        assert coordinator.of(WorkerDown) == [down]
        coordinator.drop()
        await coordinator.until(lambda: len(coordinator.hellos) == 2, "the agent to come back")
        assert coordinator.hellos[1].kept == (down,)

    play(story)


def test_bad_input_is_reported_and_ends_the_node_on_order_of_the_coordinator(
    capfd: pytest.CaptureFixture[str],
) -> None:
    async def story(coordinator: FakeCoordinator, agent: Agent, running: Running) -> None:
        (worker,) = await coordinator.attach()
        await coordinator.order(worker, "bad-input", b"global_batch is 7")
        await coordinator.until(lambda: coordinator.of(WorkerDown), "the exit")
        down = WorkerDown(worker=worker, kind=FailureKind.PROCESS_EXIT, detail="global_batch is 7", exit_code=2)
        assert coordinator.of(WorkerDown) == [down]
        await coordinator.send(EndNode(exit_code=2, why="global_batch is 7", alone=True))
        assert await asyncio.wait_for(running, DEADLINE) == 2
        assert len(coordinator.attached) == 1

    assert why(play(story)) == "global_batch is 7"
    assert "global_batch is 7" not in capfd.readouterr().err  # The job prints this error once, the workers do not.


@pytest.mark.parametrize("alone", [False, True])
def test_a_quiet_agent_prints_only_errors_of_its_own_node(tmp_path: Path, alone: bool) -> None:
    printed: list[str] = []

    async def run() -> int:
        async with fake_coordinator() as coordinator:
            settings = agent_settings(coordinator.url, tmp_path, "obedient.py", quiet=True)
            running = asyncio.create_task(live(settings, SystemClock(), printed.append))
            await coordinator.attach()
            await coordinator.send(EndNode(exit_code=2, why="another model", alone=alone))
            return await asyncio.wait_for(running, DEADLINE)

    assert asyncio.run(run()) == 2
    assert printed == (["holdfast agent node-0: another model"] if alone else [])


@pytest.mark.parametrize("grant", [0, 7])
def test_an_agent_of_a_pool_does_not_print_that_it_was_interrupted(tmp_path: Path, grant: int) -> None:
    """The pool interrupts its agent after every job, so the agent prints no message about it."""
    printed: list[str] = []

    async def run() -> None:
        async with fake_coordinator() as coordinator:
            settings = agent_settings(coordinator.url, tmp_path, "obedient.py", grant=grant)
            running = asyncio.create_task(live(settings, SystemClock(), printed.append))
            await coordinator.attach()
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.wait_for(running, DEADLINE)

    asyncio.run(run())
    assert printed == ([] if grant else ["holdfast agent node-0: ended by SIGINT"])


def test_a_script_that_never_calls_init_is_bad_input(tmp_path: Path) -> None:
    script = tmp_path / "nothing.py"
    script.write_text("print('hello')\n")

    async def story(coordinator: FakeCoordinator, agent: Agent, running: Running) -> None:
        await coordinator.until(lambda: coordinator.of(WorkerDown), "the exit")
        (down,) = coordinator.of(WorkerDown)
        assert down.exit_code == 2
        assert "holdfast.init()" in down.detail

    play(story, str(script))


def test_a_node_leaves_after_its_workers_have_failed_too_often(tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text("import os\n\nos._exit(9)\n")

    async def story(coordinator: FakeCoordinator, agent: Agent, running: Running) -> None:
        assert await asyncio.wait_for(running, DEADLINE) == 1
        await coordinator.until(lambda: coordinator.of(Leave), "the farewell")
        (leave,) = coordinator.of(Leave)
        assert leave.reason == "exhausted"
        assert "exit code 9" in leave.detail
        assert len(coordinator.of(WorkerDown)) == MAX_RESTARTS + 1

    play(story, str(script))


def test_a_stopped_worker_is_reported_as_a_hang() -> None:
    async def story(coordinator: FakeCoordinator, agent: Agent, running: Running) -> None:
        (worker,) = await coordinator.attach()
        await coordinator.order(worker, "stop")
        await coordinator.attach(2)
        (down,) = coordinator.of(WorkerDown)
        assert (down.worker, down.kind) == (worker, "hang")

    play(story)


def test_an_expelled_node_rejoins_with_a_new_session() -> None:
    async def story(coordinator: FakeCoordinator, agent: Agent, running: Running) -> None:
        (worker,) = await coordinator.attach()
        await coordinator.make_send(worker, applied(worker, 1))
        old = coordinator.attached[0].pid
        await coordinator.send(Refused(why="expelled", exit_code=1, retry=True))
        await coordinator.attach(2)
        hello = coordinator.hellos[1]
        assert hello.session != coordinator.hellos[0].session
        assert worker not in {message.worker for message in hello.kept if not isinstance(message, AppliedSteps)}
        assert not alive(old)
        # The agent gave these workers up, so it must not report their end.
        assert coordinator.of(WorkerDown) == []

    play(story)


@pytest.mark.parametrize("stubborn", [False, True])
def test_a_permanent_refusal_ends_the_node(stubborn: bool) -> None:
    async def story(coordinator: FakeCoordinator, agent: Agent, running: Running) -> None:
        (worker,) = await coordinator.attach()
        if stubborn:
            await coordinator.order(worker, "ignore-term")
            await coordinator.make_send(worker, applied(worker, 1))
        await coordinator.send(Refused(why="another script", exit_code=2))
        assert await asyncio.wait_for(running, DEADLINE) == 2

    assert why(play(story)) == "another script"


def test_scripts_may_finish_on_their_own_at_the_end_of_the_job() -> None:
    async def story(coordinator: FakeCoordinator, agent: Agent, running: Running) -> None:
        (worker,) = await coordinator.attach()
        await done(coordinator, worker)
        await coordinator.send(EndNode(exit_code=0, why="done"))
        assert (
            await asyncio.wait_for(running, DEADLINE) == TAIL_FAILED
        )  # Exit code 4 is the script's own, not a SIGTERM.

    play(story, "obedient.py", "4")


def test_a_coordinator_of_an_older_term_is_ignored() -> None:
    async def story(coordinator: FakeCoordinator, agent: Agent, running: Running) -> None:
        coordinator.welcome = Welcome(term=5, lease_s=1.0, heartbeat_s=0.02, committed=0)
        (worker,) = await coordinator.attach()
        coordinator.drop()
        await coordinator.until(lambda: len(coordinator.hellos) == 2, "a second Hello")
        assert coordinator.hellos[1].term in (1, 5)
        while agent.machine.term != 5:
            await asyncio.sleep(0.01)
        coordinator.welcome = Welcome(term=4, lease_s=1.0, heartbeat_s=0.02, committed=99)
        coordinator.drop()
        await coordinator.until(lambda: len(coordinator.hellos) >= 4, "it to look for another coordinator")
        assert agent.machine.committed == 0
        assert agent.workforce.places[0].worker == worker
        coordinator.welcome = Welcome(term=6, lease_s=1.0, heartbeat_s=0.02, committed=7)
        while agent.machine.committed != 7:
            await asyncio.sleep(0.01)

    play(story)


def test_a_stale_order_does_not_reach_the_worker() -> None:
    async def story(coordinator: FakeCoordinator, agent: Agent, running: Running) -> None:
        (worker,) = await coordinator.attach()
        passed: list[Order] = []
        agent.workforce.pass_on = lambda _, order: passed.append(order)  # type: ignore[method-assign]
        await coordinator.send(Welcome(term=1, lease_s=1.0, heartbeat_s=0.02, committed=0, members=(worker,)))
        await coordinator.send(Stop(term=0, generation=1))
        await coordinator.send(Stop(term=1, generation=1))
        while not passed:
            await asyncio.sleep(0.01)
        assert passed == [Stop(term=1, generation=1)]

    play(story)


@pytest.mark.parametrize("garbage", [b"", b"\xc1", b"\x81\xa4type\xa5Hello", b"x" * 1000])
def test_an_agent_reconnects_after_an_invalid_message(garbage: bytes) -> None:
    async def story(coordinator: FakeCoordinator, agent: Agent, running: Running) -> None:
        (worker,) = await coordinator.attach()
        await coordinator.send_raw(garbage)
        await coordinator.until(lambda: len(coordinator.hellos) == 2, "a second Hello")
        assert agent.workforce.places[0].worker == worker

    play(story)


def test_invalid_data_on_the_worker_socket_does_no_harm() -> None:
    async def story(coordinator: FakeCoordinator, agent: Agent, running: Running) -> None:
        (worker,) = await coordinator.attach()
        for garbage in (b"\xff\xff\xff\xff", b"\0\0\0\1\xc1", b"\0\0\0\0", b"\0"):
            reader, writer = await asyncio.open_unix_connection(agent.workforce.socket_path)
            writer.write(garbage)
            writer.write_eof()
            assert await asyncio.wait_for(reader.read(), DEADLINE) == b""
            writer.close()
            await writer.wait_closed()
        await coordinator.make_send(worker, applied(worker, 1))

    play(story)


def test_workers_survive_the_loss_of_their_zygote() -> None:
    async def story(coordinator: FakeCoordinator, agent: Agent, running: Running) -> None:
        (worker,) = await coordinator.attach()
        zygote = agent.workforce._zygotes._own
        assert zygote is not None
        os.kill(zygote.pid, signal.SIGKILL)
        while agent.workforce._zygotes._client is not None:
            await asyncio.sleep(0.01)
        await coordinator.make_send(worker, applied(worker, 1))
        os.kill(coordinator.attached[0].pid, signal.SIGKILL)
        await coordinator.attach(2)
        (down,) = coordinator.of(WorkerDown)
        assert down.worker == worker
        assert "zygote" in down.detail

    play(story)


def test_a_wrong_token_ends_an_agent_that_was_never_accepted(tmp_path: Path) -> None:
    from http import HTTPStatus

    from websockets.asyncio.server import ServerConnection, serve
    from websockets.http11 import Request, Response

    def refuse(connection: ServerConnection, request: Request) -> Response:
        return connection.respond(HTTPStatus.UNAUTHORIZED, "no\n")

    async def handler(connection: ServerConnection) -> None:
        raise AssertionError("the connection was accepted")

    async def story() -> None:
        async with serve(handler, "127.0.0.1", 0, process_request=refuse) as server:
            url = f"http://127.0.0.1:{next(iter(server.sockets)).getsockname()[1]}"
            agent = Agent(agent_settings(url, tmp_path, "obedient.py"), SystemClock())
            assert await asyncio.wait_for(agent.run(), DEADLINE) == 2
            assert "refuses the token" in why(agent)

    asyncio.run(story())


def test_a_leaving_node_waits_to_report_to_a_disconnected_coordinator(tmp_path: Path) -> None:
    """An agent that starts before its coordinator must stay until the coordinator has received the reason."""
    script = tmp_path / "broken.py"
    script.write_text("import os\n\nos._exit(9)\n")

    async def story() -> None:
        async with fake_coordinator() as gone:
            url = gone.url
        folder = tmp_path / "f"
        folder.mkdir()
        agent = Agent(agent_settings(url, folder, str(script)), SystemClock())
        running = asyncio.create_task(agent.run())
        while agent.machine.workers[0]:
            await asyncio.sleep(0.01)
        assert not running.done()
        async with fake_coordinator(port=int(url.rsplit(":", 1)[1])) as coordinator:
            assert await asyncio.wait_for(running, DEADLINE) == 1
            await coordinator.until(lambda: coordinator.of(Leave), "the farewell")
            assert coordinator.of(Leave)[0].reason == "exhausted"
            assert coordinator.of(WorkerDown)

    asyncio.run(asyncio.wait_for(story(), 2 * DEADLINE))


def test_checkpoint_parts_left_by_a_killed_agent_are_removed(tmp_path: Path) -> None:
    """Parts left by a killed agent do not count as pending, which would stop all later saves on this node."""

    async def run() -> None:
        settings = agent_settings("http://127.0.0.1:1", tmp_path, "obedient.py")
        spec = replace(settings.spec, checkpoint=replace(settings.spec.checkpoint, dir=str(tmp_path / "kept")))
        settings = dataclasses.replace(settings, spec=spec)
        (Path(settings.parts) / "0-step-00000004-t1-g1-ab").mkdir(parents=True)
        Agent(settings, SystemClock())
        assert list(Path(settings.parts).iterdir()) == []

    asyncio.run(run())
