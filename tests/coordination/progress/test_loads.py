"""Tests of the coordinator's expert loads, which every placement follows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from loaded_job import SHAPE, SKEWED, loads, moe_job, replicas
from machinery import attach, hello, w

from holdfast.coordination.experts.blobs import decode_experts
from holdfast.coordination.instructions import PlanExperts
from holdfast.coordination.progress.loads import decode_loads, encode_loads
from holdfast.planning.arrays import FloatArray
from holdfast.protocol import events as ev
from holdfast.protocol.messages import any_side as msg


@given(st.lists(st.floats(0, 1e6, width=32), min_size=8, max_size=8))
def test_encoded_loads_are_decoded_unchanged(values: list[float]) -> None:
    tokens = np.array(values).reshape(2, 4)
    assert (decode_loads(encode_loads(tokens), SHAPE) == tokens).all()


@pytest.mark.parametrize("tokens", [np.ones((2, 3)), np.full((2, 4), np.nan), -np.ones((2, 4)), np.ones((0, 4))])
def test_invalid_loads_are_refused(tokens: FloatArray) -> None:
    with pytest.raises(ValueError, match="are not the loads of 4 experts in 2 layers"):
        decode_loads(encode_loads(tokens), SHAPE)


def test_an_infinite_token_time_is_refused() -> None:
    book = moe_job().machine.context.loads
    assert not book.on_loads(loads(np.ones((2, 4)), token_s=np.inf))
    assert book.tokens is None
    assert book.on_loads(loads(np.ones((2, 4)), token_s=0.5))
    assert book.token_s == 0.5


def test_a_failure_only_repairs_the_placement_and_a_search_follows_the_loads() -> None:
    job = moe_job(4)
    before = job.records[-1].plan
    assert before is not None
    assert replicas(before) == [[3, 3, 3, 3]] * 2, "no loads are known yet"
    job.deliver(loads())
    job.lose("n3")
    for node in ("n0", "n1", "n2"):
        held = dict(zip(before.workers, before.expert_plan.placement, strict=True)) if before.expert_plan else {}
        job.report(node, 0, state=msg.Holding(experts=held[w(node)]))
    after = job.records[-1].plan
    assert after is not None
    assert after.expert_plan is not None
    assert after.expert_plan.repaired
    counts = np.array(replicas(after))
    assert counts.sum(axis=1).tolist() == [9, 9]
    assert (counts >= 2).all()
    for worker in after.workers:
        job.deliver(msg.Entered(worker=worker, generation=2, applied=0))
    (order,) = [asked for asked in job.last if isinstance(asked, PlanExperts)]
    found = order.search.solve()
    assert found is not None
    assert not found.experts.repaired
    assert sum(decode_experts(blob, SHAPE) for blob in found.experts.placement).tolist() == [[3, 2, 2, 2], [2, 2, 2, 3]]


def test_the_slots_of_a_joining_node_go_to_the_experts_with_the_most_load() -> None:
    job = moe_job(3)
    job.deliver(loads())
    job.connect(hello("n3"))
    job.deliver(attach(w("n3"), experts=SHAPE))
    pending = job.records[-1].pending
    assert pending is not None
    assert replicas(pending) == [[5, 2, 2, 3], [2, 2, 2, 6]], "the joiner's slots go to the hottest, and no others"


def test_only_the_newest_loads_of_a_member_count() -> None:
    job = moe_job(3)
    book = job.machine.context.loads
    job.deliver(loads(step=20))
    for old in (loads(SKEWED + 1, step=10), loads(SKEWED + 1, step=20)):
        job.deliver(old)
    assert book.tokens is not None
    assert (book.tokens == SKEWED).all()
    job.connect(hello("n3"))
    job.deliver(attach(w("n3"), experts=SHAPE))
    job.deliver(loads(SKEWED + 2, node="n3", step=30))
    assert (book.tokens == SKEWED).all(), "a worker that is not a member reports no loads"
    job.deliver(loads(SKEWED + 3, step=5, generation=2))
    assert (book.tokens == SKEWED + 3).all(), "after a rollback, steps count again"


@pytest.mark.parametrize("generation", [2, 1 << 63])
def test_loads_of_an_unknown_generation_are_ignored(generation: int) -> None:
    job = moe_job(3)
    book = job.machine.context.loads
    job.deliver(loads(SKEWED + 1, generation=generation))
    assert book.tokens is None
    job.deliver(loads())
    assert book.tokens is not None
    assert (book.tokens == SKEWED).all()


def test_loads_of_an_implausible_step_expel_the_node() -> None:
    job = moe_job(3)
    job.deliver(loads(step=1 << 63))
    assert job.machine.context.loads.tokens is None
    assert [failure.node for failure in job.emitted(ev.FailureDetected)] == ["n0"]


def test_damaged_loads_are_ignored() -> None:
    job = moe_job(3)
    job.deliver(loads(np.ones((2, 3))))
    assert job.machine.context.loads.tokens is None


def test_a_new_coordinator_receives_the_newest_loads_again() -> None:
    job = moe_job(3)
    job.deliver(loads())
    job.boot(takeover=True)
    assert job.machine.context.loads.tokens is None
    kept = (attach(w("n0"), experts=SHAPE), msg.Entered(worker=w("n0"), generation=1, applied=0), loads())
    job.connect(hello("n0", kept=kept, term=1))
    assert job.machine.context.loads.tokens is not None
