"""Linux memory statistics, read from folders made like /proc and /sys/fs/cgroup."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest

from holdfast.control.agent.memory import MemoryReading, MemoryRing, OomCounter, available_bytes, resident_bytes
from holdfast.control.agent.worker_slots import ProcessSlot
from holdfast.coordination.failures.classes import FailureClasses
from holdfast.protocol.messages.memory import MAX_MEMORY_SAMPLES, MemorySample


@dataclass
class Machine:
    proc: Path
    groups: Path

    def write(self, path: str, text: str) -> None:
        file = self.proc.parent / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def counter(self, pid: int = 7) -> OomCounter:
        return OomCounter(pid, proc=self.proc, groups=self.groups)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    made = Machine(tmp_path / "proc", tmp_path / "cgroup")
    made.write("proc/vmstat", "pgfault 12\noom_kill 3\n")
    made.write("proc/meminfo", "MemTotal: 4000 kB\nMemAvailable: 3000 kB\n")
    return made


@pytest.mark.parametrize(
    ("group", "events", "before", "after"),
    [
        ("0::/job/x\n", "cgroup/job/x/memory.events", "low 0\noom_kill 1\n", "low 0\noom_kill 2\n"),
        ("0::/not/mounted\n", "cgroup/memory.events", "oom_kill 0\n", "oom_kill 1\n"),
        ("4:memory:/job\n0::/\n", "cgroup/memory/job/memory.oom_control", "oom_kill 5\n", "oom_kill 6\n"),
        ("3:cpu:/\n", "proc/vmstat", "oom_kill 3\n", "oom_kill 4\n"),
    ],
    ids=["version 2", "in a container", "version 1", "of the machine"],
)
def test_oom_kills_are_counted_in_the_cgroup_of_the_process(
    machine: Machine, group: str, events: str, before: str, after: str
) -> None:
    machine.write("proc/7/cgroup", group)
    machine.write(events, before)
    counter = machine.counter()
    assert not counter.has_struck()
    machine.write(events, after)
    assert counter.has_struck()


def test_without_readable_counters_no_oom_kill_is_reported(tmp_path: Path) -> None:
    assert not OomCounter(7, proc=tmp_path, groups=tmp_path).has_struck()
    assert available_bytes(proc=tmp_path, groups=tmp_path) is None


def test_available_memory_is_limited_by_the_cgroup_or_the_machine(machine: Machine) -> None:
    assert available_bytes(proc=machine.proc, groups=machine.groups) == 3000 << 10
    machine.write("proc/self/cgroup", "0::/job\n")
    machine.write("cgroup/job/memory.max", "max\n")
    machine.write("cgroup/job/memory.current", "1000\n")
    assert available_bytes(proc=machine.proc, groups=machine.groups) == 3000 << 10
    machine.write("cgroup/job/memory.max", "5000\n")
    assert available_bytes(proc=machine.proc, groups=machine.groups) == 4000


def test_available_memory_of_this_machine_is_read() -> None:
    assert (available_bytes() or 0) > 1 << 20
    assert not OomCounter(os.getpid()).has_struck()


def test_a_process_killed_during_an_oom_event_is_reported_as_out_of_memory(machine: Machine) -> None:
    machine.write("proc/7/cgroup", "0::/\n")
    place = ProcessSlot(index=0, worker="n/0/ab", oom=machine.counter())
    assert place.describe_end(-signal.SIGKILL, "train.py").detail == "SIGKILL"
    machine.write("proc/vmstat", "oom_kill 4\n")
    down = place.describe_end(-signal.SIGKILL, "train.py")
    assert FailureClasses().classify(down.kind, down.detector, down.detail).status == "out_of_memory"
    assert place.describe_end(-signal.SIGTERM, "train.py").detail == "SIGTERM"


def test_memory_samples_are_oldest_first_without_repeated_values() -> None:
    ring = MemoryRing()
    for second, memory in enumerate((1, 5, 5, 5, 9)):
        ring.add(float(second), MemoryReading(memory=memory, sent=10 * second if second == 4 else 0))
    samples = ring.samples_since(4.5, 3.5)
    assert samples == (
        MemorySample(ago_s=3.5, memory=5),
        MemorySample(ago_s=1.5, memory=5),
        MemorySample(ago_s=0.5, memory=9, sent=40),
    )
    assert MemoryRing().samples_since(4.5, 3.5) == ()


def test_only_the_newest_memory_samples_are_reported() -> None:
    ring = MemoryRing()
    for look in range(10_000):
        ring.add(look / 100, MemoryReading(memory=look))
    samples = ring.samples_since(100.0, 1000.0)
    assert len(samples) == MAX_MEMORY_SAMPLES
    assert samples[-1] == MemorySample(ago_s=0.01, memory=9999)


def test_the_resident_memory_of_an_ended_process_reads_as_zero(machine: Machine) -> None:
    machine.write("proc/7/statm", "900 300 100 1 0 500 0\n")
    assert resident_bytes(7, proc=machine.proc) == 300 * os.sysconf("SC_PAGE_SIZE")
    assert resident_bytes(8, proc=machine.proc) == 0
    assert resident_bytes(os.getpid()) > 1 << 20
