"""What a worker holds from epoch to epoch: nothing is let go of before a commit operation of the epoch has passed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from holdfast.coordination.experts import encode
from holdfast.errors import BadInputError, JobFailedError
from holdfast.protocol.plan import DecisionKind, ExpertPlan
from holdfast.runtime.communicator import Communicator, HaltedError, LocalCommunicator
from holdfast.runtime.hashing import state_hash
from holdfast.runtime.job import Job
from holdfast.runtime.local_world import Seat, run_world
from holdfast.runtime.moe.layer import MoE, expert_parameters
from holdfast.runtime.moe.training import JobExperts, experts_of
from holdfast.runtime.state import TrainingState

EXPERTS, LAYERS = 4, 2
Held = Sequence[Sequence[int]]


def job_experts() -> JobExperts:
    model = nn.ModuleList(MoE(4, 8, EXPERTS, seed=1, layer=layer) for layer in range(LAYERS))
    experts = experts_of(model, torch.optim.AdamW(model.parameters()))
    assert experts is not None
    return experts


def blob(held: Sequence[int]) -> bytes:
    """One rank's experts, the same in both layers."""
    return encode(np.tile(np.bincount(held, minlength=EXPERTS), (LAYERS, 1)))


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


def take_up(experts: JobExperts, comm: Communicator, held: Held) -> None:
    """Start with what the ranks hold, and pass a commit operation."""
    experts.enter(comm, plan([()] * comm.size, held, moves=0), DecisionKind.START)
    assert experts.blob == blob(range(EXPERTS)), "all initial experts are kept until the first commit"
    experts.passed()
    assert experts.blob == blob(held[comm.rank])
    experts.begin()


def migrate(seat: Seat) -> list[object]:
    comm, experts = seat.connect(1), job_experts()
    first: Held = [(0, 1), (2, 3)]
    second: Held = [(1, 2), (0, 3)]
    take_up(experts, comm, first)
    moved = experts.enter(comm, plan(first, second), DecisionKind.REDO)
    both, hosted = experts.blob, experts.shards.hosted
    rows = [layer.experts.rows for layer in experts.layers]
    experts.passed()
    after, kept_rows = experts.shards.hosted, [layer.experts.rows for layer in experts.layers]
    experts.begin()
    experts.verify(comm)
    gathered = experts.gather(comm, wanted=seat.rank == 0)
    last = [layer.experts.rows for layer in experts.layers]
    comm.retire(sever=False)
    return [moved > 0, both, hosted, rows, after, kept_rows, last, sorted(gathered) if gathered else None]


def test_a_migration_keeps_what_was_held_until_the_first_commit() -> None:
    results = run_world(2, migrate)
    unions, targets = [(0, 1, 2), (0, 2, 3)], [(1, 2), (0, 3)]
    for rank, (moved, both, hosted, rows, after, kept_rows, last, gathered) in enumerate(results):
        assert moved
        assert both == blob(unions[rank])
        assert hosted == (unions[rank],) * LAYERS
        assert rows == kept_rows == [3] * LAYERS, "the reduced gradients of the step lie in these rows"
        assert after == (targets[rank],) * LAYERS
        assert last == [2] * LAYERS
        names = [f"moe.{m}.expert.{e}.{w}" for m in range(LAYERS) for e in range(EXPERTS) for w in ("w1", "w2")]
        assert gathered == (names if rank == 0 else None)


def halted(seat: Seat) -> tuple[str, bytes, tuple[tuple[int, ...], ...]]:
    comm, experts = seat.connect(1), job_experts()
    first: Held = [(0, 1), (2, 3)]
    take_up(experts, comm, first)
    seat.meet()
    comm.halted = lambda: True
    raised = ""
    if seat.rank == 0:  # the other never comes
        try:
            experts.enter(comm, plan(first, [(1, 2), (0, 3)]), DecisionKind.REDO)
        except HaltedError as error:
            raised = type(error).__name__
    seat.meet()
    comm.retire()
    return raised, experts.blob, experts.shards.hosted


def test_a_migration_that_is_broken_off_changes_nothing() -> None:
    (raised, held, hosted), _ = run_world(2, halted)
    assert raised == "HaltedError"
    assert held == blob((0, 1))
    assert hosted == ((0, 1),) * LAYERS


def test_what_came_too_late_to_be_reported_is_let_go_of() -> None:
    """A Stop between the end of a migration and the note of it: the next plan knows only of what was held before."""
    experts = job_experts()
    everything = tuple(range(EXPERTS))
    experts.enter(LocalCommunicator(), plan([()], [everything], moves=0), DecisionKind.START)
    before = [layer.experts.w1.data[2].clone() for layer in experts.layers]
    experts._keep(np.tile(np.array([0, 0, 1, 0]), (LAYERS, 1)))
    assert experts.shards.hosted == ((2,),) * LAYERS
    for layer, weight in zip(experts.layers, before, strict=True):
        assert torch.equal(layer.experts.w1.data[layer.experts.row(2)], weight)


def test_a_plan_that_counts_on_what_is_not_here_is_refused() -> None:
    experts = job_experts()
    everything = tuple(range(EXPERTS))
    experts.enter(LocalCommunicator(), plan([()], [everything], moves=0), DecisionKind.START)
    experts._keep(np.tile(np.array([1, 0, 1, 0]), (LAYERS, 1)))
    with pytest.raises(RuntimeError, match="broken invariant"):
        experts.enter(LocalCommunicator(), plan([(0, 1)], [everything], moves=0), DecisionKind.REDO)


def test_initial_experts_that_were_trained_are_initial_no_more() -> None:
    experts = job_experts()
    start = plan([()], [range(EXPERTS)], moves=0)
    experts.enter(LocalCommunicator(), start, DecisionKind.START)
    experts.enter(LocalCommunicator(), start, DecisionKind.START)
    experts.passed()
    with pytest.raises(JobFailedError, match="initial experts"):
        experts.enter(LocalCommunicator(), start, DecisionKind.START)


def test_layers_must_have_the_same_number_of_experts() -> None:
    model = nn.ModuleList([MoE(4, 8, 4), MoE(4, 8, 5)])
    with pytest.raises(BadInputError, match=r"\[4, 5\]"):
        experts_of(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_dense_model_has_no_experts() -> None:
    model = nn.Linear(2, 2)
    assert experts_of(model, torch.optim.SGD(model.parameters(), lr=0.1)) is None


def dense_and_experts() -> tuple[nn.Module, torch.optim.Optimizer, TrainingState]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 4), MoE(4, 8, EXPERTS, seed=1))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(6, 4)).sum().backward()
    optimizer.step()
    return model, optimizer, TrainingState(model, optimizer, apart=expert_parameters(model))


def test_the_dense_state_leaves_experts_out_and_alone() -> None:
    model, optimizer, state = dense_and_experts()
    view = state.capture()
    apart = expert_parameters(model)
    experts = {id(weight): {key: value.clone() for key, value in optimizer.state[weight].items()} for weight in apart}
    assert len(experts) == 2
    shapes = {spec.shape for spec in view.manifest.tensors}
    assert not any(len(shape) == 3 for shape in shapes)
    copies = [tensor.clone() for tensor in view.tensors]
    targets = state.prepare(view.manifest)
    with torch.no_grad():
        for target, copy in zip(targets, copies, strict=True):
            target.copy_(copy)
    state.adopt(view.manifest, targets)
    for weight in apart:
        for key, value in experts[id(weight)].items():
            assert torch.equal(optimizer.state[weight][key], value)
    assert state_hash(state.capture()) == state_hash(view)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_world_of_one_resumes_with_its_experts(tmp_path: Path) -> None:
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


def test_the_loads_of_a_step_count_once_it_has_passed() -> None:
    experts = job_experts()
    tokens = torch.ones(6, 4)

    def forward() -> None:
        experts.begin()
        experts.state.begin(1, 0)
        for layer in experts.layers:
            layer(tokens)

    forward()
    forward()  # the attempt before is done again
    assert not experts.loads.any()
    experts.passed()
    assert experts.loads.sum(axis=1).tolist() == [12.0, 12.0]
    forward()
    experts.passed()
    assert experts.loads.sum(axis=1) == pytest.approx([12.0, 12.0])
    assert experts.expert_bytes == 2 * 4 * 8 * 4


@pytest.mark.parametrize(("window", "report_every"), [(200, 10), (50, 2), (3, 1)])
def test_loads_are_those_of_about_the_window(window: int, report_every: int) -> None:
    experts = job_experts()
    whole = msgspec.structs.replace(plan([()], [range(EXPERTS)], moves=0), window=window)
    experts.enter(LocalCommunicator(), whole, DecisionKind.START)
    assert experts.report_every == report_every

    def step(tokens: int) -> None:
        experts.begin()
        experts.state.begin(1, 0)
        for layer in experts.layers:
            layer(torch.ones(tokens, 4))
        experts.passed()

    for _ in range(window):
        step(1)
    before = experts.loads.sum()
    for _ in range(window):
        step(3)
    # All of the last window weighs more than what came before it, and not all there is.
    assert 0.8 < (experts.loads.sum() - before) / (2 * before) < 0.95
