"""Tests of probes between a job's first nodes while their workers start; unreachable nodes are refused."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from machinery import Job, attach, calls, hello, w

from holdfast.coordination.inputs import Received
from holdfast.coordination.instructions import Close, Send
from holdfast.errors import EXIT_REFUSED
from holdfast.protocol import events as ev
from holdfast.protocol.job_spec import JobSpec
from holdfast.protocol.messages import any_side as msg

REFUSED, HANGS = "Connection refused", "hangs"


def no_link_fails(_here: str, _there: str) -> str:
    return ""


def every_link_fails(_here: str, _there: str) -> str:
    return REFUSED


def bad_node(*bad: str, error: str = REFUSED, sends: bool = True) -> Callable[[str, str], str]:
    """Return links on which no node can connect to these nodes; they can connect to others if `sends`."""
    return lambda here, there: error if there in bad or (not sends and here in bad) else ""


class Start:
    """Connects nodes to a new job; `link` returns the error of a connection between two nodes, or ""."""

    def __init__(self, nodes: int, link: Callable[[str, str], str], *, least: int = 0) -> None:
        self.job = Job(nodes=nodes, spec=JobSpec(min_nodes=least) if least else JobSpec()).boot()
        self.link = link
        #: (sender, receiver) of all probes
        self.tried: list[tuple[str, str]] = []
        self.refused: dict[str, msg.Refused] = {}

    def come(self, *nodes: str, address: str = "") -> None:
        for node in nodes:
            self.job.connect(msgspec.structs.replace(hello(node), address=address or f"at-{node}", probe_port=9))
            self.answer()
        for node in nodes:
            if node not in self.refused:
                self.job.deliver(attach(w(node)))
                self.answer()

    def answer(self) -> None:
        """Handle the probe orders of the last input as agents do."""
        names = {number: node for node, number in self.job.connections.items()}
        queue = list(self.job.last)
        while queue:
            one = queue.pop(0)
            if not isinstance(one, Send) or one.connection not in names:
                continue
            here, message = names[one.connection], one.message
            if isinstance(message, msg.Refused):
                self.refused[here] = message
            elif isinstance(message, msg.ProbeAddress):
                there = message.host.removeprefix("at-")
                self.tried.append((here, there))
                error = self.link(here, there)
                if error != HANGS:
                    answer = msg.AddressProbed(number=message.number, error=error and f"{message.host}:9: {error}")
                    queue += self.job.feed(Received(one.connection, answer))

    def wait(self, seconds: float) -> None:
        until = self.job.now + seconds
        while self.job.now < until:
            for node in self.job.machine.members.nodes:
                self.job.deliver_from(node, msg.Heartbeat())
            self.job.tick(0.25)
            self.answer()

    @property
    def members(self) -> list[str]:
        plan = self.job.machine.record.plan
        return [member.node for member in plan.members] if plan is not None else []

    def reported(self) -> list[str]:
        return [event.node for event in self.job.events if isinstance(event, ev.NodeRefused)]


def names(nodes: int) -> list[str]:
    return [f"n{index}" for index in range(nodes)]


def test_every_node_is_probed_by_two_others_in_both_directions() -> None:
    start = Start(6, no_link_fails)
    start.come(*names(6))
    assert start.members == names(6)
    pairs = {frozenset(pair) for pair in start.tried}
    assert all(sum(node in pair for pair in pairs) >= 2 for node in names(6))
    assert {(there, here) for here, there in start.tried} == set(start.tried), "each pair is tried in both directions"
    assert len(pairs) == 2 * 6 - 3
    assert not start.reported()


@pytest.mark.parametrize("sends", [True, False])
@pytest.mark.parametrize("bad", names(5))
def test_a_node_unreachable_for_several_others_is_refused(bad: str, sends: bool) -> None:
    start = Start(5, bad_node(bad, sends=sends), least=4)
    start.come(*names(5))
    assert start.reported() == [bad]
    refused = start.refused[bad]
    assert (refused.exit_code, refused.retry) == (EXIT_REFUSED, False)
    (event,) = [event for event in start.job.events if isinstance(event, ev.NodeRefused)]
    assert event.address == f"at-{bad}"
    assert "9: Connection refused" in event.why
    assert "--advertise" in event.why
    start.wait(1.0)
    assert start.members == [name for name in names(5) if name != bad]
    assert not [event for event in start.job.events if isinstance(event, ev.FailureDetected)]


def test_a_job_that_needs_a_refused_node_waits_and_reports_why() -> None:
    start = Start(3, bad_node("n1"))
    start.come(*names(3))
    start.wait(0.5)
    assert not start.members
    (waiting,) = [event for event in start.job.events if isinstance(event, ev.JobWaiting)]
    assert waiting.nodes == 1
    assert "node n1 and the others cannot connect to each other" in waiting.why
    start.come("n3")
    assert start.members == ["n0", "n2", "n3"]


def test_a_probe_that_hangs_times_out_and_its_node_is_refused() -> None:
    start = Start(3, bad_node("n2", error=HANGS), least=2)
    start.come(*names(3))
    start.wait(4.5)
    assert not start.members, "the probes are still running"
    assert not start.reported()
    start.wait(1.5)
    assert start.reported() == ["n2"]
    assert "no connection within 5 s" in start.refused["n2"].why
    assert start.members == ["n0", "n1"]


def test_one_failed_link_between_otherwise_reachable_nodes_is_tolerated() -> None:
    start = Start(4, lambda here, there: REFUSED if {here, there} == {"n1", "n2"} else "")
    start.come(*names(4))
    assert not start.reported()
    assert start.members == names(4)


def test_two_required_nodes_wait_until_the_unreachable_one_is_known() -> None:
    start = Start(2, bad_node("n0"))
    start.come(*names(2))
    start.wait(12.0)
    assert not start.members
    assert not start.refused
    (waiting,) = [event for event in start.job.events if isinstance(event, ev.JobWaiting)]
    assert waiting.nodes == 1
    assert "n0 (at at-n0) and n1 (at at-n1) cannot connect to each other" in waiting.why
    assert len(start.tried) <= 2 * 5, "they try again every 5 s"
    start.come("n2")
    assert start.reported() == ["n0"]
    assert start.members == ["n1", "n2"]


def test_two_required_nodes_start_once_they_reach_each_other() -> None:
    start = Start(2, bad_node("n0"))
    start.come(*names(2))
    start.wait(1.0)
    start.link = no_link_fails
    start.wait(6.0)
    assert start.members == names(2)


def test_a_restarted_node_that_is_now_reachable_is_accepted() -> None:
    start = Start(2, bad_node("n0"))
    start.come(*names(2))
    start.wait(1.0)
    start.job.lose("n0")
    start.link = no_link_fails
    start.come("n0")
    start.wait(0.5)
    assert start.members == ["n1", "n0"]


def test_a_job_that_needs_one_node_refuses_the_last_after_two_probes() -> None:
    start = Start(2, bad_node("n0", error=HANGS), least=1)
    for node in names(2):
        start.job.connect(msgspec.structs.replace(hello(node), address=f"at-{node}", probe_port=9))
        start.answer()
    for node in names(2):
        start.job.deliver(attach(w(node)))
    start.wait(9.0)
    assert not start.members
    start.wait(2.5)
    assert start.reported() == ["n1"]
    assert start.members == ["n0"]


def test_a_transient_probe_failure_does_not_refuse_a_node() -> None:
    errors = [REFUSED]
    start = Start(2, lambda _here, _there: errors.pop() if errors else "")
    start.come(*names(2))
    assert not start.reported()
    assert start.members == names(2)


def test_a_third_node_decides_which_of_two_is_refused() -> None:
    start = Start(3, bad_node("n0", error=HANGS))
    start.come("n0", "n1")
    start.wait(2.0)
    start.come("n2")
    start.wait(6.0)
    assert start.reported() == ["n0"]


def test_one_half_starts_if_two_halves_cannot_reach_each_other() -> None:
    halves = {"n0": 0, "n1": 0, "n2": 1, "n3": 1}
    start = Start(4, lambda here, there: "" if halves[here] == halves[there] else REFUSED, least=2)
    start.come(*names(4))
    start.wait(1.0)
    assert len({halves[node] for node in start.members}) == 1
    assert len(start.members) == 2


@pytest.mark.parametrize("bad", [("n0", "n1"), ("n0", "n3"), ("n2", "n3")])
def test_unreachable_nodes_do_not_cause_refusals_of_others(bad: tuple[str, str]) -> None:
    start = Start(4, bad_node(*bad), least=4)
    start.come(*names(4))
    assert sorted(start.reported()) == sorted(bad)


def test_a_refused_node_does_not_decide_about_others() -> None:
    start = Start(8, bad_node("n0", "n2"), least=5)
    start.come("n0", "n1")
    start.come("n2", *names(8)[3:])
    start.wait(1.0)
    assert sorted(start.reported()) == ["n0", "n2"]
    assert len(start.members) >= 5


def test_few_probes_are_sent_if_no_node_reaches_another() -> None:
    start = Start(30, every_link_fails)
    start.come(*names(30))
    assert not start.reported()
    assert len(start.tried) <= 2 * 12 * 30
    start.wait(0.5)
    assert [event.nodes for event in start.job.events if isinstance(event, ev.JobWaiting)] == [1]


def test_nodes_on_one_host_and_a_single_node_are_not_probed() -> None:
    start = Start(3, every_link_fails)
    start.come(*names(3), address="127.0.0.1")
    assert start.members == names(3)
    assert not start.tried
    alone = Start(1, every_link_fails)
    alone.come("n0")
    assert alone.members == ["n0"]
    assert not alone.tried


def test_a_node_that_disconnects_while_probed_is_forgotten() -> None:
    start = Start(3, bad_node("n1", error=HANGS))
    start.come("n0", "n1")
    start.job.lose("n1")
    start.come("n2", "n3")
    start.wait(0.25)
    assert start.members == ["n0", "n2", "n3"]
    assert not start.reported()


def test_returning_nodes_are_probed_before_a_stopped_job_starts_again() -> None:
    start = Start(3, no_link_fails, least=2)
    start.come(*names(3))
    for node in names(3):
        start.job.lose(node)
    assert start.job.machine.record.plan is None or not start.job.machine.members.nodes
    start.job.boot()
    start.link = bad_node("n1")
    tried = len(start.tried)
    start.wait(4.0)
    start.come("n3", "n1", "n4")
    start.wait(12.0)
    assert len(start.tried) > tried
    assert start.reported() == ["n1"]


def test_a_refused_standby_is_not_registered() -> None:
    start = Start(3, bad_node("n3"))
    start.come("n0", "n1")
    start.job.connect(msgspec.structs.replace(hello("n3"), address="at-n3", probe_port=9, standby=True))
    start.answer()
    assert start.reported() == ["n3"]
    assert not start.job.machine.members.standbys
    assert [one for one in start.job.last if isinstance(one, Close)] or "n3" in start.refused


def test_the_cost_of_a_connection_is_independent_of_the_node_count() -> None:
    counts: list[int] = []
    for nodes in (100, 400):
        start = Start(nodes, no_link_fails)
        start.come(*names(nodes - 1))
        last = msgspec.structs.replace(hello(f"n{nodes}"), address=f"at-n{nodes}", probe_port=9)
        counts.append(calls(lambda start=start, last=last: start.job.connect(last)))
    assert counts[1] <= counts[0] + 20
