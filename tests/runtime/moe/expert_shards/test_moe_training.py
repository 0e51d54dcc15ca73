"""A worker's experts from generation to generation, as `HeldExperts` specifies, and its part of each step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from holdfast.coordination.experts.blobs import encode_experts
from holdfast.coordination.experts.worker_experts import HeldExperts
from holdfast.errors import BadInputError
from holdfast.protocol.plan import DecisionKind, ExpertPlan
from holdfast.runtime.groups.communicator import Communicator, HaltedError, LocalCommunicator
from holdfast.runtime.moe.expert_shards.job_experts import JobExperts, make_job_experts
from holdfast.runtime.moe.gates.gate import TopKGate
from holdfast.runtime.moe.gates.routing import RecordedRouting
from holdfast.runtime.moe.layer.expert_layer import expert_parameters
from holdfast.runtime.moe.layer.moe_layer import MoE
from holdfast.runtime.session.job import Job
from holdfast.runtime.state.state import TrainingState, state_hash
from tests.harness.local_world import Seat, run_world

EXPERTS, LAYERS = 4, 2
Held = Sequence[Sequence[int]]


def job_experts() -> JobExperts:
    model = nn.ModuleList(MoE(4, 8, EXPERTS, seed=1, layer=layer) for layer in range(LAYERS))
    experts = make_job_experts(model, torch.optim.AdamW(model.parameters()))
    assert experts is not None
    return experts


def blob(held: Sequence[int]) -> bytes:
    """Encode one rank's experts, the same in both layers."""
    return encode_experts(np.tile(np.bincount(held, minlength=EXPERTS), (LAYERS, 1)))


def plan(held: Held, wanted: Held, moves: int = 1) -> ExpertPlan:
    return ExpertPlan(
        layers=LAYERS,
        experts=EXPERTS,
        held=tuple(blob(rank) if rank else b"" for rank in held),
        placement=tuple(blob(rank) for rank in wanted),
        moves=moves,
        asked=1,
        given=1,
    )


class Worker:
    """A worker's experts, and the records about them."""

    def __init__(self) -> None:
        self.experts = job_experts()
        self.holding = HeldExperts(self.experts.shape(1))

    def enter(self, comm: Communicator, plan: ExpertPlan, decision: DecisionKind) -> int:
        change = self.holding.apply_placement(plan, comm.rank, decision)
        received = self.experts.enter_generation(comm, plan, change)
        self.holding.on_received()
        assert self.hosted == self.noted
        return received

    def passed(self) -> None:
        self.experts.on_step_passed()
        self.holding.on_committed()
        assert self.hosted == self.noted

    def start(self, comm: Communicator, held: Held) -> None:
        """Start with this placement, and pass a commit operation."""
        self.enter(comm, plan([()] * comm.size, held, moves=0), DecisionKind.START)
        assert self.hosted == (tuple(range(EXPERTS)),) * LAYERS, "all initial experts are kept until the first commit"
        self.passed()
        assert self.hosted == (tuple(held[comm.rank]),) * LAYERS
        self.experts.start_step()

    @property
    def hosted(self) -> Held:
        return self.experts.shards.hosted

    @property
    def noted(self) -> Held:
        return tuple(tuple(int(expert) for expert in row.nonzero()[0]) for row in self.holding.held)


def migrate(seat: Seat) -> list[object]:
    comm, worker = seat.connect(1), Worker()
    experts = worker.experts
    first: Held = [(0, 1), (2, 3)]
    second: Held = [(1, 2), (0, 3)]
    worker.start(comm, first)
    moved = worker.enter(comm, plan(first, second), DecisionKind.REDO)
    both = worker.hosted
    rows = [layer.experts.rows for layer in experts.layers]
    worker.passed()
    after, kept_rows = worker.hosted, [layer.experts.rows for layer in experts.layers]
    experts.start_step()
    experts.verify(comm)
    saved = sorted(experts.rows_to_save())
    last = [layer.experts.rows for layer in experts.layers]
    comm.retire(sever=False)
    return [moved > 0, both, rows, after, kept_rows, last, saved]


def test_a_migration_keeps_the_old_experts_until_the_first_commit() -> None:
    results = run_world(2, migrate)
    unions, targets = [(0, 1, 2), (0, 2, 3)], [(1, 2), (0, 3)]
    for rank, (moved, both, rows, after, kept_rows, last, _saved) in enumerate(results):
        assert moved
        assert both == (unions[rank],) * LAYERS
        assert rows == kept_rows == [3] * LAYERS, "the reduced gradients of the step are in these rows"
        assert after == (targets[rank],) * LAYERS
        assert last == [2] * LAYERS
    names = [f"experts:{m}.{e}.{w}" for m in range(LAYERS) for e in range(EXPERTS) for w in ("w1", "w2")]
    assert sorted(name for result in results for name in result[-1]) == names, "each expert is saved by one host"


def halted(seat: Seat) -> tuple[str, Held, Held]:
    comm, worker = seat.connect(1), Worker()
    first: Held = [(0, 1), (2, 3)]
    worker.start(comm, first)
    seat.meet()
    comm.halted = lambda: True
    raised = ""
    if seat.rank == 0:  # The other rank never comes.
        try:
            worker.enter(comm, plan(first, [(1, 2), (0, 3)]), DecisionKind.REDO)
        except HaltedError as error:
            raised = type(error).__name__
    seat.meet()
    comm.retire()
    return raised, worker.noted, worker.hosted


def test_a_halted_migration_changes_nothing() -> None:
    (raised, noted, hosted), _ = run_world(2, halted)
    assert raised == "HaltedError"
    assert noted == hosted == ((0, 1),) * LAYERS


def release_experts(seat: Seat) -> list[bool]:
    comm, worker = seat.connect(1), Worker()
    everything = tuple(range(EXPERTS))
    worker.enter(comm, plan([(), ()], [everything, everything], moves=0), DecisionKind.START)
    before = [layer.experts.w1.data[2].clone() for layer in worker.experts.layers]
    kept: Held = [(2,), (0, 1, 2, 3)]
    worker.enter(comm, plan(kept, kept, moves=0), DecisionKind.REDO)
    assert worker.hosted == (kept[seat.rank],) * LAYERS
    comm.retire(sever=False)
    rows = [layer.experts.w1.data[layer.experts.row(2)] for layer in worker.experts.layers]
    return [torch.equal(row, weight) for row, weight in zip(rows, before, strict=True)]


def test_experts_outside_the_kept_placement_are_released() -> None:
    assert run_world(2, release_experts) == [[True, True], [True, True]]


def test_layers_must_have_the_same_number_of_experts() -> None:
    model = nn.ModuleList([MoE(4, 8, 4), MoE(4, 8, 5)])
    with pytest.raises(BadInputError, match=r"\[4, 5\]"):
        make_job_experts(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_dense_model_has_no_experts() -> None:
    model = nn.Linear(2, 2)
    assert make_job_experts(model, torch.optim.SGD(model.parameters(), lr=0.1)) is None


def dense_and_experts() -> tuple[nn.Module, torch.optim.Optimizer, TrainingState]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 4), MoE(4, 8, EXPERTS, seed=1))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(6, 4)).sum().backward()
    optimizer.step()
    return model, optimizer, TrainingState(model, optimizer, apart=expert_parameters(model))


def test_the_dense_state_excludes_experts_and_leaves_them_unchanged() -> None:
    model, optimizer, state = dense_and_experts()
    view = state.capture()
    apart = expert_parameters(model)
    experts = {id(weight): {key: value.clone() for key, value in optimizer.state[weight].items()} for weight in apart}
    assert len(experts) == 2
    shapes = {spec.shape for spec in view.manifest.tensors}
    assert not any(len(shape) == 3 for shape in shapes)
    copies, before = [tensor.clone() for tensor in view.tensors], state_hash(view)
    targets = state.prepare(view.manifest)  # The optimizer's old state is overwritten.
    with torch.no_grad():
        for target, copy in zip(targets, copies, strict=True):
            target.copy_(copy)
    state.adopt(view.manifest, targets)
    for weight in apart:
        for key, value in experts[id(weight)].items():
            assert torch.equal(optimizer.state[weight][key], value)
    assert state_hash(state.capture()) == before


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_single_rank_resumes_with_its_experts(tmp_path: Path) -> None:
    x = torch.randn(12, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    data = TensorDataset(x, x.flip(1))

    def train(steps: int, directory: str) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), MoE(4, 8, EXPERTS)).double()
        job = Job(None, checkpoint_dir=directory, checkpoint_every=3)
        job.protect(model, torch.optim.AdamW(model.parameters(), lr=0.01), data, global_batch=6, micro_batch=2)
        losses = []
        for step in job.steps(steps):
            for inputs, wanted in step.micro_batches():
                step.backward(nn.functional.mse_loss(model(inputs), wanted))
            assert step.apply()
            losses.append(step.loss)
        return losses

    assert len(train(3, str(tmp_path))) == 3
    assert train(6, str(tmp_path)) == train(6, "")[3:]


def test_the_loads_of_a_step_count_only_after_it_has_passed() -> None:
    experts = job_experts()
    tokens = torch.ones(6, 4)

    def forward() -> None:
        experts.start_step()
        experts.state.start_micro_batch(1, 0)
        for layer in experts.layers:
            layer(tokens)

    forward()
    forward()  # This repeats the attempt before.
    assert not experts.loads.any()
    experts.on_step_passed()
    assert experts.loads.sum(axis=1).tolist() == [12.0, 12.0]
    forward()
    experts.on_step_passed()
    assert experts.loads.sum(axis=1) == pytest.approx([12.0, 12.0])
    assert experts.expert_bytes == 2 * 4 * 8 * 4


@pytest.mark.parametrize(("window", "report_every"), [(200, 10), (50, 2), (3, 1)])
def test_loads_cover_approximately_the_window(window: int, report_every: int) -> None:
    experts = job_experts()
    whole = msgspec.structs.replace(plan([()], [range(EXPERTS)], moves=0), window=window)
    experts.enter_generation(
        LocalCommunicator(), whole, HeldExperts(experts.shape(1)).apply_placement(whole, 0, DecisionKind.START)
    )
    assert experts.report_every == report_every

    def step(tokens: int) -> None:
        experts.start_step()
        experts.state.start_micro_batch(1, 0)
        for layer in experts.layers:
            layer(torch.ones(tokens, 4))
        experts.on_step_passed()

    for _ in range(window):
        step(1)
    before = experts.loads.sum()
    for _ in range(window):
        step(3)
    # The last window has most of the weight, but not all of it.
    assert 0.8 < (experts.loads.sum() - before) / (2 * before) < 0.95


def test_a_bias_is_updated_by_the_choices_of_the_passed_attempt() -> None:
    gate = TopKGate(EXPERTS, 1, bias_rate=0.5)
    layer = MoE(4, 8, EXPERTS, 1, gate=gate, routing=RecordedRouting([[0], [0], [0], [1], [2]]))
    experts = make_job_experts(layer, torch.optim.SGD(layer.parameters(), lr=0.1))
    assert experts is not None
    assert gate.bias is not None

    def forward(micro_batch: int, tokens: int) -> torch.Tensor:
        experts.state.start_micro_batch(1, micro_batch)
        return layer(torch.ones(tokens, 4)).sum()

    experts.start_step()
    forward(0, 5).backward()
    experts.finish_micro_batch()
    experts.start_step()  # This abandons the attempt.
    with torch.no_grad():
        forward(1, 50)  # A forward pass without gradients does not count.
    for micro_batch in range(2):
        forward(micro_batch, 5).backward()
        experts.finish_micro_batch()
    forward(2, 50)  # A forward pass without a backward pass does not count either.
    for _ in range(2):
        experts.choices.reduce_scatter(LocalCommunicator(), 1.0)
    assert not gate.bias.any(), "only apply may change the bias"
    experts.choices.use_reduced()
    assert gate.bias.tolist() == [-0.5, 0.5, 0.5, 0.5]
    experts.choices.use_reduced()
    assert gate.bias.tolist() == [-0.5, 0.5, 0.5, 0.5], "the bias must change once per step"
    state = TrainingState(layer, torch.optim.SGD(layer.parameters(), lr=0.1), apart=expert_parameters(layer))
    assert "gate.bias" in [tensor.name for tensor in state.capture().manifest.tensors]


def test_different_experts_have_different_fingerprints() -> None:
    assert job_experts().fingerprint() == job_experts().fingerprint()
    other = job_experts()
    with torch.no_grad():
        other.layers[1].experts.weights()["w2"][3, 0, 0] += 1e-3
    assert other.fingerprint() != job_experts().fingerprint()
