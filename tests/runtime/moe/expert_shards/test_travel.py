"""Experts that migrate during a step: computed at the old host, applied at the new one, with the same bits."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
import torch
from test_moe_training import EXPERTS, LAYERS, Held, plan
from torch import nn

from holdfast.coordination.experts.worker_experts import HeldExperts
from holdfast.protocol.plan import DecisionKind
from holdfast.runtime.groups.communicator import Communicator
from holdfast.runtime.moe.expert_shards.job_experts import JobExperts, make_job_experts
from holdfast.runtime.moe.expert_shards.migrate import plan_moves, stage_migration
from holdfast.runtime.moe.expert_shards.travel import BackgroundMigration
from holdfast.runtime.moe.hosts import Placement
from holdfast.runtime.moe.layer.expert_layer import expert_parameters
from holdfast.runtime.moe.layer.moe_layer import MoE
from holdfast.runtime.reduction.reduction import reduce_gradients
from holdfast.runtime.state.state import StateMismatchError
from tests.harness.local_world import Seat, run_world

DIM, MICRO_BATCHES, WORLD = 4, 5, 3
#: Experts with one, two and three hosts; ranks that get more rows, fewer rows, and none.
FIRST: Held = [(0, 1, 3), (1, 2, 3), (3,)]
SECOND: Held = [(0, 2), (), (0, 1, 2, 3)]
#: The bytes of each row, by its name.
Rows = dict[str, bytes]


def made() -> tuple[nn.Module, torch.optim.Optimizer, JobExperts]:
    model = nn.ModuleList(MoE(DIM, 8, EXPERTS, 2, seed=1, layer=layer) for layer in range(LAYERS)).double()
    optimizer = torch.optim.AdamW(expert_parameters(model), lr=0.01)
    experts = make_job_experts(model, optimizer)
    assert experts is not None
    return model, optimizer, experts


class Trainee:
    """One rank of a small world in which only the experts are trained."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self.model, self.optimizer, self.experts = made()
        self.holding = HeldExperts(self.experts.shape(1))
        self.held: Held = [()] * WORLD
        self.before = self.held

    def enter(self, placement: Held, *, beside: bool) -> None:
        """Enter a placement, during the next step or before it."""
        decision = None if any(self.held) else DecisionKind.START
        the_plan = msgspec.structs.replace(plan(self.held, placement, moves=int(decision is None)), beside=beside)
        change = self.holding.apply_placement(the_plan, self.comm.rank, decision)
        self.experts.enter_generation(self.comm, the_plan, change)
        assert change.during_step == beside
        if not beside:
            self.holding.on_received()
        self.before, self.held = self.held, placement

    def step(self, number: int) -> Rows:
        """Compute and apply a step; return the rows that this rank saves."""
        experts = self.experts
        experts.start_step()
        for turn in range(-(-MICRO_BATCHES // WORLD)):
            micro_batch = turn * WORLD + self.comm.rank
            if micro_batch >= MICRO_BATCHES:
                experts.serve_micro_batch(number, micro_batch)
                continue
            experts.state.start_micro_batch(number, micro_batch)
            generator = torch.Generator().manual_seed(100 * number + micro_batch)
            x = torch.randn(7, DIM, generator=generator, dtype=torch.float64)
            for layer in self.model:  # pyright: ignore[reportGeneralTypeIssues]
                x = x + layer(x)
            x.square().mean().backward()
            experts.finish_micro_batch()
        if experts.migration is not None:
            self._bring(experts.migration)
        reduce_gradients([experts.gradients, experts.choices], self.comm, 1.0 / MICRO_BATCHES, 0.1)
        experts.on_step_passed()
        self.holding.on_committed()
        experts.gradients.use_reduced()
        self.optimizer.step()
        experts.verify(self.comm)
        return {name: row.numpy().tobytes() for name, row in experts.rows_to_save().items()}

    def _bring(self, travel: BackgroundMigration) -> None:
        """Transfer the migrating experts with the code that does so before a step."""
        held, wanted = (tuple(tuple(ranks) for _ in range(LAYERS)) for ranks in (self.before, self.held))
        staged = stage_migration(
            self.comm, self.experts.shards, held=held, wanted=wanted, transfers=plan_moves(held, wanted, [EXPERTS] * 2)
        )
        for source, pairs in travel.incoming.items():
            rows = [
                staged.arrived[layer][expert, row.name]
                for layer, expert in pairs
                for row in self.experts.describe_layers()[layer].rows
            ]
            travel.on_received(source, rows)
        assert not self.holding.is_complete or not travel.incoming
        self.holding.on_received()
        assert self.holding.is_complete


def train(seat: Seat, placements: Sequence[Held], beside: bool) -> list[Rows]:
    comm = seat.connect(1)
    trainee = Trainee(comm)
    steps: list[Rows] = []
    for number, placement in enumerate(placements, 1):
        if placement != trainee.held:
            trainee.enter(placement, beside=beside and number > 1)
        steps.append(trainee.step(number))
    comm.retire(sever=False)
    return steps


def run(placements: Sequence[Held], *, beside: bool = False) -> list[Rows]:
    """Return all rows after each step."""
    results = run_world(WORLD, train, placements, beside)
    return [{name: row for rows in step for name, row in rows.items()} for step in zip(*results, strict=True)]


def test_a_background_migration_leaves_its_steps_bit_identical() -> None:
    stays = run([FIRST] * 3)
    beside = run([FIRST, FIRST, SECOND, SECOND, FIRST], beside=True)
    before = run([FIRST, FIRST, SECOND, SECOND, FIRST])
    assert beside[:2] == stays[:2] == before[:2]
    assert beside[2] == stays[2], "the old hosts compute and sum the step"
    assert sorted(beside[3]) == sorted(stays[2]), "each expert is saved by one host"
    for one, other in zip(beside, before, strict=True):
        for name, row in one.items():
            numbers, others = (torch.frombuffer(bytearray(bits), dtype=torch.float64) for bits in (row, other[name]))
            torch.testing.assert_close(numbers, others, rtol=1e-12, atol=1e-14)


def test_received_experts_must_match_the_plan() -> None:
    _, _, experts = made()
    counts = experts.shards
    for layer in range(LAYERS):
        counts.rearrange(layer, [0, 1], rows=2)
    held: Placement = (((0, 1), (2, 3)),) * LAYERS
    wanted: Placement = (((0, 1, 2), (1, 2, 3)),) * LAYERS
    here = BackgroundMigration(counts, held, wanted, 0)
    assert sorted(here.outgoing[1]) == [(0, 1), (1, 1)]
    assert sorted(here.incoming[1]) == [(0, 2), (1, 2)]
    sent = here.view(1)
    with pytest.raises(StateMismatchError, match="rank 1"):
        here.prepare(1, sent.manifest)
    _, _, others = made()
    for layer in range(LAYERS):
        others.shards.rearrange(layer, [2, 3], rows=2)
    there = BackgroundMigration(others.shards, held, wanted, 1)
    tensors = here.prepare(1, there.view(0).manifest)
    for tensor, row in zip(tensors, there.view(0).tensors, strict=True):
        tensor.copy_(row)
    here.on_received(1, tensors)
    assert torch.equal(here.arrived[1][2, "w1"], others.shards.row(1, 2, others.describe_layers()[1].rows[0]))
