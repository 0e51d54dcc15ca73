"""Experts in a model that is sharded over a replica group: supported combinations, and refusals."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from spread_states import connected_to_nobody
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

import holdfast
from holdfast.control.link.snapshots.files import part_path
from holdfast.coordination.experts.blobs import decode_experts, encode_experts
from holdfast.coordination.experts.worker_experts import Rearrangement
from holdfast.errors import BadInputError
from holdfast.protocol.layouts.layout import Layout
from holdfast.protocol.messages.worker import SnapshotDamaged, SnapshotTaken
from holdfast.protocol.plan import ExpertPlan, ExpertShape, GenerationPlan, Member, Role
from holdfast.protocol.state import Keeper, SnapshotSource, seal_of
from holdfast.runtime.dtensor.local import local_of
from holdfast.runtime.dtensor.replica_position import ReplicaPosition
from holdfast.runtime.groups.communicator import HaltedError
from holdfast.runtime.layouts.mesh import ReplicaMesh
from holdfast.runtime.layouts.sharded import check_spread, share_expert_tokens
from holdfast.runtime.moe.expert_shards.job_experts import make_job_experts
from holdfast.runtime.moe.expert_shards.saving import hosted_pairs, named_rows
from holdfast.runtime.moe.gates.router import jitter_stream
from holdfast.runtime.moe.gates.routing import RecordedRouting
from holdfast.runtime.moe.layer.expert_layer import expert_parameters, moe_layers
from holdfast.runtime.snapshots.restoring import SnapshotLostError
from holdfast.runtime.snapshots.snapshots import Snapshots
from holdfast.runtime.state.state import TrainingState


def _check(model: torch.nn.Module, layout: Layout) -> None:
    replica = ReplicaMesh(layout, Role(), torch.device("cpu"))
    try:
        check_spread(model, replica)
    finally:
        replica.close()


def test_ranks_with_the_same_samples_split_the_tokens_of_all_layers():
    def groups_of(layout: Layout) -> list[bool]:
        model = torch.nn.Sequential(*(holdfast.MoE(4, 8, 2, seed=1) for _ in range(2)))
        replica = ReplicaMesh(layout, Role(), torch.device("cpu"))
        try:
            share_expert_tokens(model, replica)
        finally:
            replica.close()
        return [layer.token_split is not None for layer in moe_layers(model)]

    assert groups_of(Layout(tensor=2)) == groups_of(Layout(shard=2, tensor=2)) == [True, True]
    assert groups_of(Layout(shard=2)) == [False, False], "shard ranks have different tokens"
    _check(holdfast.MoE(4, 8, 2, seed=1), Layout(tensor=2))


def test_tokens_given_as_a_dtensor_are_refused():
    moe = holdfast.MoE(4, 8, 2, seed=1)
    experts = holdfast.ElasticExperts(moe.experts)
    replica = ReplicaMesh(Layout(tensor=2), Role(), torch.device("cpu"))
    try:
        spread = DTensor.from_local(torch.randn(3, 4), replica.mesh["tensor"], [Shard(0)], run_check=False)
        with pytest.raises(BadInputError, match=r"is given a DTensor: .*pass tokens\.full_tensor"):
            moe(spread)
        with pytest.raises(BadInputError, match="is given a DTensor"):
            experts(spread, torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1))
    finally:
        replica.close()


def test_only_expert_and_frozen_parameters_may_be_unsharded():
    _check(holdfast.MoE(4, 8, 2, seed=1), Layout())
    moe = holdfast.MoE(4, 8, 2, seed=1)
    with pytest.raises(BadInputError, match=r"parameter 'router\.weight' is not sharded"):
        _check(moe, Layout(shard=2))
    moe.router.weight.requires_grad_(False)
    _check(moe, Layout(shard=2))


def test_sharded_experts_are_refused():
    moe = holdfast.MoE(4, 8, 2, seed=1)
    replica = ReplicaMesh(Layout(shard=2), Role(), torch.device("cpu"))
    try:
        weight = moe.experts.get_parameter("w1")
        sharded = DTensor.from_local(weight.detach(), replica.mesh["shard"], [Shard(0)], run_check=False)
        moe.experts.register_parameter("w1", torch.nn.Parameter(sharded))
        with pytest.raises(BadInputError, match=r"'experts\.w1' belongs to experts and is sharded.*ignored_params=set"):
            check_spread(moe, replica)
    finally:
        replica.close()


@dataclass(frozen=True)
class _Seat:
    """A group without any collective."""

    rank: int
    size: int


@pytest.mark.parametrize("capacity", [None, 1.0])
def test_a_void_step_gives_gradients_to_the_same_parameters(capacity):
    moe = holdfast.MoE(4, 8, 4, seed=1, capacity_factor=capacity)
    moe.binding.state.mark_void(HaltedError("a Stop"))
    out = moe(torch.randn(3, 4, requires_grad=True))
    assert not out.any()
    out.sum().backward()
    assert moe.router.weight.grad is not None  # FSDP2 reduces existing gradients, so all ranks must have the same ones.


def test_ranks_use_their_part_of_a_fixed_routing_and_separate_noise():
    moe = holdfast.MoE(4, 8, 4, seed=1, routing=RecordedRouting([[0, 1], [1, 2], [2, 3]], seed=3))
    tokens, counted = torch.randn(8, 4), []
    for part, parts, here in ((0, 1, tokens), (0, 2, tokens[:4]), (1, 2, tokens[4:])):
        moe.binding.state.start_micro_batch(5, 7, part, parts)
        counted.append(moe(here))
    assert torch.allclose(torch.cat(counted[1:]), counted[0])
    assert len({jitter_stream(1, 2, 3, 0, part) for part in range(4)}) == 4
    assert jitter_stream(1, 2, 3, 0, 0) == jitter_stream(1, 2, 3, 0)


# ---- snapshots ----

LAYOUT, UNITS, EXPERTS = Layout(shard=2), 2, 4
SECRET = b"s" * 32
SHAPE = ExpertShape(layers=1, experts=EXPERTS, slots=EXPERTS)
MEMBERS = tuple(
    Member(worker=f"n/{rank}/a", host="h", state_port=1, role=LAYOUT.role_of(rank))
    for rank in range(UNITS * LAYOUT.places)
)


def _plan(hosted: Sequence[Sequence[int]], layout: Layout = LAYOUT) -> GenerationPlan:
    blobs = tuple(
        encode_experts(np.array([[number in mine for number in range(EXPERTS)]], dtype=np.int64)) for mine in hosted
    )
    experts = ExpertPlan(layers=1, experts=EXPERTS, placement=blobs, held=blobs, moves=0, asked=1, given=1)
    members = tuple(replace(one, role=layout.role_of(rank)) for rank, one in enumerate(MEMBERS))
    return GenerationPlan(term=1, generation=2, members=members, secret=SECRET, expert_plan=experts)


class _Holder:
    """A worker with the experts that a plan assigns to it."""

    def __init__(self, rank: int, plan: GenerationPlan, seed: int, layout: Layout = LAYOUT) -> None:
        torch.manual_seed(seed)
        self.place = ReplicaPosition(layout=layout, local_rank=rank % layout.places, has_layout=True)
        model = torch.nn.Sequential(torch.nn.Linear(5, 3), holdfast.MoE(3, 4, EXPERTS))
        with connected_to_nobody(layout.places, self.place.local_rank):
            mesh = init_device_mesh("cpu", (layout.shard,), mesh_dim_names=("shard",))
            fully_shard(model, mesh=mesh, ignored_params=set(model[1].experts.parameters()))
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
        self.state = TrainingState(model, self.optimizer, apart=expert_parameters(model))
        experts = make_job_experts(model, self.optimizer)
        assert experts is not None
        self.experts, here = experts, plan.expert_plan
        assert here is not None
        keep = decode_experts(here.placement[rank], SHAPE)
        untyped: Any = _Seat(rank, len(MEMBERS))
        experts.enter_generation(untyped, here, Rearrangement(keep=keep, fetch=False, during_step=False, serving=()))
        for parameter in model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            local_of(parameter.grad).normal_()
        self.optimizer.step()

    def rows(self) -> dict[str, torch.Tensor]:
        shards = self.experts.shards
        return {name: row.clone() for name, row in named_rows(shards, hosted_pairs(shards)).items()}


def _snapshots(folder: Path, rank: int, one: _Holder, reports: list[object]) -> Snapshots:
    untyped: Any = reports.append
    return Snapshots(
        folder=folder,
        job="job",
        worker=MEMBERS[rank].worker,
        every=1,
        state=one.state,
        send=untyped,
        experts=one.experts,
        position=one.place,
    )


def test_experts_are_restored_from_the_snapshot_parts_of_all_ranks(tmp_path: Path):
    reports: list[object] = []
    apart = _plan([[rank] for rank in range(EXPERTS)])
    holders = [_Holder(rank, apart, rank) for rank in range(EXPERTS)]
    for rank, one in enumerate(holders):
        taker = _snapshots(tmp_path, rank, one, reports)
        taker.on_step_applied(apart, 3)
        taker.wait_copied()
        taker.close()
    assert [type(one) for one in reports] == [SnapshotTaken] * EXPERTS
    saved = {name: row for one in holders for name, row in one.rows().items()}
    keepers, parts = (Keeper(node="n", host="h", port=1),), ((0,),) * EXPERTS
    source = SnapshotSource(term=1, generation=2, step=3, seal=seal_of(SECRET), keepers=keepers, parts=parts)
    hosted = [0, 1, 2, 3], [0, 3], [1], [3]
    plan = _plan(hosted)
    for rank, wanted in enumerate(hosted):
        one = _Holder(rank, plan, 9)
        reader = _snapshots(tmp_path, rank, one, reports)
        assert reader.restore(source, plan, rank) == 3, reports[EXPERTS:]
        reader.close()
        found = one.rows()
        assert {int(name.split(".")[1]) for name in found} == set(wanted)
        assert all(torch.equal(row, saved[name]) for name, row in found.items())


# ---- stashed state for another layout ----

BEFORE = [0, 1], [1, 2], [2, 3], [3]
STEP = 3


def _put_away(folder: Path) -> tuple[list[_Holder], SnapshotSource, GenerationPlan]:
    """Stash all experts on the ranks that host them, each but the first on two; nothing else is reported."""
    reports: list[object] = []
    plan = _plan(BEFORE)
    holders = [_Holder(rank, plan, 5) for rank in range(len(BEFORE))]
    for rank, one in enumerate(holders):
        for name, row in named_rows(one.experts.shards, hosted_pairs(one.experts.shards)).items():
            # Copies of an expert are equal.
            row.normal_(generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
        keeper = _snapshots(folder, rank, one, reports)
        keeper.stash(plan, STEP)
        keeper.close()
    assert [type(one) for one in reports] == [SnapshotTaken] * 6, (
        "two local ranks of a replica group, and four workers with experts"
    )
    assert plan.expert_plan is not None
    source = SnapshotSource(
        term=1,
        generation=2,
        step=STEP,
        seal=seal_of(SECRET),
        keepers=(Keeper(node="n", host="h", port=1),),
        parts=((0,),) * 6,
        everywhere=True,
        experts=plan.expert_plan.placement,
    )
    return holders, source, plan


def _cut_short(folder: Path, plan: GenerationPlan, rank: int) -> None:
    part = plan.expert_stash_part(rank, STEP)
    assert part is not None
    part_path(folder, part).write_bytes(b"")


@pytest.mark.parametrize("layout", [Layout(), LAYOUT], ids=str)
def test_stashed_experts_are_restored_under_another_layout(layout: Layout, tmp_path: Path):
    holders, source, plan = _put_away(tmp_path)
    saved = {name: row for one in holders for name, row in one.rows().items()}
    _cut_short(tmp_path, plan, 1)  # Other parts contain its experts as well.
    reports: list[object] = []
    hosted = [3], [0, 1, 2, 3], [], [1]
    plan = _plan(hosted, layout)
    for rank, wanted in enumerate(hosted):
        one = _Holder(rank, plan, 9, layout)
        reader = _snapshots(tmp_path, rank, one, reports)
        assert reader.restore(source, plan, rank) == STEP, reports
        reader.close()
        found = one.rows()
        assert {int(name.split(".")[1]) for name in found} == set(wanted)
        assert all(torch.equal(row, saved[name]) for name, row in found.items())
        (step,) = {float(value["step"]) for value in one.optimizer.state.values()}
        assert step == 1.0
    damaged = [one.snapshot.part for one in reports if isinstance(one, SnapshotDamaged)]
    assert len(damaged) == len(reports)
    assert set(damaged) <= {2 + 1}, "every expert of the damaged part has another copy"


def test_an_expert_without_any_stashed_part_is_named(tmp_path: Path):
    _, source, plan = _put_away(tmp_path)
    for rank in (2, 3):
        _cut_short(tmp_path, plan, rank)
    reports: list[object] = []
    plan = _plan([[0, 1, 2, 3], [], [], []], Layout())
    reader = _snapshots(tmp_path, 0, _Holder(0, plan, 9, Layout()), reports)
    with pytest.raises(SnapshotLostError, match="expert 3 of MoE layer 0 is in none of its parts"):
        reader.restore(source, plan, 0)
    reader.close()
    assert [(one.snapshot.part, one.node) for one in reports if isinstance(one, SnapshotDamaged)] == [
        (2 + 2, "n"),
        (2 + 3, "n"),
        (0, ""),
    ]
