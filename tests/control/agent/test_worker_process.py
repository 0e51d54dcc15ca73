"""The outermost frame of a worker process: what it makes of the ways in which a script ends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.control.agent.worker_process import run_script
from holdfast.control.link.framing import Crashed
from holdfast.control.link.last_words import LastWords
from holdfast.control.link.worker_settings import WorkerSettings
from holdfast.errors import EXIT_FAILED, EXIT_INTERRUPTED
from holdfast.protocol.failures import FailureKind
from holdfast.protocol.job_spec import JobSpec


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Crashed]]:
    """What a session that trains in this process is given to keep."""
    said: list[Crashed] = []

    def keep(crashed: Crashed) -> bool:
        said.append(crashed)
        return True

    settings = WorkerSettings(spec=JobSpec(script="train.py"), socket="/nowhere", worker="n0/0/a")
    for name, value in settings.to_environment().items():
        monkeypatch.setenv(name, value)
    words = LastWords(lambda error: error, keep)
    words.install()
    yield said
    words.remove()


@pytest.mark.parametrize(
    ("raised", "said", "code"),
    [
        ("ValueError('oops')", "ValueError: oops", EXIT_FAILED),
        ("KeyboardInterrupt", "KeyboardInterrupt", EXIT_INTERRUPTED),
        ("BaseException('oops')", "BaseException: oops", EXIT_FAILED),
        ("GeneratorExit", "GeneratorExit", EXIT_FAILED),
    ],
)
def test_whatever_a_script_raises_what_it_has_is_kept(
    kept: list[Crashed], tmp_path: Path, capfd: pytest.CaptureFixture[str], raised: str, said: str, code: int
) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"\nraise {raised}\n")
    assert run_script(str(script)) == code
    (crashed,) = kept
    assert (crashed.kind, crashed.detail) == (FailureKind.EXCEPTION, f"{said} (train.py, line 2)")
    assert (crashed.exit_code, crashed.final) == (code, False)
    assert crashed.error is not None
    assert crashed.error.traceback.endswith(f"{said}\n")
    assert said in capfd.readouterr().err
