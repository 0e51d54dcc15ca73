"""Check the class and severity of device errors in one worker, and that no other worker is affected."""

from __future__ import annotations

from pathlib import Path

from benchmarks.gpu_check.checks.jobs import SHARED_GPU, finish, losses_of, make_job, recovery_figures
from benchmarks.gpu_check.options import Figures, Options, require
from holdfast.protocol.events import FailureDetected, NodeLeft, Recovered, WorkersChanged

SCRIPT = Path(__file__).resolve().parent.parent / "failing_gpt.py"
#: The required class of each kind of failure.
CLASSES = {"memory": "gpu_out_of_memory", "index": "cuda_error", "access": "illegal_memory_access"}
#: On a CPU, one job is enough to test the check. The other failures do not exist there.
CPU_CLASSES = {"index": "software_error"}
#: the severity of a failure that restarts one process
PROCESS = 2


def run(options: Options, figures: Figures) -> None:
    """Run one job for each error."""
    for kind, wanted in (CPU_CLASSES if options.device == "cpu" else CLASSES).items():
        _fail_one_worker(options, figures, kind, wanted)


def _fail_one_worker(options: Options, figures: Figures, kind: str, wanted: str) -> None:
    nodes, steps = ("2", 12) if options.device == "cpu" else ("3", 40)
    sizes = ("--layers", "2", "--dim", "64", "--context", "32")
    marker = options.folder / f"{kind}.marker"
    arguments = ("--fail", kind, "--at", "5", "--marker", str(marker), "--steps", str(steps), *sizes)
    with make_job(options, kind, arguments, command=("--nodes", nodes, *SHARED_GPU), script=SCRIPT) as job:
        failure = job.wait(FailureDetected, timeout=90.0)
        recovered = job.wait(Recovered, timeout=60.0)
        finish(job, 90.0)
    failures = job.all(FailureDetected)
    others = {event.node for event in job.all(WorkersChanged)} - {failure.node}
    figures[kind] = {
        "class": failure.category,
        "severity": failure.severity,
        "detail": failure.detail[-200:],
        "failures": len(failures),
        "recovery": recovery_figures(recovered),
        "other_nodes_restarted": len(others),
        "nodes_lost": [event.node for event in job.all(NodeLeft) if event.reason != "finished"],
    }
    require(len(losses_of(job)) == steps, f"{kind}: {len(losses_of(job))} of {steps} steps are committed")
    require(len(failures) == 1 and not others, f"{kind}: other workers failed too: {failures}")
    require(failure.severity == PROCESS, f"{kind}: severity {failure.severity}, wanted {PROCESS}")
    require(failure.category == wanted, f"{kind}: class {failure.category}, wanted {wanted}: {failure.detail}")
