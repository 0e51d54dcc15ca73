"""Finds resources that a job leaves behind: processes, threads, descriptors, shared memory, folders."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

#: All processes of a job have a variable of this name in their environment.
MARK = "BENCHMARK_MARK"
SHARED_MEMORY = Path("/dev/shm")
#: Allowed growth since the start: released resources are cached for a while, and the number of sockets varies.
MORE_DESCRIPTORS, MORE_THREADS = 16, 6
_PAGE_KIB = os.sysconf("SC_PAGE_SIZE") // 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessResources:
    """The resources of one process. `role`: run, coordinator, agent, zygote, worker or loader."""

    pid: int
    role: str
    threads: int
    descriptors: int
    resident_kib: int


def read_resources(mark: str) -> list[ProcessResources]:
    """Return the resources of each live process with this mark in its environment."""
    found: list[ProcessResources] = []
    for process in _marked_processes(mark):
        with contextlib.suppress(OSError, IndexError):
            stat = (process / "stat").read_text().rsplit(")", 1)[1].split()
            if stat[0] != "Z":
                found.append(
                    ProcessResources(
                        pid=int(process.name),
                        role=_role(process),
                        threads=len(os.listdir(process / "task")),
                        descriptors=len(os.listdir(process / "fd")),
                        resident_kib=int((process / "statm").read_text().split()[1]) * _PAGE_KIB,
                    )
                )
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class RoleResources:
    """The number of processes of a role, and the largest resources of one of them."""

    processes: int
    threads: int
    descriptors: int
    resident_kib: int


def summarize_by_role(held: list[ProcessResources]) -> dict[str, RoleResources]:
    """Summarize the resources of processes by role."""
    roles = sorted({one.role for one in held})
    return {role: _largest([one for one in held if one.role == role]) for role in roles}


def find_growth(begin: dict[str, RoleResources], end: dict[str, RoleResources]) -> list[str]:
    """Return descriptions of resources that grew more than allowed since the start of an equally large job."""
    wrong: list[str] = []
    for role, after in end.items():
        before = begin.get(role, RoleResources(processes=0, threads=0, descriptors=0, resident_kib=0))
        if after.processes > before.processes:
            wrong.append(f"{after.processes} processes of role {role}, {before.processes} at the start")
        if after.threads > before.threads + MORE_THREADS:
            wrong.append(f"{after.threads} threads of a {role}, {before.threads} at the start")
        if after.descriptors > before.descriptors + MORE_DESCRIPTORS:
            wrong.append(f"{after.descriptors} descriptors of a {role}, {before.descriptors} at the start")
    return wrong


def list_shared_memory() -> set[str]:
    """Return the names of all files in shared memory."""
    with contextlib.suppress(OSError):
        return set(os.listdir(SHARED_MEMORY))
    return set()


def _marked_processes(mark: str) -> Iterator[Path]:
    wanted = f"{MARK}={mark}".encode()
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            with contextlib.suppress(OSError):
                if wanted in (process / "environ").read_bytes().split(b"\0"):
                    yield process


def _role(process: Path) -> str:
    if (process / "comm").read_text().startswith("loader-"):
        return "loader"
    line = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    for role in ("coordinator", "agent:"):
        if f"children {role}" in line:
            return role.removesuffix(":")
    if "agent.zygote" not in line:
        return "run"
    parent = (process / "stat").read_text().rsplit(")", 1)[1].split()[1]
    with contextlib.suppress(OSError):
        if b"\0holdfast\0run\0" in Path(f"/proc/{parent}/cmdline").read_bytes():
            return "zygote"
    return "worker"


def _largest(held: list[ProcessResources]) -> RoleResources:
    return RoleResources(
        processes=len(held),
        threads=max(one.threads for one in held),
        descriptors=max(one.descriptors for one in held),
        resident_kib=max(one.resident_kib for one in held),
    )
