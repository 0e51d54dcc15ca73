"""Tests of the choice of witnesses: enough workers, on as many nodes and racks as possible."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from machinery import Job

from holdfast.coordination.generations.witnesses import FEW, SMALL, choose_witnesses, witnesses_wanted

PLACES = st.lists(
    st.tuples(st.sampled_from([f"n{index}" for index in range(8)]), st.sampled_from(["", "a", "b"])), max_size=24
)


@given(places=PLACES, wanted=st.integers(1, 12))
def test_witnesses_are_spread_over_the_most_nodes_and_racks(places: list[tuple[str, str]], wanted: int) -> None:
    rack_of = dict(places)
    places = [(node, rack_of[node]) for node, _ in places]
    chosen = choose_witnesses(places, wanted) if places else ()
    assert len(chosen) == len(set(chosen)) == min(wanted, len(places))
    assert list(chosen) == sorted(chosen)
    nodes = {node for node, _ in places}
    racks = {rack or node for node, rack in places}
    assert len({places[rank][0] for rank in chosen}) == min(wanted, len(nodes))
    assert len({places[rank][1] or places[rank][0] for rank in chosen}) == min(wanted, len(racks))


def test_all_workers_of_a_small_job_are_witnesses_and_few_of_a_large_one() -> None:
    def witnesses(nodes: int) -> int:
        plan = Job(nodes=nodes).start().machine.record.plan
        assert plan is not None
        return len(plan.witnesses)

    assert (witnesses(4), witnesses(SMALL), witnesses(SMALL + 1), witnesses(40)) == (4, SMALL, FEW, FEW)
    assert (witnesses_wanted(SMALL, 9), witnesses_wanted(40, 9)) == (SMALL, 10)
