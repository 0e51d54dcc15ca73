"""Tests of failed transfers between nodes: the next senders to try, and the suspect."""

from __future__ import annotations

from holdfast.coordination.generations.planner import select_senders
from holdfast.coordination.transfers import TransferHistory


def senders(receiver: str, *holders: str, history: TransferHistory) -> tuple[str, ...]:
    found = select_senders([f"{receiver}/0/a"], [f"{holder}/0/a" for holder in holders], lambda _: ("", ""), history)
    return tuple(worker.split("/")[0] for worker in found[f"{receiver}/0/a"])


def test_a_sender_that_failed_is_used_only_if_no_other_is_left() -> None:
    history = TransferHistory()
    assert senders("x", "a", "b", history=history) == ("a", "b")
    history.note_failure("x", ["a"])
    assert senders("x", "a", "b", history=history) == ("b",)
    assert senders("y", "a", "b", history=history) == ("b",)
    assert senders("x", "a", history=history) == ("a",)
    history.note_failure("x", ["b"])
    history.note_failure("y", ["a"])
    assert senders("x", "a", "b", history=history) == ("b",), "the sender with fewer failures is tried"


def test_a_sender_is_suspect_once_two_receivers_failed_only_with_it() -> None:
    history = TransferHistory()
    history.note_failure("x", ["a"])
    history.note_failure("y", ["a"])
    assert not history.is_suspect("a"), "the receivers may be bad"
    history.note_receipt("x", ["b"])
    assert not history.is_suspect("a")
    history.note_receipt("y", ["b"])
    assert history.is_suspect("a")
    assert not history.is_suspect("b")
    history.note_failure("y", ["a", "b"])
    assert not history.is_suspect("a"), "y now fails with every sender"


def test_a_receipt_clears_its_senders_and_the_receiver() -> None:
    history = TransferHistory()
    history.note_failure("x", ["a"])
    history.note_failure("x", ["a"])
    assert history.tries("x") == 2
    history.note_receipt("x", ["a"])
    assert (history.tries("x"), bool(history)) == (0, False)


def test_a_lost_node_is_forgotten_except_for_evidence_against_its_sender() -> None:
    history = TransferHistory()
    history.note_failure("x", ["a"])
    history.note_failure("y", ["a"])
    history.note_receipt("y", ["b"])
    for node in ("x", "y"):
        history.forget(node)
    assert history.tries("x") == 0
    assert not history.failed("a", "x")
    assert history.failed("a", "y")
    history.forget("a")
    assert not history


def test_the_transfer_history_is_bounded() -> None:
    history = TransferHistory()
    for number in range(5000):
        history.note_failure(f"x{number}", ["a"])
    assert history.failures_by_sender()["a"] == 4096
    assert history.tries("x0") == 0
