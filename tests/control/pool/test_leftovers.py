"""The records of jobs are removed from the store once the pool no longer knows them, and no other records are."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from pool_bench import PATIENCE_S, PoolProcess

from holdfast.control.coordinator.shell import record_key
from holdfast.control.pool.leftovers import RecordSweeper, job_key
from holdfast.control.store.interface import Listing, StoreAwayError
from holdfast.control.store.memory import MemoryStore
from holdfast.control.store.sqlite import SqliteStore

OTHERS = ("pool/record", record_key("a"), "jobs/a/1/other", "jobs/1/record", "jobs/a/b/1/record")


class Bench:
    def __init__(self, *records: tuple[str, int]) -> None:
        self.store = MemoryStore()
        self.known: list[str] = []
        self.used: list[str] = []
        for key in (*OTHERS, *(job_key(*record) for record in records)):
            self.store.compare_and_swap(key, b"x", 0)
        self.leftovers = RecordSweeper(self.store, known=lambda: self.known, used=lambda: self.used)

    def sweep(self) -> set[str]:
        """Return the owners of the records that remain after a sweep."""
        asyncio.run(self.leftovers.sweep())
        there = set(self.store.list("").entries)
        assert there >= set(OTHERS)
        return there - set(OTHERS)


def test_records_of_unknown_jobs_are_removed() -> None:
    bench = Bench(("a", 1), ("a", 2), ("b", 3))
    bench.known = [job_key("a", 2)]
    assert bench.sweep() == {job_key("a", 2)}


def test_the_record_of_a_forgotten_job_is_removed_at_the_next_sweep() -> None:
    bench = Bench(("a", 1))
    bench.known = [job_key("a", 1)]
    bench.sweep()
    bench.known = [job_key("a", 1), job_key("b", 2)]
    bench.store.compare_and_swap(job_key("b", 2), b"x", 0)
    assert bench.sweep() == {*bench.known}
    bench.known = [job_key("b", 2)]
    assert bench.sweep() == {job_key("b", 2)}
    bench.known = []
    assert bench.sweep() == set()


def test_the_record_of_a_running_coordinator_is_kept() -> None:
    bench = Bench(("a", 1))
    bench.used = [job_key("a", 1)]
    assert bench.sweep() == {job_key("a", 1)}
    bench.used = []
    assert bench.sweep() == set()


def test_records_are_removed_after_an_unavailable_store_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(("a", 1))

    def away(*_: object) -> Listing:
        raise StoreAwayError("etcd does not answer")

    for method in ("list", "remove"):
        with monkeypatch.context() as patched:
            patched.setattr(bench.store, method, away)
            with pytest.raises(StoreAwayError):
                asyncio.run(bench.leftovers.sweep())
    assert bench.sweep() == set()


def test_a_pool_removes_the_records_of_its_earlier_jobs(tmp_path: Path) -> None:
    """Of a reused name only the newest job is kept, the only one that `holdfast jobs` shows."""
    store = SqliteStore(tmp_path / "pool.db")
    store.compare_and_swap(job_key("gone", 7), b"x", 0)
    store.compare_and_swap(record_key("apart"), b"x", 0)
    with PoolProcess(tmp_path) as pool:
        deadline = time.monotonic() + PATIENCE_S
        while store.get(job_key("gone", 7)) is not None:
            assert time.monotonic() < deadline, pool.log
            time.sleep(0.02)
    assert store.get(record_key("apart")) is not None
    store.close()


def test_a_second_server_is_refused_while_the_first_is_running(tmp_path: Path) -> None:
    with PoolProcess(tmp_path, token="t") as first:
        with pytest.raises(AssertionError, match=r"another server of pool 'pool' answers at .*, with the same store"):
            PoolProcess(tmp_path, token="t")
        assert first.ask("GET", "/pool").status_code == 200
