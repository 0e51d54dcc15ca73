"""Processes that execute an order: their errors when they cannot."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import msgspec
import pytest

from holdfast.control.agent.settings import AgentSettings
from holdfast.control.launch.children import AgentOrder, spawn
from holdfast.errors import EXIT_BAD_INPUT, EXIT_INTERRUPTED, EXIT_OUR_FAULT
from holdfast.protocol.job_spec import JobSpec

_MAIN = """
import sys
from holdfast.control.launch import children
def begins(order):
    raise {error}
children.execute_order = begins
sys.exit(children.main())
"""


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [("KeyboardInterrupt", EXIT_INTERRUPTED, ""), ("ValueError('odd')", EXIT_OUR_FAULT, "ValueError: odd\n")],
)
def test_a_child_interrupted_at_its_start_prints_no_traceback(error: str, code: int, words: str) -> None:
    """A pool may take its node back immediately, but an error of holdfast is reported in full."""
    spec = JobSpec(name="a", script="/train.py")
    settings = AgentSettings(spec=spec, coordinator="http://127.0.0.1:9", token="", node="n", folder="/", digest="")
    order = msgspec.json.encode(AgentOrder(settings=settings, log="warning"))
    child = [sys.executable, "-c", _MAIN.format(error=error)]
    done = subprocess.run(child, input=order, capture_output=True, timeout=60, check=False)
    assert done.returncode == code, done.stderr
    assert done.stderr.decode()[-len(words) or None :] == words


@pytest.mark.parametrize("after_s", [0.0, 0.05, 0.1, 0.2, 0.3, 0.5])
def test_a_child_interrupted_during_imports_prints_no_traceback(
    after_s: float, capfd: pytest.CaptureFixture[str]
) -> None:
    spec = JobSpec(name="a", script="/train.py")
    settings = AgentSettings(spec=spec, coordinator="http://127.0.0.1:9", token="", node="n", folder="/", digest="")
    child = spawn(AgentOrder(settings=settings, log="warning"), os.environ)
    time.sleep(after_s)
    child.send_signal(signal.SIGINT)
    code = child.reap()
    # CPython ends silently with the signal if KeyboardInterrupt occurs inside exec() of a text, as in dataclasses.
    assert code in (EXIT_INTERRUPTED, EXIT_BAD_INPUT, -signal.SIGINT), (
        "the child was interrupted, or found no such script"
    )
    assert "Traceback" not in capfd.readouterr().err
