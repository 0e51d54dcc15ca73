"""State that follows the steps, as in plain PyTorch: averages, target networks, and rates that follow a metric."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gan import Followers, Gan
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    CosineAnnealingLR,
    ExponentialLR,
    ReduceLROnPlateau,
    SequentialLR,
)
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn
from torch.utils.data import TensorDataset

from holdfast.errors import BadInputError
from holdfast.runtime.session.job import Job

X = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(X, X.sum(1, keepdim=True))


def protected(gan: Gan, followers: Followers, directory: Path | str = "") -> Job:
    gan.schedules.clear()  # A scheduler that is not in extra is refused.
    job = Job(None, checkpoint_dir=str(directory), checkpoint_every=100)
    gan.protect(
        job,
        extra=followers.state,
        after_apply=lambda step: followers.follow(step.update, step.number, step.loss),
    )
    return job


def run(gan: Gan, followers: Followers, steps: int, directory: Path | str = "") -> None:
    for step in protected(gan, followers, directory).steps(steps):
        gan.compute(step)
        assert step.apply()


def tensors(followers: Followers) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for part in (followers.moving, followers.mean, followers.target):
        found += part.state_dict().values()
    return found


def test_schedulers_and_averages_match_a_plain_loop() -> None:
    gan, plain = Gan(), Gan()
    mine, theirs = Followers(gan), Followers(plain)
    job = protected(gan, mine)
    assert job._session is not None
    workload, rates = job._session.workload, set()
    for step in job.steps(12):
        gan.compute(step)
        assert step.apply()
        for optimizer in plain.optimizers.values():
            optimizer.zero_grad()
        losses = []
        for number in range(6):
            (real,) = workload.load_micro_batch(number)
            loss = plain.loss(step.update, real)
            (loss / 6).backward()
            losses.append(float(loss.detach()))
        plain.optimizers[step.update].step()
        theirs.follow(step.update, step.number, sum(losses) / 6)
        for here, there in zip(tensors(mine), tensors(theirs), strict=True):
            torch.testing.assert_close(here, there, rtol=1e-6, atol=1e-9)
        rates.add(gan.optimizers["critic"].param_groups[0]["lr"])
        assert mine.plateau.num_bad_epochs == theirs.plateau.num_bad_epochs
    assert len(rates) > 1, "the rate has followed the loss"
    assert int(mine.moving.n_averaged) == 4
    assert int(mine.mean.n_averaged) == 2


def test_schedulers_and_averages_resume_with_the_step(tmp_path: Path) -> None:
    def trained(steps: int, directory: Path | str) -> Followers:
        gan = Gan()
        followers = Followers(gan)
        run(gan, followers, steps, directory)
        return followers

    whole, _, second = trained(12, ""), trained(7, tmp_path), trained(12, tmp_path)
    assert all(here.equal(there) for here, there in zip(tensors(second), tensors(whole), strict=True))
    assert second.plateau.state_dict() == whole.plateau.state_dict()


def test_stochastic_weight_averaging_matches_plain_pytorch() -> None:
    """SWA as in torch's documentation: a schedule that ends in SWALR, a mean from then on, and update_bn at the end."""

    def made() -> tuple[torch.nn.Module, torch.optim.Optimizer, SequentialLR, AveragedModel]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        parts: Any = [CosineAnnealingLR(optimizer, 8), SWALR(optimizer, swa_lr=0.02, anneal_epochs=2)]
        return model, optimizer, SequentialLR(optimizer, parts, [4]), AveragedModel(model)

    model, optimizer, schedule, mean = made()
    job, means = Job(None), []
    job.protect(
        model,
        optimizer,
        DATA,
        global_batch=4,
        micro_batch=4,
        extra={"schedule": schedule, "mean": mean},
        after_apply=lambda step: mean.update_parameters(model) if step.number > 4 else None,
    )
    assert job._session is not None
    workload = job._session.workload
    plain, their_optimizer, their_schedule, their_mean = made()
    for step in job.steps(8):
        for x, y in step.micro_batches():
            step.backward(torch.nn.functional.mse_loss(model(x), y))
        assert step.apply()
        x, y = workload.load_micro_batch(0)
        their_optimizer.zero_grad()
        torch.nn.functional.mse_loss(plain(x), y).backward()
        their_optimizer.step()
        their_schedule.step()
        if step.number > 4:
            their_mean.update_parameters(plain)
        means.append([p.detach().clone() for p in mean.parameters()])
        for mine, other in zip(mean.parameters(), their_mean.parameters(), strict=True):
            torch.testing.assert_close(mine, other)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.02)
    assert not means[3][0].equal(means[7][0])
    update_bn(torch.utils.data.DataLoader(TensorDataset(X), batch_size=4), mean)


def test_a_scheduler_that_needs_a_metric_without_a_source_is_refused() -> None:
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    extra = {"plateau": ReduceLROnPlateau(optimizer)}
    words = r"extra\['plateau'\] is a ReduceLROnPlateau; its step\(\) needs a metric: .*scheduler\.step\(step\.loss\)"
    with pytest.raises(BadInputError, match=words):
        Job(None).protect(model, optimizer, DATA, global_batch=4, micro_batch=2, extra=extra)


@pytest.mark.parametrize("at", [1, 2], ids=["its own optimizer's step", "another's"])
def test_a_scheduler_also_stepped_by_the_script_is_refused(at: int) -> None:
    """A user who steps the schedule in after_apply, as other extras are changed there, would double its speed."""
    gan, job = Gan(), Job(None)
    schedule = gan.schedules["generator schedule"]
    gan.protect(job, updates=None, after_apply=lambda step: schedule.step() if step.number == at else None)
    for step in job.steps(3):
        gan.compute(step)
        if step.number < at:
            assert step.apply()
            continue
        with pytest.raises(BadInputError, match=r"extra\['generator schedule'\] was stepped by the script as well"):
            step.apply()
        break


def chained(optimizer: torch.optim.Optimizer) -> ChainedScheduler:
    """A scheduler without `last_epoch`, with schedulers inside schedulers."""
    parts = [ConstantLR(optimizer, 0.5, 2), ExponentialLR(optimizer, 0.9)]
    return ChainedScheduler([SequentialLR(optimizer, parts, [3]), ExponentialLR(optimizer, 0.8)])


def test_a_chained_scheduler_is_stepped_as_in_a_plain_loop(tmp_path: Path) -> None:
    def rates(steps: int) -> list[float]:
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        job = Job(None, checkpoint_dir=str(tmp_path), checkpoint_every=100)
        job.protect(model, optimizer, DATA, extra={"s": chained(optimizer)}, global_batch=4, micro_batch=2)
        found: list[float] = []
        for step in job.steps(steps):
            for x, y in step.micro_batches():
                step.backward((model(x) - y).square().mean())
            assert step.apply()
            found.append(optimizer.param_groups[0]["lr"])
        return found

    plain = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    schedule, expected = chained(plain), list[float]()
    for _ in range(8):
        plain.step()
        schedule.step()
        expected.append(plain.param_groups[0]["lr"])
    assert rates(4) + rates(8) == expected, "the second run resumes"


def test_a_chained_scheduler_also_stepped_by_the_script_is_refused() -> None:
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule, job = chained(optimizer), Job(None)
    job.protect(
        model,
        optimizer,
        DATA,
        extra={"s": schedule},
        after_apply=lambda step: schedule.step(),
        global_batch=4,
        micro_batch=4,
    )
    step = next(iter(job.steps(2)))
    for x, y in step.micro_batches():
        step.backward((model(x) - y).square().mean())
    with pytest.raises(BadInputError, match=r"extra\['s'\] was stepped by the script as well"):
        step.apply()
