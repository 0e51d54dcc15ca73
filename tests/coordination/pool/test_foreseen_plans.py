"""Tests that plans made before a change equal the plans made after it."""

from __future__ import annotations

import time
from dataclasses import replace
from math import inf

import pytest
from bids import demands
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.coordination.pool.share.achieving import Waf
from holdfast.coordination.pool.share.dividing import divide
from holdfast.coordination.pool.share.interface import Bid, Demand, Division
from holdfast.coordination.pool.share.next_plans import NextPlansQuestion, list_futures, situation_of


def measured(demand: Demand, draw: st.DataObject, *, queued: bool = False) -> Demand:
    """Return a demand with different measurements of each job; if `queued`, some jobs wait to start."""
    bids = tuple(
        replace(
            bid,
            had=bid.has,
            admitted=not (queued and draw.draw(st.booleans())),
            ends_by=inf,
            has=max(bid.has, bid.smallest),
            achieves=tuple(sorted(draw.draw(st.lists(st.just(0.0) | st.floats(0.001, 100.0), min_size=2, max_size=8)))),
            in_flop=draw.draw(st.booleans()),
            change_s=draw.draw(st.floats(0.0, 30.0)),
        )
        for bid in demand.bids
    )
    bids = tuple(replace(bid, had=bid.has) if bid.admitted else _queued(bid) for bid in bids)
    nodes = max(demand.nodes, sum(bid.has + bid.waiting for bid in bids)) + 1
    return replace(demand, bids=bids, nodes=nodes, failure_rate=1e-6)


def _queued(bid: Bid) -> Bid:
    return replace(bid, has=0, had=0, waiting=0, achieves=())


def same(first: Division, second: Division) -> bool:
    """Compare the value of two divisions; equally good divisions are equal."""
    if first.worth is None or second.worth is None:
        return first == second
    values = (first.worth.gain - first.worth.cost, second.worth.gain - second.worth.cost)
    return abs(values[0] - values[1]) <= 1e-9 * max(1.0, abs(values[0]))


@settings(max_examples=100, deadline=None)
@given(demands(), st.data(), st.booleans())
def test_a_precomputed_plan_equals_the_plan_after_the_change(drawn: Demand, data: st.DataObject, queued: bool) -> None:
    demand = measured(drawn, data, queued=queued)
    found = NextPlansQuestion(number=1, demand=demand).solve()
    expected = list_futures(demand)
    assert len(found) == len(expected)
    for future, division in zip(expected, found, strict=True):
        assert same(division, divide(Waf(), future))


@given(demands())
def test_all_futures_are_distinct_situations(drawn: Demand) -> None:
    demand = replace(drawn, bids=tuple(replace(bid, admitted=True) for bid in drawn.bids))
    seen = [situation_of(future) for future in list_futures(demand)]
    assert len(set(seen)) == len(seen) > len(demand.bids)
    assert situation_of(demand) not in seen


def test_no_plan_is_precomputed_while_a_job_waits_for_a_time_limit() -> None:
    runs = Bid(name="runs", order=0, least=2, most=2, has=2, had=2, admitted=True, ends_by=1e9)
    waits = Bid(name="waits", order=1, least=2, most=4)
    assert list_futures(Demand(nodes=3, bids=(runs, waits))) == []


def test_the_start_of_a_queued_job_is_precomputed() -> None:
    runs = Bid(name="runs", order=0, least=2, most=4, has=2, had=2, admitted=True)
    waits = Bid(name="waits", order=1, least=2, most=4)
    demand = Demand(nodes=3, bids=(runs, waits), failure_rate=1e-6)
    found = NextPlansQuestion(number=1, demand=demand).solve()
    table = {situation_of(future): division for future, division in zip(list_futures(demand), found, strict=True)}
    assert divide(Waf(), demand).nodes == {"runs": 3, "waits": 0}
    assert table[situation_of(replace(demand, nodes=4))].nodes == {"runs": 2, "waits": 2}
    assert table[situation_of(replace(demand, bids=(waits,)))].nodes == {"waits": 3}


@pytest.mark.processor_time
def test_plans_for_1024_nodes_are_precomputed_and_looked_up_quickly() -> None:
    achieved = tuple(nodes / (0.9 + 0.1 * nodes) for nodes in range(1025))
    bids = tuple(
        Bid(
            name=f"j{order}", order=order, least=8, most=1024, has=32, had=32, admitted=True, achieves=achieved,
            in_flop=True, change_s=5.0, weight=1 + order / 100,
        )
        for order in range(32)
    )  # fmt: skip
    demand = Demand(nodes=1024, bids=bids, failure_rate=1e-7)
    begun = time.process_time()
    found = NextPlansQuestion(number=1, demand=demand).solve()
    assert time.process_time() - begun <= 5.0
    table = {situation_of(future): division for future, division in zip(list_futures(demand), found, strict=True)}
    hit = replace(demand, nodes=1023, bids=(replace(bids[0], has=31), *bids[1:]))
    begun = time.process_time()
    assert table[situation_of(hit)].nodes.keys() == {bid.name for bid in bids}
    assert time.process_time() - begun <= 0.001
