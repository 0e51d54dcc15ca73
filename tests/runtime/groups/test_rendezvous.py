"""The rendezvous board: keys are pushed, waits end by arrival, halt, close or timeout, and everything is bounded."""

import threading
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.runtime.groups import rendezvous
from holdfast.runtime.groups.communicator import HaltedError
from holdfast.runtime.groups.rendezvous import MAX_VALUE_BYTES, Board, BoardStore

DEADLINE_S = 60.0


def silent(generation: int = 1, **options) -> Board:
    return Board(generation, lambda keys: None, **options)


def store_of(board: Board, *, timeout_s: float = 0.0, rank: int = 0, owner: int = 0, name: str = "") -> BoardStore:
    """Return a board's store in which all keys come from one rank."""
    return BoardStore(board, timeout_s=timeout_s, rank=rank, owner=lambda _key: owner, name=name)


def in_thread(call) -> tuple[threading.Thread, list[object]]:
    outcome: list[object] = []

    def run() -> None:
        try:
            outcome.append(call())
        except (HaltedError, TimeoutError) as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, outcome


def test_a_posted_key_is_stored_and_sent():
    sent = []
    board = Board(3, sent.append)
    board.post("0/1", b"here")
    assert sent == [{"0/1": b"here"}]
    assert board.values() == {"0/1": b"here"}
    board.put({"0/2": b"there"})
    assert sent == [{"0/1": b"here"}], "keys of peers must not be sent on"


def test_expected_keys_are_sent_together_and_later_keys_separately():
    sent = []
    board = Board(3, sent.append)
    board.expect_keys(2)
    board.post("a", b"1")
    assert sent == []
    assert board.values() == {"a": b"1"}, "the key must be visible here at once"
    board.post("b", b"2")
    board.post("c", b"3")
    assert sent == [{"a": b"1", "b": b"2"}, {"c": b"3"}]


def test_a_rank_without_keys_sends_an_empty_message():
    sent = []
    Board(3, sent.append).expect_keys(0)
    assert sent == [{}]


def test_waiting_ends_when_the_last_key_arrives():
    board = silent()
    store = store_of(board, timeout_s=DEADLINE_S)
    thread, outcome = in_thread(lambda: store.multi_get(["a", "b"]))
    board.put({"0:b": b"2"})
    assert thread.is_alive()
    board.put({"0:a": b"1"})
    thread.join(DEADLINE_S)
    assert outcome == [[b"1", b"2"]]


@pytest.mark.parametrize("how", ["halt", "close"])
def test_waiting_ends_on_a_halt_or_close(how: str):
    halt = threading.Event()
    board = silent(9, halt=halt)
    thread, outcome = in_thread(lambda: board.wait(["never"], 1e6))
    halt.set() if how == "halt" else board.close()
    thread.join(DEADLINE_S)
    assert isinstance(outcome[0], HaltedError)
    assert "generation 9" in str(outcome[0])
    with pytest.raises(HaltedError):
        board.wait(["never"], 1e6)


def test_waiting_times_out():
    with pytest.raises(TimeoutError, match="generation 2: '0:never' did not come"):
        store_of(silent(2), timeout_s=0.001).wait(["never"], timedelta(seconds=1e6))
    with pytest.raises(TimeoutError):
        store_of(silent(2), timeout_s=0.001).get("never")


def test_a_key_that_has_arrived_counts_even_when_halted():
    board = silent(halt=lambda: True)
    board.put({"0:a": b"1"})
    assert store_of(board, timeout_s=0.0).get("a") == b"1"


def test_sizes_and_number_of_keys_are_limited(monkeypatch: pytest.MonkeyPatch):
    board = silent()
    with pytest.raises(ValueError, match="too large"):
        board.put({"k": b"x" * (MAX_VALUE_BYTES + 1)})
    with pytest.raises(ValueError, match="too large"):
        board.post("k" * 2000, b"")
    monkeypatch.setattr(rendezvous, "MAX_KEYS", 3)
    board.put({str(number): b"" for number in range(3)})
    board.put({"0": b"again"})
    with pytest.raises(ValueError, match="more than"):
        board.put({"one too many": b""})
    assert len(board.values()) == 3


def test_posts_over_the_message_limit_are_refused_with_advice():
    sent = []
    board = Board(4, sent.append)
    board.expect_keys(2)
    board.post("a", bytes(MAX_VALUE_BYTES))
    with pytest.raises(ValueError, match=r"for generation 4 have \d+ bytes, and at most 589824 .* fewer workers"):
        board.post("b", bytes(MAX_VALUE_BYTES))
    assert sent == []


def test_a_key_counts_only_from_its_owner():
    board = silent()
    board.put({"2:g/a": b"forged", "1:h/a": b"of another group"})
    store = store_of(board, owner=1, name="g/")
    assert not store.check(["a"])
    board.put({"1:g/a": b"true"})
    assert store.get("a") == b"true"


def test_a_refused_post_is_not_sent():
    sent = []
    board = Board(1, sent.append)
    with pytest.raises(ValueError, match="too large"):
        board.post("k", b"x" * (MAX_VALUE_BYTES + 1))
    assert sent == []


@given(st.dictionaries(st.text(max_size=20), st.binary(max_size=100), max_size=20))
def test_the_store_behaves_like_a_dictionary(entries: dict[str, bytes]):
    store = store_of(silent(), timeout_s=0.0)
    store.multi_set(list(entries), list(entries.values()))
    assert store.num_keys() == len(entries)
    assert store.multi_get(list(entries)) == list(entries.values())
    assert store.check(list(entries))
    for key in entries:
        assert store.delete_key(key)
        assert not store.delete_key(key)
        assert not store.check([key])


def test_atomic_operations_are_refused():
    store = store_of(silent(), timeout_s=0.0)
    with pytest.raises(NotImplementedError):
        store.add("k", 1)
    with pytest.raises(NotImplementedError):
        store.compare_set("k", b"", b"1")
    assert not store.has_extended_api()
