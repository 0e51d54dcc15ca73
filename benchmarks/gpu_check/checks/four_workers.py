"""Kill one of four workers on one device and add one; the losses must equal an undisturbed run."""

from __future__ import annotations

import time

from benchmarks.gpu_check.checks.jobs import (
    SHARED_GPU,
    CheckJob,
    finish,
    largest_difference,
    losses_of,
    make_job,
    median_step_s,
    recovery_figures,
)
from benchmarks.gpu_check.options import Figures, Options, require
from holdfast.protocol.events import FailureDetected, GenerationStarted, Recovered, StepCommitted

#: The order of additions depends on the number of workers.
BOUND = 1e-4
#: Steps before the loss of a worker, and after the arrival of another one.
STEPS_BEFORE, STEPS_AFTER = 10, 5
ENDLESS = "1000000"


def run(options: Options, figures: Figures) -> None:
    """Train with a loss and an arrival, then the same steps undisturbed."""
    nodes = 2 if options.device == "cpu" else 4
    sizes = ("2", "64", "4", "32") if options.device == "cpu" else ("6", "512", "8", "256")
    names = ("--layers", "--dim", "--heads", "--context")
    arguments = tuple(part for pair in zip(names, sizes, strict=True) for part in pair)
    command = ("--nodes", str(nodes), *SHARED_GPU)
    with make_job(options, "disturbed", ("--steps", ENDLESS, *arguments), command=command) as disturbed:
        _disturb(disturbed, nodes, figures)
    # The steps after the arrival must be included.
    losses = losses_of(disturbed)
    steps = max(losses)
    with make_job(options, "undisturbed", ("--steps", str(steps), *arguments), command=command) as undisturbed:
        finish(undisturbed, 90.0)
    figures["step_s"] = median_step_s(undisturbed)
    figures["arrival_of_a_worker"]["stall_s"] = figures["arrival_of_a_worker"]["first_step_s"] - figures["step_s"]
    figures["compared_steps"], figures["last_loss"] = steps, losses[steps]
    figures["loss_difference"] = largest_difference(losses, losses_of(undisturbed))
    require(
        figures["loss_difference"] <= BOUND,
        f"losses differ from the undisturbed run by {figures['loss_difference']:.2g}, allowed {BOUND:g}",
    )


def _disturb(job: CheckJob, nodes: int, figures: Figures) -> None:
    """Kill a node and add one; record the times of both."""
    job.wait(StepCommitted, lambda event: event.step >= STEPS_BEFORE)
    members = job.nodes()
    require(len(members) == nodes, f"{nodes - len(members)} nodes left before any was killed")
    since, victim = len(job.events), members[1]
    killed = job.signal_node(victim)
    failure = job.wait(FailureDetected, node=victim, since=since, timeout=60.0)
    recovered = job.wait(Recovered, since=since, timeout=60.0)
    figures["loss_of_a_worker"] = {"seen_after_s": failure.time - killed, **recovery_figures(recovered)}
    since, asked = len(job.events), time.time()
    job.add_nodes(1)
    grown = job.wait(GenerationStarted, lambda event: event.world_size == nodes, since=since, timeout=90.0)
    first = job.wait(StepCommitted, lambda event: event.world_size == nodes, since=since, timeout=60.0)
    figures["arrival_of_a_worker"] = {"joined_after_s": grown.time - asked, "first_step_s": first.step_s}
    job.wait(StepCommitted, lambda event: event.step >= first.step + STEPS_AFTER, since=since, timeout=60.0)
