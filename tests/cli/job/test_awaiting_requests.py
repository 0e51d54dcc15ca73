"""Tests of commands that wait, judged by /status: for training nodes, warm standbys or the end of the job."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from holdfast.cli.job.act import _count_missing_nodes, _drain_all_in_turn
from holdfast.cli.job.waiting import await_back, await_left, await_moved
from holdfast.control.client import CoordinatorClient
from holdfast.errors import RefusedError, UnreachableError
from holdfast.protocol.events import AnyEvent, NodeLeft, NodeMoved, NodeStayed, StepCommitted


class Answers(CoordinatorClient):
    """Returns each of a list of statuses once, in order."""

    def __init__(self, *statuses: dict[str, Any]) -> None:
        self.left = list(statuses)

    def status(self) -> dict[str, Any]:
        return self.left.pop(0)

    def events(self, after: int = 0, *, follow: bool = False, patience_s: float = 30.0) -> Iterator[AnyEvent]:
        return iter(())

    def await_event(self, after: int, wait_s: float) -> None:
        assert after == 7


def node(name: str, rank: int | None = 0, generation: int = 2, standby: str = "") -> dict[str, Any]:
    return {"node": name, "standby": standby, "workers": [{"rank": rank, "generation": generation}]}


def status(*nodes: dict[str, Any], state: str = "running") -> dict[str, Any]:
    return {"nodes": list(nodes), "generation": 2, "state": state, "leaving": [], "events": 7}


def test_a_node_is_back_once_its_workers_are_in_the_current_generation() -> None:
    starting = {"node": "a", "standby": "", "workers": []}
    client = Answers(
        status(), status(starting), status(node("a", None)), status(node("a", generation=1)), status(node("a"))
    )
    assert await_back(client, "a", 7)
    assert not client.left


def test_a_standby_is_back_once_it_waits_again() -> None:
    """A standby never gets a rank, so a rolling drain once waited forever."""
    client = Answers(status(), status(node("s", None, 0, standby="cold")))
    assert await_back(client, "s", 7)
    assert not client.left


def test_waiting_for_a_departure_fails_if_the_job_has_ended() -> None:
    await_left(Answers(status(node("a"), node("b")), status(node("b"))), ["a"])
    with pytest.raises(RefusedError, match="the job is failed, before a had left"):
        await_left(Answers(status(node("a"), state="failed")), ["a"])


def leaving(name: str, waits_for: str) -> dict[str, Any]:
    return {"node": name, "since": 1.0, "stays": True, "to": "", "waits_for": waits_for}


def left(*nodes: dict[str, Any], leaving: tuple[dict[str, Any], ...] = ()) -> dict[str, Any]:
    return {**status(*nodes), "leaving": list(leaving)}


class Moves(Answers):
    """Returns also the events of moves, one answer after the other."""

    def __init__(self, *statuses: dict[str, Any], events: tuple[list[AnyEvent], ...]) -> None:
        super().__init__(*statuses)
        self.told = list(events)

    def events(self, after: int = 0, *, follow: bool = False, patience_s: float = 30.0) -> Iterator[AnyEvent]:
        assert after == 7
        yield from self.told.pop(0)


def test_move_waits_for_the_move_event_and_prints_each_delay_once() -> None:
    moved = NodeMoved(
        time=1.0,
        job="j",
        term=1,
        generation=3,
        seq=9,
        from_node="a",
        to_node="s",
        reason="move",
        down_s=0.1,
        moved_bytes=5,
    )
    waiting, here = node("a", None, standby="warm"), node("b")
    client = Moves(
        left(node("a"), here, leaving=(leaving("a", "a standby to be warm"),)),
        left(node("a"), here, leaving=(leaving("a", "a standby to be warm"),)),
        left(node("a"), here, leaving=(leaving("a", "the end of a step"),)),
        left(waiting, here),
        left(waiting, here),
        events=([], [moved]),
    )
    said: list[str] = []
    assert await_moved(client, ["a"], 7, print_status=said.append) == {"a": moved}
    assert said == ["a waits for a standby to be warm", "a waits for the end of a step"]
    assert not client.left


def test_waiting_for_a_move_fails_if_the_job_ends_first() -> None:
    going = left(node("a"), leaving=(leaving("a", "nothing: the job ends"),))
    client = Moves(going, {**going, "state": "finished"}, events=())
    with pytest.raises(RefusedError, match="the job is finished, before a had moved"):
        await_moved(client, ["a"], 7, print_status=None)


def test_no_successor_is_returned_if_it_fails_before_training() -> None:
    """The node waits as a standby without further events, so the command once waited forever."""
    left_ = NodeLeft(time=1.0, job="j", term=1, generation=3, seq=8, node="a", reason="moved")
    steps = [
        StepCommitted(
            time=1.0, job="j", term=1, generation=3, seq=8 + n, step=n, loss=1.0, samples=1, world_size=1, step_s=1.0
        )
        for n in (1, 2)
    ]
    waiting = left(node("a", None, standby="warm"), node("b"))
    client = Moves(waiting, waiting, waiting, events=([left_], [left_, steps[0]], [left_, *steps]))
    assert await_moved(client, ["a"], 7, print_status=None) == {"a": None}
    assert not client.left


def test_a_node_that_cannot_move_is_returned_with_the_reason() -> None:
    stayed = NodeStayed(time=1.0, job="j", term=1, generation=3, seq=8, node="a", reason="no_standby", detail="none")
    client = Moves(left(node("a")), events=([stayed],))
    assert await_moved(client, ["a"], 7, print_status=None) == {"a": stayed}
    assert not client.left


def test_waiting_for_a_node_ends_if_it_fails_before_it_rejoins() -> None:
    gone = NodeLeft(time=1.0, job="j", term=1, generation=3, seq=8, node="a", reason="failed")
    client = Moves(left(), left(node("a", None)), left(), events=([], [gone]))
    assert not await_back(client, "a", 7)
    assert not client.left


class Rolls(Answers):
    """Nodes leave and return on request, but another node is lost when the first one leaves."""

    def __init__(self, *names: str, loses: str) -> None:
        self.here, self.loses, self.drained = list(names), loses, list[str]()

    def status(self) -> dict[str, Any]:
        return status(*map(node, self.here))

    def drain(self, nodes: Sequence[str]) -> None:
        if nodes[0] not in self.here:
            raise UnreachableError(f"there is no node {nodes[0]!r}")
        self.drained += nodes
        self.here = [name for name in self.here if name not in (*nodes, self.loses)]

    def undrain(self, node: str) -> bool:
        self.here.append(node)
        return True


def test_a_rolling_drain_skips_a_node_that_fails_meanwhile() -> None:
    client, said = Rolls("a", "b", "c", loses="b"), list[str]()
    assert _drain_all_in_turn(client, said.append) == (["a", "c"], ["b"])
    assert client.drained == ["a", "c"]
    assert [line for line in said if line.startswith("b ")] == [
        "b is gone, and is skipped: see `holdfast events` (2 of 3)"
    ]
    assert said[-1] == "c is back (3 of 3)"


def test_a_node_lost_before_its_move_has_no_successor() -> None:
    client = Moves(left(node("b")), events=([],))
    assert await_moved(client, ["a"], 7, print_status=None) == {"a": None}


def test_standbys_do_not_count_towards_the_jobs_size() -> None:
    assert _count_missing_nodes(Answers(status(node("a"), node("s", None, standby="warm"))), 2) == 1
