"""Tests of blame for exceptions: the work is at fault if the exception follows it to other nodes."""

from __future__ import annotations

from holdfast.coordination.failures.blame import find_agreeing_nodes
from holdfast.coordination.failures.budget import WINDOW_S
from holdfast.protocol.record import RaisedBefore

PLACE = "ValueError (train.py, line 3)"


def raised(
    node: str, step: int | None = 7, micro_batch: int | None = 2, place: str = PLACE, time: float = 10.0
) -> RaisedBefore:
    return RaisedBefore(worker=f"{node}/0/ab", place=place, time=time, step=step, micro_batch=micro_batch)


def blamed(*all_raised: RaisedBefore, nodes: int = 8, machine: bool = False) -> list[str]:
    *before, last = all_raised
    return find_agreeing_nodes(before, last, nodes, machine=machine)


def test_an_exception_repeated_on_a_second_node_blames_the_script() -> None:
    assert blamed(raised("a")) == []
    assert blamed(raised("a"), raised("b")) == ["a", "b"]
    assert blamed(raised("a"), raised("b"), machine=True) == ["a", "b"], "a sample can exhaust the memory of any GPU"
    assert blamed(raised("a", micro_batch=None), raised("b", micro_batch=None)) == ["a", "b"]


def test_exceptions_that_differ_between_nodes_do_not_blame_the_script() -> None:
    assert blamed(raised("a"), raised("a")) == []
    assert blamed(raised("a"), raised("b", step=8)) == []
    assert blamed(raised("a"), raised("b", micro_batch=3)) == []
    assert blamed(raised("a"), raised("b", place="KeyError (train.py, line 3)")) == []


def test_a_line_that_raises_on_three_nodes_blames_the_script() -> None:
    """Only the first rank reaches the line, such as logging, so it raises at another step on each node."""
    nodes = [raised(node, step) for step, node in enumerate("abc")]
    assert blamed(*nodes[:2]) == []
    assert blamed(*nodes) == ["a", "b", "c"]
    assert blamed(*nodes, machine=True) == [], "an unreachable file server affects all nodes"
    assert blamed(*nodes[:2], nodes=2) == ["a", "b"], "the job has no other nodes"
    late = [raised(node, step, time=step * WINDOW_S) for step, node in enumerate("abc")]
    assert blamed(*late) == []


def test_outside_the_loop_a_second_node_does_not_prove_the_same_cause() -> None:
    assert blamed(raised("a", None, None), raised("b", None, None)) == []
    assert blamed(*(raised(node, None, None) for node in "abc")) == ["a", "b", "c"]


def test_a_lone_node_must_raise_twice_to_blame_the_script() -> None:
    assert blamed(raised("a"), nodes=1) == []
    assert blamed(raised("a"), raised("a"), nodes=1) == ["a"]
    assert blamed(raised("a"), raised("a", step=8), nodes=1) == []


def test_a_job_that_just_shrank_to_one_node_compares_with_the_lost_node() -> None:
    """The other node had just raised at another micro-batch; all workers were once restarted before the job ended."""
    assert blamed(raised("a", micro_batch=1), raised("b", micro_batch=0), nodes=1) == ["a", "b"]
    assert blamed(raised("a", micro_batch=1), raised("b", micro_batch=0), nodes=1, machine=True) == []
    assert blamed(raised("b", micro_batch=1), raised("b", micro_batch=0), nodes=1) == []
