"""Tests of rendezvous bundles: one from each node and one to each node, complete according to the plan."""

from __future__ import annotations

import msgspec
from machinery import Job, attach, hello, w

from holdfast.coordination.instructions import Broadcast
from holdfast.protocol import events as ev
from holdfast.protocol.messages import any_side as msg
from holdfast.protocol.names import MAX_POSTED_BYTES, key_of


def post(node: str, generation: int = 1, *, key: str = "", value: bytes = b"v") -> msg.Post:
    return msg.Post(worker=w(node), generation=generation, keys={own(node, key or node): value})


def own(node: str, name: str) -> str:
    """Return a named key of the worker of a node n0, n1, ..."""
    return key_of(int(node[1:]), name)


def nothing(node: str) -> msg.Post:
    return msg.Post(worker=w(node), generation=1, keys={})


def bundles(job: Job) -> list[tuple[tuple[int, ...], dict[str, bytes]]]:
    """Return the target connections and the keys of the last input's bundles."""
    found = [i for i in job.last if isinstance(i, Broadcast) and isinstance(i.message, msg.Posted)]
    sent = [(i.connections, i.message.keys) for i in found if isinstance(i.message, msg.Posted)]
    return [(to, {key.partition(":")[2]: value for key, value in keys.items()}) for to, keys in sent]


def test_all_nodes_are_sent_one_bundle_after_every_member_has_posted() -> None:
    job = Job().start()
    for node in ("n0", "n1"):
        job.deliver_from(node, msg.Posts(posts=(post(node),)))
        assert not job.last
    job.deliver_from("n2", msg.Posts(posts=(post("n2"),)))
    assert bundles(job) == [((1, 2, 3), {"n0": b"v", "n1": b"v", "n2": b"v"})]
    assert job.orders(msg.Posted).keys() == {w("n0"), w("n1"), w("n2")}


def test_a_late_key_is_sent_in_another_bundle() -> None:
    job = Job(nodes=1).start()
    job.deliver_from("n0", msg.Posts(posts=(post("n0"),)))
    job.deliver_from("n0", msg.Posts(posts=(post("n0", key="late"),)))
    assert bundles(job) == [((1,), {"late": b"v"})]


def test_a_bundle_contains_only_the_one_posted_key() -> None:
    """NCCL does this: rank 0 has the group's id, and all other ranks post that they have none."""
    job = Job().start()
    job.deliver_from("n0", msg.Posts(posts=(post("n0", key="id"),)))
    job.deliver_from("n1", msg.Posts(posts=(nothing("n1"),)))
    assert not job.last
    job.deliver_from("n2", msg.Posts(posts=(nothing("n2"),)))
    assert bundles(job) == [((1, 2, 3), {"id": b"v"})]


def test_no_bundle_is_sent_if_no_member_has_a_key() -> None:
    job = Job().start()
    for node in ("n0", "n1", "n2"):
        job.deliver_from(node, msg.Posts(posts=(nothing(node),)))
        assert not job.last


def test_keys_posted_for_other_nodes_or_by_non_members_are_ignored() -> None:
    job = Job().start()
    job.connect(hello("n3"))
    job.deliver_from("n0", msg.Posts(posts=(post("n0"), post("n1"), post("n2"))))
    job.deliver_from("n3", msg.Posts(posts=(post("n3"),)))
    assert not job.last
    for node in ("n1", "n2"):
        job.deliver_from(node, msg.Posts(posts=(post(node, value=b"own"),)))
    assert bundles(job) == [((1, 2, 3), {"n0": b"v", "n1": b"own", "n2": b"own"})]


def test_keys_of_other_generations_are_dropped() -> None:
    job = Job().start()
    job.deliver_from("n0", msg.Posts(posts=(post("n0", generation=7), post("n0", generation=0))))
    assert not job.last


def expelled(job: Job) -> list[tuple[str | None, str]]:
    return [(event.node, event.detail) for event in job.emitted(ev.FailureDetected)]


def test_a_node_that_posts_too_many_bytes_is_expelled_with_a_reason() -> None:
    """If the key were dropped silently, all workers would repeatedly wait for it until they time out."""
    job = Job().start()
    for number in range(7):
        job.deliver_from("n0", msg.Posts(posts=(post("n0", key=str(number), value=bytes(MAX_POSTED_BYTES // 8)),)))
        assert not job.last
    job.deliver_from("n0", msg.Posts(posts=(post("n0", key="7", value=bytes(MAX_POSTED_BYTES // 8)),)))
    ((node, why),) = expelled(job)
    assert node == "n0"
    assert f"bytes of keys; at most {MAX_POSTED_BYTES} are allowed" in why


def test_a_member_that_posts_a_key_of_another_rank_is_expelled() -> None:
    """Otherwise it could redirect other workers from another rank to itself or to no worker."""
    job = Job().start()
    forged = msg.Post(worker=w("n1"), generation=1, keys={own("n1", "a"): b"v", own("n2", "a"): b"v"})
    job.deliver_from("n1", msg.Posts(posts=(forged,)))
    assert expelled(job) == [("n1", "n1/0/a has posted the key '2:a', which is not a key of its rank 1")]
    assert not bundles(job)


def test_a_bundle_that_is_larger_than_a_message_is_split() -> None:
    job = Job().start()
    large = bytes(msg.MAX_KEY_BYTES)
    for node in ("n0", "n1", "n2"):
        job.deliver_from(node, msg.Posts(posts=(post(node, value=large),)))
    assert [list(keys) for _, keys in bundles(job)] == [["n0"], ["n1"], ["n2"]]
    sizes = [len(msgspec.msgpack.encode(i.message)) for i in job.last if isinstance(i, Broadcast)]
    assert max(sizes) <= msg.MAX_MESSAGE_BYTES


def test_keys_of_a_pending_generation_are_bundled_separately() -> None:
    job = Job().start()
    job.connect(hello("n3"))
    job.deliver(attach(w("n3")))
    for node in ("n0", "n1", "n2", "n3"):
        assert not bundles(job)
        job.deliver_from(node, msg.Posts(posts=(post(node, generation=2),)))
    assert [connections for connections, _ in bundles(job)] == [(1, 2, 3, 4)]


def test_a_member_that_has_not_posted_its_address_is_the_suspect() -> None:
    """Its listener answers but its training thread hangs before it posts, so the other workers cannot identify it."""
    job = Job().start()
    for node in ("n0", "n2"):
        job.deliver_from(node, msg.Posts(posts=(post(node),)))
    for node in ("n0", "n2"):
        job.deliver(msg.Complaint(worker=w(node), generation=1, detail="rendezvous", timed_out=True))
    for node in ("n0", "n1", "n2"):
        job.report(node, 0, msg.Phase.ENTERING)
    found = [(event.node, event.detail) for event in job.emitted(ev.FailureDetected)]
    assert found == [("n1", "its address has not come, for which all waited")]
