"""Tests of refused advertised addresses: addresses that only their own host can reach, unless all are on one host."""

from __future__ import annotations

import msgspec
import pytest
from machinery import Job, hello

from holdfast.coordination.job.admission import is_local_address
from holdfast.errors import EXIT_BAD_INPUT
from holdfast.protocol import events as ev
from holdfast.protocol.messages import any_side as msg


def connect_address(job: Job, node: str, address: str, *, beside: bool) -> msg.Refused | None:
    """Return the refusal of an agent, or None if it is accepted."""
    job.connect(msgspec.structs.replace(hello(node), address=address, beside_coordinator=beside))
    return next(iter(job.sent(msg.Refused)), None)


@pytest.mark.parametrize(
    ("address", "only_itself"),
    [
        ("127.0.0.1", True),
        ("127.8.9.1", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", True),
        ("::", True),
        ("10.0.0.2", False),
        ("fe80::1", False),
        ("gpu-7.cluster", False),
        ("", False),
    ],
)
def test_loopback_and_unspecified_addresses_reach_only_their_own_host(address: str, only_itself: bool) -> None:
    assert is_local_address(address) is only_itself


def test_loopback_addresses_are_accepted_on_the_coordinator_host() -> None:
    job = Job().boot()
    assert connect_address(job, "n0", "127.0.0.1", beside=True) is None
    assert connect_address(job, "n1", "127.0.0.1", beside=True) is None


def test_a_loopback_address_from_another_host_is_refused_with_advice() -> None:
    job = Job().boot()
    refused = connect_address(job, "n0", "127.0.0.1", beside=False)
    assert refused is not None
    assert (refused.exit_code, refused.retry) == (EXIT_BAD_INPUT, False)
    assert "the coordinator is on another host" in refused.why
    assert "--advertise ADDRESS" in refused.why
    (event,) = job.emitted(ev.NodeRefused)
    assert (event.node, event.address, event.why) == ("n0", "127.0.0.1", refused.why)
    assert connect_address(job, "n0", "127.0.0.1", beside=False) is not None
    assert not job.emitted(ev.NodeRefused), "it is reported once"
    assert connect_address(job, "n0", "10.0.0.2", beside=False) is None


def test_a_loopback_address_is_refused_if_a_node_is_on_another_host() -> None:
    job = Job().boot()
    assert connect_address(job, "n0", "10.0.0.2", beside=False) is None
    refused = connect_address(job, "n1", "127.0.0.1", beside=True)
    assert refused is not None
    assert "node n0 is on another host" in refused.why
    assert connect_address(job, "n2", "10.0.0.1", beside=True) is None


def test_a_remote_node_is_refused_with_the_unreachable_loopback_address() -> None:
    job = Job().boot()
    assert connect_address(job, "n0", "127.0.0.1", beside=True) is None
    refused = connect_address(job, "n1", "10.0.0.2", beside=False)
    assert refused is not None
    assert "cannot reach node n0, which advertises 127.0.0.1" in refused.why


def test_a_returning_member_is_not_refused_for_its_address() -> None:
    """The coordinator may now run on another host, but its members have already reached each other."""
    job = Job(nodes=1).start()
    job = Job(nodes=1, records=job.records, events=job.events, now=job.now + 1).boot()
    refused = connect_address(job, "n0", "127.0.0.1", beside=False)
    assert refused is None or refused.retry, "it is refused only for its lost workers"
    assert not job.emitted(ev.NodeRefused)
