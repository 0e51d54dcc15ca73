"""Tests that a newcomer and a member probe each other before it joins; if that fails, a second member tries."""

from __future__ import annotations

import msgspec
import pytest
from machinery import Job, attach, hello, w

from holdfast.coordination.instructions import Close, Send
from holdfast.coordination.nodes.probing import MAX_BACKLOG
from holdfast.errors import EXIT_REFUSED
from holdfast.protocol import events as ev
from holdfast.protocol.messages import any_side as msg


def at(node: str, port: int = 9) -> msg.Hello:
    return msgspec.structs.replace(hello(node), address=f"host-of-{node}", probe_port=port)


def start_job(nodes: int, *, saves: bool = False) -> Job:
    """Return a training job of nodes with addresses, which reached each other while their workers started."""
    job = Job(nodes=nodes).boot()
    for index in range(nodes):
        job.connect(at(f"n{index}"))
        assert job.sent(msg.Welcome), job.last
        answer(job, probes(job))
        job.deliver(msgspec.structs.replace(attach(w(f"n{index}")), saves=saves))
    for index in range(nodes):
        job.deliver(msg.Entered(worker=w(f"n{index}"), generation=1, applied=0))
    job.step(1)
    return job


def probes(job: Job) -> dict[str, msg.ProbeAddress]:
    """Return the probe that the last input ordered for each node."""
    sent = {
        i.connection: i.message for i in job.last if isinstance(i, Send) and isinstance(i.message, msg.ProbeAddress)
    }
    return {node: sent[number] for node, number in job.connections.items() if number in sent}


def answer(job: Job, asked: dict[str, msg.ProbeAddress], **errors: str) -> None:
    for node, probe in asked.items():
        job.deliver_from(node, msg.AddressProbed(number=probe.number, error=errors.get(node, "")))
        if errors.get(node):
            return


def test_a_new_node_is_accepted_after_mutual_probes_with_a_member() -> None:
    job = start_job(2)
    job.connect(at("n9"))
    asked = probes(job)
    (member,) = asked.keys() - {"n9"}
    assert (asked[member].host, asked["n9"].host) == ("host-of-n9", f"host-of-{member}")
    assert not job.sent(msg.Welcome)
    job.deliver_from(member, msg.AddressProbed(number=asked[member].number))
    assert not job.sent(msg.Welcome)
    job.deliver(attach(w("n9")))  # its worker attaches before the node is accepted
    job.deliver_from("n9", msg.AddressProbed(number=asked["n9"].number))
    assert job.sent(msg.Welcome)
    assert w("n9") in job.machine.members.nodes["n9"].workers
    assert job.machine.record.pending is not None


def test_a_second_member_repeats_a_failed_probe_of_a_new_node() -> None:
    job = start_job(2)
    job.connect(at("n9"))
    first = probes(job)
    (one,) = first.keys() - {"n9"}
    answer(job, {one: first[one]}, **{one: "refused"})
    second = probes(job)
    (other,) = second.keys() - {"n9"}
    assert other != one
    job.deliver_from("n9", msg.AddressProbed(number=first["n9"].number, error="late"))
    answer(job, second)
    assert job.sent(msg.Welcome)
    assert not [event for event in job.events if isinstance(event, ev.NodeRefused)]


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("newcomers_side", [True, False])
def test_a_new_node_is_refused_after_two_failed_probes(nodes: int, newcomers_side: bool) -> None:
    job = start_job(nodes)
    job.connect(at("n9"))
    for _ in range(2):
        asked = probes(job)
        (member,) = asked.keys() - {"n9"}
        bad = "n9" if newcomers_side else member
        answer(job, {bad: asked[bad]}, **{bad: "host-of-n9:9: Connection refused"})
    (refused,) = job.sent(msg.Refused)
    assert (refused.exit_code, refused.retry) == (EXIT_REFUSED, False)
    assert [i for i in job.last if isinstance(i, Close)]
    (event,) = job.emitted(ev.NodeRefused)
    assert (event.node, event.address, event.why) == ("n9", "host-of-n9", refused.why)
    assert "Connection refused" in event.why
    assert "--advertise" in event.why
    assert "n9" not in job.machine.members.nodes
    assert job.machine.record.pending is None


def test_a_new_node_is_refused_after_its_probes_time_out() -> None:
    job = start_job(1)
    job.connect(at("n9"))
    began, refused = job.now, list[ev.NodeRefused]()
    while not refused and job.now < began + 20:
        job.deliver_from("n0", msg.Heartbeat())
        job.tick(0.5)
        refused = job.emitted(ev.NodeRefused)
    assert 10.0 < job.now - began <= 11.5, "two probes of 5 s"
    assert "no connection within 5 s" in refused[0].why
    assert "n0" in job.machine.members.nodes


def test_the_loss_of_a_probing_member_is_not_a_failed_probe() -> None:
    """Two failed probes would refuse the newcomer, which the job now needs most."""
    job = start_job(2)
    job.connect(at("n9"))
    (lost,) = probes(job).keys() - {"n9"}
    job.lose(lost)
    job.tick(0.1)
    asked = probes(job)
    (other,) = asked.keys() - {"n9"}
    assert other != lost
    answer(job, {other: asked[other]}, **{other: "refused"})
    assert not job.sent(msg.Refused), "one probe has failed"
    answer(job, probes(job))
    assert job.sent(msg.Welcome)


def test_a_new_node_is_accepted_if_the_only_member_is_lost_while_probing() -> None:
    job = start_job(1, saves=True)
    job.connect(at("n9"))
    job.lose("n0")
    job.tick(0.1)
    assert job.sent(msg.Welcome)


def test_a_new_node_that_reconnects_is_not_refused_for_its_lost_connection() -> None:
    """Its link was down for a moment, and the coordinator has not yet seen the first connection end."""
    job, lost = start_job(1), at("n9")
    job.connect(lost)
    first = job.connections["n9"]
    job.connect(lost)
    assert [i.connection for i in job.last if isinstance(i, Close)] == [first]
    answer(job, probes(job))
    assert job.sent(msg.Welcome)
    for _ in range(25):
        for node in ("n0", "n9"):
            job.deliver_from(node, msg.Heartbeat())
        job.tick(0.5)
    assert not [event for event in job.events if isinstance(event, ev.NodeRefused)]
    assert "n9" in job.machine.members.nodes


def test_a_new_node_is_accepted_immediately_if_no_member_can_probe_it() -> None:
    job = Job(nodes=2).start()  # members from an earlier version, without addresses
    job.connect(at("n9"))
    assert job.sent(msg.Welcome)
    assert not probes(job)


def test_a_new_node_that_disconnects_while_probed_is_forgotten() -> None:
    job = start_job(1)
    job.connect(at("n9"))
    asked = probes(job)
    job.lose("n9")
    answer(job, {"n0": asked["n0"]})
    job.tick(20.0)
    assert not job.sent(msg.Welcome)
    assert not [event for event in job.events if isinstance(event, ev.NodeRefused)]


def test_a_new_node_is_probed_once_per_session() -> None:
    job = start_job(1)
    job.connect(at("n9"))
    answer(job, probes(job))
    job.lose("n9")
    job.connect(at("n9"))
    assert not probes(job)


def test_messages_of_a_node_not_yet_accepted_are_bounded() -> None:
    job = start_job(1)
    job.connect(at("n9"))
    for _ in range(MAX_BACKLOG):
        job.deliver_from("n9", msg.NodeSnapshots(host="h", port=1))
    assert not [i for i in job.last if isinstance(i, Close)]
    job.deliver_from("n9", msg.NodeSnapshots(host="h", port=1))
    assert [i for i in job.last if isinstance(i, Close)]


def test_a_loopback_address_from_another_host_is_refused_without_a_probe() -> None:
    job = start_job(1)
    job.connect(msgspec.structs.replace(at("n9"), address="127.0.0.1", beside_coordinator=False))
    assert not probes(job)
    (refused,) = job.sent(msg.Refused)
    assert "only its own host can reach" in refused.why
