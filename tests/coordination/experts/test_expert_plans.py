"""Tests of encoded placements: blobs, the experts that survivors hold, and moves."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from machinery import Job, attach, hello, w

from holdfast.coordination.experts.blobs import decode_experts, encode_experts, experts_by_layer, find_lost_experts
from holdfast.coordination.experts.placing import PlacementQuestion, compute_placement, keep_placement
from holdfast.planning import Shortage
from holdfast.protocol.failures import FailureKind
from holdfast.protocol.messages.agent import WorkerDown
from holdfast.protocol.plan import ExpertPlan, ExpertShape

SHAPE = ExpertShape(layers=3, experts=8, slots=6)


@given(st.data())
def test_decoding_an_encoded_placement_returns_the_counts(data: st.DataObject) -> None:
    layers, experts = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 9))
    counts = np.array(
        data.draw(
            st.lists(st.lists(st.integers(0, 3), min_size=experts, max_size=experts), min_size=layers, max_size=layers)
        )
    )
    shape = ExpertShape(layers=layers, experts=experts, slots=1)
    assert (decode_experts(encode_experts(counts), shape) == counts).all()
    assert [len(layer) for layer in experts_by_layer(encode_experts(counts), shape)] == counts.sum(axis=1).tolist()


@given(st.binary(min_size=1, max_size=64))
def test_arbitrary_bytes_decode_to_a_placement_or_raise_value_error(blob: bytes) -> None:
    try:
        counts = decode_experts(blob + b"\x00" * (len(blob) % 2), SHAPE)
    except ValueError:
        return
    assert encode_experts(counts) != b""


def test_an_empty_blob_holds_no_experts() -> None:
    assert not decode_experts(b"", SHAPE).any()
    assert find_lost_experts(SHAPE, [b""]) == [(layer, expert) for layer in range(3) for expert in range(8)]


def placed(workers: list[str], held: dict[str, bytes], slots: int = 6) -> ExpertPlan:
    question = asked(workers, held, slots)
    plan = keep_placement(question) or compute_placement(question)
    assert not isinstance(plan, Shortage)
    return plan


def asked(workers: list[str], held: dict[str, bytes], slots: int = 6) -> PlacementQuestion:
    nodes = {worker.split("/")[0] for worker in workers}
    return PlacementQuestion(
        shape=SHAPE,
        workers=tuple(workers),
        held=tuple(held.get(worker, b"") for worker in workers),
        slots=(slots,) * len(nodes),
        fault_threshold=2,
        strategy="mro",
    )


def test_replicas_are_spread_over_racks_before_nodes() -> None:
    workers = [f"n{number}/0/a" for number in range(4)]
    for racks in ((0, 0, 1, 1), (0, 1, 1, 0)):
        plan = compute_placement(msgspec.structs.replace(asked(workers, {}), strategy="best", racks=racks))
        assert isinstance(plan, ExpertPlan)
        for lost in (0, 1):
            left = [blob for rack, blob in zip(racks, plan.placement, strict=True) if rack != lost]
            assert find_lost_experts(SHAPE, left) == []


@pytest.mark.parametrize("racks", [("a", "a", "b", "b"), ("a", "b", "b", ""), ("", "", "", "")])
def test_placements_use_the_racks_that_nodes_report(racks: tuple[str, ...]) -> None:
    job = Job(nodes=len(racks)).boot()
    for number, rack in enumerate(racks):
        job.connect(msgspec.structs.replace(hello(f"n{number}"), rack=rack))
        job.deliver(attach(w(f"n{number}"), experts=SHAPE))
    plan = job.records[-1].plan
    assert plan is not None
    assert plan.expert_plan is not None
    assert plan.expert_plan.given == 2
    rack_of = {f"n{number}": rack or f"n{number}" for number, rack in enumerate(racks)}
    for lost in set(rack_of.values()):
        left = [
            blob
            for member, blob in zip(plan.members, plan.expert_plan.placement, strict=True)
            if rack_of[member.node] != lost
        ]
        assert find_lost_experts(SHAPE, left) == []


def test_every_expert_has_a_replica_on_a_reliable_node() -> None:
    workers = [f"n{number}/0/a" for number in range(4)]
    for rates in ((9.0, 9.0, 1.0, 1.0), (1.0, 9.0, 9.0, 1.0)):
        question = msgspec.structs.replace(asked(workers, {}, slots=4), strategy="best", failure_rates=rates)
        plan = compute_placement(question)
        assert isinstance(plan, ExpertPlan)
        safe = [blob for rate, blob in zip(rates, plan.placement, strict=True) if rate == 1.0]
        assert find_lost_experts(SHAPE, safe) == []


def test_failure_rates_are_reported_by_nodes_and_grow_with_node_failures() -> None:
    job = Job(nodes=4).boot()
    for number, rate in enumerate((1.0, 1.0, 1.0, 10.0)):
        job.connect(msgspec.structs.replace(hello(f"n{number}"), failure_rate=rate))
        job.deliver(attach(w(f"n{number}"), experts=SHAPE))

    def rate_of(node: str) -> float:
        return job.machine.members.failure_rate(node)

    assert [rate_of(f"n{number}") for number in range(4)] == [1.0, 1.0, 1.0, 10.0]
    job.deliver_from("n1", WorkerDown(worker=w("n1"), kind=FailureKind.PROCESS_EXIT, detail="Xid: 94", exit_code=1))
    job.deliver_from("n0", WorkerDown(worker=w("n0"), kind=FailureKind.EXCEPTION, detail="ValueError: x", exit_code=1))
    assert [rate_of(node) for node in ("n0", "n1")] == [1.0, 2.0]
    job.lose("n3")
    job.connect(msgspec.structs.replace(hello("n3"), failure_rate=10.0))
    assert rate_of("n3") == 20.0


def test_a_node_loss_leaves_all_experts_and_only_missing_ones_move() -> None:
    workers = [f"n{number}/0/a" for number in range(4)]
    first = placed(workers, {})
    assert first.moves == 0, "the first placement is made in place"
    assert (first.asked, first.given) == (2, 2)
    held = dict(zip(workers, first.placement, strict=True))
    moves = []
    for dead in workers:
        rest = [worker for worker in workers if worker != dead]
        assert find_lost_experts(SHAPE, [held[worker] for worker in rest]) == []
        after = placed(rest, held)
        assert after.held == tuple(held[worker] for worker in rest)
        moves.append(after.moves)
        for blob in after.placement:
            assert decode_experts(blob, SHAPE).sum(axis=1).tolist() == [6, 6, 6]
    assert 0 < max(moves) <= 3 * 6, "no more experts move than the dead node held"


def test_a_joining_worker_holds_no_experts_and_is_assigned_some() -> None:
    workers = ["a/0/x", "b/0/x"]
    first = placed(workers, {})
    held = dict(zip(workers, first.placement, strict=True))
    grown = placed([*workers, "c/0/x"], held)
    assert grown.held[2] == b""
    assert decode_experts(grown.placement[2], SHAPE).sum() == 18
    assert grown.moves > 0


def test_ranks_of_a_node_share_its_slots_in_any_rank_order() -> None:
    workers = ["a/0/x", "b/0/x", "a/1/x", "b/1/x"]
    plan = placed(workers, {})
    assert [decode_experts(blob, SHAPE).sum() for blob in plan.placement] == [9, 9, 9, 9]
    for node in (0, 1):
        counts = sum(decode_experts(plan.placement[rank], SHAPE) for rank in (node, node + 2))
        assert (counts.sum(axis=1) == 6).all()


def test_too_few_slots_are_a_shortage_with_a_remedy() -> None:
    for plan in (compute_placement(asked(["a/0/x"], {})), keep_placement(asked(["a/0/x"], {}))):
        assert isinstance(plan, Shortage)
        assert "slots" in str(plan)


@pytest.mark.parametrize("experts", [7, 9])
def test_a_blob_of_another_model_is_refused(experts: int) -> None:
    blob = encode_experts(np.ones((3, 9), dtype=np.int64))
    other = ExpertShape(layers=3 if experts == 7 else 2, experts=experts, slots=6)
    with pytest.raises(ValueError, match="do not name experts"):
        decode_experts(blob, other)
