"""One node writes its checkpoint part slowly: checkpoints become less frequent, but stay complete."""

from __future__ import annotations

from pathlib import Path

from job_cases import FOREVER, TINY, wait_until

from holdfast.protocol.checkpoints.directory import find_checkpoints
from holdfast.protocol.events import CheckpointDelayed, CheckpointFailed, CheckpointSaved
from holdfast.storage import LocalStorage
from tests.harness.local_job import LocalJob

#: Python runs this code at the start of every process. It simulates a slow disk on one node: if the file `armed`
#: exists, the next fsync of a file of rank 1 waits until the file `release` exists.
SLOW_DISK = """
import os, pathlib, time
_folder, _fsync = pathlib.Path({folder!r}), os.fsync
def fsync(descriptor):
    if "part-00001-of" in os.readlink(f"/proc/self/fd/{{descriptor}}"):
        try:
            (_folder / "armed").rename(_folder / "held")
        except FileNotFoundError:
            return _fsync(descriptor)
        while not (_folder / "release").exists():
            time.sleep(0.01)
        (_folder / "release").unlink()
        (_folder / "held").unlink()
    return _fsync(descriptor)
os.fsync = fsync
"""


def test_a_node_with_a_slow_disk_delays_periodic_but_not_requested_checkpoints(tmp_path: Path) -> None:
    slow, saved = tmp_path / "slow", tmp_path / "checkpoints"
    slow.mkdir()
    (slow / "sitecustomize.py").write_text(SLOW_DISK.format(folder=str(slow)))
    (slow / "armed").touch()
    options = ("--nodes", "2", "--checkpoint-dir", str(saved), "--checkpoint-every", "2")
    environment = {"PYTHONPATH": str(slow), "XDG_RUNTIME_DIR": str(tmp_path)}
    with LocalJob(TINY, FOREVER, options=options, folder=tmp_path, environment=environment) as job:
        # More checkpoints are due than may be unfinished at a time, so all wait for the first one. On a busy machine
        # the other node may also be late at first.
        job.wait(CheckpointDelayed, lambda event: event.left_out > 16 and event.nodes == job.nodes()[1:])
        assert not job.all(CheckpointSaved)
        (slow / "release").touch()
        first = job.wait(CheckpointSaved)
        assert first.step == 2
        assert first.left_out > 16
        (slow / "armed").touch()
        wait_until(lambda: (slow / "held").exists())
        since = len(job.events)
        with job.client() as client:
            client.checkpoint()
        requested = job.wait(CheckpointSaved, since=since)
        assert (slow / "held").exists(), "the earlier checkpoint was not still being written"
        (slow / "release").touch()
        job.wait(CheckpointSaved, lambda event: event.step > requested.step, since=since)
        assert not job.all(CheckpointFailed)
        assert job.process is not None
        job.process.terminate()
        job.wait_exit()
    assert max(name.step for name in find_checkpoints(LocalStorage(saved))) > requested.step
