"""Tests that long-running commands survive a restarted server or an unavailable store."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from holdfast.cli import retrying
from holdfast.cli.following.stop import _stop_pooled
from holdfast.cli.pool.jobs import _await_settled, _follow
from holdfast.control.client import SilentError
from holdfast.control.pool_client import PoolClient
from holdfast.errors import RefusedError, UnreachableError

SILENT = SilentError("no pool answers at http://127.0.0.1:1: refused")
AWAY = RefusedError("the store has been unavailable for 7 s, and nothing is decided until it answers; training goes on")


class FakePool(PoolClient):
    """A pool that returns or raises a scripted job state at each query."""

    def __init__(self, *looks: str | Exception) -> None:
        self.looks = list(looks)

    def __enter__(self) -> FakePool:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def job(self, name: str) -> dict[str, Any]:
        found = self.looks.pop(0)
        if isinstance(found, Exception):
            raise found
        nodes = {"nodes": ["n0"], "standbys": [], "share": 1}
        return {"job": name, "submission": 1, "state": found, "why": "", **nodes}

    def stop(self, name: str, *, now: bool = False, why: str = "") -> None:
        pass


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the clock, so that waiting takes no real time."""
    now = [0.0]
    monkeypatch.setattr(retrying.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    monkeypatch.setattr(retrying.time, "monotonic", lambda: now[0])


def follow(pool: FakePool) -> int:
    return _follow(pool, "a", 1, as_json=False)


def wait(pool: FakePool) -> None:
    _await_settled(pool, "a", "suspending", no_wait=False, as_json=False)


def stop(pool: FakePool) -> None:
    _stop_pooled(pool, "a", now=False, no_wait=False, as_json=False)


@pytest.mark.parametrize(
    ("stays", "passing", "end"),
    [(follow, "admitted", "finished"), (wait, "suspending", "suspended"), (stop, "stopping", "stopped")],
)
def test_waiting_commands_survive_a_server_restart_and_a_store_outage(
    stays: Callable[[FakePool], object], passing: str, end: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pool = FakePool(SILENT, passing, *[SILENT] * 100, passing, *[AWAY] * 1000, *[SILENT] * 100, end)
    stays(pool)
    assert not pool.looks
    assert capsys.readouterr().err == f"holdfast: {AWAY}\n", "the message is printed once"


def test_waiting_ends_if_the_server_stays_silent_or_the_job_is_missing() -> None:
    with pytest.raises(SilentError):
        follow(FakePool("admitted", *[SILENT] * 1000))
    gone = FakePool("admitted", UnreachableError("there is no job 'a'"), "admitted")
    with pytest.raises(UnreachableError, match="there is no job"):
        follow(gone)
    assert gone.looks == ["admitted"]
