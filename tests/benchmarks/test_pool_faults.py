"""Tests of the faults of `make bench-pool`: on a slow machine, users still issue all requests at the end."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any, cast

import pool_faults
import pytest

from tests.harness.local_pool import LocalPool


def _nobody(*_: object) -> None:
    pass


class SlowPool:
    """A pool that records only its users' actions."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.done: list[tuple[str, ...]] = []

    def submit(self, name: str, *_: Any, **__: Any) -> None:
        self.done.append(("submit", name))

    def call(self, *args: str) -> None:
        self.done.append(args)

    def goes_on(self, *names: str, **_: int) -> None:
        suspended = {args[-1] for args in self.done if args[0] == "suspend"}
        resumed = {args[-1] for args in self.done if args[0] == "resume"}
        assert not (suspended - resumed) & {*names}, "the benchmark would wait in vain"

    def until_answered(self) -> None:
        pass

    def wait(self, *_: Any) -> None:
        pass


def test_a_suspended_job_is_resumed_before_the_benchmark_waits_for_it(tmp_path: Path) -> None:
    pool = SlowPool(tmp_path)
    assert pool_faults.inject_faults(cast(LocalPool, pool), 0.0, Random(1)) == []
    asked = [("submit", "fourth"), ("suspend", "-j", "first"), ("resume", "-j", "first"), ("stop", "-j", "fourth")]
    assert pool.done[-4:] == asked


def test_a_job_suspended_in_the_last_round_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool, now = SlowPool(tmp_path), [0.0]

    class Clock:
        """A clock with long rounds, so that the second one is the last."""

        @staticmethod
        def time() -> float:
            return now[0]

        @staticmethod
        def sleep(_: float) -> None:
            now[0] += 35.0

    monkeypatch.setattr(pool_faults, "time", Clock)
    monkeypatch.setattr(pool_faults, "kill_random", _nobody)
    pool_faults.inject_faults(cast(LocalPool, pool), 1.0, Random(1))
    assert pool.done[-2:] == [("resume", "-j", "first"), ("stop", "-j", "fourth")]
