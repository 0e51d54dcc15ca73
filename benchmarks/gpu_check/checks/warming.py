"""Measure the first step of a new worker, cold and after its shadow steps, eager and compiled."""

from __future__ import annotations

import shutil

from benchmarks.gpu_check.checks.jobs import ROOT, SHARED_GPU, make_job, median_step_s
from benchmarks.gpu_check.options import CheckFailedError, Figures, Options
from benchmarks.measured_gpt import Attempt, attempts_of
from holdfast.protocol.events import Recovered, StandbyReady, StepCommitted

SCRIPT = ROOT / "benchmarks" / "measured_gpt.py"


def run(options: Options, figures: Figures) -> None:
    """Replace a lost node by a standby, in an eager job and in a compiled one."""
    figures["eager"] = _replace_node(options, "eager", ())
    if options.device == "cpu":
        return
    if not shutil.which("gcc") and not shutil.which("cc"):
        figures["compiled"] = "not possible: torch.compile needs a C compiler, and gcc and cc are not installed"
        return
    figures["compiled"] = _replace_node(options, "compiled", ("--compile",))


def _replace_node(options: Options, name: str, more: tuple[str, ...]) -> dict[str, object]:
    attempts = options.folder / f"{name}-attempts"
    attempts.mkdir(parents=True)
    sizes = ("2", "64", "4", "32") if options.device == "cpu" else ("8", "512", "8", "256")
    names = ("--layers", "--dim", "--heads", "--context")
    arguments = ["--folder", str(attempts), *more]
    for option, size in zip(names, sizes, strict=True):
        arguments += [option, size]
    command = ("--nodes", "2", "--standbys", "1", *SHARED_GPU)
    with make_job(options, name, arguments, command=command, script=SCRIPT) as job:
        standby = job.wait(StandbyReady, timeout=110.0)
        step = job.wait(StepCommitted, timeout=90.0).step
        job.wait(StepCommitted, lambda event: event.step > step + 5, timeout=60.0)
        since = len(job.events)
        job.signal_node(job.nodes()[0])
        recovered = job.wait(Recovered, since=since, timeout=60.0)
        since, step = len(job.events), max(event.step for event in job.all(StepCommitted))
        job.wait(StepCommitted, lambda event: event.step > step + 2, since=since, timeout=60.0)
        step_s = median_step_s(job)
        steps = [one for one in attempts_of(attempts, standby.node) if one.micro_batches]
    shadows, real = [one for one in steps if one.shadow], [one for one in steps if not one.shadow]
    if not shadows or not real:
        raise CheckFailedError(f"{name}: the standby has {len(shadows)} shadow steps and {len(real)} others")
    return {
        "standby_warm_after_s": standby.warm_s,
        "first_shadow_step": _figures(shadows[0]),
        "last_shadow_step": _figures(shadows[-1]),
        "first_step": _figures(real[0]),
        "step_s": step_s,
        "recovery_s": recovered.down_s,
    }


def _figures(attempt: Attempt) -> dict[str, float]:
    return {"micro_batches": attempt.micro_batches, "s": attempt.own_s, "s_per_micro_batch": attempt.each_s}
