"""The command line: what it accepts, what it refuses, and with which exit code."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from holdfast.cli import app, main
from holdfast.control.launch.settings import STRATEGIES
from holdfast.observability.event_lines import read_events
from holdfast.planning import strategies
from holdfast.protocol.events import FailureDetected, GenerationStarted, JobStarted, StepCommitted
from holdfast.testing.local_job import LocalJob
from places import CONTROL_SCRIPTS

DEADLINE = 60.0
TRAINING = CONTROL_SCRIPTS / "fake_training.py"

#: of all commands that launch a job
LAUNCH_OPTIONS = {
    "--workers-per-node",
    "--events",
    "--store",
    "--checkpoint",
    "--checkpoint-every",
    "--allow-faults",
    "--port",
    "--job",
    "--job-dir",
    "--preload",
    "--zygote",
    "--plain",
    "--verify-state",
    "--slots",
    "--fault-threshold",
    "--strategy",
    "--rebalance-every",
    "--join-window",
    "--static-experts",
    "--ep-size",
    "--on-failure",
    "--emulate-compute",
}

#: Options are a contract: whoever changes one changes this, and the README.
OPTIONS = {
    "run": {*LAUNCH_OPTIONS, "--nodes"},
    "replay": {*LAUNCH_OPTIONS, "--speed", "--from", "--until", "--json"},
    "coordinator": {
        "--host",
        "--port",
        "--token",
        "--job",
        "--store",
        "--events",
        "--start-nodes",
        "--fault-threshold",
        "--strategy",
        "--rebalance-every",
        "--join-window",
        "--allow-faults",
        "--certfile",
        "--keyfile",
        "--checkpoint",
    },
    "agent": {
        "--coordinator",
        "--token",
        "--node",
        "--workers",
        "--host",
        "--cafile",
        "--rack",
        "--checkpoint",
        "--checkpoint-every",
        "--slots",
        "--verify-state",
    },
    "status": {"--coordinator", "--token", "--cafile", "--json"},
    "events": {"--coordinator", "--token", "--cafile", "--follow", "--after", "--json"},
    "add-node": {"--coordinator", "--token", "--cafile", "--count"},
    "fail": {"--how", "--worker", "--step", "--phase", "--coordinator", "--token", "--cafile"},
}


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    runtime = tmp_path / "xdg"
    runtime.mkdir(mode=0o700)
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    return {**os.environ, "XDG_RUNTIME_DIR": str(runtime), "TMPDIR": str(temporary), "HOLDFAST_TOKEN": ""}


def holdfast(environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "holdfast", *words],
        env={name: value for name, value in environment.items() if value},
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )


@pytest.mark.parametrize("command", sorted(OPTIONS))
def test_options_are_frozen_and_explained(command: str) -> None:
    group = typer.main.get_command(app)
    found = group.commands[command]  # type: ignore[attr-defined]
    options = {name for param in found.params for name in param.opts if name.startswith("--")} - {"--help"}
    assert options == OPTIONS[command]
    assert all(param.help for param in found.params if param.param_type_name == "option")
    assert found.help
    result = CliRunner().invoke(app, [command, "--help"])
    assert result.exit_code == 0


def test_the_strategies_that_the_options_name_are_those_that_there_are() -> None:
    assert list(STRATEGIES) == list(strategies())


def test_importing_the_command_line_leaves_torch_out() -> None:
    code = "import sys, holdfast.cli; sys.exit('torch' in sys.modules or 'scipy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.fixture
def busy_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["run", "MISSING.py"], "there is no script MISSING.py"),
        (["run", "--nodes", "0", "SCRIPT"], "--nodes is 0"),
        (["run", "--workers-per-node", "0", "SCRIPT"], "--workers-per-node is 0"),
        (["run", "--checkpoint-every", "0", "SCRIPT"], "--checkpoint-every is 0"),
        (["run", "--slots", "0", "SCRIPT"], "--slots is 0"),
        (["run", "--fault-threshold", "0", "SCRIPT"], "--fault-threshold is 0"),
        (["run", "--join-window", "-1", "SCRIPT"], "--join-window is -1"),
        (["coordinator", "--fault-threshold", "0"], "--fault-threshold is 0"),
        (["run", "--strategy", "random", "SCRIPT"], "choose one of best, mro, spread, compact"),
        (["run", "--rebalance-every", "-1", "SCRIPT"], "--rebalance-every is -1"),
        (["coordinator", "--strategy", "random"], "--strategy is 'random'"),
        (["agent", "--slots", "0", "--", "SCRIPT"], "--slots is 0"),
        (["run", "--events", "TMP/no/such/folder/e.jsonl", "SCRIPT"], "there is no folder"),
        (["run", "--events", "TMP", "SCRIPT"], "is a folder"),
        (["run", "--checkpoint", "SCRIPT/below", "SCRIPT"], "is not a folder"),
        (["run", "--port", "BUSY", "SCRIPT"], "Address already in use"),
        (["run", "--port", "70000", "SCRIPT"], "--port is 70000"),
        (["run", "--job", "a b", "SCRIPT"], "the job's name is 'a b'"),
        (["run", "--store", "etcetera:x", "SCRIPT"], "etcetera:x"),
        (["run", "--zygote", "TMP/none", "SCRIPT"], "no zygote listens there"),
        (["coordinator", "--port", "BUSY"], "Address already in use"),
        (["coordinator", "--start-nodes", "0"], "--start-nodes is 0"),
        (["coordinator", "--host", "0.0.0.0"], "--token"),
        (["agent", "--", "MISSING.py"], "there is no script"),
        (["agent", "--workers", "0", "--", "SCRIPT"], "--workers is 0"),
        (["agent", "--node", "../x", "--", "SCRIPT"], "--node is '../x'"),
        (["agent", "--node", "n\n", "--", "SCRIPT"], "--node is 'n\\n'"),
        (["coordinator", "--job", "a b"], "the job's name is 'a b'"),
        (["status", "--coordinator", "http://127.0.0.1:1", "--token", "wörd"], "the token must be"),
        (["status", "--coordinator", "http://127.0.0.1:9"], "--token"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_clear_line_and_touches_nothing(
    words: list[str], complaint: str, environment: dict[str, str], tmp_path: Path, busy_port: int
) -> None:
    before = sorted(tmp_path.rglob("*"))
    places = {"TMP": str(tmp_path), "BUSY": str(busy_port), "SCRIPT": str(TRAINING)}
    for name, value in places.items():
        words = [word.replace(name, value) for word in words]
    result = holdfast(environment, *words)
    assert result.returncode == 2, result.stderr
    (line,) = result.stderr.splitlines()
    assert line.startswith("holdfast: ")
    assert complaint in line
    assert sorted(path for path in tmp_path.rglob("*") if "xdg/holdfast" not in str(path)) == before


@pytest.mark.parametrize(
    "words", [["agent", "--", str(TRAINING)], ["status"], ["events"], ["add-node"], ["fail", "node-0", "--how", "kill"]]
)
def test_where_no_job_runs_that_is_said(words: list[str], environment: dict[str, str]) -> None:
    result = holdfast(environment, *words)
    assert result.returncode == 3
    (line,) = result.stderr.splitlines()
    assert line.startswith("holdfast: no job runs on this machine")


def test_a_missing_coordinator_is_told(environment: dict[str, str]) -> None:
    result = holdfast(environment, "status", "--coordinator", "http://127.0.0.1:9", "--token", "t")
    assert result.returncode == 3
    assert "no coordinator answers at http://127.0.0.1:9" in result.stderr


def test_commands_beside_a_job_that_runs(environment: dict[str, str], tmp_path: Path) -> None:
    folder = tmp_path / "job"
    folder.mkdir()
    options = ("--preload", "", "--nodes", "2", "--allow-faults")
    with LocalJob(TRAINING, ("--steps", "1000000"), options=options, folder=folder, environment=environment) as job:
        job.wait(StepCommitted, step=2)
        status = json.loads(holdfast(environment, "status", "--json").stdout)
        assert status["job"] == "fake_training"
        assert {node["node"] for node in status["nodes"]} == {"node-0", "node-1"}
        human = holdfast(environment, "status")
        assert human.returncode == 0
        assert "node-1" in human.stdout

        events = [json.loads(line) for line in holdfast(environment, "events", "--json").stdout.splitlines()]
        assert events[0]["event"] == "job_started"
        assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
        assert holdfast(environment, "events", "--after", "1").stdout.count("joined") == 2

        refused = holdfast(environment, "fail", "node-9", "--how", "kill")
        assert refused.returncode == 3
        assert "node-9" in refused.stderr
        assert holdfast(environment, "fail", "node-1", "--how", "kill").returncode == 0
        job.wait(FailureDetected, node="node-1")
        job.wait(GenerationStarted, members=("node-0",))

        job.wait(StepCommitted, since=len(job.events))
        assert holdfast(environment, "fail", "node-0", "--how", "raise", "--worker", "0").returncode == 0
        failed = job.wait(FailureDetected, node="node-0")
        assert failed.kind == "exception"
        assert "injected: raise" in failed.detail


def test_two_jobs_must_be_told_apart_and_faults_be_allowed(environment: dict[str, str], tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
    options = ("--preload", "", "--nodes", "1")
    args = ("--steps", "1000000")
    with (
        LocalJob(TRAINING, args, options=options, folder=tmp_path / "a", environment=environment) as one,
        LocalJob(TRAINING, args, options=options, folder=tmp_path / "b", environment=environment) as two,
    ):
        urls = [job.wait(JobStarted).url for job in (one, two)]
        for job in (one, two):
            job.wait(StepCommitted, step=1)
        result = holdfast(environment, "status")
        assert result.returncode == 2
        assert all(url in result.stderr for url in urls)
        chosen = holdfast(environment, "status", "--json", "--coordinator", urls[0])
        assert json.loads(chosen.stdout)["url"] == urls[0]
        refused = holdfast(environment, "fail", "node-0", "--how", "kill", "--coordinator", urls[0])
        assert refused.returncode == 2
        assert "--allow-faults" in refused.stderr


def test_a_mistake_of_ours_has_its_own_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> None:
        raise AssertionError("nobody thought of this")

    monkeypatch.setattr("holdfast.cli.app", broken)
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 70
    assert "AssertionError: nobody thought of this" in capsys.readouterr().err


def test_arguments_reach_the_script_untouched(environment: dict[str, str], tmp_path: Path) -> None:
    script = tmp_path / "show.py"
    script.write_text(
        "import json, sys\n"
        "print(json.dumps(sys.argv[1:]))\n"
        "from holdfast.errors import BadInputError\nraise BadInputError('that is all')\n"
    )
    args = ["--nodes", "7", "-x", "--", "--help", "a b"]
    result = holdfast(environment, "run", "--preload", "", "--nodes", "1", str(script), *args)
    assert result.returncode == 2
    assert json.dumps(args) in result.stdout.splitlines()


def test_the_pieces_on_their_own(environment: dict[str, str], tmp_path: Path) -> None:
    """A coordinator and an agent, started by hand as on two machines; the agent is there first, and waits."""
    command = [sys.executable, "-m", "holdfast"]
    token = {**environment, "HOLDFAST_TOKEN": "s3cret"}
    with (tmp_path / "log").open("wb") as log, socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        port = str(holder.getsockname()[1])
        url = f"http://127.0.0.1:{port}"
        events = tmp_path / "events.jsonl"
        agent = subprocess.Popen(
            [
                *command,
                "agent",
                "--coordinator",
                url,
                "--node",
                "far",
                "--verify-state",
                "--",
                str(TRAINING),
                "--steps",
                "5",
            ],
            env=token,
            stdout=log,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert agent.stderr is not None
        line = agent.stderr.readline()
        assert f"no coordinator answers at {url}" in line
        assert "waiting for it" in line
        coordinator = subprocess.Popen(
            [*command, "coordinator", "--port", port, "--job", "two", "--events", str(events)],
            env=token,
            stdout=log,
            stderr=log,
        )
        try:
            assert agent.wait(DEADLINE) == 0
            assert coordinator.wait(DEADLINE) == 0
        finally:
            for process in (agent, coordinator):
                if process.poll() is None:
                    process.send_signal(signal.SIGKILL)
                    process.wait()
            agent.stderr.close()
    steps = [event.step for event in read_events(events) if isinstance(event, StepCommitted)]
    assert steps == [1, 2, 3, 4, 5]
    assert list((tmp_path / "tmp").glob("holdfast-*")) == []  # torch leaves a cache of its own
