"""Tests of commands with unwritable output: a job continues, other commands end."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
import threading

import pytest

from holdfast import cli
from holdfast.cli import output
from holdfast.errors import EXIT_BAD_INPUT, EXIT_FAILED

_JOB = """
import sys
from holdfast.cli.output import lasting_output, warn
with lasting_output() as say:
    for number in range(3):
        say(f"step {number}")
        warn(f"warning {number}")
sys.exit(7)
"""


def test_a_job_continues_if_the_disk_of_its_output_is_full() -> None:
    with open("/dev/full", "w") as full:
        ended = subprocess.run([sys.executable, "-c", _JOB], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert ended.returncode == 7
    first, *warnings = ended.stderr.splitlines()
    assert first == "holdfast: the output cannot be written: No space left on device; the job goes on"
    assert warnings == [f"warning {number}" for number in range(3)]


@pytest.mark.parametrize("both", [False, True])
def test_a_job_continues_if_the_reader_of_its_output_closes(both: bool) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    stderr = writer if both else subprocess.PIPE
    ended = subprocess.run([sys.executable, "-c", _JOB], stdout=writer, stderr=stderr, text=True, timeout=60)
    os.close(writer)
    assert ended.returncode == 7
    if not both:
        first, *warnings = ended.stderr.splitlines()
        assert first == "holdfast: the output cannot be written: Broken pipe; the job goes on"
        assert warnings == [f"warning {number}" for number in range(3)]


@pytest.mark.parametrize("both", [False, True])
def test_a_job_continues_if_its_errors_cannot_be_written(both: bool) -> None:
    with open("/dev/full", "w") as full:
        stdout = full if both else subprocess.PIPE
        ended = subprocess.run([sys.executable, "-c", _JOB], stdout=stdout, stderr=full, text=True, timeout=60)
    assert ended.returncode == 7
    assert both or ended.stdout.splitlines() == [f"step {number}" for number in range(3)]


def test_a_full_disk_ends_a_command_with_one_error_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(**_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "rows.csv")

    monkeypatch.setattr(cli, "app", fails)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == EXIT_FAILED
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "holdfast: rows.csv: No space left on device; make room, or write elsewhere"


def test_log_lines_begin_with_the_time_of_day() -> None:
    program = (
        "import logging; from holdfast.cli.output import start_log; start_log('info');"
        "logging.getLogger('holdfast.coordinator').info('job %s begins', 'j')"
    )
    said = subprocess.run([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True, check=True).stderr
    assert re.fullmatch(r"\d\d:\d\d:\d\d\.\d{3} job j begins\n", said)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_characters_outside_the_terminals_encoding_are_replaced(encoding: str) -> None:
    program = (
        "from holdfast.cli.output import lasting_output, open_standard_streams; open_standard_streams()\n"
        "with lasting_output() as say: say('node-0 failed: \\u4e2d\\udcff')"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONIOENCODING": encoding},
        stdout=subprocess.PIPE,
        check=True,
    )
    shown = "\u4e2d" if encoding == "utf-8" else "?"
    assert ended.stdout.decode(encoding) == f"node-0 failed: {shown}?\n"


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["stauts"], "No such command 'stauts'. Did you mean 'status'? See --help"),
        (["spares", "paln"], "No such command 'paln'. Did you mean 'plan'? See --help"),
        (["demo", "--steps", "3"], "Input should be greater than or equal to 16, not '3'; see --help"),
        (["run", "--port", "x", "train.py"], "unable to parse string as an integer, not 'x'; see --help"),
    ],
)
def test_invalid_arguments_are_reported_with_a_remedy(
    words: list[str], complaint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["holdfast", *words])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == EXIT_BAD_INPUT
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("holdfast: ")
    assert line.endswith(complaint)


@pytest.mark.parametrize("group", ["", "examples", "checkpoints", "experts", "spares"])
def test_a_command_group_without_a_command_prints_its_help(
    group: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["holdfast", *group.split()])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == EXIT_BAD_INPUT
    first, *others = capsys.readouterr().err.splitlines()
    assert first.startswith("Usage: ")
    assert "Options:" in others


@pytest.mark.parametrize(
    "call", ["cli.output.print_line", "cli.output.warn", "control.processes.print_error"], ids=["say", "warn", "error"]
)
def test_each_line_is_printed_with_one_write(call: str) -> None:
    """Otherwise other processes could write to the same terminal in between."""
    module, _, name = call.rpartition(".")
    reader, writer = os.pipe2(os.O_DIRECT)  # each write is read alone
    script = f"from holdfast.{module} import {name}; {name}('first'); {name}('second')"
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with os.fdopen(reader, "rb", buffering=0) as source:
        subprocess.run(
            [sys.executable, "-c", script], stdout=writer, stderr=writer, env=environment, timeout=60, check=True
        )
        os.close(writer)
        assert [source.read(4096) for _ in range(2)] == [b"first\n", b"second\n"]


def test_lines_are_printed_in_order_and_a_stopped_terminal_never_blocks() -> None:
    seen: list[str] = []
    with output.called_in_a_thread(seen.append) as put:
        for number in range(100):
            put(f"{number}")
    assert seen == [f"{number}" for number in range(100)]
    stopped = threading.Event()

    def wait(_line: str) -> None:
        stopped.wait(60.0)

    with output.called_in_a_thread(wait) as put:
        for _ in range(20_000):
            put("line")
    stopped.set()
