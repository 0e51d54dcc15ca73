"""An optimizer with only frozen parameters does nothing until one of them trains again, as in plain PyTorch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from changing import DATA
from cluster import Cluster
from turns import STEPS, Turns, train

from holdfast.errors import StepUseError
from holdfast.protocol import events as ev
from holdfast.runtime.session.job import Job


def near(values: Any) -> Any:
    return pytest.approx(values, rel=1e-12, abs=1e-15)


@pytest.mark.parametrize(
    "options",
    [{}, {"clips": True}, {"scaler": torch.amp.GradScaler("cpu", init_scale=2.0**10)}],
    ids=["plain", "clipped", "scaled"],
)
@pytest.mark.parametrize("experts", [0, 4])
def test_optimizers_with_frozen_parameters_train_like_plain_pytorch(experts: int, options: dict[str, Any]) -> None:
    ours, plain = Turns(experts), Turns(experts)
    losses = ours.train(Job(None), **options)
    assert losses == near(plain.train_plainly(clips="clips" in options))
    assert ours.numbers == near(plain.numbers)


@pytest.mark.parametrize("experts", [0, 4])
def test_frozen_optimizers_match_plain_pytorch_despite_a_worker_loss(tmp_path: Path, experts: int) -> None:
    """Also with more workers than a step has micro-batches, and with notes next to the gradients."""
    options = {"script": train, "steps": STEPS, "experts": experts}
    with Cluster(tmp_path, nodes=3, options=options) as cluster:
        cluster.wait("step 1", lambda: bool(cluster.of(ev.StepCommitted)))
        cluster.fail("n1", step=6, phase="reducing")
        cluster.wait_done()
        plain = Turns(experts)
        calm = plain.train_plainly()
        assert cluster.steps() == near(calm)
        for node in ("n2", "n3"):
            assert json.loads((tmp_path / f"{node}.json").read_text()) == near(plain.numbers)


@pytest.mark.parametrize("experts", [0, 4])
def test_experts_or_dense_layers_can_be_trained_alone(experts: int) -> None:
    """Alternatively only the layers next to them train."""
    script, job = Turns(experts or 4), Job(None)
    trained = {name for name, _ in script.model.named_parameters() if ("experts" in name) == bool(experts)}
    for name, parameter in script.model.named_parameters():
        parameter.requires_grad_(name in trained)
    before = {name: p.detach().clone() for name, p in script.model.named_parameters()}
    optimizer = torch.optim.SGD(script.model.parameters(), lr=0.1)
    job.protect(script.model, optimizer, DATA, global_batch=24, micro_batch=4)
    for step in job.steps(2):
        for batch in step.micro_batches():
            step.backward(script.loss("g", batch))
        assert step.apply()
    changed = {name for name, p in script.model.named_parameters() if not torch.equal(p, before[name])}
    assert changed
    assert changed <= trained


@pytest.mark.parametrize("in_loop", [False, True])
@pytest.mark.parametrize("several", [False, True])
def test_freezing_all_parameters_is_refused_with_a_remedy(several: bool, in_loop: bool) -> None:
    script, job = Turns(), Job(None)
    optimizer = script.optimizers if several else torch.optim.SGD(script.model.parameters(), lr=0.1)
    done: list[int] = []

    def follow(step: Any) -> None:
        done.append(step.number)
        if step.number == 3 and not in_loop:
            script.model.requires_grad_(False)

    extra = {"schedule": script.schedule} if several else {}
    job.protect(script.model, optimizer, DATA, global_batch=24, micro_batch=4, after_apply=follow, extra=extra)

    def run() -> None:
        for step in job.steps(6):
            if in_loop and step.number == 4:
                script.model.requires_grad_(False)
            for batch in step.micro_batches():
                step.backward(script.loss("g", batch))
            step.apply()

    with pytest.raises(
        StepUseError, match=r"nothing left to train: call requires_grad_\(True\) .* job\.stop\(reason\)"
    ):
        run()
    assert done == [1, 2, 3]
