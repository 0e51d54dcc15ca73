"""Experts move between real ranks with their optimizer state, equal in every bit, without an effect on training."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from moe_cases import EXPERTS, batch, expert_tensors, loss_of, random_placement, run_rounds, settle, small_model

from holdfast.runtime.groups.communicator import Communicator, HaltedError, LocalCommunicator, Pending
from holdfast.runtime.moe.expert_shards import migrate
from holdfast.runtime.moe.expert_shards.binding import bind_layers, dense_parameters
from holdfast.runtime.moe.expert_shards.gradients import ExpertGradients
from holdfast.runtime.moe.expert_shards.migrate import CorruptExpertError, LostExpertsError, plan_moves, stage_migration
from holdfast.runtime.moe.expert_shards.shards import ExpertShards
from holdfast.runtime.moe.hosts import Placement, place_everywhere
from holdfast.runtime.moe.layer.expert_layer import expert_parameters, moe_layers
from holdfast.runtime.reduction.reduction import reduce_gradients
from tests.harness.local_world import Seat, run_world

MICRO_BATCHES = 4
LR = 0.01


def all_rows(shards: ExpertShards) -> dict[tuple[int, int, str], bytes]:
    """Return every local row: weights and optimizer state."""
    return {
        (layer, expert, row.name): shards.row(layer, expert, row).numpy().tobytes()
        for layer in range(len(shards.layers))
        for expert in shards.hosted[layer]
        for row in shards.describe(layer).rows
    }


def train_step(
    comm: Communicator, model: Any, optimizer: Any, state: Any, gradients: ExpertGradients, step: int
) -> None:
    gradients.zero()
    for parameter in dense_parameters(model):
        parameter.grad = torch.zeros_like(parameter)
    run_rounds(comm, model, state, gradients, step, MICRO_BATCHES)
    for parameter in dense_parameters(model):
        assert parameter.grad is not None
        everyones = torch.empty(comm.size * parameter.numel(), dtype=parameter.dtype)
        comm.wait(comm.start_all_gather(everyones, parameter.grad.reshape(-1)))
        parameter.grad = everyones.view(comm.size, *parameter.shape).sum(0) / MICRO_BATCHES
    reduce_gradients([gradients], comm, 1.0 / MICRO_BATCHES)
    gradients.use_reduced()
    optimizer.step()
    gradients.use_local()
    assert state.void is None


def travel(seat: Seat, legs: list[tuple[int, Placement]]) -> list[dict[str, Any]]:
    """Train two steps on each leg (size, placement), with migrations in between. The last ranks join and leave."""
    model = small_model()
    layers, optimizer = moe_layers(model), torch.optim.AdamW(model.parameters(), lr=LR)
    shards = ExpertShards(layers, optimizer)
    results = []
    for generation, (size, placement) in enumerate(legs, start=1):
        if seat.rank >= size:
            results.append({})
            continue
        comm = seat.connect(generation, size=size)
        if generation == 1:
            settle(shards, placement, comm.rank)
        else:
            before, old = legs[generation - 2]
            held = tuple(tuple(layer[r] if r < before else () for r in range(size)) for layer in old)
            if seat.rank >= before:
                # A joining worker has fresh weights that must not count, and an optimizer without state.
                optimizer.state.clear()
                settle(shards, tuple(((),) * size for _ in EXPERTS), comm.rank)
                copy_dense(comm, model, optimizer, None)
            else:
                copy_dense(comm, model, optimizer, optimizer)
            moves = plan_moves(held, placement, EXPERTS)
            rows = [len(set(layer[comm.rank])) + 1 for layer in placement]
            staged = stage_migration(
                comm, shards, held=held, wanted=placement, transfers=moves, rows=rows, wave_bytes=5000
            )
            staged.apply()
        arrived = all_rows(shards)
        state, gradients = bind_layers(layers, comm, placement), ExpertGradients(layers, placement, comm)
        for step in (2 * generation - 1, 2 * generation):
            train_step(comm, model, optimizer, state, gradients, step)
        results.append(
            {
                "arrived": arrived,
                "left": all_rows(shards),
                "weights": expert_tensors(layers, "data"),
                "dense": [p.detach().numpy().copy() for p in dense_parameters(model)],
                "steps": {float(optimizer.state[w]["step"]) for w in expert_parameters(model)},
                "zero": all(_unused_rows_are_zero(shards, layer) for layer in range(len(layers))),
            }
        )
        comm.retire(sever=False)
    return results


def copy_dense(comm: Communicator, model: Any, optimizer: Any, known: Any) -> None:
    """Copy rank 0's dense parameters and optimizer state to joining ranks, in place of the runtime's state transfer."""
    for parameter in dense_parameters(model):
        state = optimizer.state[parameter]
        if known is None:
            state.update(
                step=torch.zeros(()), exp_avg=torch.zeros_like(parameter), exp_avg_sq=torch.zeros_like(parameter)
            )
        for tensor in (parameter.data, state["step"], state["exp_avg"], state["exp_avg_sq"]):
            everyones = torch.empty(comm.size * tensor.numel(), dtype=tensor.dtype)
            comm.wait(comm.start_all_gather(everyones, tensor.reshape(-1)))
            tensor.copy_(everyones[: tensor.numel()].view(tensor.shape))


def _unused_rows_are_zero(shards: ExpertShards, layer: int) -> bool:
    free = [row for row, expert in enumerate(shards.layers[layer].experts.row_experts) if expert < 0]
    return all(not shards._stack_of(layer, spec)[free].any() for spec in shards.describe(layer).rows)


def reference(steps: int) -> tuple[dict[Any, np.ndarray], list[np.ndarray]]:
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        for number in range(MICRO_BATCHES):
            (loss_of(model, batch(step, number)) / MICRO_BATCHES).backward()
        optimizer.step()
    return expert_tensors(moe_layers(model), "data"), [p.detach().numpy() for p in dense_parameters(model)]


def test_training_continues_through_expert_moves_and_world_size_changes() -> None:
    rng = np.random.default_rng(3)
    legs = [(size, random_placement(rng, size, least)) for size, least in ((3, 1), (3, 2), (2, 1), (4, 1))]
    results = run_world(4, travel, legs)
    for leg, (size, _) in enumerate(legs):
        rows: dict[Any, bytes] = {}
        weights, dense = reference(2 * leg + 2)
        for rank in range(size):
            got = results[rank][leg]
            assert got["zero"]
            assert got["steps"] == {2.0 * leg + 2.0}
            for key, data in got["left"].items():
                assert rows.setdefault(key, data) == data, f"replicas of {key} differ"
            for key, weight in got["weights"].items():
                np.testing.assert_allclose(weight, weights[key], rtol=1e-9, atol=1e-12)
            for mine, wanted in zip(got["dense"], dense, strict=True):
                np.testing.assert_allclose(mine, wanted, rtol=1e-9, atol=1e-12)
            if leg:
                old = {
                    key: data for other in results[: legs[leg - 1][0]] for key, data in other[leg - 1]["left"].items()
                }
                assert all(old[key] == data for key, data in got["arrived"].items()), "an expert changed on its way"
        assert {key[:2] for key in rows} == {(layer, e) for layer, number in enumerate(EXPERTS) for e in range(number)}


class Flipping(Communicator):
    """A world of two in one process: data sent to rank 1 returns with one bit flipped."""

    def __init__(self) -> None:
        super().__init__(rank=0, size=2)

    def start_all_gather(self, output: torch.Tensor, input: torch.Tensor) -> Any:
        output.copy_(input.repeat(2))
        return super().start_all_gather(output, output)

    def start_all_to_all(self, output: torch.Tensor, input: torch.Tensor, *splits: Any) -> Any:
        output.copy_(input)
        output[1000] ^= 1
        return super().start_all_to_all(output, output)


def test_a_flipped_bit_is_detected_and_changes_no_expert() -> None:
    model = small_model()
    shards = ExpertShards(moe_layers(model))
    # Rank 0 gives expert 0 of layer 0 away and gets it back from a peer that also had it, in the same parcel.
    held = (((0, 1, 2, 3, 4, 5), (0,)), ((0, 1, 2), ()))
    moves = migrate.Transfers(
        layer=np.array([0, 0]), expert=np.array([0, 0]), source=np.array([0, 1]), destination=np.array([1, 0])
    )
    before = all_rows(shards)
    with pytest.raises(CorruptExpertError, match="expert 0 of MoE layer 0"):
        stage_migration(Flipping(), shards, held=held, wanted=held, transfers=moves)
    assert all_rows(shards) == before


class Halted(Flipping):
    """Is halted in its n-th operation."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self._left = at

    def start_all_to_all(self, output: torch.Tensor, input: torch.Tensor, *splits: Any) -> Any:
        return Pending("all_to_all", None)

    def wait(self, pending: Any) -> None:
        self._left -= 1
        if not self._left:
            raise HaltedError("halted")


@pytest.mark.parametrize("at", [1, 2])
def test_a_halted_staging_changes_nothing(at: int) -> None:
    shards = ExpertShards(moe_layers(small_model()))
    held = (((0, 1, 2, 3, 4, 5), (0,)), ((0, 1, 2), ()))
    wanted = (((0, 1, 2), (0, 3, 4, 5)), ((0, 1), (2,)))
    before = all_rows(shards)
    with pytest.raises(HaltedError):
        stage_migration(Halted(at), shards, held=held, wanted=wanted, transfers=plan_moves(held, wanted, EXPERTS))
    assert all_rows(shards) == before
    assert shards.hosted == ((0, 1, 2, 3, 4, 5), (0, 1, 2))


def test_an_expert_without_a_live_copy_is_named() -> None:
    held = (((0, 1, 2), (2, 3, 5)), ((0, 1), (1,)))
    wanted = place_everywhere(EXPERTS, 2)
    with pytest.raises(LostExpertsError, match=r"expert 4 of MoE layer 0, expert 2 of MoE layer 1") as caught:
        plan_moves(held, wanted, EXPERTS)
    assert caught.value.lost == ((0, 4), (1, 2))


def test_a_plan_without_transfers_for_missing_experts_is_refused() -> None:
    shards = ExpertShards(moe_layers(small_model()))
    held = place_everywhere(EXPERTS, 1)
    nothing = plan_moves(held, held, EXPERTS)
    short = (((0, 1),), ((0, 1, 2),))
    with pytest.raises(LostExpertsError):
        stage_migration(LocalCommunicator(), shards, held=short, wanted=held, transfers=nothing)
    with pytest.raises(ValueError, match="do not fit"):
        stage_migration(LocalCommunicator(), shards, held=held, wanted=held, transfers=nothing, rows=[5, 3])


def test_rows_are_rearranged_while_an_old_autograd_graph_exists() -> None:
    model = small_model()
    layers = moe_layers(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    loss = loss_of(model, batch(1, 0))
    loss.backward()
    optimizer.step()
    weight = layers[0].experts.w1
    kept = weight.detach()[4].clone()
    average = optimizer.state[weight]["exp_avg"][4].clone()
    shards = ExpertShards(layers, optimizer)
    shards.rearrange(0, [4, 1], rows=3)
    shards.rearrange(1, [0, 1, 2], rows=5)
    assert layers[0].experts.row_experts == (4, 1, -1)
    assert layers[0].experts.w1 is weight
    row = layers[0].experts.row(4)
    assert torch.equal(weight.detach()[row], kept)
    assert torch.equal(optimizer.state[weight]["exp_avg"][row], average)
    layers[0].routing = Only([1, 4])
    again = loss_of(model, batch(1, 1))
    for parameter in model.parameters():
        parameter.grad = None
    # All used experts of layer 0 are here, in a world of one.
    again.backward()
    assert weight.grad is not None
    assert weight.grad.shape == weight.shape == (3, 8, 16)
    optimizer.step()
    assert not weight.detach()[layers[0].experts.row_experts.index(-1)].any()
    assert loss.requires_grad


class Only:
    """Sends every token to the same experts."""

    def __init__(self, experts: list[int]) -> None:
        self._experts = experts

    def assign(self, step: int, micro_batch: int, tokens: int) -> torch.Tensor:
        return torch.tensor([self._experts] * tokens)


def keep_different_state(seat: Seat) -> str:
    comm = seat.connect(1)
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9 if seat.rank else 0.0)
    loss_of(model, batch(1, 0)).backward()
    optimizer.step()
    held = place_everywhere(EXPERTS, 2)
    try:
        stage_migration(
            comm, ExpertShards(moe_layers(model), optimizer), held=held, wanted=held, transfers=nothing_moves()
        )
    except ValueError as error:
        return str(error)
    finally:
        comm.retire(sever=False)
    return ""


def nothing_moves() -> migrate.Transfers:
    held = place_everywhere(EXPERTS, 2)
    return plan_moves(held, held, EXPERTS)


def test_all_ranks_refuse_different_kinds_of_optimizer_state() -> None:
    assert (
        run_world(2, keep_different_state) == ["the ranks [0, 1] keep different kinds of state for their experts"] * 2
    )
