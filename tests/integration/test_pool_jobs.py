"""Several jobs on one pool of nodes, with real processes: shares, the server's death, nodes', what users ask for."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from job_cases import TINY, TINY_MOE

from holdfast.observability.event_lines import read_events
from holdfast.observability.history.audit import audit_events
from holdfast.protocol.events import RolledBack, StepCommitted

PATIENCE_S = 90.0
NODES = 4


class LocalPool:
    """`holdfast pool --local 4`, and the commands of its user."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {**os.environ, "XDG_RUNTIME_DIR": str(folder), "OMP_NUM_THREADS": "1"}
        self.log = folder / "pool.log"
        command = [sys.executable, "-m", "holdfast", "pool", "--local", str(NODES), "--store", f"sqlite:{folder}/p.db"]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, env=self.environment, stdout=log, stderr=subprocess.STDOUT, process_group=0
            )
        self.wait(lambda: len(self.events("node_added")) == NODES, "its nodes")

    # ---- what a user does ----

    def call(self, *args: str, code: int = 0) -> str:
        """Run a command; return what it prints."""
        command = [sys.executable, "-m", "holdfast", *args]
        done = subprocess.run(
            command,
            env=self.environment,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert done.returncode == code, f"{args}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    def submit(self, name: str, nodes: str, *args: str, script: Path = TINY, options: tuple[str, ...] = ()) -> None:
        self.call("submit", "--name", name, "--nodes", nodes, *options, str(script), *args)

    def job(self, name: str) -> Mapping[str, Any]:
        jobs = json.loads(self.call("jobs", "--json"))["jobs"]
        return next(job for job in jobs if job["job"] == name)

    # ---- what is written down ----

    @property
    def journals(self) -> Path:
        return Path(f"{self.folder}/p.db.journals")

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        path = self.journals / "pool.events.jsonl"
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        events = [json.loads(line) for line in lines if line.endswith(b"\n")]
        return [event for event in events if not kinds or event["event"] in kinds]

    def steps(self, name: str) -> list[int]:
        (path,) = self.journals.glob(f"{name}.*.events.jsonl")
        lines = path.read_bytes().splitlines(keepends=True)
        events = [json.loads(line) for line in lines if line.endswith(b"\n")]
        return [event["step"] for event in events if event["event"] == "step_committed"]

    def check_journal_of(self, name: str) -> None:
        """Every step is there once, with all samples, and none was ever undone."""
        (path,) = self.journals.glob(f"{name}.*.events.jsonl")
        events = read_events(path)
        audited = audit_events(events)
        assert audited.sound, audited.findings
        assert audited.unproven == 0
        assert not [event for event in events if isinstance(event, RolledBack)]
        steps = [event.step for event in events if isinstance(event, StepCommitted)]
        assert steps == list(range(1, len(steps) + 1))

    def check_owners(self) -> None:
        """Nobody ever owned a node before the one before had let go of it."""
        owner: dict[str, int] = {}
        for event in self.events("node_granted", "node_released"):
            if event["event"] == "node_granted":
                assert event["node"] not in owner
                assert event["grant"] > max(owner.values(), default=0)
                owner[event["node"]] = event["grant"]
            else:
                assert owner.pop(event["node"]) == event["grant"]

    # ---- processes ----

    def pid_of(self, part: str) -> int:
        """Return the process of the server, or of a node."""
        found = [pid for pid, line in self.processes() if f"local_pool {part}" in line]
        assert len(found) == 1, found
        return found[0]

    def processes(self) -> list[tuple[int, str]]:
        """Return all processes that have come of this pool: they have its environment."""
        mark, found = f"XDG_RUNTIME_DIR={self.folder}".encode(), list[tuple[int, str]]()
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            try:
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.append((int(entry.name), (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()))
            except (OSError, UnicodeDecodeError):
                continue
        return found

    def wait(self, what: Callable[[], object], of: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not what():
            assert time.monotonic() < deadline, f"{of} did not come\n{self.log.read_text()}\n{self.events()[-12:]}"
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.05)

    def goes_on(self, *names: str, steps: int = 3) -> None:
        """Wait until each of these jobs has committed further steps."""
        for name in names:
            self.wait(lambda name=name: list(self.journals.glob(f"{name}.*.events.jsonl")), f"the journal of {name}")
            before = len(self.steps(name))
            self.wait(lambda name=name, before=before: len(self.steps(name)) >= before + steps, f"steps of {name}")

    def has(self, name: str, nodes: int) -> Callable[[], bool]:
        return lambda: len(self.job(name)["nodes"]) == nodes

    def end(self) -> None:
        """End it as a user does; nothing is left."""
        self.process.send_signal(signal.SIGINT)
        assert self.process.wait(timeout=PATIENCE_S) == 130
        assert not self.processes()


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[LocalPool]:
    tmp_path.chmod(0o700)
    pool = LocalPool(tmp_path)
    try:
        yield pool
    finally:
        if pool.process.poll() is None:
            pool.process.kill()
        for pid, _ in pool.processes():
            os.kill(pid, signal.SIGKILL)


FOREVER = ("--steps", "1000000", "--step-seconds", "0.2")


def test_jobs_share_nodes_and_outlive_the_server_and_a_node(pool: LocalPool) -> None:
    pool.submit("dense", "1:4", *FOREVER)
    pool.wait(pool.has("dense", NODES), "all nodes")
    pool.goes_on("dense")
    assert "dense" in pool.call("status", "-j", "dense")
    pool.submit("experts", "2:2", *FOREVER, script=TINY_MOE)
    pool.wait(pool.has("experts", 2), "two nodes")
    pool.goes_on("dense", "experts")

    os.kill(pool.pid_of("server"), signal.SIGKILL)
    pool.wait(lambda: len(pool.events("pool_started")) == 2, "another server")
    pool.goes_on("dense", "experts")
    assert [len(pool.job(name)["nodes"]) for name in ("dense", "experts")] == [2, 2]

    lost = pool.job("dense")["nodes"][0]
    grants = len(pool.events("node_granted"))
    os.kill(pool.pid_of(lost), signal.SIGKILL)
    pool.wait(lambda: len(pool.events("node_granted")) > grants, "the node's next grant")
    pool.wait(pool.has("dense", 2), "as many nodes as before")
    pool.goes_on("dense", "experts")

    assert "dense is stopped: a person has stopped it" in pool.call("stop", "-j", "dense")
    assert "is over" in pool.call("stop", "-j", "dense", code=4)
    pool.goes_on("experts")
    pool.check_journal_of("dense")
    pool.check_journal_of("experts")
    pool.check_owners()
    pool.end()


def test_a_suspended_job_goes_on_where_it_was_and_what_is_asked_wrongly_is_refused(pool: LocalPool) -> None:
    saved = ("--checkpoint-dir", "saved")
    pool.submit("a", "2:2", *FOREVER, options=saved)
    pool.submit("b", "3:3", *FOREVER)
    assert "queued: it needs 3 nodes, and 2 can be given" in pool.call("jobs")
    told = pool.call("explain", "-j", "b")
    assert "1 more node" in told
    assert "the end of a" in told
    pool.goes_on("a")
    assert "a  suspended" in pool.call("suspend", "-j", "a")
    steps = len(pool.steps("a"))
    pool.goes_on("b")
    assert "keeps no checkpoints" in pool.call("suspend", "-j", "b", code=4)
    pool.call("resume", "-j", "a")
    assert "queued" in pool.call("jobs")
    pool.call("stop", "-j", "b")
    pool.wait(pool.has("a", 2), "its nodes again")
    pool.goes_on("a")
    assert pool.steps("a")[steps] == steps + 1, "nothing of it was done again"

    refused = pool.call("submit", "--name", "huge", "--nodes", "9", str(TINY), code=2)
    assert "9 nodes" in refused
    assert "4 would fit" in refused
    assert "a job of this name is admitted" in pool.call("submit", "--name", "a", str(TINY), code=2)
    assert "weight" in pool.call("submit", "--set", "weight=0", str(TINY), code=2)
    (pool.folder / "job.toml").write_text(f'script = "{TINY}"\nwieght = 2\n')
    assert "weight" in pool.call("submit", "job.toml", code=2)
    assert "there is no script" in pool.call("submit", "nowhere.py", code=2)
    assert "nothing is to be changed" in pool.call("update", "-j", "a", code=2)
    pool.call("update", "-j", "a", "--weight", "2")
    assert pool.job("a")["weight"] == 2
    pool.check_owners()
    pool.end()
    assert "job a is being saved" in pool.log.read_text()
    assert pool.events("job_suspended")[-1]["job"] == "a"
