"""The outermost frame of a worker process: how it reports each way in which a script ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.control.agent.worker_process import run_script
from holdfast.control.agent.worker_slots import ProcessSlot
from holdfast.control.link.exit_after_exception import ScriptErrorHook
from holdfast.control.link.framing import Crashed
from holdfast.control.link.worker_settings import WorkerSettings
from holdfast.errors import EXIT_BAD_INPUT, EXIT_FAILED, EXIT_INTERRUPTED
from holdfast.protocol.failures import FailureKind
from holdfast.protocol.job_spec import JobSpec


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Crashed]]:
    """The crash reports that a session in this process receives; stderr shows when it learns of the end."""
    crashes: list[Crashed] = []

    def keep(crashed: Crashed) -> bool:
        crashes.append(crashed)
        return True

    settings = WorkerSettings(spec=JobSpec(script="train.py"), socket="/nowhere", worker="n0/0/a")
    for name, value in settings.to_environment().items():
        monkeypatch.setenv(name, value)
    words = ScriptErrorHook(
        lambda: print("ending", file=sys.stderr), lambda error: error, keep, lambda: print("saving", file=sys.stderr)
    )
    words.install()
    yield crashes
    words.remove()


@pytest.mark.parametrize(
    ("raised", "message", "code"),
    [
        ("ValueError('oops')", "ValueError: oops", EXIT_FAILED),
        ("KeyboardInterrupt", "KeyboardInterrupt", EXIT_INTERRUPTED),
        ("BaseException('oops')", "BaseException: oops", EXIT_FAILED),
        ("GeneratorExit", "GeneratorExit", EXIT_FAILED),
    ],
)
def test_a_crash_report_precedes_the_traceback_for_any_exception(
    kept: list[Crashed], tmp_path: Path, capfd: pytest.CaptureFixture[str], raised: str, message: str, code: int
) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"\nraise {raised}\n")
    assert run_script(str(script)) == code
    (crashed,) = kept
    assert (crashed.kind, crashed.detail) == (FailureKind.EXCEPTION, f"{message} (train.py, line 2)")
    assert (crashed.exit_code, crashed.final) == (code, False)
    assert crashed.error is not None
    assert crashed.error.traceback.endswith(f"{message}\n")
    error = capfd.readouterr().err
    assert error.startswith("ending\n"), "the report must precede the traceback, which takes time to format"
    assert error.endswith(f"{message}\n")


def test_a_second_default_process_group_is_bad_input(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """torch's own error for this does not say how to fix the script."""
    script = tmp_path / "train.py"
    made = "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
    script.write_text(
        f"import torch.distributed as dist\ntry:\n    {made}    {made}finally:\n    dist.destroy_process_group()\n"
    )
    assert run_script(str(script)) == EXIT_BAD_INPUT
    printed = capfd.readouterr().err.splitlines()
    assert len(printed) == 1
    assert "leave it out, holdfast.init(layout=...) has made the layout's groups" in printed[0]
    assert printed[0].endswith(" (train.py, line 4)")


def test_a_reported_crash_remains_the_cause_if_the_process_is_then_killed() -> None:
    crashed = Crashed(worker="n0/0/a", kind=FailureKind.EXCEPTION, detail="ValueError: oops", exit_code=1)
    place = ProcessSlot(index=0, worker="n0/0/a", crashed=crashed, hung="its way out has taken 40 s")
    down = place.describe_end(-signal.SIGKILL, "train.py")
    assert (down.kind, down.detail) == (FailureKind.EXCEPTION, "ValueError: oops")


def test_an_exception_of_a_child_process_is_located_by_its_own_frames(kept: list[Crashed], tmp_path: Path) -> None:
    script, data = tmp_path / "train.py", tmp_path / "data.py"
    script.write_text(
        "from holdfast.errors import TracebackElsewhereError\n"
        "error, cause = ValueError('oops'), TracebackElsewhereError('there')\n"
        f"cause.frames = (('/lib/holdfast/loader.py', 3), ({str(data)!r}, 17), ('/lib/site-packages/x.py', 1))\n"
        "raise error from cause\n"
    )
    assert run_script(str(script)) == EXIT_FAILED
    (crashed,) = kept
    assert crashed.detail == "ValueError: oops (data.py, line 17)"
    assert crashed.error is not None
    assert crashed.error.place == "ValueError (data.py, line 17)"


@pytest.mark.parametrize(
    "words", ["Default process group has not been initialized, please", "environment variable RANK expected, but not"]
)
def test_a_script_written_for_torchrun_ends_the_job_immediately(
    kept: list[Crashed], tmp_path: Path, capfd: pytest.CaptureFixture[str], words: str
) -> None:
    """Every worker fails in the same way, so the job prints the error once and no worker prints it."""
    script = tmp_path / "train.py"
    script.write_text(f"\nraise ValueError({words!r})\n")
    assert run_script(str(script)) == EXIT_BAD_INPUT
    (crashed,) = kept
    assert (crashed.kind, crashed.exit_code, crashed.final) == (FailureKind.PROCESS_EXIT, EXIT_BAD_INPUT, True)
    assert crashed.detail.startswith(f"ValueError: {words} (train.py, line 2): there is no process group to join")
    assert crashed.error is not None
    assert "line 2" in crashed.error.traceback
    assert capfd.readouterr().err == "ending\n"


def test_a_crash_in_native_code_prints_the_line_of_the_script(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    settings = WorkerSettings(spec=JobSpec(script="train.py"), socket="/nowhere", worker="n0/0/a")
    worker = "import sys; from holdfast.control.agent.worker_process import run_script; run_script(sys.argv[1])"
    ended = subprocess.run(
        [sys.executable, "-c", worker, str(script)],
        env={**os.environ, **settings.to_environment()},
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
    )
    assert ended.returncode == -signal.SIGSEGV
    assert "Fatal Python error: Segmentation fault" in ended.stderr
    assert f'File "{script}", line 2' in ended.stderr
