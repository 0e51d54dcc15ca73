"""Threads that wait for a CPU core: measured on real threads, and on a recorded /proc."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from holdfast.control.agent.stacks import CoreMeter, thread_clock
from holdfast.coordination.timing.reading import Reading
from holdfast.protocol.messages.progress import Activity

READING = Reading(generation=1, step=1, activity=Activity.COMPUTE, micro_batch=0, since=0.0, world=1)
SPIN = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); print('up', flush=True)\nwhile True: pass"
SLEEP = "import time; print('up', flush=True); time.sleep(600)"


@contextmanager
def running(*programs: str) -> Iterator[list[int]]:
    """Run these programs until the end of the block, which begins once all have started."""
    children = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) for code in programs]
    try:
        for child in children:
            assert child.stdout is not None
            child.stdout.readline()
        yield [child.pid for child in children]
    finally:
        for child in children:
            child.send_signal(signal.SIGKILL)
            child.communicate()


def starved_s(meter: CoreMeter) -> float:
    return meter.add_to(READING, time.monotonic(), closely=False).starved_s


def test_processes_that_share_a_core_are_starved_and_a_sleeping_one_is_not() -> None:
    with running(SPIN, SPIN, SLEEP) as pids:
        *spinning, asleep = map(CoreMeter, pids)
        before_s = starved_s(asleep)
        wait_until(lambda: all(starved_s(meter) > 0.1 for meter in spinning))
        assert starved_s(asleep) - before_s < 0.1
    assert starved_s(asleep) == 0.0


def test_other_threads_are_read_only_on_request() -> None:
    meter, done = CoreMeter(os.getpid()), threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    try:
        assert meter.add_to(READING, 1.0, closely=False).others_starved_s == {}
        found = meter.add_to(READING, 2.0, closely=True).others_starved_s
        assert thread.native_id in found
        assert os.getpid() not in found
    finally:
        done.set()
        thread.join()


def write(folder: Path, state: str, ran_ns: int, waited_ns: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "stat").write_text(f"7 (a ) R b) {state} 1 2 3\n")
    (folder / "schedstat").write_text(f"{ran_ns} {waited_ns} 12\n")


def test_an_unfinished_wait_for_a_core_counts(tmp_path: Path) -> None:
    """Recorded next to three busy processes: a main thread is runnable for 0.34 s while no counter moves."""
    meter = CoreMeter(7, proc=tmp_path)
    write(tmp_path / "7", "R", 5_001_000_000, 2_021_000_000)
    looks = [meter.add_to(READING, at, closely=False).starved_s for at in (0.11, 0.23, 0.34)]
    assert looks == pytest.approx([2.021, 2.141, 2.251])
    write(tmp_path / "7", "S", 5_001_000_000, 2_021_000_000)
    assert meter.add_to(READING, 0.44, closely=False).starved_s == pytest.approx(2.021)


@pytest.mark.parametrize("state", ["T", "S", "D", "Z"])
def test_a_thread_that_is_not_runnable_does_not_wait_for_a_core(tmp_path: Path, state: str) -> None:
    meter = CoreMeter(7, proc=tmp_path)
    write(tmp_path / "7", state, 5, 2_000_000_000)
    assert [meter.add_to(READING, at, closely=False).starved_s for at in (0.0, 9.0)] == [2.0, 2.0]


def test_no_wait_is_reported_without_kernel_counters(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    assert thread_clock(str(tmp_path / "7")) is None
    write(tmp_path / "7", "R", 0, 0)
    (tmp_path / "7" / "schedstat").write_text("nonsense")
    assert CoreMeter(7, proc=tmp_path).add_to(READING, 1.0, closely=True) == READING


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30.0
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)
