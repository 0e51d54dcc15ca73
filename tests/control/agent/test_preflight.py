"""The preflight checks of a node: the checks themselves, their time limits, and the reported reasons."""

from __future__ import annotations

import asyncio
import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from holdfast.control.agent import preflight
from holdfast.control.agent.preflight import Preflight


def unfit(own_folder: Path, **changes: Any) -> str:
    settings: dict[str, Any] = {"workers": 2, "folder": str(own_folder), "host": "127.0.0.1", **changes}
    return asyncio.run(Preflight(**settings).unfit())


def test_this_machine_passes_the_preflight_checks(tmp_path: Path) -> None:
    assert unfit(tmp_path) == ""


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"workers": 1 << 20}, f"memory: .* MiB are left for {1 << 20} workers, each needs at least 64"),
        ({"folder": "/nonexistent"}, "disk: /nonexistent: No such file or directory"),
        ({"host": "192.0.2.1"}, r"network: 192\.0\.2\.1 cannot be reached from itself: "),
        ({"program": "sh -c 'echo fan 3 stands >&2; exit 5'"}, "sh -c .*: sh ended with 5: fan 3 stands$"),
        ({"program": "/nonexistent/check"}, "/nonexistent/check: .*No such file"),
        ({"program": "sleep 60", "program_s": 0.05}, r"sleep 60: it took longer than 0\.05 s"),
    ],
    ids=["memory", "disk", "network", "fails", "is not there", "hangs"],
)
def test_a_failed_check_is_reported_in_one_line(tmp_path: Path, changes: dict[str, Any], why: str) -> None:
    found = unfit(tmp_path, **changes)
    assert "\n" not in found
    assert re.match(why, found), found


def test_all_failed_checks_are_reported_together(tmp_path: Path) -> None:
    found = unfit(tmp_path, workers=1 << 20, program="false")
    assert found.startswith("memory: ")
    assert found.endswith("; false: false ended with 1: it printed no error")


def test_a_full_disk_fails_the_disk_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda _: usage._replace(free=3 << 20))
    assert unfit(tmp_path) == f"disk: 3 MiB are left in {tmp_path}, 16 are needed"


def test_a_hanging_check_program_is_killed_with_its_children(tmp_path: Path) -> None:
    number = tmp_path / "pid"
    program = f"sh -c 'sleep 600 & echo $! > {number}; wait'"
    assert "took longer" in unfit(tmp_path, program=program, program_s=3.0)
    pid = int(number.read_text())
    until = time.monotonic() + 20
    while Path(f"/proc/{pid}").exists() and time.monotonic() < until:
        time.sleep(0.01)  # The process that adopted it reaps it.
    assert not Path(f"/proc/{pid}/exe").exists()


@pytest.mark.parametrize("hangs", [1, 2])
def test_a_network_check_is_repeated_once_if_the_process_was_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hangs: int
) -> None:
    """Its time limit had passed when it continued, whatever the state of the network."""
    echoed, tries = preflight._echoed, list[str]()

    async def stopped(host: str) -> bool:
        tries.append(host)
        if len(tries) <= hangs:
            time.sleep(0.1)  # The whole process stops.
            monkeypatch.setattr(preflight, "NETWORK_S", 20.0 if hangs == 1 else 0.05)
            await asyncio.sleep(0)
        return await echoed(host)

    monkeypatch.setattr(preflight, "_echoed", stopped)
    monkeypatch.setattr(preflight, "NETWORK_S", 0.05)
    found = unfit(tmp_path)
    assert found == ("" if hangs == 1 else "network: 128 KiB over 127.0.0.1 take longer than 0.05 s")
    assert len(tries) == 2
