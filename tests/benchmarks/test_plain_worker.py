"""Tests of the plain-torch rank used as a baseline for planned moves: its state is one tensor, adopted unchanged."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from plain_worker import Training, split_views


def test_views_of_a_flat_tensor_share_its_memory() -> None:
    flat = torch.arange(10.0)
    first, second = split_views(flat, [torch.Size((2, 3)), torch.Size((4,))])
    assert first.tolist() == [[0, 1, 2], [3, 4, 5]]
    second += 1
    assert flat[6:].tolist() == [7, 8, 9, 10]


def test_a_new_rank_adopts_parameters_moments_and_step(tmp_path: Path) -> None:
    old = Training(tmp_path / "old", fresh=True)
    parameter = next(old.model.parameters())
    for each in old.model.parameters():
        each.grad.fill_(0.01)
    old.optimizer.step()
    old.state[-1] = 7.0
    shutil.copyfile(tmp_path / "old", tmp_path / "new")
    new = Training(tmp_path / "new", fresh=False)
    new.restore_step_counts()
    assert new.number == 7
    assert torch.equal(next(new.model.parameters()), parameter)
    kept, taken = old.optimizer.state[parameter], new.optimizer.state[next(new.model.parameters())]
    assert float(kept["exp_avg"].abs().max()) > 0
    assert torch.equal(kept["exp_avg"], taken["exp_avg"])
    assert torch.equal(kept["exp_avg_sq"], taken["exp_avg_sq"])
    assert float(taken["step"]) == 7.0
    # The restored model does not share memory with the old one.
    next(new.model.parameters()).data.zero_()
    assert not torch.equal(next(new.model.parameters()), parameter)
