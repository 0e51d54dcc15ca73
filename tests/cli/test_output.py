"""What commands print goes on, or is given up, where it cannot be written."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys

import pytest

from holdfast import cli
from holdfast.errors import EXIT_FAILED

_JOB = """
import sys
from holdfast.cli.output import lasting_output, warn
with lasting_output() as say:
    for number in range(3):
        say(f"step {number}")
        warn(f"warning {number}")
sys.exit(7)
"""


def test_a_job_goes_on_although_its_output_goes_to_a_full_disk() -> None:
    with open("/dev/full", "w") as full:
        ended = subprocess.run([sys.executable, "-c", _JOB], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert ended.returncode == 7
    first, *warnings = ended.stderr.splitlines()
    assert first == "holdfast: the output cannot be written: No space left on device; the job goes on"
    assert warnings == [f"warning {number}" for number in range(3)]


@pytest.mark.parametrize("both", [False, True])
def test_so_it_does_where_errors_cannot_be_written_either(both: bool) -> None:
    with open("/dev/full", "w") as full:
        stdout = full if both else subprocess.PIPE
        ended = subprocess.run([sys.executable, "-c", _JOB], stdout=stdout, stderr=full, text=True, timeout=60)
    assert ended.returncode == 7
    assert both or ended.stdout.splitlines() == [f"step {number}" for number in range(3)]


def test_a_command_that_writes_to_a_full_disk_ends_with_one_line(
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


def test_the_log_has_the_time_of_day_as_events_have_it() -> None:
    program = (
        "import logging; from holdfast.cli.output import start_log; start_log('info');"
        "logging.getLogger('holdfast.coordinator').info('job %s begins', 'j')"
    )
    said = subprocess.run([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True, check=True).stderr
    assert re.fullmatch(r"\d\d:\d\d:\d\d\.\d{3} job j begins\n", said)
