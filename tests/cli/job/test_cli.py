"""Tests of the command line: accepted and refused input, and exit codes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from holdfast.cli import app, main
from holdfast.cli.command_table import COMMANDS
from holdfast.cli.spec_options import SPEC_OPTIONS
from holdfast.documents import keys_of
from holdfast.environment import TOKEN
from holdfast.observability.event_lines import read_events
from holdfast.planning import strategies
from holdfast.protocol.events import FailureDetected, GenerationStarted, JobStarted, StepCommitted
from holdfast.protocol.job_spec import JobSpec
from places import CONTROL_SCRIPTS
from warm_jobs import HOLDFAST, WarmJob
from warm_start import run_warm

DEADLINE = 60.0
TRAINING = CONTROL_SCRIPTS / "fake_training.py"
README = Path(__file__).parents[3] / "README.md"

SERVER = {"--address", "--job", "--token-file", "--tls-ca"}

#: Options are a contract: each change must also change this table and docs/commands.md.
OPTIONS = {
    "run": {option.name for option in SPEC_OPTIONS}
    | {"--module", "--set", "--store", "--port", "--job-dir", "--preload", "--zygote", "--plain", "--verbose", "--json"}
    | {"--availability", "--speed", "--from", "--until"},
    "coordinator": {
        "--listen",
        "--token-file",
        "--tls-cert",
        "--tls-key",
        "--name",
        "--nodes",
        "--store",
        "--events",
        "--alert",
        "--flop-per-sample",
        "--peak-flop-per-s",
        "--on-node-failure",
        "--stragglers",
        "--on-process-failure",
        "--fault-threshold",
        "--expert-placement",
        "--rebalance-every",
        "--join-window",
        "--max-restarts",
        "--max-skipped-steps",
        "--failure-classes",
        "--time-limit",
        "--allow-faults",
        "--checkpoint-dir",
    },
    "agent": SERVER
    | {"--node-name", "--advertise", "--rack", "--zone", "--standby", "--failure-rate", "--workers-per-node"}
    | {"--checkpoint-dir", "--checkpoint-every", "--checkpoint-rate", "--snapshot-every", "--snapshot-dir"}
    | {"--expert-slots", "--emulate-compute", "--verify-state", "--preflight", "--grace"}
    | {"--log-dir", "--print", "--module"},
    "status": {*SERVER, "--wide", "--json"},
    "events": {*SERVER, "--follow", "--after", "--json"},
    "logs": {*SERVER, "--follow", "--node", "--json"},
    "explain": {*SERVER, "--json"},
    "report": {*SERVER, "--plot", "--plot-memory", "--json"},
    "audit": {*SERVER, "--json"},
    "export": {*SERVER, "--format", "--output", "--follow", "--json"},
    "scale": {*SERVER, "--json"},
    "drain": {*SERVER, "--rolling", "--dry-run", "--no-wait", "--json"},
    "move": {*SERVER, "--to", "--compact", "--dry-run", "--no-wait", "--json"},
    "undrain": {*SERVER, "--json"},
    "stop": {*SERVER, "--now", "--no-wait", "--json"},
    "checkpoint": {*SERVER, "--no-wait", "--json"},
    "inject": {*SERVER, "--worker", "--step", "--phase", "--times", "--by", "--json"},
    "schema": set[str](),
    "simulate": {"--nodes", "--mtbf", "--mttr", "--standbys", "--hours", "--replications", "--seed", "--scale"}
    | {"--availability", "--policy", "--job", "--set", "--json"},
}


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    runtime = tmp_path / "xdg"
    runtime.mkdir(mode=0o700)
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    kept = str(tmp_path / "state")  # no journal of another test's job
    return {
        **os.environ,
        "XDG_RUNTIME_DIR": str(runtime),
        "XDG_STATE_HOME": kept,
        "TMPDIR": str(temporary),
        TOKEN: "",
    }


Run = Callable[..., subprocess.CompletedProcess[str]]


def cold(environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    """Run `holdfast` with these words as a shell does."""
    return subprocess.run(
        [sys.executable, "-m", "holdfast", *words],
        env={name: value for name, value in environment.items() if value},
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )


@pytest.fixture
def holdfast(warm_commands: str) -> Run:
    """Run `holdfast` with an environment and words, without a cold start."""

    def run(environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
        return run_warm(warm_commands, HOLDFAST, *words, environment=environment)

    return run


@pytest.mark.parametrize("command", sorted(OPTIONS))
def test_the_options_of_each_command_are_fixed_and_have_help_texts(command: str) -> None:
    group: Any = typer.main.get_command(app)
    found = group.get_command(None, command)
    options = {name for param in found.params for name in param.opts if name.startswith("--")} - {
        "--help",
        "--help-all",
    }
    assert options == OPTIONS[command]
    assert all(param.help for param in found.params if param.param_type_name == "option")
    assert found.help
    result = CliRunner().invoke(app, [command, "--help"])
    assert result.exit_code == 0


def test_every_expert_placement_strategy_can_be_selected() -> None:
    assert list(keys_of(JobSpec)["experts.placement"].choices) == list(strategies())


def test_every_key_of_a_job_file_has_an_option() -> None:
    # `format` belongs to the file, the last ones are for --set, the others are covered by other options.
    without = {"format", "script", "module", "args", "min_nodes"}
    without |= {"backend", "experiments.watch", "experiments.own_times_every"}
    pools = {"sizes", "weight", "priority", "preemptible", "snooze"}
    # These keys do not apply to a command that runs one job.
    pools |= {"pace.step_s", "pace.micro_batches", "pace.samples", "pace.places"}
    assert {option.key for option in SPEC_OPTIONS} == keys_of(JobSpec).keys() - without - pools


def test_importing_the_commands_imports_no_heavy_modules() -> None:
    heavy = {"torch", "numpy", "scipy", "matplotlib", "starlette", "uvicorn"}
    modules = sorted(
        {f"holdfast.cli.{row.module}" for row in COMMANDS.values()} - {"holdfast.cli.planner.spares.commands"}
    )
    code = f"import sys, {', '.join(modules)}; print(*{heavy} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


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
        (["run", "README"], "README.md, line "),
        (["run", "--nodes", "0", "SCRIPT"], "--nodes is 0"),
        (["run", "--workers-per-node", "0", "SCRIPT"], "--workers-per-node is 0"),
        (["run", "--checkpoint-every", "0", "SCRIPT"], "--checkpoint-every is 0"),
        (["run", "--expert-slots", "0", "SCRIPT"], "--expert-slots is 0: it must be a whole number from 1 to 65535"),
        (["run", "--fault-threshold", "0", "SCRIPT"], "--fault-threshold is 0"),
        (["run", "--join-window", "-1", "SCRIPT"], "--join-window is -1"),
        (["coordinator", "--fault-threshold", "0"], "--fault-threshold is 0"),
        (["run", "--expert-placement", "random", "SCRIPT"], "it must be one of best, mro, spread, compact"),
        (["run", "--rebalance-every", "-1", "SCRIPT"], "--rebalance-every is -1"),
        (["coordinator", "--expert-placement", "random"], "--expert-placement is 'random'"),
        (["agent", "--expert-slots", "0", "--", "SCRIPT"], "--expert-slots is 0"),
        (["run", "--alert", "no-such-mailer x", "SCRIPT"], "there is no program 'no-such-mailer'"),
        (["coordinator", "--alert", "https://"], "--alert is 'https://': it is not a URL"),
        (["run", "--flop-per-sample", "-1", "SCRIPT"], "--flop-per-sample is -1"),
        (["run", "--events", "TMP/no/such/folder/e.jsonl", "SCRIPT"], "there is no folder"),
        (["run", "--events", "TMP", "SCRIPT"], "is a folder"),
        (["run", "--checkpoint-dir", "SCRIPT/below", "SCRIPT"], "is not a folder"),
        (["run", "--checkpoint-dir", "memory://x", "SCRIPT"], "where no other worker finds it: give a folder or a URL"),
        (["run", "--port", "BUSY", "SCRIPT"], "Address already in use"),
        (["run", "--port", "70000", "SCRIPT"], "--port is 70000"),
        (
            ["run", "--name", "a b", "SCRIPT"],
            "--name is 'a b': it must be letters, digits, dots and dashes, at most 64",
        ),
        (["run", "--store", "etcetera:x", "SCRIPT"], "etcetera:x"),
        (["run", "--zygote", "TMP/none", "SCRIPT"], "no zygote listens there"),
        (["coordinator", "--listen", "127.0.0.1:BUSY"], "Address already in use"),
        (["coordinator", "--nodes", "0"], "--nodes is 0"),
        (["coordinator", "--listen", "0.0.0.0:0"], "--token-file"),
        (["coordinator", "--listen", "7000"], "--listen is '7000': it must be HOST:PORT"),
        (["agent", "--", "MISSING.py"], "there is no script"),
        (["agent", "--workers-per-node", "0", "--", "SCRIPT"], "--workers-per-node is 0"),
        (["agent", "--node-name", "../x", "--", "SCRIPT"], "--node-name is '../x'"),
        (["agent", "--node-name", "n\n", "--", "SCRIPT"], "--node-name is 'n\\n'"),
        (["coordinator", "--name", "a b"], "--name is 'a b'"),
        (["status", "--token-file", "TMP/none"], "none cannot be read"),
        (["run", "--nodes", "0:4", "SCRIPT"], "--nodes is '0:4': give a number of nodes, or MIN:MAX"),
        (["run", "--nodes", "4:2", "SCRIPT"], "--nodes is 4:2: the first number must not be above the second"),
        (["run", "--speed", "2", "SCRIPT"], "--speed is 2.0: it counts in a trace; give --availability TRACE"),
        (["run", "--set", "checkpoint.evry=5", "SCRIPT"], "the nearest one is checkpoint.every"),
        (["run", "--set", "foo=1", "SCRIPT"], "--set foo is not known; `holdfast schema job` lists the keys"),
        (["run", "--set", "checkpoint.every", "SCRIPT"], "write KEY=VALUE"),
        (["suspend", "second"], "`holdfast suspend` takes no argument 'second': name a job with -j second"),
        (["audit", "a.jsonl", "b.jsonl"], "Got unexpected extra argument(s) (b.jsonl); see --help"),
        (["scale", "-1"], "the size is '-1': to remove nodes, name them: holdfast drain NODE"),
        (["logs", "node-1"], "there is no folder node-1: give the job's --log-dir; if node-1 is a node, give --node"),
        (["status", "--address", "foo"], "the coordinator's URL is 'foo': it must be http://HOST:PORT"),
        (["jobs", "--address", "127.0.0.1:7050"], "the coordinator's URL is '127.0.0.1:7050': it must be http://"),
        (
            ["run", "--set", "checkpoint.every=0", "SCRIPT"],
            "--set checkpoint.every is 0: it must be a whole number from 1",
        ),
        (["run", "--emulate-compute", "0.1", "SCRIPT"], "must be seconds for each token or micro-batch, such as"),
        (["run", "--emulate-compute", "-1", "SCRIPT"], "--emulate-compute is -1"),
        (["run", "--on-node-failure", "restart-all", "SCRIPT"], "give --checkpoint-dir DIR"),
        (["run", "--on-node-failure", "pray", "SCRIPT"], "it must be one of auto, standby, shrink, wait, restart-all"),
        (["run", "--ep-size", "2", "SCRIPT"], "it counts with static experts; give --static-experts"),
        (["run", "--static-experts", "--workers-per-node", "2", "SCRIPT"], "with static experts it must be 1"),
        (["scale", "some"], "the size is 'some'"),
        (["events", "EVENTS", "--follow"], "--follow is for a job that runs"),
        (["events", "TMP/none"], "cannot be read as an event file"),
        (["run"], "Missing argument 'SCRIPT|JOB.toml|MOD'; see --help"),
        (["run", "--nodse", "3", "SCRIPT"], "No such option: --nodse"),
        (["run", "--nodes"], "--nodes"),
        (["run", "--port", "x", "SCRIPT"], "--port"),
        (["runn", "SCRIPT"], "No such command 'runn'"),
        (["spares", "paln"], "No such command 'paln'"),
        (["run", "--nodes", "9" * 5000 + ":3", "SCRIPT"], "give a number of nodes, or MIN:MAX"),
        (["run", "--set", "args=" + "[" * 5000, "SCRIPT"], "it must be a list of texts"),
        (["run", "--name", "n\n", "SCRIPT"], "--name is 'n\\n': it must be letters, digits"),
        (["run", "--checkpoint-dir", "TMP/" + "d" * 300, "SCRIPT"], "File name too long"),
        (["run", "--events", "TMP/" + "e" * 300, "SCRIPT"], "File name too long"),
        (["run", "--job-dir", "TMP/" + "j" * 300, "SCRIPT"], "File name too long"),
        (["run", "--events", "/dev/null", "SCRIPT"], "--events /dev/null is a device or a pipe: give a file"),
        (["run", "TMP/\x1b[2J\n.py"], "\\x1b[2J .py: give the path"),
        (["coordinator", "--listen", "127.0.0.1:" + "9" * 5000], "it must be HOST:PORT"),
        (["agent", "--rack", "r\n", "--", "SCRIPT"], "--rack is 'r\\n'"),
        (["agent", "--zone", "z/1", "--", "SCRIPT"], "--zone is 'z/1': use letters"),
        (["agent", "--failure-rate", "0", "--", "SCRIPT"], "--failure-rate is 0: give a number from 0.001 to 1000"),
        (["agent", "--failure-rate", "nan", "--", "SCRIPT"], "--failure-rate is nan"),
        (["events", "TMP"], "cannot be read as an event file"),
        (["schema", "pool"], "there is no schema 'pool': choose one of job, events"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_reported_in_one_line_and_changes_no_files(
    words: list[str], complaint: str, environment: dict[str, str], tmp_path: Path, busy_port: int, holdfast: Run
) -> None:
    before = sorted(tmp_path.rglob("*"))
    places = {"TMP": str(tmp_path), "BUSY": str(busy_port), "SCRIPT": str(TRAINING), "README": str(README)}
    for name, value in places.items():
        words = [word.replace(name, value) for word in words]
    result = holdfast(environment, *words)
    assert result.returncode == 2, result.stderr
    (line,) = result.stderr.splitlines()
    assert line.startswith("holdfast: ")
    assert complaint in line
    ours = ("xdg/holdfast", "/state")  # lists of jobs and journals, kept by every command
    assert sorted(path for path in tmp_path.rglob("*") if not any(part in str(path) for part in ours)) == before


@pytest.mark.parametrize(
    "words",
    [
        *(["agent", "--", str(TRAINING)], ["status"], ["events"], ["explain"], ["report"], ["audit"]),
        *(["scale", "+1"], ["inject", "kill", "node-0"]),
    ],
)
def test_commands_report_that_no_job_runs(words: list[str], environment: dict[str, str], holdfast: Run) -> None:
    result = holdfast(environment, *words)
    assert result.returncode == 3
    (line,) = result.stderr.splitlines()
    assert line.startswith("holdfast: no job runs on this machine")


def test_an_unreachable_coordinator_is_reported(environment: dict[str, str]) -> None:
    result = cold({**environment, TOKEN: "t"}, "status", "--address", "http://127.0.0.1:9")
    assert result.returncode == 3
    assert "no coordinator answers at http://127.0.0.1:9" in result.stderr


@pytest.mark.parametrize(
    "words", [["status"], ["move", "n"], ["drain", "n"], ["move", "--compact"], ["stop"], ["jobs"]]
)
def test_an_unreachable_coordinator_is_reported_if_the_token_is_missing(
    words: list[str], environment: dict[str, str], holdfast: Run
) -> None:
    result = holdfast(environment, *words, "--address", "http://127.0.0.1:9")
    assert result.returncode == 3, result.stderr
    (line,) = result.stderr.splitlines()
    assert "no coordinator answers at http://127.0.0.1:9: check the address, and give its token" in line


def test_commands_work_on_a_running_job(
    environment: dict[str, str], tmp_path: Path, holdfast: Run, warm_commands: str
) -> None:
    folder = tmp_path / "job"
    folder.mkdir()
    options = ("--preload", "", "--nodes", "2", "--allow-faults")
    with WarmJob(
        warm_commands, TRAINING, ("--steps", "1000000"), options=options, folder=folder, environment=environment
    ) as job:
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

        stands = json.loads(holdfast(environment, "explain", "--json").stdout)
        assert (stands["job"], stands["state"], stands["awaited"]) == ("fake_training", "running", [])
        report = json.loads(holdfast(environment, "report", "--json").stdout)
        assert report["job"] == "fake_training"
        audited = holdfast(environment, "audit", "--json")
        assert (audited.returncode, json.loads(audited.stdout)["sound"]) == (0, True)
        assert holdfast(environment, "events", "-j", "fake_training", str(job.events_file)).returncode == 0
        elsewhere = holdfast(environment, "status", "-j", "other")
        assert elsewhere.returncode == 3
        assert "the running jobs are fake_training" in elsewhere.stderr

        fewer = holdfast(environment, "scale", "1")
        assert fewer.returncode == 4
        assert (
            fewer.stderr
            == "holdfast: the job has 2 nodes, 1 is fewer: choose the nodes to remove with `holdfast drain NODE`\n"
        )
        assert json.loads(holdfast(environment, "scale", "2", "--json").stdout) == {"nodes_started": 0}

        refused = holdfast(environment, "inject", "kill", "node-9")
        assert refused.returncode == 3
        assert "node-9" in refused.stderr
        assert holdfast(environment, "inject", "kill", "node-1").returncode == 0
        job.wait(FailureDetected, node="node-1")
        job.wait(GenerationStarted, members=("node-0",))

        job.wait(StepCommitted, since=len(job.events))
        assert holdfast(environment, "inject", "raise", "node-0", "--worker", "0").returncode == 0
        failed = job.wait(FailureDetected, node="node-0")
        why = holdfast(environment, "explain", str(failed.seq), str(job.events_file))
        assert "injected: raise" in why.stdout
        assert failed.kind == "exception"
        assert "injected: raise" in failed.detail


def test_an_ambiguous_job_and_faults_without_permission_are_refused(
    environment: dict[str, str], tmp_path: Path, holdfast: Run, warm_commands: str
) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
    options = ("--preload", "", "--nodes", "1")
    args = ("--steps", "1000000")
    with (
        WarmJob(warm_commands, TRAINING, args, options=options, folder=tmp_path / "a", environment=environment) as one,
        WarmJob(warm_commands, TRAINING, args, options=options, folder=tmp_path / "b", environment=environment) as two,
    ):
        urls = [job.wait(JobStarted).url for job in (one, two)]
        for job in (one, two):
            job.wait(StepCommitted, step=1)
        result = holdfast(environment, "status")
        assert result.returncode == 2
        assert all(url in result.stderr for url in urls)
        chosen = holdfast(environment, "status", "--json", "--address", urls[0])
        assert json.loads(chosen.stdout)["url"] == urls[0]
        refused = holdfast(environment, "inject", "kill", "node-0", "--address", urls[0])
        assert refused.returncode == 2
        assert "--allow-faults" in refused.stderr


def test_an_internal_error_has_its_own_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*, standalone_mode: bool) -> None:
        raise AssertionError("nobody thought of this")

    monkeypatch.setattr("holdfast.cli.app", broken)
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 70
    assert "AssertionError: nobody thought of this" in capsys.readouterr().err


def test_closed_standard_streams_are_opened_before_other_files() -> None:
    code = (
        "import os, sys; from holdfast.cli.output import open_standard_streams; open_standard_streams(); "
        "print('lost', sys.stdin.read(), sys.stdout.isatty()); assert all(map(os.get_inheritable, range(3))); "
        "sys.exit(os.open(os.devnull, os.O_RDONLY) < 3)"
    )
    words = ["sh", "-c", 'exec "$@" <&- >&-', "sh", sys.executable, "-c", code]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=DEADLINE, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        ('name = "a b"', "job.toml: name is 'a b': it must be letters, digits, dots and dashes, at most 64"),
        ("min_nodes = 5\nmax_nodes = 3", "job.toml: min_nodes is 5: it must not be above "),
        ("max_nodes = 5000", "job.toml: max_nodes is 5000: it must lie between 1 and 1024"),
        ("[experiments]\nep_size = 3", "job.toml: experiments.ep_size is 3: it counts with static experts"),
        ('[recovery]\non_node_failure = "restart-all"', "job.toml: recovery.on_node_failure is restart-all"),
        ('[recovery]\nfailure_classes = "job.toml"', "job.toml: script is not known: give one of class"),
        ('[output]\nalert = "mail \'"', 'job.toml: output.alert is "mail \'": No closing quotation'),
        ('[output]\nevents = "no/such/e"', "job.toml: output.events TMP/no/such/e: there is no folder"),
        ('[checkpoint]\ndir = "job.toml/d"', "job.toml: checkpoint.dir TMP/job.toml/d: TMP/job.toml is not a folder"),
    ],
)
def test_a_mistake_in_a_job_file_is_reported_with_its_key(
    lines: str, complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "job.toml"
    file.write_text(f'script = "{TRAINING}"\n{lines}\n')
    monkeypatch.setattr(sys, "argv", ["holdfast", "run", str(file)])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"holdfast: {tmp_path}/")
    assert complaint.replace("TMP", str(tmp_path)) in line


@pytest.mark.parametrize("as_module", [False, True])
def test_script_arguments_are_unchanged_and_its_output_is_printed_and_logged(
    environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_module: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "package" / "show.py"
    script.parent.mkdir()
    script.write_text(
        "import json, os, sys\n"
        "print(json.dumps([*sys.argv[1:], os.environ.get('HOLDFAST_TOKEN', 'no secret')]))\n"
        "from holdfast.errors import BadInputError\nraise BadInputError('that is all')\n"
    )
    args = ["--nodes", "7", "-x", "--", "--help", "a b"]
    what = ("-m", "package.show") if as_module else (str(script),)
    options = ("--preload", "", "--nodes", "1", "--log-dir", str(tmp_path / "logs"), *what)
    result = cold({**environment, TOKEN: "s3cret"}, "run", *options, *args)
    assert result.returncode == 2, result.stderr
    printed = json.dumps([*args, "no secret"])
    assert f"[node-0] {printed}" in result.stdout.splitlines()
    assert printed in (tmp_path / "logs" / "node-0.0.log").read_text().splitlines()


def test_a_job_file_is_run_and_its_events_are_printed_as_json(environment: dict[str, str], tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text(f'script = "{TRAINING}"\nargs = ["--steps", "3"]\nmax_nodes = 2\nname = "filed"\n')
    result = cold(environment, "run", "--json", "--preload", "", "--set", "max_nodes=1", str(file))
    assert result.returncode == 0, result.stderr
    events = [json.loads(line) for line in result.stdout.splitlines()]
    assert {event["job"] for event in events} == {"filed"}
    assert [event["step"] for event in events if event["event"] == "step_committed"] == [1, 2, 3]
    assert [event["world_size"] for event in events if event["event"] == "generation_started"] == [1]
    assert "job_finished" in [event["event"] for event in events]
    assert "done: 3 steps" in result.stderr


def test_an_agent_started_before_its_coordinator_waits_and_trains(environment: dict[str, str], tmp_path: Path) -> None:
    """A coordinator and an agent are started by hand as on two machines; the agent starts first, and waits."""
    command = [sys.executable, "-m", "holdfast"]
    token = {**environment, TOKEN: "s3cret"}
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
                "--address",
                url,
                "--node-name",
                "far",
                "--verify-state",
                "1",
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
            [*command, "coordinator", "--listen", f"127.0.0.1:{port}", "--name", "two", "--events", str(events)],
            env=token,
            stdout=log,
            stderr=log,
        )
        try:
            assert agent.wait(DEADLINE) == 0
            assert f"node far is connected to job two at {url}" in agent.stderr.read()
            assert coordinator.wait(DEADLINE) == 0
        finally:
            for process in (agent, coordinator):
                if process.poll() is None:
                    process.send_signal(signal.SIGKILL)
                    process.wait()
            agent.stderr.close()
    steps = [event.step for event in read_events(events) if isinstance(event, StepCommitted)]
    assert steps == [1, 2, 3, 4, 5]
    said = (tmp_path / "log").read_text()
    for line in (f"waiting for 1 node: holdfast agent --address {url} -- SCRIPT", "far joined", "done: 5 steps"):
        assert line in said
    assert list((tmp_path / "tmp").glob("holdfast-*")) == []  # torch leaves a cache of its own
