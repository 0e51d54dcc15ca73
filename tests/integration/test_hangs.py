"""Nobody is dead, and nothing comes: after a time-out the job goes on without whom that is due to."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from job_cases import FOREVER, TINY, StartJob, goes_on
from namespaces import Network, joined

from holdfast.coordination.config import CoordinatorConfig
from holdfast.protocol.events import FailureDetected, GenerationStarted, NodesJoined, RolledBack, StepCommitted
from holdfast.protocol.failures import FailureKind
from holdfast.protocol.job_spec import JobSpec
from holdfast.testing.local_job import EventLog

TIMEOUT_S = 4.0
CONFIG = CoordinatorConfig(spec=JobSpec())
#: from the moment at which nothing comes any more: the time-out, then two leases
WITHIN_S = TIMEOUT_S + 2 * CONFIG.lease_s


def test_a_thread_that_hangs_is_named_and_replaced(start_job: StartJob) -> None:
    """Reproducer hang.py: the same members for ever, a time-out apart, and the wrong node blamed."""
    job = start_job(*FOREVER, "--step-seconds", "0.1", "--timeout", str(TIMEOUT_S), "--hang-at", "10")
    last = job.wait(StepCommitted, step=9)
    failure = job.wait(FailureDetected)
    assert (failure.node, failure.kind) == ("node-1", FailureKind.HANG), job.story()
    assert "of step 10 while the others waited for it in vain" in failure.detail
    again = job.wait(StepCommitted, step=10)
    assert again.time - last.time < WITHIN_S
    goes_on(job, 10)
    assert not job.all(RolledBack)


@contextmanager
def job_on(network: Network, nodes: int, folder: Path) -> Iterator[EventLog]:
    """A coordinator on the hub and an agent on each node, until the end of the block."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_RUNTIME_DIR": str(folder), "HOLDFAST_TOKEN": "secret"}
    events, output = folder / "events.jsonl", folder / "output.txt"
    holdfast = [sys.executable, "-m", "holdfast"]
    script = [str(TINY), *FOREVER, "--step-seconds", "0.1", "--timeout", str(TIMEOUT_S)]
    url = f"http://{network.address('hub')}:7077"
    with ExitStack() as stack, output.open("wb") as out:

        def start(where: str, *arguments: str) -> subprocess.Popen[bytes]:
            command = [*network.inside(where), *holdfast, *arguments]
            process = subprocess.Popen(command, env=environment, stdout=out, stderr=out)
            stack.callback(process.wait, 30)
            stack.callback(process.send_signal, signal.SIGTERM)
            return process

        listen = ("--listen", f"{network.address('hub')}:7077", "--nodes", str(nodes))
        coordinator = start("hub", "coordinator", *listen, "--events", str(events))
        for index in range(nodes):
            name = f"node-{index}"
            start(
                name,
                "agent",
                "--address",
                url,
                "--node-name",
                name,
                "--advertise",
                network.address(name),
                "--",
                *script,
            )
        log = EventLog(events, alive=lambda: coordinator.poll() is None)
        log.follow()
        stack.callback(log.unfollow)
        yield log


def test_two_nodes_that_are_cut_off_from_each_other_are_never_put_together_again(tmp_path: Path) -> None:
    """Both reach all others, the coordinator too: the job goes on without one of them."""
    with joined(3) as network, job_on(network, 3, tmp_path) as job:
        job.wait(StepCommitted, step=5)
        network.cut("node-1", "node-2")
        cut = len(job.events)
        failure = job.wait(FailureDetected, since=cut)
        assert failure.node in ("node-1", "node-2"), job.story()
        assert "no connection between" in failure.detail
        before = [event for event in job.all(StepCommitted) if event.time < failure.time][-1]
        again = job.wait(StepCommitted, step=before.step + 1)
        assert again.time - before.time < WITHIN_S
        assert again.world_size == 2
        # The one that was left out comes back with fresh workers, and no group can be built with it.
        job.wait(NodesJoined, lambda e: failure.node in e.names, since=cut)
        job.wait(StepCommitted, step=again.step + 100)
        generations = [set(event.members) for event in job.events[cut:] if isinstance(event, GenerationStarted)]
        assert generations == [{"node-0", "node-1", "node-2"} - {failure.node}], job.story()
