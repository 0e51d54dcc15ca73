"""Tests of the GPU check: a failed, hung or crashed check does not stop the others, and each result is written."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from benchmarks.gpu_check import runner
from benchmarks.gpu_check.options import NotPossibleError
from benchmarks.gpu_check.report import as_markdown, copy_logs, write_results
from benchmarks.gpu_check.runner import FAILED, NOT_RUN, PASSED, Check, Outcome, run_check, run_checks
from benchmarks.gpu_check.wheels import unpack_wheels
from places import ROOT

GOOD = "print('working'); print('{\"step_s\": 0.5}')"


def check(code: str, name: str = "one", limit_s: float = 30.0) -> Check:
    return Check(name=name, question="?", limit_s=limit_s, command=(sys.executable, "-c", code))


def outcome_of(code: str, folder: Path, limit_s: float = 30.0) -> Outcome:
    return run_check(check(code), limit_s=limit_s, environment=os.environ, folder=folder)


def test_the_figures_are_read_from_the_last_line(tmp_path: Path) -> None:
    outcome = outcome_of(GOOD, tmp_path)
    assert (outcome.status, outcome.reason, outcome.figures, outcome.output) == (PASSED, "", {"step_s": 0.5}, "")


def test_a_failing_check_keeps_its_figures_and_the_end_of_its_output(tmp_path: Path) -> None:
    figures = json.dumps({"a": 1, "problem": "too slow"})
    code = f"import sys; print('x' * 100_000); print('the end'); print({figures!r}); sys.exit(1)"
    outcome = outcome_of(code, tmp_path)
    assert (outcome.status, outcome.reason, outcome.figures) == (FAILED, "too slow", {"a": 1})
    assert "the end" in outcome.output
    assert len(outcome.output) <= 16_000


def test_a_check_that_raises_fails_with_its_traceback(tmp_path: Path) -> None:
    outcome = outcome_of("raise ValueError('broken')", tmp_path)
    assert (outcome.status, outcome.reason) == (FAILED, "exit code 1")
    assert "ValueError: broken" in outcome.output


def test_a_check_that_prints_no_figures_fails(tmp_path: Path) -> None:
    outcome = outcome_of("print('nothing measured')", tmp_path)
    assert (outcome.status, outcome.reason) == (FAILED, "printed no figures")


def test_a_crashed_check_fails_with_the_name_of_the_signal(tmp_path: Path) -> None:
    outcome = outcome_of("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", tmp_path)
    assert (outcome.status, outcome.reason) == (FAILED, "was killed by SIGSEGV")


def test_a_hanging_check_is_ended_with_its_children(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print('child', child.pid, flush=True)\n"
        "time.sleep(600)"
    )
    outcome = outcome_of(code, tmp_path, limit_s=2.0)
    assert (outcome.status, outcome.reason) == (FAILED, "took longer than 2 s")
    child = int(outcome.output.split()[1])
    deadline = time.monotonic() + 30.0
    while _runs(child) and time.monotonic() < deadline:
        time.sleep(0.01)  # a process that was killed ends once it is scheduled
    assert not _runs(child)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_check_ended_at_its_time_limit_keeps_its_figures(tmp_path: Path) -> None:
    code = (
        "import json, signal, sys, time\n"
        "def end(*_):\n"
        "    print(json.dumps({'a': 1, 'problem': 'SystemExit: 143'}), flush=True)\n"
        "    sys.exit(1)\n"
        "signal.signal(signal.SIGTERM, end)\n"
        "time.sleep(600)"
    )
    outcome = outcome_of(code, tmp_path, limit_s=2.0)
    assert (outcome.status, outcome.reason, outcome.figures) == (FAILED, "took longer than 2 s", {"a": 1})


def test_job_logs_of_a_check_are_copied_up_to_a_size_limit(tmp_path: Path) -> None:
    job = tmp_path / "files" / "training" / "timed"
    job.mkdir(parents=True)
    for name in ("events.jsonl", "output.txt", "state.bin"):
        (job / name).write_text("x" * 5_000_000)
    copy_logs(tmp_path / "files", "training", tmp_path / "logs")
    copied = {path.name: path.stat().st_size for path in (tmp_path / "logs" / "training" / "timed").iterdir()}
    assert copied == {"events.jsonl": 4_000_000, "output.txt": 4_000_000}


def test_an_impossible_check_counts_as_not_run(tmp_path: Path) -> None:
    outcome = outcome_of('import sys; print(\'{"problem": "no NCCL"}\'); sys.exit(3)', tmp_path)
    assert (outcome.status, outcome.reason, outcome.output) == (NOT_RUN, "no NCCL", "")


def test_results_are_reported_after_each_check_including_failed_ones(tmp_path: Path) -> None:
    seen: list[list[str]] = []

    def on_outcome(outcomes: Sequence[Outcome]) -> str:
        seen.append([outcome.status for outcome in outcomes])
        return ""

    checks = [check("import os; os.abort()", "crashes"), check(GOOD, "works")]
    run_checks(checks, budget_s=60.0, environment=os.environ, folder=tmp_path, on_outcome=on_outcome)
    assert seen == [[FAILED], [FAILED, PASSED]]


def test_a_check_longer_than_the_remaining_budget_is_not_run(tmp_path: Path) -> None:
    times = iter([0.0, 1.0, 55.0, 55.0])
    checks = [check(GOOD, "first"), check(GOOD, "long", limit_s=100.0), check(GOOD, "short", limit_s=5.0)]
    outcomes = run_checks(
        checks,
        budget_s=60.0,
        environment=os.environ,
        folder=tmp_path,
        on_outcome=lambda outcomes: "",
        clock=lambda: next(times),
    )
    assert [(outcome.status, outcome.reason) for outcome in outcomes] == [
        (PASSED, ""),
        (NOT_RUN, "no time left"),
        (PASSED, ""),
    ]


def test_a_reason_to_stop_is_given_for_all_later_checks(tmp_path: Path) -> None:
    checks = [check(GOOD, "first"), check(GOOD, "second")]
    outcomes = run_checks(
        checks, budget_s=60.0, environment=os.environ, folder=tmp_path, on_outcome=lambda outcomes: "there is no GPU"
    )
    assert [(outcome.status, outcome.reason) for outcome in outcomes] == [(PASSED, ""), (NOT_RUN, "there is no GPU")]


def test_results_replace_earlier_results(tmp_path: Path) -> None:
    machine = {"gpu": "NVIDIA H100 80GB", "versions": {"torch": "2.11"}}
    outcome = Outcome(name="one", question="?", status=FAILED, reason="a | b", figures={"step": {"s": 0.123456}})
    for _ in range(2):
        path = write_results(tmp_path, machine, [outcome])
    assert path.name == "gpu-check-nvidia-h100-80gb.json"
    assert json.loads(path.read_text())["checks"][0]["figures"] == {"step": {"s": 0.123456}}
    assert path.with_suffix(".md").read_text() == as_markdown(machine, [outcome])
    assert "| one | failed: a \\| b | step s 0.1235 |" in path.with_suffix(".md").read_text()
    assert len(list(tmp_path.iterdir())) == 2


def test_wheels_are_unpacked(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "thing-1-py3-none-any.whl", "w") as archive:
        archive.writestr("thing/__init__.py", "")
    assert unpack_wheels(tmp_path, tmp_path / "target") == 1
    assert (tmp_path / "target" / "thing" / "__init__.py").exists()
    with pytest.raises(NotPossibleError, match="has no wheels"):
        unpack_wheels(tmp_path / "target", tmp_path)


@pytest.mark.parametrize("number", [signal.SIGRTMIN + 5, signal.SIGKILL])
def test_each_signal_that_ends_a_check_has_a_name(number: int, tmp_path: Path) -> None:
    outcome = outcome_of(f"import os; os.kill(os.getpid(), {int(number)})", tmp_path)
    assert outcome.status == FAILED
    assert outcome.reason.startswith("was killed by ")


@pytest.mark.parametrize(
    "code",
    [
        "import sys; sys.stdout.buffer.write(bytes(range(256)) * 100_000)",
        "print('x' * 50_000_000)",
        "print('[' * 200_000)",
        "print('NaN')",
    ],
)
def test_output_without_a_json_object_has_no_figures(code: str, tmp_path: Path) -> None:
    outcome = outcome_of(code, tmp_path)
    assert (outcome.status, outcome.reason) == (FAILED, "printed no figures")
    assert len(outcome.output) <= 16_000
    write_results(tmp_path, {"gpu": "none"}, [outcome])


def test_figures_are_found_after_megabytes_of_output(tmp_path: Path) -> None:
    outcome = outcome_of(f"print('x' * 50_000_000); {GOOD}", tmp_path)
    assert (outcome.status, outcome.figures) == (PASSED, {"step_s": 0.5})


def test_an_impossible_check_without_a_reason_fails(tmp_path: Path) -> None:
    outcome = outcome_of("import sys; sys.exit(3)", tmp_path)
    assert (outcome.status, outcome.reason) == (FAILED, "exit code 3")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # it outlives its Popen object
def test_a_check_that_cannot_be_killed_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that hangs in a driver survives SIGKILL."""
    monkeypatch.setattr(runner, "GRACE_S", 0.2)
    with monkeypatch.context() as patch:
        patch.setattr(os, "killpg", lambda *_: None)
        code = (
            "import os, signal, time; signal.signal(15, signal.SIG_IGN); print(os.getpid(), flush=True); time.sleep(60)"
        )
        outcome = outcome_of(code, tmp_path, limit_s=2.0)
    os.kill(int(outcome.output), signal.SIGKILL)
    assert (outcome.status, outcome.reason) == (FAILED, "took longer than 2 s")
    assert outcome.seconds < 30.0


def test_after_an_interrupt_the_check_is_ended_and_the_rest_is_not_run(tmp_path: Path) -> None:
    ended = tmp_path / "ended"
    code = (
        "import os, signal, sys, time\n"
        f"signal.signal(signal.SIGTERM, lambda *_: (open({str(ended)!r}, 'w').close(), sys.exit(1)))\n"
        "os.kill(os.getppid(), signal.SIGINT)\n"
        "time.sleep(60)"
    )
    seen: list[int] = []

    def on_outcome(outcomes: Sequence[Outcome]) -> str:
        seen.append(len(outcomes))
        return ""

    checks = [check(GOOD, "done"), check(code, "interrupted"), check(GOOD, "later")]
    outcomes = run_checks(checks, budget_s=60.0, environment=os.environ, folder=tmp_path, on_outcome=on_outcome)
    assert [(one.status, one.reason) for one in outcomes] == [
        (PASSED, ""),
        (NOT_RUN, "interrupted"),
        (NOT_RUN, "interrupted"),
    ]
    assert seen == [1, 2, 3]
    assert ended.exists()


def test_concurrent_writers_of_the_same_results_do_not_conflict(tmp_path: Path) -> None:
    outcome = Outcome(name="one", question="?", status=PASSED)
    with ThreadPoolExecutor(8) as pool:
        for path in pool.map(lambda _: write_results(tmp_path, {"gpu": "cpu"}, [outcome]), range(400)):
            assert json.loads(path.read_text())["machine"] == {"gpu": "cpu"}
    assert len(list(tmp_path.iterdir())) == 2


def test_results_can_contain_any_text(tmp_path: Path) -> None:
    outcome = Outcome(name="one", question="?", status=FAILED, reason="no file \udcff\ufffd", figures={"a": "\x1b[0m"})
    path = write_results(tmp_path, {"gpu": "cpu", "nvidia_smi": "a\nb"}, [outcome])
    table = path.with_suffix(".md").read_text()
    assert "\x1b" not in table
    assert len(table.splitlines()) == 5


def wheel(folder: Path, name: str) -> Path:
    with zipfile.ZipFile(folder / name, "w") as archive:
        archive.writestr("thing/__init__.py", "")
    return folder / name


@pytest.mark.parametrize("tags", ["cp27-cp27m-linux_x86_64", "py3-none-win_amd64"])
def test_a_wheel_for_another_machine_is_refused(tags: str, tmp_path: Path) -> None:
    wheel(tmp_path, f"thing-1-{tags}.whl")
    with pytest.raises(NotPossibleError, match=rf"thing-1-{tags}.whl.*gpu_wheels.sh"):
        unpack_wheels(tmp_path, tmp_path / "target")


def test_a_wheel_of_the_stable_abi_is_unpacked(tmp_path: Path) -> None:
    wheel(tmp_path, f"thing-1-cp37-abi3-manylinux_2_17_{platform.machine()}.manylinux2014_{platform.machine()}.whl")
    assert unpack_wheels(tmp_path, tmp_path / "target") == 1


def test_a_broken_wheel_is_reported_by_name(tmp_path: Path) -> None:
    (tmp_path / "thing-1-py3-none-any.whl").write_text("half a file")
    with pytest.raises(NotPossibleError, match=r"thing-1-py3-none-any\.whl"):
        unpack_wheels(tmp_path, tmp_path / "target")


def gpu_check(out: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--out", str(out), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_check_runs_without_a_gpu(tmp_path: Path) -> None:
    done = gpu_check(tmp_path, "--only", "nccl")
    assert done.returncode == 2, done.stdout
    (path,) = tmp_path.glob("*.json")
    machine, nccl = json.loads(path.read_text())["checks"]
    assert machine["status"] == nccl["status"] == NOT_RUN
    assert machine["reason"] == nccl["reason"] != ""


def test_all_checks_pass_on_a_cpu(tmp_path: Path) -> None:
    done = gpu_check(tmp_path, "--device", "cpu", "--quick")
    assert done.returncode == 0, done.stdout
    found = statuses(tmp_path)
    assert set(found.values()) == {PASSED}
    assert len(found) == 9


def statuses(folder: Path) -> dict[str, str]:
    return {one["name"]: one["status"] for one in json.loads((folder / "gpu-check-cpu.json").read_text())["checks"]}


@pytest.mark.parametrize(
    "arguments",
    [
        ("--budget", "nan"),
        ("--budget", "0"),
        ("--budget", "-3"),
        ("--budget", "soon"),
        ("--only", "everything"),
        ("--device", "tpu"),
        ("--out", "/dev/null/results"),
        ("--out", __file__),
        ("--out", "/proc/results"),
        ("--logs", "/dev/null/logs"),
        ("--logs", __file__),
        ("--wheels", "/does/not/exist"),
        ("--wheels", __file__),
        ("extra",),
    ],
)
def test_bad_input_is_refused_before_any_check(arguments: tuple[str, ...], tmp_path: Path) -> None:
    done = gpu_check(tmp_path, "--device", "cpu", "--only", "nccl", *arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert arguments[-1] in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_results_that_cannot_be_written_do_not_stop_the_checks(tmp_path: Path) -> None:
    (tmp_path / "gpu-check-cpu.json").mkdir()
    done = gpu_check(tmp_path, "--device", "cpu", "--only", "machine")
    assert done.returncode == 0, done.stderr
    assert "| machine | passed |" in done.stdout
    assert "gpu-check-cpu.json" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 130), (signal.SIGKILL, -9)])
def test_no_process_outlives_the_gpu_check(number: signal.Signals, code: int, tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--device", "cpu", "--only", "four_workers"]
    with subprocess.Popen(
        [*command, "--out", str(tmp_path / "out")], cwd=ROOT, env=environment, stdout=subprocess.PIPE
    ) as run:
        wait_until(lambda: any("holdfast\0run" in line for line in processes_below(tmp_path)))
        run.send_signal(number)
        run.communicate(timeout=60)
    assert run.returncode == code
    wait_until(lambda: not processes_below(tmp_path))
    if number != signal.SIGKILL:
        assert statuses(tmp_path / "out") == {"machine": PASSED, "four_workers": NOT_RUN}
        assert [path.name for path in tmp_path.iterdir()] == ["out"]


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30.0
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def processes_below(folder: Path) -> list[str]:
    """Return the command lines of all processes with `TMPDIR` at or below this folder."""
    found: list[str] = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"TMPDIR={folder}".encode() in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_text())
    return [line for line in found if line]  # a zombie has none
