"""Several optimizers, one updated per step: with the results of plain PyTorch, and with misuse refused."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from gan import UPDATES, Gan, X

from holdfast.errors import BadInputError, StepUseError
from holdfast.runtime.moe.layer.moe_layer import MoE
from holdfast.runtime.session.job import Job

Weights = dict[str, torch.Tensor]


def weights(gan: Gan, part: str) -> Weights:
    return {name: p.detach().clone() for name, p in gan.model[part].named_parameters()}


def same(before: Weights, after: Weights) -> bool:
    return all(before[name].equal(after[name]) for name in before)


def run(gan: Gan, steps: int, directory: Path | str = "", **options: Any) -> list[tuple[float, float, Weights]]:
    """Train, and return loss, norm and the generator's weights of each step."""
    job, found = Job(None, checkpoint_dir=str(directory), checkpoint_every=2), []
    gan.protect(job, **options)
    for step in job.steps(steps):
        gan.compute(step)
        before = {part: weights(gan, part) for part in gan.optimizers}
        assert step.apply()
        for part, values in before.items():
            mine = part == step.update
            assert same(values, weights(gan, part)) != mine
            assert all((p.grad is not None) == mine for p in gan.model[part].parameters())
        found.append((step.loss, step.grad_norm, weights(gan, "generator")))
    return found


@pytest.mark.parametrize("norms", [None, 0.05, {"critic": 0.05}])
def test_alternating_optimizers_train_like_plain_pytorch(norms: float | dict[str, float] | None) -> None:
    gan, plain = Gan(), Gan()
    job = Job(None)
    gan.protect(job, max_grad_norm=norms)
    assert job._session is not None
    workload, updates = job._session.workload, []
    for step in job.steps(9):
        gan.compute(step)
        assert step.apply()
        updates.append(step.update)
        optimizer = plain.optimizers[step.update]
        for each in plain.optimizers.values():
            each.zero_grad()
        for number in range(6):
            (real,) = workload.load_micro_batch(number)  # This also seeds the micro-batch.
            (plain.loss(step.update, real) / 6).backward()
        norm = norms.get(step.update) if isinstance(norms, dict) else norms
        parameters = list(plain.model[step.update].parameters())
        theirs = torch.nn.utils.clip_grad_norm_(parameters, norm if norm is not None else 1e9)
        assert step.grad_norm == pytest.approx(float(theirs), rel=1e-9)
        optimizer.step()
        plain.schedules[f"{step.update} schedule"].step()
        for part in plain.optimizers:
            assert gan.optimizers[part].param_groups[0]["lr"] == plain.optimizers[part].param_groups[0]["lr"]
            for mine, other in zip(gan.model[part].parameters(), plain.model[part].parameters(), strict=True):
                torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-12)
    assert updates == [*UPDATES] * 3


def test_a_job_resumes_within_a_cycle_of_optimizers(tmp_path: Path) -> None:
    whole = run(Gan(), 8)
    first = run(Gan(), 5, tmp_path)
    second = run(Gan(), 8, tmp_path)
    for found, expected in zip([*first, *second], whole, strict=True):
        assert found[:2] == expected[:2]
        assert same(found[2], expected[2])


def test_optimizers_alternate_without_an_explicit_order() -> None:
    gan, job = Gan(), Job(None)
    gan.protect(job, updates=None)
    updates = []
    for step in job.steps(3):
        updates.append(step.update)
        gan.compute(step)
        step.apply()
    assert updates == ["generator", "critic", "generator"]


def test_a_loss_scale_skips_only_the_update_that_overflows() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100)
    gan, job = Gan(), Job(None)
    gan.protect(job, scaler=scaler)
    for step in job.steps(3):
        before = {part: weights(gan, part) for part in gan.optimizers}
        for (real,) in step.micro_batches():
            loss = gan.loss(step.update, real)
            step.backward(loss * torch.inf if step.number == 2 else loss)
        assert step.apply()
        assert step.skipped == (step.number == 2)
        changed = {part for part, values in before.items() if not same(values, weights(gan, part))}
        assert changed == ({step.update} if step.number != 2 else set())
        assert scaler.get_scale() == (4.0 if step.number == 1 else 2.0)


def test_manual_gradients_of_another_optimizer_are_refused() -> None:
    gan, job = Gan(), Job(None)
    gan.protect(job)
    step = next(job.steps(1))
    (real,) = next(step.micro_batches())
    assert step.update == "critic"
    gan.loss("generator", real).backward()
    with pytest.raises(StepUseError, match=r"outside of step\.backward"):
        step.backward(gan.loss("critic", real))


def test_a_parameter_unfrozen_later_is_trained_by_its_optimizer() -> None:
    gan, job = Gan(), Job(None)
    unfrozen = gan.model["generator"][0].weight
    unfrozen.requires_grad_(False)
    gan.protect(job)
    before = unfrozen.detach().clone()
    unfrozen.requires_grad_(True)
    for step in job.steps(3):
        gan.compute(step)
        assert step.apply()
        assert unfrozen.equal(before) == (step.update != "generator")
        if step.update == "generator":
            break


def test_trainable_parameters_without_an_optimizer_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    gan, job = Gan(), Job(None)
    critic = gan.model["critic"]
    del gan.schedules["critic schedule"]
    gan.optimizers["critic"] = torch.optim.SGD([critic[3].bias], lr=0.1)
    left = torch.nn.Linear(1, 1).double()
    gan.model.add_module("left", left)
    frozen = critic[0].weight.requires_grad_(False)
    gan.protect(job)
    with caplog.at_level(logging.WARNING):
        for step in job.steps(3):
            gan.compute(step)
            step.apply()
            assert critic[3].weight.grad is frozen.grad is None
    (logged,) = [record.getMessage() for record in caplog.records if "no optimizer has" in record.message]
    assert "no optimizer has critic.0.bias, critic.3.weight, left.weight and 1 more: they require" in logged


class Twice(torch.nn.Module):
    """Experts with a dense layer in front of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 4)
        self.experts = MoE(4, 8, experts=2, top_k=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts(self.first(x)).square().mean() + self.experts.aux_loss


def test_experts_change_only_in_updates_of_their_optimizer() -> None:
    torch.manual_seed(0)
    model, job = Twice(), Job(None)
    optimizers: dict[str, torch.optim.Optimizer] = {
        "dense": torch.optim.SGD(model.first.parameters(), lr=0.1),
        "experts": torch.optim.AdamW(model.experts.parameters(), lr=0.1),
    }
    data = torch.utils.data.TensorDataset(torch.randn(16, 4))
    job.protect(model, optimizers, data, global_batch=4, micro_batch=2)
    for step in job.steps(4):
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        for (x,) in step.micro_batches():
            step.backward(model(x))
        assert step.apply()
        changed = {name.split(".")[0] for name, p in model.named_parameters() if not p.equal(before[name])}
        assert changed == {{"dense": "first", "experts": "experts"}[step.update]}


def test_experts_in_two_optimizers_are_refused() -> None:
    model, job = torch.nn.ModuleDict({"a": MoE(4, 8, experts=2), "b": MoE(4, 8, experts=2)}), Job(None)
    optimizers = {name: torch.optim.SGD(part.parameters(), lr=0.1) for name, part in model.items()}
    with pytest.raises(BadInputError, match="experts of the model's MoE layers are in the optimizers 'a', 'b': give"):
        job.protect(model, optimizers, torch.utils.data.TensorDataset(X), global_batch=4, micro_batch=2)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"updates": ("critic", "discriminator")}, "updates names 'discriminator', .* there are 'generator', 'critic'"),
        ({"updates": ("critic",)}, "updates leaves out 'generator': no step would ever update it; name it"),
        ({"updates": "critic"}, "updates is 'critic': give the names of the optimizers in their order, in a list"),
        ({"max_grad_norm": {"all": 1.0}}, "max_grad_norm names 'all', not an optimizer"),
        ({"max_grad_norm": {"critic": 0.0}}, r"max_grad_norm\['critic'\] is 0\.0: it must be positive, or left out"),
    ],
)
def test_bad_input_is_reported_in_one_line(options: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInputError, match=words) as caught:
        Gan().protect(Job(None), **options)
    assert "\n" not in str(caught.value)


def test_optimizers_without_trainable_parameters_are_refused_by_name() -> None:
    gan = Gan()
    gan.model.requires_grad_(False)
    words = "none of the optimizers 'generator', 'critic' has a parameter that requires a gradient: .* requires_grad_"
    with pytest.raises(BadInputError, match=words):
        gan.protect(Job(None))


def test_one_optimizer_without_trainable_parameters_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    gan, job = Gan(), Job(None)
    gan.model["critic"].requires_grad_(False)
    gan.protect(job, updates=None)
    with caplog.at_level(logging.WARNING):
        step = next(job.steps(2))
    gan.compute(step)
    assert step.apply()
    assert "optimizer 'critic' has no parameter that requires a gradient: its steps change nothing until" in caplog.text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"updates": ("a",)}, "updates is for several optimizers"),
        ({"max_grad_norm": {"a": 1.0}}, "max_grad_norm is a mapping, but the job has one optimizer"),
    ],
)
def test_options_for_several_optimizers_are_refused_for_one(options: dict[str, Any], words: str) -> None:
    model = torch.nn.Linear(3, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(X)
    with pytest.raises(BadInputError, match=words):
        Job(None).protect(model, optimizer, data, global_batch=4, micro_batch=2, **options)
