"""Behavior only of the store in etcd: crashes, lost answers, several members, refused values."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from etcd_server import EtcdServer
from holdfast.control.store.etcd import MAX_KEPT_BYTES, EtcdStore
from holdfast.control.store.interface import Entry, StoreAwayError, StoreError
from holdfast.control.store.store_choice import open_store
from holdfast.errors import BadInputError


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EtcdServer]:
    server = EtcdServer(tmp_path / "etcd")
    yield server
    server.kill()


@pytest.fixture
def store(server: EtcdServer) -> Iterator[EtcdStore]:
    with contextlib.closing(EtcdStore(server.url, answer_s=1.0)) as store:
        yield store


class _Lossy(httpx.BaseTransport):
    """Loses the answers to the next `loses` writes, which etcd has carried out."""

    def __init__(self) -> None:
        self._real = httpx.HTTPTransport()
        self.loses = 0

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        reply = self._real.handle_request(request)
        if request.url.path.endswith("/kv/txn") and self.loses:
            self.loses -= 1
            reply.read()
            reply.close()
            raise httpx.ReadTimeout("the answer was lost")
        return reply

    def close(self) -> None:
        self._real.close()


def _lossy(store: EtcdStore) -> _Lossy:
    transport = _Lossy()
    store._gateway._http.close()
    store._gateway._http = httpx.Client(transport=transport)
    return transport


def test_a_value_survives_a_crash_of_etcd(server: EtcdServer, store: EtcdStore) -> None:
    assert store.compare_and_swap("a", b"1", 0) == 1
    server.kill()
    with pytest.raises(StoreAwayError, match=f"etcd does not answer: {server.address}"):
        store.get("a")
    server.start()
    assert store.get("a") == Entry(b"1", 1)
    assert store.compare_and_swap("a", b"2", 1) == 2


def test_a_connection_closed_by_a_restart_is_reopened(server: EtcdServer, store: EtcdStore) -> None:
    for revision in range(3):
        assert store.compare_and_swap("a", b"x", revision) == revision + 1
        server.kill()
        server.start()


def test_a_repeated_call_finds_the_result_of_a_write_with_a_lost_answer(store: EtcdStore) -> None:
    assert store.compare_and_swap("a", b"1", 0) == 1
    _lossy(store).loses = 1
    with pytest.raises(StoreAwayError, match="the answer was lost"):
        store.compare_and_swap("a", b"2", 1)
    assert store.compare_and_swap("b", b"2", 0) == 3, "writes of other keys continue meanwhile"
    assert store.compare_and_swap("a", b"2", 1) == 2
    assert store.get("a") == Entry(b"2", 2), "the value was written once"
    assert store.compare_and_swap("a", b"2", 1) is None, "a new call expects an old revision"


def test_a_lost_write_is_not_confused_with_a_write_of_another_client(server: EtcdServer, store: EtcdStore) -> None:
    lossy = _lossy(store)
    lossy.loses = 1
    with pytest.raises(StoreAwayError):
        store.compare_and_swap("a", b"mine", 0)
    with contextlib.closing(open_store(server.url)) as other:
        assert other.compare_and_swap("a", b"theirs", 1) == 2
    assert store.compare_and_swap("a", b"mine", 0) is None

    server.kill()
    with pytest.raises(StoreAwayError):
        store.compare_and_swap("b", b"same", 0)
    server.start()
    with contextlib.closing(open_store(server.url)) as other:
        assert other.compare_and_swap("b", b"same", 0) == 3
    assert store.compare_and_swap("b", b"same", 0) is None, "the lost write was never carried out"


def test_a_hung_or_missing_etcd_member_is_skipped(server: EtcdServer, tmp_path: Path) -> None:
    with contextlib.closing(EtcdStore(f"etcd:http://127.0.0.1:9,{server.address}", answer_s=1.0)) as store:
        assert store.compare_and_swap("a", b"1", 0) == 1
    other = EtcdServer(tmp_path / "hangs")
    try:
        other.halt()
        with contextlib.closing(EtcdStore(f"{other.url},{server.address}", answer_s=0.5)) as store:
            assert store.get("a") == Entry(b"1", 1)
    finally:
        other.go_on()
        other.kill()


def test_the_store_works_again_after_a_hang_of_etcd(server: EtcdServer, store: EtcdStore) -> None:
    server.halt()
    with pytest.raises(StoreAwayError):
        store.compare_and_swap("a", b"1", 0)
    server.go_on()
    assert store.compare_and_swap("a", b"1", 0) == 1


def test_a_watch_continues_after_a_crash_of_etcd(server: EtcdServer, store: EtcdStore) -> None:
    store.compare_and_swap("a", b"1", 0)
    with contextlib.closing(store.watch("a", 1)) as watch:
        server.kill()
        with pytest.raises(StoreAwayError):
            watch.next(0.0)
        server.start()
        store.compare_and_swap("a", b"2", 1)
        assert watch.next(60.0) == {"a": Entry(b"2", 2)}


def test_stores_with_different_prefixes_are_separate(server: EtcdServer, store: EtcdStore) -> None:
    with contextlib.closing(open_store(f"{server.url}/team/one")) as one:
        assert one.compare_and_swap("a", b"one", 0) == 1
        assert store.get("a") is None
        assert store.compare_and_swap("a", b"two", 0) == 2
        assert one.list("").entries == {"a": Entry(b"one", 1)}


def test_large_values_are_compressed_and_too_large_ones_are_not_written(store: EtcdStore) -> None:
    large = b"node-0001 " * 400_000
    assert store.compare_and_swap("a", large, 0) == 1
    assert store.get("a") == Entry(large, 1)
    with pytest.raises(StoreError, match=r"weighs 2000000 bytes.*nothing was written") as caught:
        store.compare_and_swap("a", os.urandom(2_000_000), 1)
    assert not isinstance(caught.value, StoreAwayError)
    assert store.compare_and_swap("a", os.urandom(MAX_KEPT_BYTES - 1000), 1) == 2


def test_a_value_written_by_another_program_is_refused(server: EtcdServer, store: EtcdStore) -> None:
    body = {"key": "aG9sZGZhc3QvYQ==", "value": "eA=="}  # holdfast/a, x
    assert httpx.post(f"{server.address}/v3/kv/put", json=body).is_success
    with pytest.raises(BadInputError, match=r"holdfast/a.*holdfast did not write"):
        store.get("a")
