"""Jobs at the end of their pool, with other events at the same time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Self

import pytest

from holdfast.control.pool import jobs_at_end
from holdfast.control.pool.jobs_at_end import JobsAtEnd
from holdfast.errors import RefusedError, UnreachableError


class FakePool(contextlib.nullcontext[Any]):
    """A pool with room for one job at a time, which saves jobs immediately."""

    def __init__(self, **states: str) -> None:
        super().__init__()
        self.states = states
        self.saves = dict.fromkeys(states, True)
        #: Called before each request, with its words.
        self.before: Callable[[str], None] = lambda words: None

    def __enter__(self) -> Self:
        return self

    def status(self) -> dict[str, Any]:
        self._asked("status")
        jobs = enumerate(self.states.items(), 1)
        return {
            "jobs": [
                {"job": name, "state": state, "saves": self.saves[name], "submission": number}
                for number, (name, state) in jobs
            ]
        }

    def suspend(self, name: str, *, force: bool = False) -> None:
        self._asked(f"suspend {name}")
        if self.states[name] == "admitted" and not (force or self.saves[name]):
            raise RefusedError(f"job {name} keeps no checkpoints")
        self._leaves(name, "suspended")

    def stop(self, name: str, *, now: bool = False, why: str = "") -> None:
        self._asked(f"stop {name}")
        assert why
        self._leaves(name, "stopped")

    def resume(self, name: str) -> None:
        self._asked(f"resume {name}")
        if self.states[name] == "stopped":
            raise RefusedError(f"job {name} is over")
        self.states[name] = "queued"

    def _leaves(self, name: str, state: str) -> None:
        if self.states[name] == "stopped":
            raise RefusedError(f"job {name} is over")
        self.states[name] = state
        if "admitted" not in self.states.values():
            queued = [one for one, state in self.states.items() if state == "queued"]
            self.states.update(dict.fromkeys(queued[:1], "admitted"))

    def _asked(self, words: str) -> None:
        self.before(words)


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs_at_end, "_POLL_S", 0.0)


def ended(pool: FakePool) -> list[str]:
    """End the jobs and queue the interrupted ones again; return the printed lines."""
    printed: list[str] = []
    jobs = JobsAtEnd(lambda: pool, lambda: False, printed.append)
    jobs.end()
    assert not {"queued", "admitted"} & set(pool.states.values())
    jobs.queue_again()
    return printed


def test_queued_jobs_do_not_start_on_nodes_of_suspended_jobs() -> None:
    pool = FakePool(a="admitted", b="queued", c="queued")
    pool.saves["c"] = pool.saves["b"] = False
    pool.before = lambda words: None if "admitted" not in (pool.states["b"], pool.states["c"]) else pytest.fail(words)
    ended(pool)
    assert pool.states == {"a": "suspended", "b": "queued", "c": "queued"}


def test_a_job_that_starts_during_the_shutdown_is_queued_again() -> None:
    pool = FakePool(a="admitted", b="queued", c="queued")
    pool.saves["b"] = False

    def ends(words: str) -> None:
        if words == "suspend b" and pool.states["a"] == "admitted":
            pool.states.update(a="stopped", b="admitted")  # Job a has ended on its own.

    pool.before = ends
    ended(pool)
    assert pool.states == {"a": "stopped", "b": "queued", "c": "queued"}


def test_a_started_job_is_queued_again_if_a_reply_was_lost() -> None:
    pool = FakePool(a="admitted", b="queued")
    pool.saves["b"] = False

    def lost(words: str) -> None:
        if words == "suspend b" and pool.states["a"] == "admitted":
            pool.states.update(a="stopped", b="admitted")
            raise UnreachableError("no pool answers")

    pool.before = lost
    printed = ended(pool)
    assert pool.states == {"a": "stopped", "b": "queued"}
    assert printed == ["holdfast: jobs cannot be saved yet: no pool answers"]


def test_a_stopped_job_does_not_prevent_queueing_the_other_jobs() -> None:
    pool = FakePool(a="queued", b="queued", c="queued")

    def stopped(words: str) -> None:
        if words == "resume b":
            pool.states["b"] = "stopped"  # A person stopped it just before.

    pool.before = stopped
    printed = ended(pool)
    assert pool.states == {"a": "queued", "b": "stopped", "c": "queued"}
    assert printed == ["holdfast: queued jobs (a, b, c) could not be queued again yet: job b is over"]


def test_a_job_suspended_before_the_shutdown_stays_suspended() -> None:
    pool = FakePool(a="suspended", b="admitted", c="queued")
    pool.saves["b"] = False
    ended(pool)
    assert pool.states == {"a": "suspended", "b": "stopped", "c": "queued"}
