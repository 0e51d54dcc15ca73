"""N ranks over real groups compute the same as one process, under any placement."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from moe_cases import (
    EXPERTS,
    SmallModel,
    batch,
    bound,
    expert_tensors,
    loss_of,
    random_placement,
    rich_model,
    run_rounds,
    small_model,
)

from holdfast.planning import scheme_named, schemes
from holdfast.runtime.groups.communicator import LocalCommunicator
from holdfast.runtime.layouts.outer_group import OuterGroup
from holdfast.runtime.moe.expert_shards.binding import bind_layers
from holdfast.runtime.moe.expert_shards.choices import RoutingChoices
from holdfast.runtime.moe.expert_shards.gradients import ExpertGradients
from holdfast.runtime.moe.hosts import Placement, place_everywhere
from holdfast.runtime.moe.layer.expert_layer import moe_layers
from holdfast.runtime.moe.layer.same_tokens import TokenSplit
from holdfast.runtime.reduction.reduction import reduce_gradients
from tests.harness.local_world import Seat, run_world

TOLERANCE = 1e-12
MODELS = (small_model, rich_model)


def one_step(seat: Seat, placements: list[Placement], micro_batches: int, places: int = 1) -> list[dict[str, Any]]:
    """Run one step per placement on a fresh model, alternating the plain and the rich one, all in one group.

    Args:
        places: the number of consecutive ranks that form a replica group with the same tokens.
    """
    comm = seat.connect(1)
    unit, place = divmod(seat.rank, places)
    beside = OuterGroup("beside", place, places)
    if places > 1:
        beside.swap(seat.connect(2 + unit, rank=place, size=places))
    results = []
    for number, placement in enumerate(placements):
        model = MODELS[number % 2]()
        for layer in moe_layers(model) if places > 1 else ():
            layer.token_split = TokenSplit(beside)
        state, gradients = bound(comm, model, placement)
        choices = RoutingChoices(moe_layers(model), state)
        loss = run_rounds(comm, model, state, gradients, 1, micro_batches, places)
        dense = model.dense.weight.grad
        gates = [layer.router.weight.grad for layer in moe_layers(model)]
        reduced = reduce_gradients([gradients, choices], comm, 1.0 / micro_batches)
        choices.use_reduced()
        local = expert_tensors(moe_layers(model), "grad")
        gradients.use_reduced()
        results.append(
            {
                "loss": loss,
                "square": reduced.grad_square,
                "nonfinite": reduced.nonfinite,
                "grads": expert_tensors(moe_layers(model), "grad"),
                "local": local,
                "idle_rows": max(_idle(layer) for layer in moe_layers(model)),
                "dense": None if dense is None else dense.numpy(),
                "gates": [None if gate is None else gate.numpy() for gate in gates],
                "loads": [layer.binding.state.loads[layer.binding.index] for layer in moe_layers(model)],
                "biases": biases(model),
                "void": state.void,
            }
        )
    beside.retire_communicator(sever=False)
    comm.retire(sever=False)
    return results


def _idle(layer: Any) -> float:
    """Return the largest gradient of an unused row."""
    free = [row for row, expert in enumerate(layer.experts.row_experts) if expert < 0]
    return max((float(w.grad[free].abs().max()) for w in layer.experts.weights().values() if free), default=0.0)


def biases(model: SmallModel) -> list[list[float]]:
    return [layer.gate.bias.tolist() for layer in moe_layers(model) if layer.balancing is not None]


def reference(build: Callable[[], SmallModel], micro_batches: int) -> dict[str, Any]:
    model = build()
    layers, alone = moe_layers(model), LocalCommunicator()
    state = bind_layers(layers, alone, place_everywhere(EXPERTS, 1))
    loss = run_rounds(
        alone, model, state, ExpertGradients(layers, place_everywhere(EXPERTS, 1), alone), 1, micro_batches
    )
    choices = RoutingChoices(layers, state)
    choices.reduce_scatter(alone, 1.0)
    choices.use_reduced()
    grads = {key: value / micro_batches for key, value in expert_tensors(layers, "grad").items()}
    return {
        "loss": loss,
        "grads": grads,
        "square": sum(float((grad**2).sum()) for grad in grads.values()),
        "dense": model.dense.weight.grad.numpy(),  # type: ignore[union-attr]
        "gates": [layer.router.weight.grad.numpy() for layer in layers],  # type: ignore[union-attr]
        "loads": [layer.binding.state.loads[layer.binding.index] for layer in layers],
        "biases": biases(model),
    }


def total(parts: Sequence[np.ndarray | None]) -> np.ndarray:
    """Return the sum of all parts that are not None."""
    return np.sum([part for part in parts if part is not None], axis=0)


def assert_close(got: np.ndarray, wanted: np.ndarray) -> None:
    scale = max(float(np.abs(wanted).max()), 1e-30)
    assert float(np.abs(got - wanted).max()) <= TOLERANCE * scale


def assert_equals_reference(ranks: list[dict[str, Any]], wanted: dict[str, Any], places: int = 1) -> None:
    units = ranks[::places]
    for number, rank in enumerate(ranks):
        first = units[number // places]
        assert rank["loss"] == first["loss"], "the results must be equal in every bit"
        for mine, its in zip((rank["dense"], *rank["gates"]), (first["dense"], *first["gates"]), strict=True):
            assert np.array_equal(mine, its), "local ranks must have the same gradients in every bit"
    assert sum(rank["loss"] for rank in units) == pytest.approx(wanted["loss"], rel=TOLERANCE)
    assert len({rank["square"] for rank in ranks}) == 1
    assert ranks[0]["square"] == pytest.approx(wanted["square"], rel=TOLERANCE)
    assert_close(total([rank["dense"] for rank in units]), wanted["dense"])
    for layer, gate in enumerate(wanted["gates"]):
        assert_close(total([rank["gates"][layer] for rank in units]), gate)
    seen: dict[Any, np.ndarray] = {}
    for rank in ranks:
        assert rank["void"] is None
        assert rank["nonfinite"] == 0
        assert rank["idle_rows"] == 0.0
        assert rank["biases"] == wanted["biases"], "the results must be equal in every bit"
        for got, loads in zip(rank["loads"], wanted["loads"], strict=True):
            assert got.tolist() == loads.tolist()
        for key, grad in rank["grads"].items():
            assert_close(grad, wanted["grads"][key])
            # Replicas are equal in every bit.
            assert seen.setdefault(key, grad).tobytes() == grad.tobytes()
    assert seen.keys() == wanted["grads"].keys()


@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 3), (3, 7), (4, 2), (4, 9)])
def test_every_placement_computes_the_result_of_one_process(ranks: int, micro_batches: int) -> None:
    rng = np.random.default_rng(ranks * 100 + micro_batches)
    placements = [random_placement(rng, ranks) for _ in range(6)]
    placements.append(place_everywhere(EXPERTS, ranks))
    # All experts are on one rank, and the others host none.
    placements.append(tuple((tuple(range(n)), *(((),) * (ranks - 1))) for n in EXPERTS))
    results = run_world(ranks, one_step, placements, micro_batches)
    wanted = [reference(build, micro_batches) for build in MODELS]
    assert any(any(bias) for bias in wanted[1]["biases"])
    for number in range(len(placements)):
        assert_equals_reference([rank[number] for rank in results], wanted[number % 2])


@pytest.mark.parametrize("places", [2, 4])
def test_ranks_with_the_same_tokens_compute_the_result_of_one_process(places: int) -> None:
    """Each has 5 tokens: two local ranks split them as 3 and 2, four as 2, 2, 1 and 0."""
    rng = np.random.default_rng(places)
    placements = [random_placement(rng, 4) for _ in range(4)]
    results = run_world(4, one_step, placements, 3, places)
    wanted = [reference(build, 3) for build in MODELS]
    for number in range(len(placements)):
        assert_equals_reference([rank[number] for rank in results], wanted[number % 2], places)


def local_gradients_survive(seat: Seat, placement: Placement) -> bool:
    comm = seat.connect(1)
    model = small_model()
    state, gradients = bound(comm, model, placement)
    run_rounds(comm, model, state, gradients, 1, 4)
    before = expert_tensors(moe_layers(model), "grad")
    reduce_gradients([gradients], comm, 0.25)
    gradients.use_reduced()
    free = expert_tensors(moe_layers(model), "grad")
    # The second clipping starts from the same local gradients.
    norm = reduce_gradients([gradients], comm, 0.25).grad_square ** 0.5
    reduce_gradients([gradients], comm, 0.25, max_norm=0.5 * norm)
    gradients.use_reduced()
    for key, gradient in expert_tensors(moe_layers(model), "grad").items():
        # torch's formula adds 1e-6 to the norm.
        np.testing.assert_allclose(gradient, free[key] * 0.5 * norm / (norm + 1e-6), rtol=1e-12)
    gradients.use_local()
    after = expert_tensors(moe_layers(model), "grad")
    comm.retire(sever=False)
    return all(after[key].tobytes() == value.tobytes() for key, value in before.items())


def test_the_reduction_keeps_the_local_gradients() -> None:
    placement = random_placement(np.random.default_rng(5), 2)
    assert run_world(2, local_gradients_survive, placement) == [True, True]


def train(seat: Seat, placement: Placement, scheme_name: str, dtype: torch.dtype) -> list[float]:
    """Train five steps with this dtype on the wire, and return this rank's sums of the losses."""
    comm = seat.connect(1)
    model = small_model(torch.float32)
    state, gradients = bound(comm, model, placement)
    if scheme_name != "interval":
        state = bind_layers(moe_layers(model), comm, placement, scheme=scheme_named(scheme_name))
    optimizer = torch.optim.SGD(
        [weight for layer in moe_layers(model) for weight in layer.experts.weights().values()], lr=0.1
    )
    losses = []
    for step in range(1, 6):
        gradients.zero()
        total = 0.0
        for turn in range(2):
            state.start_micro_batch(step, turn * comm.size + comm.rank)
            with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
                loss = loss_of(model, batch(step, state.micro_batch, torch.float32))
            loss.backward()
            total += float(loss.detach())
        reduce_gradients([gradients], comm, 1.0 / (2 * comm.size))
        gradients.use_reduced()
        optimizer.step()
        gradients.use_local()
        losses.append(total)
    comm.retire(sever=False)
    assert state.void is None
    assert all(
        weight.grad is not None and weight.grad.dtype == torch.float32
        for weight in moe_layers(model)[0].experts.weights().values()
    )
    return losses


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_communication_trains_like_fp32(dtype: torch.dtype) -> None:
    placement = random_placement(np.random.default_rng(11), 2)
    half = np.sum(run_world(2, train, placement, "interval", dtype), axis=0)
    full = np.sum(run_world(2, train, placement, "interval", torch.float32), axis=0)
    assert half.tolist() != full.tolist()
    assert np.abs(half - full).max() <= 0.02 * np.abs(full).max()


def test_all_dispatch_schemes_compute_the_same_result() -> None:
    placement = random_placement(np.random.default_rng(13), 3)
    interval, *others = (np.sum(run_world(3, train, placement, name, torch.float32), axis=0) for name in schemes())
    for other in others:
        assert np.abs(interval - other).max() <= 1e-5 * np.abs(interval).max()
