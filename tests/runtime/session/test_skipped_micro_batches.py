"""`step.skip` permanently removes a micro-batch from its step, on any worker and in any attempt."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from cluster import Cluster
from torch.utils.data import TensorDataset

from holdfast.errors import BadInputError, StepUseError
from holdfast.observability.history.audit import audit_events
from holdfast.protocol import events as ev
from holdfast.protocol.commit import MAX_REASON, MAX_REASONS, Commit, MicroBatchSkip, step_weight
from holdfast.runtime.gradients.skipped_micro_batches import MAX_DECISIONS, SkippedMicroBatches
from holdfast.runtime.session.job import Job

X = torch.randn(36, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = X.sum(1, keepdim=True)
STEPS = 6
#: (step, micro-batch) skipped before the model is called, and after.
BEFORE, AFTER = {(1, 0), (2, 4)}, {(2, 1), (3, 5), (5, 2)}


def model() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1)).double()


@pytest.mark.parametrize("max_norm", [None, 0.5])
def test_a_step_is_the_mean_over_the_micro_batches_not_skipped(max_norm: float | None) -> None:
    """Compared: gradients, clipping, loss, norm and running statistics, also if the skipped loss is NaN."""
    ours, theirs = model(), model()
    job = Job(None)
    arguments: dict[str, Any] = {"global_batch": 6, "micro_batch": 2, "max_grad_norm": max_norm}
    job.protect(ours, torch.optim.SGD(ours.parameters(), 0.1), TensorDataset(X, Y), **arguments)
    assert job._session is not None
    order = job._session.workload.loader.order
    optimizer = torch.optim.SGD(theirs.parameters(), 0.1)
    for step in job.steps(STEPS):
        for number, (x, y) in enumerate(step.micro_batches()):
            if (step.number + number) % 3 == 0:
                loss = torch.nn.functional.mse_loss(ours(x), y)
                assert (loss * float("nan")).isnan()
                step.skip("NaN")
            else:
                step.backward(torch.nn.functional.mse_loss(ours(x), y))
        assert step.apply()
        optimizer.zero_grad()
        losses = [
            torch.nn.functional.mse_loss(theirs(X[samples]), Y[samples])
            for samples in (order.indices(step.number, number) for number in range(3) if (step.number + number) % 3)
        ]
        loss = sum(losses) / len(losses)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), max_norm or float("inf"))
        optimizer.step()
        assert not step.skipped
        assert step.loss == pytest.approx(loss.item(), rel=1e-12)
        assert step.grad_norm == pytest.approx(norm.item(), rel=1e-9)
    for mine, plain in zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-9, atol=1e-12)


def test_a_step_with_all_micro_batches_skipped_is_skipped() -> None:
    ours = model()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
    job = Job(None)
    optimizer = torch.optim.SGD(ours.parameters(), 0.1)
    job.protect(ours, optimizer, TensorDataset(X, Y), global_batch=6, micro_batch=2, scaler=scaler)
    before = [parameter.clone() for parameter in ours.parameters()]
    for step in job.steps(1):
        for _ in step.micro_batches():
            step.skip("none is good")
        assert step.apply()
        assert step.skipped
        assert step.loss != step.loss
    assert all(map(torch.equal, before, ours.parameters()))
    assert scaler.get_scale() == 4.0, "a skipped step must not change the scale"


def test_wrong_uses_of_skip_are_refused() -> None:
    ours = model()
    job = Job(None)
    job.protect(ours, torch.optim.SGD(ours.parameters(), 0.1), TensorDataset(X, Y), global_batch=6, micro_batch=2)
    step = next(iter(job.steps(1)))
    with pytest.raises(StepUseError, match="inside `for batch"):
        step.skip("too early")
    for x, y in step.micro_batches():
        with pytest.raises(BadInputError, match="give the reason in words"):
            step.skip(" ")
        step.backward(torch.nn.functional.mse_loss(ours(x), y))
        with pytest.raises(StepUseError, match="in place of backward"):
            step.skip("too late")
    assert job._session is not None
    job._session.close()


def test_skip_reasons_and_decisions_are_bounded() -> None:
    source = SkippedMicroBatches()
    source.on_micro_batch_start(1, 0)
    source.skip("r" * 1000)
    assert source.make_note() == b"r" * MAX_REASON
    assert source.make_note() == b""
    source.merge([b"r" * MAX_REASON] * 100, [])
    assert 0 < sum(len(skip.reason) for skip in source.skips) <= MAX_REASONS
    assert [skip.micro_batch for skip in source.skips] == list(range(len(source.skips)))
    for step in range(2, MAX_DECISIONS + 10):
        source.on_micro_batch_start(step, 3)
        source.skip("bad")
    assert source.find_decision(1, 0) == ""
    assert source.find_decision(MAX_DECISIONS, 3) == "bad"
    assert source.find_decision(MAX_DECISIONS, 4) == ""
    v = Commit(grad_square=0.0, loss_sum=0.0, samples=1, nonfinite=0)
    many = tuple(MicroBatchSkip(micro_batch=number, reason="r" * 100) for number in range(20))
    assert step_weight(v) == 1
    assert step_weight(Commit(grad_square=0.0, loss_sum=0.0, samples=1, nonfinite=0, skips=many)) > 8


def train(directory: str, node: str, options: dict[str, Any]) -> None:
    """Train a small model with two MoE layers, and skip some micro-batches."""
    import holdfast

    torch.set_num_threads(1)
    torch.manual_seed(0)
    job = holdfast.init()

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into = torch.nn.Linear(4, 8)
            self.layers = torch.nn.ModuleList(holdfast.MoE(8, 16, experts=4, top_k=2) for _ in range(2))
            self.out = torch.nn.Linear(8, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.into(x)
            for layer in self.layers:
                x = x + layer(x)
            return self.out(x)

    net = (Model() if options["experts"] else torch.nn.Linear(4, 1)).double()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    job.protect(net, optimizer, TensorDataset(X, Y), global_batch=12, micro_batch=2, seed=3, max_grad_norm=1.0)
    with (Path(directory) / f"{node}.jsonl").open("a") as file:
        for step in job.steps(STEPS):
            for x, y in step.micro_batches():
                at = step.number, step._open
                if at in BEFORE:
                    step.skip(f"before {at}")
                    continue
                loss = torch.nn.functional.mse_loss(net(x), y)
                if at in AFTER:
                    step.skip(f"after {at}")
                else:
                    step.backward(loss)
            if (node, step.number) == ("n1", options["kill"]):
                os.kill(os.getpid(), signal.SIGKILL)
            if step.apply():
                print(json.dumps([step.number, step.loss]), file=file, flush=True)


def played(path: Path, nodes: int, *, experts: bool, kill: int = 0) -> list[float]:
    path.mkdir()
    with Cluster(path, nodes=nodes, options={"script": train, "experts": experts, "kill": kill}) as cluster:
        cluster.wait_done()
        cluster.assert_replicas_equal()
        committed = cluster.of(ev.StepCommitted)
        reasons = {(event.step, event.micro_batch): event.reason for event in cluster.of(ev.MicroBatchSkipped)}
        assert reasons == {at: f"before {at}" for at in BEFORE} | {at: f"after {at}" for at in AFTER}
        assert [event.skipped_samples for event in committed] == [2, 4, 2, 0, 2, 0]
        assert {event.samples for event in committed} == {12}
        result = audit_events(cluster.events)
        assert result.sound
        assert (result.proven, result.skipped_samples, len(result.skips)) == (STEPS, 10, 5)
        return [event.loss or 0.0 for event in committed]


@pytest.mark.parametrize("experts", [False, True], ids=["dense", "experts"])
def test_workers_that_skip_match_a_single_worker_despite_a_failure(tmp_path: Path, experts: bool) -> None:
    """With experts, a worker that skips still serves the others' tokens."""
    alone = played(tmp_path / "1", 1, experts=experts)
    assert played(tmp_path / "3", 3, experts=experts) == pytest.approx(alone, rel=1e-9)
    assert played(tmp_path / "k", 3, experts=experts, kill=2) == pytest.approx(alone, rel=1e-9)
