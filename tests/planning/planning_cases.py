"""Random planning problems, and simple checks of the properties that plans must have."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st

from holdfast.planning import Allocation, PlacementProblem, allocate
from places import RECORDED

#: Deterministic, and without deadlines because the cores are shared.
PROPERTY = settings(derandomize=True, deadline=None, max_examples=100)

ROUTING = RECORDED / "routing"


def routing_loads(model: str, iteration: int) -> np.ndarray:
    """Return recorded tokens `(L, E)` of one iteration; skip the test if the recordings are missing."""
    path = ROUTING / f"lazarus_gpt_{model}.npz"
    if not path.exists():
        pytest.skip(f"recorded routing is not at {path}")
    with np.load(path) as trace:
        return trace["tokens"][int(np.flatnonzero(trace["iterations"] == iteration)[0])]


def tables(rows: int, columns: int, most: int) -> st.SearchStrategy[np.ndarray]:
    """Draw counts `(rows, columns)` up to `most`, with all magnitudes equally likely, and with ties and zeros.

    They come from a seed, because drawing them one by one takes most of a property's time.
    """

    def table(seed: int) -> np.ndarray:
        rng = np.random.default_rng(seed)
        return rng.integers(0, rng.choice(sorted({1, 3, most})) + 1, (rows, columns))

    return st.integers(0, 1 << 16).map(table)


@st.composite
def problems(draw: st.DrawFn, *, uneven: bool = True, most_nodes: int = 8, most_layers: int = 3) -> PlacementProblem:
    """Draw problems that have a solution, with the threshold that fits."""
    nodes = draw(st.integers(1, most_nodes))
    if uneven and draw(st.booleans()):
        slots = 1 + draw(tables(1, nodes, 5))[0]
    else:
        slots = np.full(nodes, draw(st.integers(1, 6)))
    experts = draw(st.integers(1, min(int(slots.sum()), 12)))
    loads = draw(tables(draw(st.integers(1, most_layers)), experts, 1000))
    allocation = allocate(loads, slots, fault_threshold=draw(st.integers(1, 4)))
    assert isinstance(allocation, Allocation)
    return PlacementProblem(replicas=allocation.replicas, slots=slots, fault_threshold=allocation.fault_threshold.given)


def assert_complete(problem: PlacementProblem, counts: np.ndarray) -> None:
    """Assert that every replica is placed and every slot is used."""
    assert (counts >= 0).all()
    np.testing.assert_array_equal(counts.sum(axis=2), problem.replicas)
    np.testing.assert_array_equal(counts.sum(axis=1), np.broadcast_to(problem.slots, counts.sum(axis=1).shape))
