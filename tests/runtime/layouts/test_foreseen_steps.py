"""torch's caches for an optimizer's first step on sharded tensors are filled in advance, without side effects."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from spread_states import connected_to_nobody
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from holdfast.runtime.dtensor.local import local_of, wrap_like
from holdfast.runtime.warm_up.planned_optimizer_steps import dry_run_steps

untyped: Any = DTensor
propagator: Any = untyped._op_dispatcher.sharding_propagator


def _model(width: int) -> torch.nn.Module:
    """The width is unique to each test, because torch's caches live as long as the process."""
    model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Linear(width, width), torch.nn.Linear(width, 3))
    with connected_to_nobody(2, 0):
        fully_shard(model, mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("shard",)))
    return model


def _step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = wrap_like(torch.ones_like(local_of(parameter)), parameter)
    optimizer.step()


def test_a_dry_run_fills_the_cache_for_the_first_step(monkeypatch: pytest.MonkeyPatch):
    found_out: list[object] = []
    real = propagator._propagate_tensor_meta_non_cached
    monkeypatch.setattr(
        propagator, "_propagate_tensor_meta_non_cached", lambda schema: found_out.append(schema) or real(schema)
    )
    for width, foreseen in ((11, False), (13, True)):
        model = _model(width)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        if foreseen:
            dry_run_steps([optimizer])
        found_out.clear()
        _step(model, optimizer)
        assert bool(found_out) is not foreseen


def test_a_dry_run_changes_no_state_and_calls_no_hooks():
    model = _model(17)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)  # The scheduler has wrapped the optimizer's step.
    called: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    optimizer.register_step_post_hook(lambda *_: called.append("after"))
    before = [local_of(one).detach().clone() for one in model.parameters()]
    dry_run_steps([optimizer])
    assert not optimizer.state
    assert not called
    assert schedule.last_epoch == 0
    assert all(one.grad is None for one in model.parameters())
    assert all(torch.equal(local_of(one), known) for one, known in zip(model.parameters(), before, strict=True))
    assert [one for group in optimizer.param_groups for one in group["params"]] == list(model.parameters())
    _step(model, optimizer)
    assert called == ["before", "after"]


def test_a_dry_run_skips_custom_and_unsupported_optimizers():
    class Counting(torch.optim.SGD):
        steps = 0

        def step(self, closure: Any = None) -> None:
            Counting.steps += 1

    Counting.__module__ = "somebody.elses"
    model = _model(19)
    dry_run_steps([Counting(model.parameters(), lr=0.1), torch.optim.LBFGS(model.parameters())])
    assert not Counting.steps
