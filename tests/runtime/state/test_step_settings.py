"""An attempt's changes to the optimizers are undone with the attempt."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch.nn import Linear

from holdfast.runtime.gradients.fingerprinting import Fingerprinting
from holdfast.runtime.state.state import TrainingState


def made() -> tuple[Linear, torch.optim.Adam, TrainingState]:
    """Return a layer with a bias that no optimizer has yet."""
    model = Linear(3, 2)
    model.bias.requires_grad_(False)
    optimizer = torch.optim.Adam([model.weight], lr=torch.tensor(0.1))
    optimizer.param_groups[0].update(betas=[0.9, 0.99], own={"a": 1})
    return model, optimizer, TrainingState(model, optimizer)


def options(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in sorted(group.items()) if name != "params"}
        | {"lr": float(group["lr"]), "params": [id(parameter) for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]


def change(model: Linear, optimizer: torch.optim.Adam) -> None:
    group = optimizer.param_groups[0]
    group["lr"].mul_(0.5)
    group["betas"][0] = 0.5
    group["own"]["a"] = 2
    group["weight_decay"] = 0.1
    group["new"] = True
    del group["eps"]
    model.bias.requires_grad_(True)
    model.weight.requires_grad_(False)
    optimizer.add_param_group({"params": [model.bias]})
    optimizer.state[model.bias]["step"] = torch.ones(())


def test_each_attempt_starts_with_the_settings_of_the_first_attempt() -> None:
    model, optimizer, state = made()
    rate, groups, group = optimizer.param_groups[0]["lr"], optimizer.param_groups, optimizer.param_groups[0]
    before = repr(options(optimizer))
    for _ in range(3):
        state.settings.start_attempt()
        assert repr(options(optimizer)) == before
        assert (model.weight.requires_grad, model.bias.requires_grad) == (True, False)
        assert model.bias not in optimizer.state
        assert optimizer.param_groups is groups
        assert groups[0] is group
        assert group["lr"] is rate, "a recorded CUDA graph may read this tensor"
        change(model, optimizer)


def test_settings_changed_by_an_applied_step_are_kept() -> None:
    model, optimizer, state = made()
    state.settings.start_attempt()
    change(model, optimizer)
    changed = repr(options(optimizer))
    state.settings.on_applied()
    state.settings.restore()
    state.settings.start_attempt()
    assert repr(options(optimizer)) == changed


def test_optimizer_options_of_a_received_state_replace_local_ones() -> None:
    (model, optimizer, state), (_, other, source) = made(), made()
    other.param_groups[0]["lr"].fill_(0.7)
    state.settings.start_attempt()
    change(model, optimizer)
    view = source.capture()
    tensors = state.prepare(view.manifest)
    with torch.no_grad():
        for here, there in zip(tensors, view.tensors, strict=True):
            here.copy_(there)
    state.adopt(view.manifest, tensors)
    change(model, optimizer)
    state.settings.start_attempt()
    assert repr(options(optimizer)) == repr([{**options(other)[0], "params": [id(model.weight)]}])


def test_a_captured_state_does_not_change_with_an_in_place_learning_rate() -> None:
    """It may be sent or saved while the loop changes the rate for the next step."""
    _, optimizer, state = made()
    view = state.capture()
    optimizer.param_groups[0]["lr"].mul_(0.5)
    (rate,) = [tensor for tensor in view.tensors if not tensor.dim()]
    assert float(rate) == float(torch.tensor(0.1))


def test_an_option_changed_in_place_changes_the_fingerprint() -> None:
    """Otherwise a joining worker would seem to have different settings."""
    _, optimizer, state = made()
    optimizer.param_groups[0]["lr"] = 0.1
    fingerprinting = Fingerprinting(state)
    before = fingerprinting.make(1, with_state=False).settings
    optimizer.param_groups[0]["betas"][0] = 0.5
    assert fingerprinting.make(2, with_state=False).settings != before


def test_step_settings_of_1000_parameters_take_less_than_a_millisecond() -> None:
    model = torch.nn.Sequential(*(Linear(1, 1) for _ in range(500)))
    state = TrainingState(model, torch.optim.AdamW(model.parameters()))
    seconds: list[float] = []
    for _ in range(20):
        began = time.perf_counter()
        state.settings.start_attempt()
        state.settings.on_applied()
        seconds.append(time.perf_counter() - began)
    assert min(seconds) < 1e-3
