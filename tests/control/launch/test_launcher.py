"""`holdfast run` as a process, with workers that train without torch; no file or process may remain afterwards."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from holdfast.protocol.events import (
    CoordinatorRestarted,
    FailureDetected,
    GenerationStarted,
    JobFinished,
    JobStarted,
    NodesJoined,
    StepCommitted,
    WorkersChanged,
)
from places import CONTROL_SCRIPTS
from tests.harness.local_job import LocalJob
from tests.harness.local_pool import Command
from warm_jobs import WarmJob, spoken_here

TRAINING = CONTROL_SCRIPTS / "fake_training.py"
DEADLINE = 60.0


def descendants(marker: str, folder: Path) -> dict[int, str]:
    """Return the processes that carry the marker in their environment, with their command lines.

    A forked process has another process's environment, so processes that run in the folder count as well.
    """
    found: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            environment = (entry / "environ").read_bytes()
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            marked = f"HF_TEST_MARKER={marker}\0".encode() in environment or (entry / "cwd").readlink() == folder
        except OSError:
            continue
        if marked and state not in "ZX":
            found[int(entry.name)] = command
    return found


def wait_until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline, f"waited too long for {what}"
        time.sleep(0.01)


class World:
    """One test's job, and the folders in which it may leave files."""

    def __init__(self, folder: Path, commands: str) -> None:
        self.commands = commands
        self.marker = f"{os.getpid()}-{folder.name}-{time.monotonic_ns()}"
        self.folder = folder
        self.temporary = folder / "tmp"
        self.runtime = folder / "xdg"
        for path in (self.temporary, self.runtime):
            path.mkdir(mode=0o700)

    @property
    def environment(self) -> dict[str, str]:
        return {
            "HF_TEST_MARKER": self.marker,
            "TMPDIR": str(self.temporary),
            "XDG_RUNTIME_DIR": str(self.runtime),
        }

    @contextmanager
    def job(
        self,
        *args: str,
        options: Sequence[str] = (),
        script: Path = TRAINING,
        folder: str = "job",
        warm: bool = False,
    ) -> Iterator[LocalJob]:
        """Run a job; with `warm`, its launcher is forked, for tests of other processes."""
        (self.folder / folder).mkdir()
        every = ("--preload", "", *options)
        kind = partial(WarmJob, self.commands, cwd=self.folder) if warm else LocalJob
        with kind(script, args, options=every, folder=self.folder / folder, environment=self.environment) as job:
            yield job

    def processes(self) -> dict[int, str]:
        return descendants(self.marker, self.folder)

    def process(self, words: str) -> int:
        """Return the pid of the only process with these words in its command line."""
        (pid,) = [pid for pid, command in self.processes().items() if words in command]
        return pid

    def check_nothing_is_left(self) -> None:
        assert self.processes() == {}
        assert list(self.temporary.iterdir()) == []
        assert list(self.runtime.glob("holdfast/*.json")) == []


@pytest.fixture
def world(tmp_path: Path, warm_commands: str) -> Iterator[World]:
    # Socket paths must be short, and /tmp/pytest-of-USER/pytest-123/a-long-test-name is almost too long.
    world = World(tmp_path, warm_commands)
    yield world
    for pid in world.processes():
        os.kill(pid, signal.SIGKILL)


def test_a_job_runs_to_its_end_and_leaves_no_files_or_processes(world: World) -> None:
    with world.job("--steps", "12", options=("--nodes", "3")) as job:
        assert job.wait_exit() == 0
    steps = [event.step for event in job.all(StepCommitted)]
    assert steps == list(range(1, 13))
    assert {node for event in job.all(NodesJoined) for node in event.names} == {"node-0", "node-1", "node-2"}
    assert job.all(JobFinished)[0].steps == 12
    output = job.output_file.read_text()
    assert "done: 12 steps" in output
    assert "Traceback" not in output
    world.check_nothing_is_left()


def test_a_finished_job_that_is_run_again_makes_no_steps(world: World) -> None:
    """Its nodes are new, and one of them has a name that the job never knew."""
    store = ("--store", f"sqlite:{world.folder}/store.sqlite")
    with world.job("--steps", "3", options=(*store, "--nodes", "1"), warm=True) as job:
        assert job.wait_exit() == 0
    with world.job("--steps", "3", options=(*store, "--nodes", "2"), folder="again", warm=True) as job:
        assert job.wait_exit() == 0
    assert not job.all(StepCommitted)
    world.check_nothing_is_left()


def test_a_job_finishes_after_a_node_is_killed(world: World) -> None:
    with world.job("--steps", "60", options=("--nodes", "3"), warm=True) as job:
        job.wait(StepCommitted, step=5)
        job.signal_node("node-1")
        job.wait(FailureDetected, node="node-1")
        assert job.wait_exit() == 0
    assert [event.step for event in job.all(StepCommitted)] == list(range(1, 61))
    assert set(job.nodes()) == {"node-0", "node-2"}
    world.check_nothing_is_left()


def test_a_killed_worker_is_replaced(world: World) -> None:
    with world.job("--steps", "1000000", options=("--nodes", "2"), warm=True) as job:
        job.wait(StepCommitted, step=3)
        agent, (worker,) = job.pids("node-1")
        os.kill(worker, signal.SIGKILL)
        job.wait(FailureDetected, node="node-1", kind="process_exit")
        changed = job.wait(WorkersChanged, node="node-1")
        assert changed.worker_pids != [worker]
        assert job.pids("node-1")[0] == agent


def test_a_killed_coordinator_is_replaced_at_the_same_address(world: World) -> None:
    with world.job("--steps", "100", "--step-s", "0.03", options=("--nodes", "2"), warm=True) as job:
        started = job.wait(JobStarted)
        job.wait(StepCommitted, step=3)
        workers = {node: job.pids(node) for node in job.nodes()}
        os.kill(started.coordinator_pid, signal.SIGKILL)
        restarted = job.wait(CoordinatorRestarted)
        assert restarted.url == started.url
        assert restarted.term == 2
        assert job.wait_exit() == 0
        assert {node: job.pids(node) for node in job.nodes()} == workers
    assert [event.step for event in job.all(StepCommitted)] == list(range(1, 101))
    world.check_nothing_is_left()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75), (signal.SIGHUP, 75)])
def test_a_signal_ends_all_processes_of_the_run(world: World, number: int, code: int) -> None:
    with world.job("--steps", "1000000", options=("--nodes", "3")) as job:
        job.wait(StepCommitted, step=3)
        assert job.process is not None
        os.kill(job.process.pid, number)
        assert job.wait_exit() == code
    assert "Traceback" not in job.output_file.read_text()
    world.check_nothing_is_left()


def test_a_signal_also_ends_stopped_processes(world: World) -> None:
    with world.job("--steps", "1000000", options=("--nodes", "2")) as job:
        job.wait(StepCommitted, step=3)
        assert job.process is not None
        started = job.all(JobStarted)[0]
        job.signal_node("node-1", signal.SIGSTOP)
        os.kill(started.coordinator_pid, signal.SIGSTOP)
        os.kill(job.process.pid, signal.SIGINT)
        assert job.wait_exit(30) == 130
    world.check_nothing_is_left()


def test_a_signal_during_startup_ends_all_processes(world: World) -> None:
    with world.job("--steps", "1000000", options=("--nodes", "2")) as job:
        wait_until(lambda: any("agent:node-1" in command for command in world.processes().values()), "the agents")
        assert job.process is not None
        os.kill(job.process.pid, signal.SIGINT)
        assert job.wait_exit() == 130
    world.check_nothing_is_left()


def test_no_process_survives_a_killed_run(world: World) -> None:
    with world.job("--steps", "1000000", options=("--nodes", "2")) as job:
        job.wait(StepCommitted, step=3)
        job.signal_node("node-1", signal.SIGSTOP)
        assert job.process is not None
        job.process.kill()
        wait_until(lambda: not world.processes(), "all processes to end")
    wait_until(lambda: not list(world.temporary.iterdir()), "the folder to go")


def test_the_snapshots_of_a_killed_run_are_removed(world: World, tmp_path: Path) -> None:
    memory = tmp_path / "memory"
    options = ("--nodes", "2", "--snapshot-every", "5", "--snapshot-dir", str(memory))
    with world.job("--steps", "1000000", options=options) as job:
        job.wait(StepCommitted, step=3)
        assert len(list(memory.iterdir())) == 2
        assert job.process is not None
        job.process.kill()
        wait_until(lambda: not world.processes(), "all processes to end")
    wait_until(lambda: not list(memory.iterdir()), "the snapshots to go")


def test_the_next_run_removes_the_folders_of_a_killed_run(world: World, tmp_path: Path) -> None:
    """If the zygote is killed as well, no process of the run is left to remove its folders."""
    memory = tmp_path / "memory"
    options = ("--nodes", "1", "--snapshot-every", "5", "--snapshot-dir", str(memory))
    with world.job("--steps", "1000000", options=options) as job:
        job.wait(StepCommitted, step=3)
        assert job.process is not None
        for pid, command in world.processes().items():
            if "control.agent.zygote" in command:  # This also matches the processes that it forked.
                os.kill(pid, signal.SIGSTOP)
        job.process.kill()
        for pid in world.processes():
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not world.processes(), "all processes to end")
    # The run's socket folder is elsewhere if the path of the temporary folder is too long for a socket.
    left = (*memory.iterdir(), *world.temporary.iterdir())
    assert len(list(memory.iterdir())) == 1, left
    with world.job("--steps", "3", options=options, folder="next", warm=True) as job:
        assert job.wait_exit() == 0
    assert not [folder for folder in left if folder.exists()]
    world.check_nothing_is_left()


def test_a_frozen_standby_is_ended_and_replaced(world: World) -> None:
    with world.job("--steps", "1000000", options=("--nodes", "1", "--standbys", "1")) as job:
        job.wait(StepCommitted, step=3)
        frozen = world.process("agent:standby-0")
        os.kill(frozen, signal.SIGSTOP)
        wait_until(lambda: any("agent:standby-1" in command for command in world.processes().values()), "another one")
        assert frozen not in world.processes()


def test_a_standby_that_ends_with_the_job_is_not_reported(world: World) -> None:
    with world.job("--steps", "1000000", options=("--nodes", "1", "--standbys", "1")) as job:
        job.wait(StepCommitted, step=3)
        wait_until(lambda: any("agent:standby-0" in command for command in world.processes().values()), "the standby")
        assert job.process is not None
        os.kill(job.process.pid, signal.SIGINT)
        assert job.wait_exit() == 130
    assert "before it joined" not in job.output_file.read_text()
    world.check_nothing_is_left()


def test_a_job_started_with_nohup_survives_sighup(world: World) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with world.job("--steps", "1000000", options=("--nodes", "1")) as job:
            job.wait(StepCommitted, step=3)
            assert job.process is not None
            os.kill(job.process.pid, signal.SIGHUP)
            step = job.all(StepCommitted)[-1].step
            job.wait(StepCommitted, step=step + 20)
            os.kill(job.process.pid, signal.SIGTERM)
            assert job.wait_exit() == 75
    finally:
        signal.signal(signal.SIGHUP, before)


def test_workers_of_a_killed_agent_end_even_if_they_are_stopped(world: World) -> None:
    with world.job("--steps", "1000000", options=("--nodes", "2", "--workers-per-node", "2")) as job:
        job.wait(StepCommitted, step=3)
        agent, workers = job.pids("node-1")
        os.kill(workers[0], signal.SIGSTOP)
        os.kill(agent, signal.SIGKILL)
        wait_until(lambda: not set(workers) & set(world.processes()), "the workers to end")


@pytest.mark.parametrize(("fault", "kind"), [("freeze", "lease_expired"), ("exit", "connection_lost")])
def test_a_fault_can_be_injected_into_a_whole_node(world: World, fault: str, kind: str) -> None:
    with world.job("--steps", "1000000", options=("--nodes", "3", "--allow-faults"), warm=True) as job:
        job.wait(StepCommitted, step=3)
        agent, _ = job.pids("node-1")
        assert cli(world, "inject", fault, "node-1")[0] == 0
        assert job.wait(FailureDetected, node="node-1").kind == kind
        job.wait(GenerationStarted, lambda e: sorted(e.members) == ["node-0", "node-2"])
        if fault == "freeze":
            since = len(job.events)
            os.kill(agent, signal.SIGCONT)  # The agent learns that it was expelled, and comes back with new workers.
            job.wait(NodesJoined, lambda e: "node-1" in e.names, since=since)


def test_nodes_can_be_added_to_a_running_job(world: World) -> None:
    with world.job("--steps", "1000000", options=("--nodes", "1"), warm=True) as job:
        job.wait(StepCommitted, step=3)
        assert cli(world, "scale", "+2") == (0, "2 more nodes are on the way\n", "")
        job.wait(NodesJoined, lambda e: "node-1" in e.names)
        job.wait(NodesJoined, lambda e: "node-2" in e.names)


def test_the_snapshots_of_a_killed_node_are_removed(world: World, tmp_path: Path) -> None:
    memory = tmp_path / "memory"
    options = ("--nodes", "2", "--snapshot-every", "5", "--snapshot-dir", str(memory))
    with world.job("--steps", "1000000", options=options) as job:
        job.wait(StepCommitted, step=3)
        assert len(list(memory.glob("*-node-[01]-*"))) == 2
        os.kill(world.process("agent:node-1"), signal.SIGKILL)
        wait_until(lambda: not list(memory.glob("*-node-1-*")), "its memory's end")
        assert len(list(memory.iterdir())) == 1


def test_a_node_that_ends_before_it_has_joined_is_reported(world: World) -> None:
    held = world.folder / "held"
    waits = world.folder / "waits.sh"
    waits.write_text(f"#!/bin/sh\nwhile [ -e {held} ]; do sleep 0.05; done\n")
    waits.chmod(0o755)
    with world.job("--steps", "1000000", options=("--nodes", "1", "--preflight", str(waits))) as job:
        job.wait(StepCommitted, step=3)
        held.touch()
        job.add_nodes(1)
        wait_until(lambda: "agent:node-1" in " ".join(world.processes().values()), "the node's agent")
        os.kill(world.process("agent:node-1"), signal.SIGKILL)
        job.wait_output("node-1 has ended before it joined the job: SIGKILL")
        held.unlink()


def test_added_nodes_over_the_open_file_limit_are_not_started(world: World) -> None:
    with world.job("--steps", "1000000", options=("--nodes", "1")) as job:
        job.wait(StepCommitted, step=3)
        assert job.process is not None
        resource.prlimit(job.process.pid, resource.RLIMIT_NOFILE, (40, 40))
        assert cli(world, "scale", "+3")[0] == 0
        joined = job.wait(NodesJoined, lambda e: "node-1" in e.names)
        goes_on_from = max(event.step for event in job.all(StepCommitted))
        job.wait(StepCommitted, step=goes_on_from + 3)
        assert joined.names == ("node-1",)
        words = "2 more nodes are not started: its processes may open as many files as 2 nodes take; raise the limit"
        wait_until(lambda: words in job.output_file.read_text(), "the refusal")


def test_a_job_whose_first_nodes_exceed_the_open_file_limit_is_refused(world: World) -> None:
    command = (sys.executable, "-m", "holdfast", "run", "--nodes", "9", str(TRAINING))
    shell = ("bash", "-c", 'ulimit -n 64 && exec "$0" "$@"', *command)
    done = subprocess.run(shell, env={**os.environ, **world.environment}, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == (
        "holdfast: the job begins with 9 nodes on this machine: its processes may open as many files as 8 nodes take; "
        "raise the limit (ulimit -n)\n"
    )
    world.check_nothing_is_left()


def test_an_exception_in_the_script_fails_the_job(world: World) -> None:
    with world.job("--crash", "exception", options=("--nodes", "2"), warm=True) as job:
        assert job.wait_exit() == 1
    output = job.output_file.read_text()
    assert "RuntimeError: out of luck" in output
    # Even if one node spends its restart budget first, the job waits for the other and blames the work, not a node.
    assert re.search("on nodes node-., node-.", output)
    world.check_nothing_is_left()


def test_bad_input_in_the_script_ends_the_job_as_bad_input(world: World) -> None:
    with world.job("--crash", "bad-input", options=("--nodes", "2"), warm=True) as job:
        assert job.wait_exit() == 2
    output = job.output_file.read_text()
    assert output.splitlines().count("holdfast: global_batch is 7: it must be a multiple of micro_batch 2") == 1
    assert "Traceback" not in output
    world.check_nothing_is_left()


def test_a_script_that_fails_after_its_last_step_fails_the_run(world: World) -> None:
    with world.job("--steps", "3", "--tail", "4", options=("--nodes", "2"), warm=True) as job:
        assert job.wait_exit() == 1
    assert job.all(JobFinished)
    world.check_nothing_is_left()


def cli(world: World, *words: str) -> tuple[int, str, str]:
    """Run a command for this job; return exit code, stdout and stderr."""
    return spoken_here(Command(words, {**os.environ, **world.environment}, world.folder))
