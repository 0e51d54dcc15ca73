"""Layouts: sizes, places, coordinates, and what does not fit."""

import itertools
import re

import msgspec
import pytest

from holdfast.errors import BadInputError
from holdfast.protocol.layouts.layout import DIMENSIONS, Layout

SIZES = (1, 2, 3)


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"shard": 0}, "Layout(shard=0)"),
        ({"tensor": -1}, "Layout(tensor=-1)"),
        ({"stages": 1.5}, "Layout(stages=1.5)"),
        ({"shard": True}, "Layout(shard=True)"),
        ({"shard": "2"}, "Layout(shard='2')"),
        ({"shard": 1 << 20}, "from 1 to 1024"),
    ],
)
def test_sizes_that_are_not_positive_integers_are_refused(sizes, said):
    with pytest.raises(BadInputError, match=re.escape(said)):
        Layout(**sizes)


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"sharrd": 2}, "Layout(sharrd=2): sharrd is not known; the nearest one is shard"),
        ({"tp": 4, "shard": 2}, "Layout(tp=4): tp is not known; the nearest one is tensor"),
    ],
)
def test_an_unknown_size_is_refused_with_the_nearest_name(sizes: dict[str, int], said: str) -> None:
    with pytest.raises(BadInputError, match=re.escape(said)):
        Layout(**sizes)
    with pytest.raises(BadInputError, match=re.escape("Layout(1, 2, 3, 4): give no more than shard, tensor, stages")):
        Layout(*(1, 2, 3, 4))


def test_a_decoded_layout_is_validated():
    layout = Layout(shard=2, tensor=3)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(layout), type=Layout) == layout
    with pytest.raises(msgspec.ValidationError, match=r"`int` >= 1 - at `\$\.shard`"):
        msgspec.msgpack.decode(msgspec.msgpack.encode({"shard": 0}), type=Layout)


def test_ranks_and_coordinates_of_a_layout_are_consistent():
    for shard, tensor, stages in itertools.product(SIZES, repeat=3):
        layout = Layout(shard=shard, tensor=tensor, stages=stages)
        roles = list(itertools.product(range(stages), range(shard * tensor)))
        assert [layout.rank(*role) for role in roles] == list(range(layout.roles))
        where = [layout.coordinates(place) for place in range(layout.places)]
        assert [tuple(one.values()) for one in where] == list(itertools.product(range(shard), range(tensor)))
        for place, dimension in itertools.product(range(layout.places), DIMENSIONS):
            others = [one for one in DIMENSIONS if one != dimension]
            same = [p for p in range(layout.places) if all(where[p][one] == where[place][one] for one in others)]
            assert layout.ranks_along(place, dimension) == tuple(same)
            assert same.index(place) == where[place][dimension]


def test_a_role_outside_the_layout_is_refused():
    layout = Layout(shard=2, stages=2)
    for role in ((2, 0), (0, 2), (-1, 0)):
        with pytest.raises(ValueError, match="has no stage"):
            layout.rank(*role)
