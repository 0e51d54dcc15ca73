"""The values that a script may pass as its layouts."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import holdfast
from holdfast.errors import BadInputError
from holdfast.protocol.layouts.layout_list import ListedLayout, have_node_counts
from holdfast.runtime.session.replica_group.layout_list import check_micro_batch, parse_layouts

TWO, FOUR = holdfast.Layout(shard=2), holdfast.Layout(shard=4)


def test_a_single_layout_is_parsed_equally_from_every_form() -> None:
    assert parse_layouts(None) == (None, ())
    for given in (TWO, [TWO], (TWO,), {1: TWO}, {1: TWO, 4: TWO}):
        assert parse_layouts(given) == (TWO, ())


def test_several_layouts_are_ordered_by_preference_or_node_count() -> None:
    assert parse_layouts([FOUR, TWO]) == (None, (ListedLayout(layout=FOUR), ListedLayout(layout=TWO)))
    only, layouts = parse_layouts({3: TWO, 1: FOUR})
    assert (only, layouts) == (None, (ListedLayout(layout=FOUR, nodes=1), ListedLayout(layout=TWO, nodes=3)))
    assert have_node_counts(layouts)


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ([], "is empty: give at least one layout"),
        ({}, "is empty: give at least one layout"),
        ("shard", "is a str: give holdfast.Layout(shard=N), a list"),
        ([TWO, 4], "contains a int"),
        ([TWO, FOUR, TWO], "got a layout twice (shard 2, shard 4, shard 2)"),
        ({0: TWO, 1: FOUR}, "has the key 0: give whole numbers of nodes from 1 to 1000000"),
        ({1: FOUR, 10**20: TWO}, "has the key 100000000000000000000: give whole numbers of nodes"),
        ({"1": TWO}, "has the key '1'"),
        ({2: TWO, 3: FOUR}, "has no layout for fewer than 2 nodes"),
        ([TWO, holdfast.Layout(stages=2)], "pipeline stages cannot be trained yet"),
        ([holdfast.Layout(shard=n) for n in range(1, 19)], "got 18 layouts: give at most 16"),
    ],
)
def test_invalid_lists_of_layouts_are_refused(given: Any, error: str) -> None:
    with pytest.raises(BadInputError, match=re.escape(error)):
        parse_layouts(given)


def test_each_listed_layout_must_divide_the_micro_batch() -> None:
    _, listed = parse_layouts([TWO, FOUR])
    check_micro_batch(listed, 8)
    check_micro_batch((), 7)
    with pytest.raises(BadInputError, match="a micro-batch of 6 samples cannot be split evenly over shard 4"):
        check_micro_batch(listed, 6)


def test_a_standalone_script_with_several_layouts_has_world_size_one() -> None:
    try:
        job = holdfast.init(layout=[TWO, FOUR])
        assert job.layout == holdfast.Layout()
        assert (job.mesh["shard"].size(), job.world_size) == (1, 1)
    finally:
        torch.distributed.destroy_process_group()
