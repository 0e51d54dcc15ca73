"""A tiny DeepSeek-V3 of transformers survives kills and joins with unchanged losses."""

from __future__ import annotations

from collections.abc import Iterator

import job_cases
import pytest
from job_cases import FOREVER, StartJob, goes_on, goes_on_until_interrupted

from holdfast.control.link.forking import PRELOAD
from holdfast.observability.event_lines import read_events
from holdfast.observability.report import committed_steps
from holdfast.protocol.events import FailureDetected, GenerationStarted, Recovered, RolledBack, StepCommitted
from places import BENCHMARKS
from warm_start import zygote

#: The example examples/deepseek_tiny.py without the roundings to float32 in transformers.
EXAMPLE = BENCHMARKS / "deepseek_float64.py"
SIZES = ("--layers", "2", "--dim", "16", "--context", "16", "--global-batch", "8", "--micro-batch", "2")
ARGUMENTS = (*SIZES, "--dtype", "float64", "--bias-rate", "0.01", "--lr", "0.003")
SLOTS = ("--expert-slots", "8")


@pytest.fixture
def _with_transformers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fork workers from a process that has imported the model, because each import takes four seconds."""
    with zygote((*PRELOAD, "transformers.models.deepseek_v3.modeling_deepseek_v3")) as socket:
        monkeypatch.setattr(job_cases, "zygote", socket)
        yield


@pytest.mark.usefixtures("_with_transformers")
def test_a_converted_model_keeps_its_losses_through_kills_and_joins(start_job: StartJob) -> None:
    """Losses agree to 1e-9, and all workers have bit-equal states after each step, including the gates' biases."""
    options = (*SLOTS, "--verify-state", "1")
    job = start_job(*FOREVER, *ARGUMENTS, "--pause", "0.2", nodes=3, options=options, script=EXAMPLE)
    job.wait(StepCommitted, step=3)
    for phase in ("voted", "applying"):
        goes_on(job)
        since = len(job.events)
        victim = job.nodes()[1]
        job.inject("kill", victim, phase=phase)
        job.wait(FailureDetected, node=victim, since=since)
        job.wait(Recovered, action="shrink", since=since)
        job.add_nodes(1)
        job.wait(GenerationStarted, reason="join", world_size=3, since=since)
        job.wait(Recovered, action="grow", since=since)
    goes_on_until_interrupted(job)
    assert not job.all(RolledBack)
    steps = committed_steps(read_events(job.events_file))
    calm = start_job("--steps", str(steps[-1].step), *ARGUMENTS, nodes=1, options=SLOTS, script=EXAMPLE)
    assert calm.wait_exit() == 0
    wanted = [event.loss for event in calm.all(StepCommitted)]
    assert [step.loss for step in steps] == pytest.approx(wanted, rel=1e-9)
    assert len(steps) >= 9
