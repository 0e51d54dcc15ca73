"""Routing that follows a recorded trace: the same choice every time, in the recorded proportions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import BadInputError
from holdfast.runtime.moe.gates.routing_trace import RoutingTrace
from places import RECORDED

TOKENS = np.array([[[6, 1, 1], [1, 1, 2]], [[0, 8, 0], [0, 0, 0]]])
ITERATIONS = np.array([1, 11])


@settings(derandomize=True, deadline=None, max_examples=50)
@given(st.integers(0, 20), st.integers(0, 9), st.integers(1, 3), st.integers(0, 40))
def test_repeated_routing_of_a_micro_batch_is_identical(step: int, micro_batch: int, top_k: int, tokens: int) -> None:
    trace = RoutingTrace(TOKENS, ITERATIONS)
    once = trace.layer_routing(0, top_k, seed=3).assign(step, micro_batch, tokens)
    again = trace.layer_routing(0, top_k, seed=3).assign(step, micro_batch, tokens)
    assert once.shape == (tokens, top_k)
    assert torch.equal(once, again)
    assert all(len(set(row)) == top_k for row in once.tolist())


def test_layers_steps_and_micro_batches_are_routed_differently() -> None:
    trace = RoutingTrace(TOKENS[:1], ITERATIONS[:1])
    first = trace.layer_routing(0, 1).assign(1, 0, 64)
    others = [
        trace.layer_routing(0, 1).assign(2, 0, 64),
        trace.layer_routing(0, 1).assign(1, 1, 64),
        trace.layer_routing(1, 1).assign(1, 0, 64),
    ]
    assert not any(torch.equal(first, other) for other in others)


def test_tokens_follow_the_nearest_recorded_iteration() -> None:
    layer = RoutingTrace(TOKENS, ITERATIONS).layer_routing(0, 1, seed=1)
    counts = np.bincount(layer.assign(2, 0, 8000)[:, 0], minlength=3)
    assert counts / 8000 == pytest.approx([0.75, 0.125, 0.125], abs=0.02)
    assert set(layer.assign(7, 0, 100)[:, 0].tolist()) == {1}
    assert set(layer.assign(500, 0, 100)[:, 0].tolist()) == {1}
    fast = RoutingTrace(TOKENS, ITERATIONS).layer_routing(0, 1, stride=5.0)
    assert set(fast.assign(2, 0, 100)[:, 0].tolist()) == {1}


def test_two_experts_per_token_where_only_one_has_load_and_none_at_all() -> None:
    trace = RoutingTrace(TOKENS, ITERATIONS)
    chosen = trace.layer_routing(0, 2).assign(11, 0, 50)
    assert set(chosen[:, 0].tolist()) == {1}
    uniform = trace.layer_routing(1, 1).assign(11, 0, 3000)
    assert np.bincount(uniform[:, 0], minlength=3).min() > 800


@pytest.mark.parametrize(
    ("tokens", "iterations", "what"),
    [
        (np.ones((2, 3)), [1, 2], "tokens has shape"),
        (np.ones((2, 1, 3)), [1], "iterations has shape"),
        (np.ones((2, 1, 3)), [2, 2], "must ascend"),
        (np.array([[[1.0, -1.0]]]), [1], r"tokens\[0, 0, 1\] is -1.0"),
        (np.array([[[np.nan, 1.0]]]), [1], r"tokens\[0, 0, 0\] is nan"),
        (np.array([[["a"]]]), [1], "tokens has shape"),
    ],
)
def test_an_invalid_trace_is_bad_input(tokens: np.ndarray, iterations: list[int], what: str) -> None:
    with pytest.raises(BadInputError, match=what):
        RoutingTrace(tokens, iterations)


def test_mismatched_models_and_invalid_trace_files_are_refused(tmp_path: Path) -> None:
    trace = RoutingTrace(TOKENS, ITERATIONS)
    trace.check_model(1, 3)
    for layers, experts in ((3, 3), (2, 4)):
        with pytest.raises(BadInputError, match=f"the model has {layers} layers of {experts}"):
            trace.check_model(layers, experts)
    with pytest.raises(BadInputError, match="stride"):
        trace.layer_routing(0, 1, stride=0.0)
    file = tmp_path / "trace.npz"
    with pytest.raises(BadInputError, match="cannot be read"):
        RoutingTrace.read(file)
    file.write_bytes(b"no zip")
    with pytest.raises(BadInputError, match="cannot be read"):
        RoutingTrace.read(file)
    np.savez(file, tokens=TOKENS)
    with pytest.raises(BadInputError, match="iterations is missing"):
        RoutingTrace.read(file)
    np.savez(file, tokens=TOKENS, iterations=ITERATIONS)
    assert RoutingTrace.read(file).layer_loads(1).tolist() == [[1, 1, 2], [1, 1, 1]]


def test_the_recorded_trace_of_gpt_s_is_followed() -> None:
    path = RECORDED / "routing" / "lazarus_gpt_S_12L8E.npz"
    if not path.exists():
        pytest.skip(f"recorded routing is not at {path}")
    trace = RoutingTrace.read(path)
    trace.check_model(4, 8)
    wanted = trace.layer_loads(3)[20]  # iteration 201
    counts = np.bincount(trace.layer_routing(3, 1).assign(201, 0, 20000)[:, 0], minlength=8)
    assert counts / 20000 == pytest.approx(wanted / wanted.sum(), abs=0.02)
