"""Fingerprints of a worker's settings and state: equal on equal workers, and different after any change."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from holdfast.protocol.fingerprint import MAX_SHOWN, MAX_SHOWN_CHARACTERS
from holdfast.runtime.gradients.fingerprinting import SLICE_TENSORS, Fingerprinting
from holdfast.runtime.state.state import TrainingState


def trained(*, layers: int = 2, lr: object = 0.1) -> tuple[TrainingState, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)  # type: ignore[arg-type]
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    return TrainingState(model, optimizer), optimizer


def test_equal_workers_have_equal_fingerprints() -> None:
    one, other = (Fingerprinting(trained()[0]) for _ in range(2))
    assert one.make(1, with_state=True) == other.make(1, with_state=True)
    assert one.make(1, with_state=False).state == 0
    assert one.make(1, with_state=True).state > 0


@pytest.mark.parametrize(
    "change",
    [
        lambda state, optimizer: optimizer.param_groups[0].update(lr=0.2),
        lambda state, optimizer: optimizer.param_groups[0].update(betas=(0.9, 0.99)),
        lambda state, optimizer: optimizer.param_groups[0].update(own=1),
        lambda state, optimizer: next(state.model.parameters()).requires_grad_(False),
    ],
)
def test_a_changed_setting_changes_the_fingerprint(
    change: Callable[[TrainingState, torch.optim.Optimizer], object],
) -> None:
    state, optimizer = trained()
    fingerprinting = Fingerprinting(state)
    before = fingerprinting.make(1, with_state=False)
    change(state, optimizer)
    assert fingerprinting.make(1, with_state=False).settings != before.settings


def test_a_learning_rate_tensor_is_read_at_every_step() -> None:
    rate = torch.tensor(0.1)
    state, _ = trained(lr=rate)
    fingerprinting = Fingerprinting(state)
    before = fingerprinting.make(1, with_state=False)
    rate.fill_(0.2)
    assert fingerprinting.make(2, with_state=False).settings != before.settings


def test_received_options_have_the_same_fingerprint_as_local_ones() -> None:
    """They come in another order, and without numpy types."""
    (state, optimizer), (other, theirs) = trained(), trained()
    optimizer.param_groups[0]["lr"] = np.float64(0.1)
    optimizer.param_groups[0]["scale"] = np.float32(0.5)
    group = theirs.param_groups[0]
    group["scale"] = 0.5
    reordered = dict(reversed(group.items()))
    group.clear()
    group.update(reordered)
    mine, sent = (Fingerprinting(one).make(1, with_state=False) for one in (state, other))
    assert mine.settings == sent.settings


@pytest.mark.parametrize("where", ["first parameter", "last parameter", "optimizer"])
def test_a_changed_state_changes_the_fingerprint_within_eight_steps(where: str) -> None:
    (state, _), (other, optimizer) = (trained(layers=SLICE_TENSORS // 4), trained(layers=SLICE_TENSORS // 4))
    parameters = list(other.model.parameters())
    with torch.no_grad():
        if where == "optimizer":
            optimizer.state[parameters[3]]["exp_avg"][0] += 1e-3
        else:
            parameters[0 if where.startswith("first") else -1].view(-1)[0] += 1e-3
    one, two = Fingerprinting(state), Fingerprinting(other)
    assert any(one.make(n, with_state=True) != two.make(n, with_state=True) for n in range(1, 9))


def test_readable_settings_are_bounded_in_number_and_length() -> None:
    state, optimizer = trained()
    optimizer.param_groups[0]["name"] = "x" * 500
    next(state.model.parameters()).requires_grad_(False)
    shown = Fingerprinting(state).describe()
    assert "lr 0.1" in shown
    assert len(shown) <= MAX_SHOWN
    assert all(len(one) <= MAX_SHOWN_CHARACTERS for one in shown)
