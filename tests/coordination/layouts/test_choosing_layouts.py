"""Tests of the layout choice for a number of nodes, and whether a change pays."""

from __future__ import annotations

import math

import msgspec
import pytest

from holdfast.coordination.layouts.choosing import GAIN_PER_COST, HORIZON_S, choose_layout, layouts_by_nodes
from holdfast.protocol.layouts.layout import WHOLE, Layout
from holdfast.protocol.layouts.layout_list import ListedLayout, layout_for, places_by_nodes
from holdfast.protocol.record import SCHEMA, Record

TWO, FOUR = Layout(shard=2), Layout(shard=4)
LISTED = (ListedLayout(layout=TWO), ListedLayout(layout=FOUR))
TOLD = (ListedLayout(layout=FOUR, nodes=1), ListedLayout(layout=TWO, nodes=3))


@pytest.mark.parametrize(("nodes", "layout"), [(1, FOUR), (2, FOUR), (3, TWO), (9, TWO)])
def test_layouts_with_node_counts_in_the_script_are_used(nodes: int, layout: Layout) -> None:
    choice = choose_layout(TOLD, TWO, nodes=nodes, workers=4, micro_batches=6, measured_s={str(TWO): 9.0})
    assert choice.layout == layout == layout_for(TOLD, nodes)
    assert choice.is_worth(1e9)


def test_larger_replica_groups_are_not_chosen_if_micro_batches_divide_evenly() -> None:
    """Twelve micro-batches: six groups do two each; three larger ones do four each, each in over half the time."""
    choice = choose_layout(LISTED, TWO, nodes=3, workers=4, micro_batches=12, measured_s={})
    assert choice.layout == TWO
    assert not choice.is_worth(0.0)


def test_larger_replica_groups_are_chosen_if_smaller_ones_would_be_idle() -> None:
    """Four micro-batches on eight workers: four groups of two do one each; two of four do two, each in half the time.

    With one micro-batch, five workers leave groups idle: it is done by two or by four workers.
    """
    even = choose_layout(LISTED, FOUR, nodes=2, workers=4, micro_batches=4, measured_s={})
    assert even.layout == TWO
    few = choose_layout(LISTED, TWO, nodes=2, workers=4, micro_batches=2, measured_s={})
    assert few.layout == FOUR
    assert few.gain_s == pytest.approx(HORIZON_S * (1 - 1.1 / 2))
    assert few.is_worth(few.gain_s / GAIN_PER_COST / 1.01)
    assert not few.is_worth(few.gain_s / GAIN_PER_COST * 1.01)


def test_measured_step_times_take_precedence_over_estimates() -> None:
    measured = {str(FOUR): 1.0, str(TWO): 1.0}
    choice = choose_layout(LISTED, TWO, nodes=2, workers=4, micro_batches=2, measured_s=measured)
    assert choice.layout == TWO, "four workers are not faster than two"
    # Guesses for other layouts start from the measured one, not from one second.
    slow = choose_layout(LISTED, TWO, nodes=2, workers=4, micro_batches=2, measured_s={str(TWO): 50.0})
    assert slow.layout == FOUR
    assert slow.gain_s == pytest.approx(HORIZON_S * (1 - 1.1 / 2))


def test_an_equally_fast_layout_does_not_replace_the_current_one() -> None:
    """Two groups need two rounds for four micro-batches; one group needs four rounds of half the time."""
    same = {str(TWO): 1.0, str(FOUR): 0.5}
    for in_force in (TWO, FOUR):
        choice = choose_layout(LISTED, in_force, nodes=1, workers=4, micro_batches=4, measured_s=same)
        assert choice.layout == in_force
        assert not choice.is_worth(0.0)
    assert layout_for(LISTED, 7) == TWO, "without a layout in force, the first one is chosen"


def test_a_layout_that_exceeded_memory_is_replaced() -> None:
    listed = (ListedLayout(layout=WHOLE), *LISTED)
    choice = choose_layout(listed, WHOLE, nodes=3, workers=4, micro_batches=12, measured_s={}, too_large=[WHOLE])
    assert choice.layout == TWO
    assert choice.is_worth(math.inf)
    assert "one place has not fitted memory" in choice.why
    nothing = choose_layout(LISTED, TWO, nodes=3, workers=4, micro_batches=12, measured_s={}, too_large=[TWO, FOUR])
    assert nothing.layout == TWO


def record(layout: Layout, *listed: ListedLayout, micro_batches: int = 6) -> Record:
    return Record(
        schema=SCHEMA, job="j", term=1, generation=1, layout=layout, layouts=listed, micro_batches=micro_batches
    )


def test_layouts_are_listed_by_number_of_nodes_for_a_pool() -> None:
    assert layouts_by_nodes(record(WHOLE), nodes=9, workers=4) == ()
    assert layouts_by_nodes(record(TWO), nodes=9, workers=4) == (ListedLayout(layout=TWO, nodes=1),)
    told = layouts_by_nodes(record(FOUR, *TOLD), nodes=9, workers=4)
    assert told == TOLD
    assert places_by_nodes(told) == (4, 4, 2)
    chosen = layouts_by_nodes(record(TWO, *LISTED), nodes=3, workers=4)
    assert places_by_nodes(chosen) == (2, 4, 2), "on two nodes, four groups of two would wait for each other"


def test_a_layout_that_exceeded_memory_is_not_listed_for_a_pool() -> None:
    small = msgspec.structs.replace(record(TWO, *LISTED), too_large=(TWO,))
    assert layouts_by_nodes(small, nodes=9, workers=4) == (ListedLayout(layout=FOUR, nodes=1),)
