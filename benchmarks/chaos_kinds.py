"""The kinds of faults that the chaos benchmark injects: how each strikes, the expected report, and how to heal it."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from struck_job import LONGEST_S, SETTLE_STEPS, StruckJob, kill

from holdfast.protocol.checkpoints.directory import find_checkpoints
from holdfast.protocol.events import (
    CheckpointFailed,
    CheckpointSaved,
    CoordinatorRestarted,
    FailureDetected,
    JobFailed,
    NodesJoined,
    SnapshotSaved,
    StepCommitted,
)
from holdfast.storage import LocalStorage

PHASES = ("compute", "reducing", "ready", "voted", "passed", "applying")
#: If three nodes raise the same exception within this time, the job ends. Two nodes may.
RAISED_WITHIN_S = 320.0
CLOCK_S = 7200.0
AWAY_S = 2.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Taken:
    """The failure report that a fault must cause: one of the kinds, with the severity."""

    kinds: tuple[str, ...]
    severity: int
    #: Allowed categories; any category is allowed if this is empty.
    categories: tuple[str, ...] = ()

    def wrong(self, told: FailureDetected) -> str:
        """Return how a reported failure differs from the expected one, or "" if it matches."""
        if told.kind not in self.kinds or told.severity != self.severity:
            return f"{told.node} was taken for {told.kind} of severity {told.severity}: {told.detail}"
        if self.categories and told.category not in self.categories:
            return f"{told.node} was classified as {told.category}: {told.detail}"
        return ""


LOST = Taken(kinds=("connection_lost",), severity=1)
SILENT = Taken(kinds=("lease_expired",), severity=1)
#: The coordinator was away, so either report is correct.
GONE = Taken(kinds=("connection_lost", "lease_expired"), severity=1)
ENDED = Taken(kinds=("process_exit",), severity=2)
#: On a busy machine, hang detection may report the worker before its exit is reported.
ENDED_OR_LATE = Taken(kinds=("process_exit", "hang"), severity=2)
HANGS = Taken(kinds=("hang",), severity=2)
RAISED = Taken(kinds=("exception",), severity=2)
NO_MEMORY = Taken(kinds=("exception",), severity=2, categories=("out_of_memory",))
BROKEN = Taken(kinds=("connection_lost",), severity=3)


@dataclass(kw_only=True, slots=True)
class Blow:
    """An injected fault, with the reports and the repairs that it requires."""

    #: When it was injected, in Unix seconds.
    at: float
    #: The expected report for each node.
    taken: Mapping[str, Taken] = field(default_factory=dict[str, Taken])
    #: Whether another node may be reported instead.
    anybody: bool = False
    #: Number of nodes that do not return without help.
    gone: int = 0
    #: Number of faults that this counts as.
    faults: int = 1
    #: Undoes effects that would otherwise last.
    heal: Callable[[], None] = lambda: None
    #: Whether steps may be lost because the last copy of some state was destroyed.
    loses: bool = False
    #: Whether the job has ended and must be started again.
    ends: bool = False


class Blows:
    """Injects faults of every kind into one job; all random choices follow from the seed."""

    def __init__(self, struck: StruckJob, rng: random.Random) -> None:
        self.struck = struck
        self.rng = rng
        self._raised: list[tuple[float, str]] = []

    def strike(self, kind: str) -> Blow | None:
        """Inject a fault at a random moment of a step; return None if this kind cannot be injected now."""
        time.sleep(self.rng.random() * 0.3)
        return KINDS[kind](self)

    # ---- one node ----

    def node_killed(self) -> Blow:
        (node,) = self._nodes(1)
        return Blow(at=self.struck.kill_node(node), taken={node: LOST}, gone=1)

    def node_killed_at_a_phase(self) -> Blow:
        (node,) = self._nodes(1)
        return self._inject("kill", node, LOST, gone=1, phase=self.rng.choice(PHASES), worker=None)

    def node_exits(self) -> Blow:
        (node,) = self._nodes(1)
        return self._inject("exit", node, LOST, gone=1, worker=None)

    def agent_killed(self) -> Blow:
        (node,) = self._nodes(1)
        at = time.time()
        kill(self.struck.job.pids(node)[0])
        return Blow(at=at, taken={node: LOST}, gone=1)

    def node_leaves(self) -> Blow:
        (node,) = self._nodes(1)
        at = time.time()
        kill(self.struck.job.pids(node)[0], signal.SIGTERM)
        return Blow(at=at, taken={node: LOST}, gone=1)

    def node_stopped(self) -> Blow:
        (node,) = self._nodes(1)
        agent, workers = self.struck.job.pids(node)
        at = self.struck.job.signal_node(node, signal.SIGSTOP)

        def wake() -> None:
            for pid in (*workers, agent):
                kill(pid, signal.SIGCONT)

        return Blow(at=at, taken={node: SILENT}, heal=wake)

    def link_down(self) -> Blow:
        (node,) = self._nodes(1)

        def end() -> None:
            self.struck.kill_node(node)

        return self._inject("link-down", node, SILENT, gone=1, heal=end, worker=None)

    def clock_jumps(self) -> Blow:
        (node,) = self._nodes(1)
        by = self.rng.choice((-CLOCK_S, CLOCK_S))

        def back() -> None:
            self.struck.ask(lambda job: job.inject("clock-jump", node, by_s=-by))

        return self._inject("clock-jump", node, None, heal=back, worker=None, by_s=by)

    # ---- one process ----

    def process_killed(self) -> Blow:
        (node,) = self._nodes(1)
        at = time.time()
        kill(self.struck.worker(node))
        return Blow(at=at, taken={node: ENDED})

    def process_exits(self) -> Blow:
        (node,) = self._nodes(1)
        return self._inject("exit", node, ENDED)

    def process_stopped(self) -> Blow:
        (node,) = self._nodes(1)
        return self._inject("freeze", node, HANGS)

    def thread_hangs(self) -> Blow:
        (node,) = self._nodes(1)
        return self._inject("hang", node, HANGS)

    def exception(self) -> Blow | None:
        """Raise an exception on one node.

        Return None if it would hit a third node within five minutes: the job would then blame the script and end.
        """
        (node,) = self._nodes(1)
        before = {name for at, name in self._raised if at > time.time() - RAISED_WITHIN_S}
        if len(before) > 1 and node not in before:
            known = [name for name in self.struck.nodes() if name in before]
            if not known:
                return None
            node = self.rng.choice(known)
        self._raised.append((time.time(), node))
        return self._inject("raise", node, RAISED)

    def no_memory(self) -> Blow:
        (node,) = self._nodes(1)
        return self._inject("memory", node, NO_MEMORY)

    def connections_drop(self) -> Blow:
        (node,) = self._nodes(1)
        blow = self._inject("drop", node, BROKEN, phase="voted")
        blow.anybody = True
        return blow

    def slow(self) -> Blow:
        return self._slowly("slow", 2.0)

    def slow_link(self) -> Blow:
        return self._slowly("slow-link", 5.0)

    def disk_full(self) -> Blow:
        """Fail a checkpoint write for lack of disk space, which is only reported; then kill a process of that node."""
        struck, place = self.struck, self.struck.place
        (node,) = self._nodes(1)
        struck.job.inject("disk-full", node, worker=0)
        struck.save()
        struck.wait(CheckpointFailed, lambda e: e.node == node, since=place)
        at = time.time()
        kill(struck.worker(node))
        return Blow(at=at, taken={node: ENDED}, faults=2)

    def process_flaps(self) -> Blow:
        """Kill a process, and kill its replacement as soon as that runs."""
        (node,) = self._nodes(1)
        place, at = self.struck.place, time.time()
        kill(self.struck.worker(node))
        self._told(node, place)
        self.struck.settle(place, 1)
        place = self.struck.place
        kill(self.struck.worker(node))
        self._told(node, place)
        return Blow(at=at, taken={node: ENDED}, faults=2)

    # ---- the coordinator ----

    def coordinator_killed(self) -> Blow:
        return self._without_coordinator(dict, 0)

    def coordinator_stopped(self) -> Blow:
        at, pid = time.time(), self.struck.coordinator()
        kill(pid, signal.SIGSTOP)
        time.sleep(AWAY_S)
        kill(pid, signal.SIGCONT)
        return Blow(at=at)

    def coordinator_and_node(self) -> Blow:
        (node,) = self._nodes(1)

        def lose() -> dict[str, Taken]:
            self.struck.kill_node(node)
            return {node: GONE}

        return self._without_coordinator(lose, 1)

    def coordinator_and_process(self) -> Blow:
        (node,) = self._nodes(1)

        def lose() -> dict[str, Taken]:
            kill(self.struck.worker(node))
            return {node: ENDED}

        return self._without_coordinator(lose, 0)

    def coordinator_in_a_recovery(self) -> Blow:
        (node,) = self._nodes(1)
        place, at = self.struck.place, self.struck.kill_node(node)
        self._told(node, place)
        kill(self.struck.coordinator())
        self.struck.wait(CoordinatorRestarted, since=place)
        return Blow(at=at, taken={node: GONE}, gone=1, faults=2)

    # ---- several at once ----

    def two_nodes(self) -> Blow:
        return self._kill_nodes(2)

    def all_but_one(self) -> Blow:
        return self._kill_nodes(3)

    def node_in_a_recovery(self) -> Blow:
        first, second = self._nodes(2)
        place, at = self.struck.place, self.struck.kill_node(first)
        self._told(first, place)
        self.struck.kill_node(second)
        return Blow(at=at, taken={first: LOST, second: LOST}, gone=2, faults=2)

    def process_in_a_recovery(self) -> Blow:
        first, second = self._nodes(2)
        place, at = self.struck.place, time.time()
        kill(self.struck.worker(first))
        self._told(first, place)
        kill(self.struck.worker(second))
        return Blow(at=at, taken={first: ENDED, second: ENDED}, faults=2)

    def storm(self) -> Blow:
        """Kill one node, kill a process of a second and hang a thread of a third, all at once."""
        first, second, third = self._nodes(3)
        place = self.struck.place
        self.struck.job.inject("hang", third, worker=0)
        at = self.struck.kill_node(first)
        kill(self.struck.worker(second))
        hung = self.struck.worker(third)

        def end() -> None:
            # If the other failures were detected first, the thread hangs in an abandoned generation and is not
            # detected.
            if not any(e.node == third for e in self.struck.since(FailureDetected, place)):
                kill(hung)

        taken = {first: LOST, second: ENDED, third: ENDED_OR_LATE}
        return Blow(at=at, taken=taken, gone=1, faults=3, heal=end)

    # ---- who comes ----

    def joiner_killed(self) -> Blow:
        place = self.struck.place
        self.struck.add_nodes(1)
        node = self.struck.added(place)
        return Blow(at=self.struck.kill_node(node), taken={node: LOST})

    def sender_killed(self) -> Blow:
        """Kill a member while it sends its state to a joining node, which then replaces it."""
        node = self.struck.nodes()[0]
        blow = self._inject("kill", node, LOST, worker=None, phase="transfer")
        self.struck.add_nodes(1)
        return blow

    def one_comes_one_leaves(self) -> Blow:
        place = self.struck.place
        self.struck.add_nodes(1)
        joined = self.struck.wait(NodesJoined, since=place)
        self.struck.wait(StepCommitted, lambda e: e.time > joined.time, since=place)
        (node,) = self._nodes(1)
        return Blow(at=self.struck.kill_node(node), taken={node: LOST}, faults=2)

    # ---- the last copy ----

    def all_processes(self) -> Blow:
        """Kill all workers at once. Their agents survive, so state is left in node memory and on disk."""
        at, nodes = time.time(), self.struck.nodes()
        for node in nodes:
            kill(self.struck.worker(node))
        return Blow(at=at, taken=dict.fromkeys(nodes, ENDED_OR_LATE), faults=len(nodes), loses=True)

    def all_processes_and_a_snapshot(self) -> Blow:
        """Kill all workers after flipping a bit in each copy of a part of the newest snapshot.

        Recovery must use the next source of state.
        """
        place = self.struck.place
        saved = self.struck.wait(SnapshotSaved, since=place)
        parts = [path for path in self.struck.memory.rglob("*.part") if f"{saved.step:08d}" in path.name]
        flipped = self.rng.choice(sorted({path.name for path in parts}))
        for path in parts:
            if path.name == flipped:
                with path.open("r+b") as file:
                    byte = file.read(1)
                    file.seek(0)
                    file.write(bytes([byte[0] ^ 0x10]))
        return self.all_processes()

    def all_nodes(self) -> Blow:
        """Kill all nodes. Their memory is lost too, so state is left on disk only."""
        at, nodes = time.time(), self.struck.nodes()
        for node in nodes:
            self.struck.kill_node(node)
        return Blow(at=at, taken=dict.fromkeys(nodes, LOST), gone=len(nodes), faults=len(nodes), loses=True)

    def all_nodes_and_the_newest_checkpoint(self) -> Blow:
        """Truncate a file of the newest checkpoint, then kill all nodes. The checkpoint before it must be used."""
        place = self.struck.place
        for _ in range(2):
            self.struck.save()
            saved = self.struck.wait(CheckpointSaved, since=place)
            place = self.struck.job.events.index(saved) + 1
        largest = _largest_file(self.struck.checkpoints)
        os.truncate(largest, largest.stat().st_size // 2)
        return self.all_nodes()

    def corrupt_state(self) -> Blow:
        """Change the state of one replica, so that the job ends because replicas diverged."""
        (node,) = self._nodes(1)
        place, known = self.struck.place, self.struck.hashes.stat().st_size
        blow = self._inject("corrupt-state", node, None, ends=True, loses=True)
        failed = self.struck.wait(JobFailed, since=place)
        if "replicas diverged" not in failed.why:
            raise AssertionError(f"the job failed for another reason: {failed.why}")
        self.struck.job.wait_exit(LONGEST_S)
        self.struck.corrupt.append((known, self.struck.hashes.stat().st_size))
        return blow

    # ---- inside ----

    def _nodes(self, count: int) -> Sequence[str]:
        return self.rng.sample(self.struck.nodes(), count)

    def _inject(
        self,
        fault: str,
        node: str,
        taken: Taken | None,
        *,
        gone: int = 0,
        heal: Callable[[], None] = lambda: None,
        ends: bool = False,
        loses: bool = False,
        worker: int | None = 0,
        phase: str = "",
        by_s: float = 3600.0,
    ) -> Blow:
        at = time.time()
        self.struck.job.inject(fault, node, worker=worker, phase=phase, by_s=by_s)
        told = {node: taken} if taken is not None else {}
        return Blow(at=at, taken=told, gone=gone, heal=heal, ends=ends, loses=loses)

    def _slowly(self, fault: str, times: float) -> Blow:
        """Make a node slow for some steps, which must not be reported as a failure."""
        (node,) = self._nodes(1)
        place, at = self.struck.place, time.time()
        self.struck.job.inject(fault, node, worker=0, times=times)
        self.struck.settle(place, 2 * SETTLE_STEPS)
        self.struck.job.inject(fault, node, worker=0, times=1.000001)
        return Blow(at=at)

    def _without_coordinator(self, lose: Callable[[], dict[str, Taken]], gone: int) -> Blow:
        place, at = self.struck.place, time.time()
        kill(self.struck.coordinator())
        taken = lose()
        self.struck.wait(CoordinatorRestarted, since=place)
        return Blow(at=at, taken=taken, gone=gone, faults=1 + len(taken))

    def _kill_nodes(self, count: int) -> Blow:
        nodes, at = self._nodes(count), time.time()
        for node in nodes:
            self.struck.kill_node(node)
        return Blow(at=at, taken=dict.fromkeys(nodes, LOST), gone=count, faults=count)

    def _told(self, node: str, place: int) -> FailureDetected:
        return self.struck.wait(FailureDetected, lambda e: e.node == node, since=place)


def _largest_file(checkpoints: Path) -> Path:
    """Return the largest file of the newest checkpoint."""
    newest = checkpoints / find_checkpoints(LocalStorage(checkpoints))[-1].folder
    return max((path for path in newest.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


KINDS: Mapping[str, Callable[[Blows], Blow | None]] = {
    kind.__name__.replace("_", " "): kind
    for kind in (
        Blows.node_killed,
        Blows.node_killed_at_a_phase,
        Blows.node_exits,
        Blows.agent_killed,
        Blows.node_leaves,
        Blows.node_stopped,
        Blows.link_down,
        Blows.clock_jumps,
        Blows.process_killed,
        Blows.process_exits,
        Blows.process_stopped,
        Blows.thread_hangs,
        Blows.exception,
        Blows.no_memory,
        Blows.connections_drop,
        Blows.slow,
        Blows.slow_link,
        Blows.disk_full,
        Blows.process_flaps,
        Blows.coordinator_killed,
        Blows.coordinator_stopped,
        Blows.coordinator_and_node,
        Blows.coordinator_and_process,
        Blows.coordinator_in_a_recovery,
        Blows.two_nodes,
        Blows.all_but_one,
        Blows.node_in_a_recovery,
        Blows.process_in_a_recovery,
        Blows.storm,
        Blows.joiner_killed,
        Blows.sender_killed,
        Blows.one_comes_one_leaves,
        Blows.all_processes,
        Blows.all_processes_and_a_snapshot,
        Blows.all_nodes,
        Blows.all_nodes_and_the_newest_checkpoint,
        Blows.corrupt_state,
    )
}
