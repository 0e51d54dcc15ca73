"""Workers that warm up before they join a generation, with real processes: effects on the script, and side effects."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cluster import Cluster

import holdfast
from holdfast.protocol import events as ev
from holdfast.protocol.messages import any_side as msg
from holdfast.runtime.tensors import seed_all

STEPS = 10


def drawing(directory: str, node: str, options: dict[str, Any]) -> None:
    """A script that draws random numbers outside micro-batches, and requests a stop in shadow steps."""
    seed_all(0)
    random.seed(0)
    np.random.seed(0)
    job = holdfast.init()
    model = torch.nn.Linear(8, 1)
    x = torch.randn(50, 8, generator=torch.Generator().manual_seed(5))
    data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
    job.protect(model, torch.optim.Adagrad(model.parameters()), data, global_batch=24, micro_batch=4, seed=3)
    for step in job.steps(options["steps"]):
        kind = "shadow" if step.shadow else "step"
        with (Path(directory) / f"{node}.{kind}").open("a") as file:
            print(step.number, float(torch.rand(())), random.random(), np.random.rand(), file=file)
        if step.shadow:
            job.stop("nobody is to hear this")
        while step.number in options["gates"] and not (Path(directory) / f"go{step.number}").exists():
            time.sleep(0.005)
        for inputs, targets in step.micro_batches():
            step.backward(torch.nn.functional.mse_loss(model(inputs), targets))
        step.apply()


def grown(path: Path, warm: str, **options: Any) -> tuple[dict[int, str], list[Any], list[msg.Warmed]]:
    """Let a third worker join a job before step 6; return hashes by step, shadow steps, and Warmed reports."""
    path.mkdir(exist_ok=True)
    given: dict[str, Any] = {"steps": STEPS, "float64": True, "gates": (6,), **options}
    with Cluster(path, nodes=2, options=given) as cluster:
        cluster.wait("step 5", lambda: len(cluster.of(ev.StepCommitted)) >= 5)
        cluster.add(warm=warm)
        cluster.wait("the joiner's group", lambda: len(cluster.messages_of(msg.Prepared)) == 3)
        cluster.go()
        cluster.wait_done()
        assert set(cluster.exit_codes().values()) == {0}
        cluster.assert_replicas_equal()
        assert cluster.of(ev.StepCommitted)[-1].world_size == 3
        hashes = {report.step: report.state_hash for report in cluster.messages_of(msg.Applied)}
        lines = path / "n3.shadows"
        shadows = [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []
        return hashes, shadows, cluster.messages_of(msg.Warmed)


@pytest.mark.parametrize(
    "options",
    [{}, {"batch_norm": True, "logs": True}, {"streams": True, "scale": 2.0**40}, {"evaluate": {}}],
    ids=["plain", "statistics and logs", "streams and a loss scale", "evaluations"],
)
def test_warming_up_a_joining_worker_leaves_all_states_bit_identical(tmp_path: Path, options: dict[str, Any]) -> None:
    cold, none, silent = grown(tmp_path / "cold", "", **options)
    warm, shadows, warmings = grown(tmp_path / "warm", "before", **options)
    assert cold == warm
    assert len(cold) == STEPS
    assert (none, silent) == ([], [])
    # A failed attempt looks the same: not applied, no loss, the same number again, nothing logged.
    assert shadows == [[1, False, True, {}, 1]] * 2
    (warmed,) = warmings
    assert not warmed.error
    assert warmed.seconds > 0


def test_shadow_steps_are_cut_short_when_the_worker_is_needed(tmp_path: Path) -> None:
    """Its script is in the first shadow step while the others prepare the generation that it will join."""
    cold, _, _ = grown(tmp_path / "cold", "")
    warm, _, _ = grown(tmp_path / "warm", "while")
    assert cold == warm


def test_random_draws_and_stop_requests_of_shadow_steps_have_no_effect(tmp_path: Path) -> None:
    """Its optimizer has state from the start, and keeps it."""
    grown(tmp_path / "cold", "", script=drawing)
    grown(tmp_path / "warm", "before", script=drawing)
    cold, warm = ((tmp_path / how / "n3.step").read_text().splitlines()[0] for how in ("cold", "warm"))
    assert cold == warm
    shadows = (tmp_path / "warm" / "n3.shadow").read_text().splitlines()
    assert len(shadows) == 2
    assert shadows[0].split()[1:] == warm.split()[1:], (
        "shadow steps draw the same numbers, and the generators are restored"
    )
