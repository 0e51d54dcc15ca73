"""A script that trains alone ends as under an agent: with the exit code of its error."""

from __future__ import annotations

import subprocess
import sys

import pytest

from holdfast.control.link.solo_exit import SoloExitHook
from holdfast.errors import BadInputError, JobFailedError

SCRIPT = """
from holdfast.control.link.solo_exit import SoloExitHook
from holdfast.errors import {error}
SoloExitHook(lambda: print("saved")).install()
raise {error}("what is wrong")
"""


@pytest.mark.parametrize(("error", "code"), [("BadInputError", 2), ("JobFailedError", 1)])
def test_python_exits_with_the_exit_code_of_the_error(error: str, code: int) -> None:
    ended = subprocess.run([sys.executable, "-c", SCRIPT.format(error=error)], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (code, "saved\n")
    assert ended.stderr.startswith("Traceback")
    assert ended.stderr.endswith(f"holdfast.errors.{error}: what is wrong\n")


def test_the_previous_exception_hook_prints_each_error_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The previous hook prints it once, and a second job's hook replaces the first one's."""
    printed: list[BaseException] = []
    saved: list[str] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: printed.append(error))
    SoloExitHook(lambda: saved.append("first")).install()
    SoloExitHook(lambda: saved.append("second")).install()
    errors = [LookupError("mine"), BadInputError("ours"), JobFailedError("ours")]
    sys.excepthook(LookupError, errors[0], None)
    for error in errors[1:]:
        with pytest.raises(SystemExit):
            sys.excepthook(type(error), error, None)
    assert printed == errors
    assert saved == ["second"] * 3
