"""All workers of a job die while their agents hold snapshots of the state."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from job_cases import FOREVER, TINY, TINY_MOE, StartJob, check_losses, goes_on_until_interrupted, wait_until

from holdfast.protocol.events import (
    Recovered,
    RolledBack,
    SnapshotFailed,
    SnapshotRejected,
    SnapshotSaved,
    StepCommitted,
)
from tests.harness.local_job import LocalJob

SLOWLY = ("--step-seconds", "0.1")


def kill_all_workers(job: LocalJob) -> int:
    """Kill all worker processes at once; return the number of events before."""
    since = len(job.events)
    for pid in [pid for node in job.nodes() for pid in job.pids(node)[1]]:
        os.kill(pid, signal.SIGKILL)
    return since


def test_a_job_resumes_from_snapshots_after_all_workers_die(start_job: StartJob, tmp_path: Path) -> None:
    folder = tmp_path / "memory"
    options = ("--snapshot-every", "4", "--snapshot-dir", str(folder))
    job = start_job(*FOREVER, *SLOWLY, options=options)
    job.wait(SnapshotSaved, step=8)
    since = kill_all_workers(job)
    back = job.wait(RolledBack, since=since)
    assert back.to_step >= 8
    assert "memory of node-0, node-1, node-2" in back.why, job.story()
    recovered = job.wait(Recovered, since=since)
    assert (recovered.action, recovered.state_source) == ("rollback", "snapshot"), job.story()
    job.wait(SnapshotSaved, lambda event: event.step > back.to_step, since=since)
    goes_on_until_interrupted(job)
    check_losses(job, script=TINY, least=10)
    assert job.all(StepCommitted)[-1].step > back.to_step
    assert list(folder.iterdir()) == [], "files of the ended job are left"


def parts_in(folder: Path, step: int) -> dict[str, list[Path]]:
    """Return the parts of a step's snapshot by node."""
    found = {place.name.split("-tiny-")[1].rpartition("-")[0]: place for place in folder.iterdir()}
    return {node: sorted(place.glob(f"step-{step:08d}-*.part")) for node, place in found.items()}


def test_a_lost_node_and_a_damaged_snapshot_are_recovered_from_other_copies(
    start_job: StartJob, tmp_path: Path
) -> None:
    folder, gate, late = tmp_path / "memory", tmp_path / "go", tmp_path / "late"
    options = ("--snapshot-every", "4", "--snapshot-dir", str(folder))
    script = ("--gate", str(gate), "--gate-at", "10", "--held-back", "node-2", str(late))
    job = start_job("--steps", "14", *script, options=options)
    job.wait(SnapshotSaved, step=8)
    wait_until(lambda: sum(map(len, parts_in(folder, 8).values())) == 6)  # Each of three parts is on two nodes.
    mine = parts_in(folder, 8)["node-0"][0]
    data = bytearray(mine.read_bytes())
    data[len(data) // 3] ^= 4
    mine.write_bytes(data)
    late.touch()  # Otherwise node-2 could start alone with its own copy, and the damaged copy would not be read.
    since = kill_all_workers(job)
    job.signal_node("node-1")
    assert job.wait(RolledBack, since=since).to_step == 8
    rejected = job.wait(SnapshotRejected, since=since)
    assert (rejected.node, rejected.step) == ("node-0", 8), job.story()
    assert "checksum" in rejected.why
    late.unlink()
    (tmp_path / "go-10").touch()
    assert job.wait_exit() == 0, job.story()
    check_losses(job, script=TINY, least=14)
    assert all("checkpoint" not in event.why for event in job.all(RolledBack))


def test_a_failed_snapshot_is_reported_and_training_continues(start_job: StartJob, tmp_path: Path) -> None:
    full = tmp_path / "full"
    full.write_text("no folder")
    job = start_job("--steps", "12", nodes=2, options=("--snapshot-every", "4", "--snapshot-dir", str(full)))
    failed = job.wait(SnapshotFailed)
    assert failed.step == 4
    assert job.wait_exit() == 0, job.story()
    assert job.all(SnapshotSaved) == []
    assert "no snapshots are kept on this node" in job.output()


def test_an_expert_without_a_live_copy_is_restored_from_its_snapshot(start_job: StartJob, tmp_path: Path) -> None:
    """Two nodes hold one copy of each expert; a worker dies but its agent lives, so all roll back to the snapshot."""
    options = ("--expert-slots", "4", "--fault-threshold", "1", "--verify-state", "1")
    options = (*options, "--snapshot-every", "4", "--snapshot-dir", str(tmp_path / "memory"))
    job = start_job(*FOREVER, "--step-seconds", "0.4", nodes=2, options=options, script=TINY_MOE)
    job.wait(SnapshotSaved, step=4)
    job.wait(StepCommitted, step=6)
    since = len(job.events)
    os.kill(job.pids(job.nodes()[0])[1][0], signal.SIGKILL)
    back = job.wait(RolledBack, since=since)
    assert "expert" in back.why, back
    assert "the snapshot of step" in back.why, back
    assert "done again" in back.why, "the number of lost steps is not reported"
    assert job.wait(Recovered, since=since).state_source == "snapshot"
    goes_on_until_interrupted(job)
    check_losses(job, script=TINY_MOE, least=8)
