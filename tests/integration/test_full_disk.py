"""A full disk does not end training: output lines are lost, the loss is reported once, and the job continues."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from job_cases import TINY

from holdfast.observability.event_lines import read_events
from holdfast.protocol.events import JobFinished, OutputLost, StepCommitted

#: The disk has room for the start of each file; the files are copied before the disk is unmounted.
RUN = """
mount -t tmpfs -o size={size} tmpfs "$1" && shift
"$@" > out 2> err; echo $? > code
cp small/* . 2> none; true
"""
STEPS = 60


def run_with_small_disk(folder: Path, *options: str, script: Path = TINY, size: str) -> tuple[int, str, str]:
    """Run a job with its folder `small` on a small disk; return the exit code, stdout and stderr."""
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-m", "true"], check=False).returncode:
        pytest.skip("no mount namespaces here")
    (folder / "small").mkdir()
    job = [sys.executable, "-m", "holdfast", "run", "--plain", "--nodes", "2", *options, str(script)]
    command = [*job, "--steps", str(STEPS), "--step-seconds", "0.02"]
    shell = ["unshare", "-m", "sh", "-c", RUN.format(size=size), "sh", "small", *command]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_RUNTIME_DIR": str(folder)}
    subprocess.run(shell, cwd=folder, env=environment, timeout=240, check=True)
    out, err = (folder / "out").read_text(), (folder / "err").read_text()
    return int((folder / "code").read_text()), out, err


def test_a_job_continues_after_its_events_and_metrics_files_fill_the_disk(tmp_path: Path) -> None:
    """The reproducers events_on_a_full_disk and metrics_on_a_full_disk failed with exit code 1 and 70."""
    outputs = ("--events", "small/events.jsonl", "--metrics-file", "small/rows.jsonl")
    code, out, err = run_with_small_disk(tmp_path, *outputs, size="16k")
    assert code == 0, out + err
    assert "Traceback" not in err
    assert f"done: {STEPS} steps" in out
    assert out.count("small/events.jsonl cannot be written: No space left on device; training goes on") == 1, out
    assert err.count("the metrics file small/rows.jsonl cannot be written: No space left on device") == 1, err
    events = list(read_events(tmp_path / "events.jsonl"))
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    assert not any(isinstance(event, JobFinished | OutputLost) for event in events), (
        "events were written after the disk was full"
    )
    assert sum(isinstance(event, StepCommitted) for event in events) > 5


def test_a_worker_log_that_fills_the_disk_is_reported_once(tmp_path: Path) -> None:
    talks = tmp_path / "talks.py"
    talks.write_text(TINY.read_text().replace("    if step.apply():\n", '    print("x" * 500)\n    if step.apply():\n'))
    shutil.copy(TINY.with_name("averaging.py"), tmp_path)
    outputs = ("--events", "events.jsonl", "--log-dir", "small")
    code, out, err = run_with_small_disk(tmp_path, *outputs, script=talks, size="8k")
    assert code == 0, out + err
    lost = [event for event in read_events(tmp_path / "events.jsonl") if isinstance(event, OutputLost)]
    nodes = [event.node for event in lost]
    assert nodes
    assert len(nodes) == len(set(nodes)), "a lost file was reported twice"
    assert all(event.file.endswith(f"{event.node}.0.log") for event in lost)
