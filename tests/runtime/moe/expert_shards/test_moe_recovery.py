"""A rank is killed in mid-step; the others leave it, regroup, replace the missing copies, and redo the step."""

from __future__ import annotations

import os
import signal
import time
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from moe_cases import EXPERTS, batch, bound, expert_tensors, loss_of, random_placement, run_rounds, small_model

from holdfast.runtime.groups.communicator import HaltedError, LocalCommunicator, PeerLostError
from holdfast.runtime.moe.expert_shards.binding import bind_layers
from holdfast.runtime.moe.expert_shards.gradients import ExpertGradients
from holdfast.runtime.moe.expert_shards.migrate import plan_moves, stage_migration
from holdfast.runtime.moe.expert_shards.shards import ExpertShards
from holdfast.runtime.moe.expert_shards.verify import ReplicasDifferError, verify_replicas
from holdfast.runtime.moe.hosts import Placement
from holdfast.runtime.moe.layer.expert_layer import moe_layers
from holdfast.runtime.reduction.reduction import reduce_gradients
from tests.harness.local_world import LocalWorld, Seat, run_world

MICRO_BATCHES = 6
VICTIM = 2


class DiesAfter:
    """Counts the operations of a rank, and kills it at one of them, between two ranks' parts of a collective."""

    def __init__(self, comm: Any, operations: int) -> None:
        self._start, self._left = comm.start_all_to_all, operations
        comm.start_all_to_all = self._counted

    def _counted(self, *args: Any) -> Any:
        self._left -= 1
        if self._left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return self._start(*args)


def survive(seat: Seat, first: Placement, second: Placement, die_after: int, flag: str) -> dict[str, Any]:
    comm = seat.connect(1, halt=lambda: os.path.exists(flag), timeout_s=5.0)
    model = small_model()
    state, gradients = bound(comm, model, first)
    if seat.rank == VICTIM:
        DiesAfter(comm, die_after)
    run_rounds(comm, model, state, gradients, 1, MICRO_BATCHES)
    failed = state.void
    if failed is None:
        try:
            reduce_gradients([gradients], comm, 1.0 / MICRO_BATCHES)
        except (HaltedError, PeerLostError) as error:
            failed = error.with_traceback(None)
    comm.retire()
    # In a real job the coordinator tells the survivors that the generation has ended; here a file does.
    while not os.path.exists(flag):
        time.sleep(0.01)
    comm = seat.connect(2, rank=seat.rank if seat.rank < VICTIM else seat.rank - 1, size=3)
    layers = moe_layers(model)
    held = tuple(tuple(held for rank, held in enumerate(layer) if rank != VICTIM) for layer in first)
    shards = ExpertShards(layers)
    rows = [len(set(layer[comm.rank])) for layer in second]
    staged = stage_migration(
        comm, shards, held=held, wanted=second, transfers=plan_moves(held, second, EXPERTS), rows=rows
    )
    staged.apply()
    state, gradients = bind_layers(layers, comm, second), ExpertGradients(layers, second, comm)
    verify_replicas(comm, shards)
    loss = run_rounds(comm, model, state, gradients, 1, MICRO_BATCHES)
    reduce_gradients([gradients], comm, 1.0 / MICRO_BATCHES)
    gradients.use_reduced()
    comm.retire(sever=False)
    return {"failed": type(failed).__name__, "loss": loss, "grads": expert_tensors(layers, "grad"), "void": state.void}


@pytest.mark.parametrize("die_after", [0, 3, 5, 9, 16])
def test_survivors_of_a_kill_redo_the_step_without_a_restart(die_after: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(die_after)
    first, second = random_placement(rng, 4, least=2), random_placement(rng, 3)
    flag = tmp_path / "stop"
    with LocalWorld(4, survive, first, second, die_after, str(flag)) as world:
        # The test acts as the coordinator: it sees the death, and informs all ranks.
        wait([world.processes[VICTIM].sentinel])
        flag.touch()
        results = world.results()
    model = small_model()
    losses = [loss_of(model, batch(1, number)) for number in range(MICRO_BATCHES)]
    for loss in losses:
        loss.backward()
    wanted = expert_tensors(moe_layers(model), "grad")
    survivors = [result for rank, result in enumerate(results) if rank != VICTIM]
    assert results[VICTIM] is None
    assert sum(r["loss"] for r in survivors) == pytest.approx(sum(float(x.detach()) for x in losses), rel=1e-12)
    for result in survivors:
        assert result["failed"] in ("HaltedError", "PeerLostError")
        assert result["void"] is None
        for key, grad in result["grads"].items():
            np.testing.assert_allclose(grad, wanted[key] / MICRO_BATCHES, rtol=1e-12, atol=1e-15)


def differ(seat: Seat) -> str:
    comm = seat.connect(1)
    model = small_model()
    shards = ExpertShards(moe_layers(model))
    verify_replicas(comm, shards)
    if seat.rank == 1:
        weight = shards.layers[1].experts.w2.data
        weight[2, 0, 0] = torch.nextafter(weight[2, 0, 0], torch.tensor(1.0, dtype=weight.dtype))
    message = ""
    try:
        verify_replicas(comm, shards)
    except ReplicasDifferError as error:
        message = str(error)
    comm.retire(sever=False)
    return message


def test_all_ranks_detect_a_replica_that_differs_in_one_bit() -> None:
    messages = run_world(2, differ)
    assert all(message.startswith("expert 2 of MoE layer 1 differs") for message in messages)


def test_a_single_rank_has_no_replicas_to_compare() -> None:
    verify_replicas(LocalCommunicator(), ExpertShards(moe_layers(small_model())))
