"""Tests that membership indexes are updated with every change, so that queries need no walk over all workers."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from machinery import Job, attach, hello

from holdfast.coordination.membership import Membership
from holdfast.protocol import events as ev
from holdfast.protocol.messages import any_side as msg
from holdfast.protocol.messages.worker import Attach

NODES = ("n0", "n1", "n2")
IDS = [msg.worker_id(node, index, "a") for node in NODES for index in range(2)]
CHANGES = ("come", "go", "attach", "drop", "left", "enter", "prepare", "finish", "go on", "plan")


def plan(generation: int, workers: list[str]) -> msg.GenerationPlan:
    members = tuple(msg.Member(worker=worker, host="h", state_port=1) for worker in workers)
    return msg.GenerationPlan(term=1, generation=generation, members=members)


class Driven:
    """A membership and the changes applied to it."""

    def __init__(self) -> None:
        self.members = Membership()
        self.plan = plan(1, IDS[:3])

    def change(self, what: str, worker: str, number: int) -> None:
        members, node = self.members, self.members.nodes.get(msg.node_of(worker))
        info = members.worker(worker)
        match what:
            case "come" if node is None:
                members.add(msg.Hello(**{**_fields(hello(msg.node_of(worker))), "workers": 2}), number, 0.0)
            case "go" if node is not None:
                members.remove(node.name)
            case "attach" if node is not None and info is None:
                members.attach(node, attach(worker))
            case "drop" if node is not None:
                members.drop(node, worker)
            case "left" if node is not None and members.drop(node, worker):
                members.left_loop(worker, 1)
            case "enter" if info is not None:
                members.enter(info, number % 4)
            case "prepare" if info is not None:
                members.prepare(info, number % 4)
            case "finish" | "go on" if info is not None:
                members.finish(info, finished=what == "finish")
            case "plan":
                self.plan = plan(number % 4, [each for index, each in enumerate(IDS) if number >> index & 1])
            case _:
                pass


def _fields(message: msg.Hello) -> dict[str, object]:
    return {name: getattr(message, name) for name in message.__struct_fields__}


@given(changes=st.lists(st.tuples(st.sampled_from(CHANGES), st.sampled_from(IDS), st.integers(0, 63)), max_size=60))
def test_membership_indexes_equal_a_walk_over_all_workers(changes: list[tuple[str, str, int]]) -> None:
    driven = Driven()
    for change in changes:
        driven.change(*change)
        members, now = driven.members, driven.plan
        infos = {worker: members.worker(worker) for worker in now.workers}
        assert members.entered(now) == all(info and info.entered >= now.generation for info in infos.values())
        assert members.prepared(now) == all(info and info.prepared >= now.generation for info in infos.values())
        going = [w for w, info in infos.items() if w not in members.left and not (info and info.finished)]
        assert members.unfinished(now) == len(going)
        nodes = list(members.nodes.values())
        assert members.complete_nodes == sum(node.complete for node in nodes)
        complete = [worker for node in nodes if node.complete for worker in node.workers]
        assert members.outside(now) == [worker for worker in complete if now.rank(worker) is None]
        assert {info.id for info in members.all_workers()} == {w for w in IDS if members.worker(w) is not None}
        assert [info.id for info in members.workers()] == complete, "none of these workers was announced yet"


def test_an_announced_worker_stays_listed_after_another_process_of_its_node_is_lost() -> None:
    members = Membership()
    node = members.add(msgspec.structs.replace(hello("n0"), workers=2), 1, 0.0)
    for worker in IDS[:2]:
        members.attach(node, attach(worker))
    node.announced = node.pids
    members.drop(node, IDS[1])
    assert [info.id for info in members.workers()] == [IDS[0]]


def test_removing_a_node_returns_its_workers() -> None:
    members = Membership()
    node = members.add(hello("n0"), 1, 0.0)
    message: Attach = attach(IDS[0])
    members.attach(node, message)
    assert members.remove("n0") == (IDS[0],)
    assert members.worker(IDS[0]) is None


@pytest.mark.parametrize("worker", ["n2/0/b", "n2/1/a", "n2/9999/a"])
def test_a_node_with_more_workers_than_declared_is_expelled(worker: str) -> None:
    job = Job().start()
    job.deliver(attach(worker))
    assert [failure.node for failure in job.emitted(ev.FailureDetected)] == ["n2"]
    assert job.machine.members.worker(worker) is None


def test_locations_of_only_the_newest_removed_nodes_are_remembered() -> None:
    members = Membership()
    for number in range(5000):
        members.add(msg.Hello(**{**_fields(hello(f"n{number}")), "rack": "r1", "zone": "z1"}), number, 0.0)
        if number:
            members.remove(f"n{number}")
    assert members.place_of("n4999") == members.place_of("n0") == ("r1", "z1")
    assert members.place_of("n1") == ("", "")
    sizes = [len(held) for held in vars(members).values() if isinstance(held, dict)]
    assert max(sizes) <= 4096
