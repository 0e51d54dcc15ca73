"""The fast helpers against numpy's own functions."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from planning_cases import PROPERTY

from holdfast.planning.arrays import count_true, distinct_rows
from holdfast.planning.survival.search import as_masks, as_pattern


@st.composite
def patterns(draw: st.DrawFn, most_nodes: int) -> np.ndarray:
    """Return rows that repeat, in row-major or column-major memory."""
    nodes, kinds = draw(st.integers(1, most_nodes)), draw(st.integers(1, 6))
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    rows = (rng.random((kinds, nodes)) < rng.random())[rng.integers(0, kinds, draw(st.integers(1, 20)))]
    return np.asfortranarray(rows) if draw(st.booleans()) else rows


@PROPERTY
@given(patterns(most_nodes=70))
def test_packed_rows_sort_as_rows(rows: np.ndarray) -> None:
    distinct, kind_of = distinct_rows(rows)
    expected, inverse = np.unique(rows, axis=0, return_inverse=True)
    np.testing.assert_array_equal(distinct, expected)
    np.testing.assert_array_equal(kind_of, inverse.reshape(-1))


@PROPERTY
@given(patterns(most_nodes=70))
def test_true_places_are_counted(rows: np.ndarray) -> None:
    np.testing.assert_array_equal(count_true(rows[None]), rows.sum(axis=1)[None])


@PROPERTY
@given(patterns(most_nodes=12))
def test_masks_are_patterns(pattern: np.ndarray) -> None:
    np.testing.assert_array_equal(as_pattern(as_masks(pattern), pattern.shape[1]), pattern)
