"""Train one model sharded over two workers with FSDP2 on one device, and compare the losses with one worker."""

from __future__ import annotations

from contextlib import ExitStack

from benchmarks.gpu_check.checks.jobs import (
    ROOT,
    SHARED_GPU,
    finish,
    largest_difference,
    losses_of,
    make_job,
    median_step_s,
)
from benchmarks.gpu_check.options import Figures, Options, require

SCRIPT = ROOT / "examples" / "fsdp_gpt.py"
BOUND = 1e-4


def run(options: Options, figures: Figures) -> None:
    """Train both jobs at the same time."""
    steps = 6 if options.device == "cpu" else 20
    sizes = ("--layers", "2", "--dim", "64", "--context", "32") if options.device == "cpu" else ()
    arguments = ("--steps", str(steps), *sizes)
    with ExitStack() as stack:
        jobs = {
            workers: stack.enter_context(
                make_job(
                    options,
                    f"shard-{workers}",
                    ("--shard", str(workers), *arguments),
                    command=("--nodes", "1", "--workers-per-node", str(workers), *SHARED_GPU),
                    script=SCRIPT,
                )
            )
            for workers in (1, 2)
        }
        for job in jobs.values():
            finish(job, 85.0)
    difference = largest_difference(losses_of(jobs[2]), losses_of(jobs[1]))
    figures["loss_difference"] = difference
    figures["step_s"] = {
        "one_worker": median_step_s(jobs[1], first=steps // 3),
        "two_workers": median_step_s(jobs[2], first=steps // 3),
    }
    require(difference <= BOUND, f"losses differ from the job with one worker by {difference:.2g}, allowed {BOUND:g}")
