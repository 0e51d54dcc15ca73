"""The kinds of faults that the chaos benchmark injects: how each strikes, the expected report, and how to heal it."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from struck_job import LONGEST_S, SETTLE_STEPS, ChaosJob, send_signal

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
class ExpectedFailure:
    """The failure report that a fault must cause: one of the kinds, with the severity."""

    kinds: tuple[str, ...]
    severity: int
    #: Allowed categories; any category is allowed if this is empty.
    categories: tuple[str, ...] = ()

    def mismatch(self, reported: FailureDetected) -> str:
        """Return how a reported failure differs from the expected one, or "" if it matches."""
        if reported.kind not in self.kinds or reported.severity != self.severity:
            return f"{reported.node} was taken for {reported.kind} of severity {reported.severity}: {reported.detail}"
        if self.categories and reported.category not in self.categories:
            return f"{reported.node} was classified as {reported.category}: {reported.detail}"
        return ""


LOST = ExpectedFailure(kinds=("connection_lost",), severity=1)
SILENT = ExpectedFailure(kinds=("lease_expired",), severity=1)
#: The coordinator was away, so either report is correct.
LOST_OR_SILENT = ExpectedFailure(kinds=("connection_lost", "lease_expired"), severity=1)
ENDED = ExpectedFailure(kinds=("process_exit",), severity=2)
#: On a busy machine, hang detection may report the worker before its exit is reported.
ENDED_OR_LATE = ExpectedFailure(kinds=("process_exit", "hang"), severity=2)
HANGS = ExpectedFailure(kinds=("hang",), severity=2)
RAISED = ExpectedFailure(kinds=("exception",), severity=2)
NO_MEMORY = ExpectedFailure(kinds=("exception",), severity=2, categories=("out_of_memory",))
BROKEN = ExpectedFailure(kinds=("connection_lost",), severity=3)


@dataclass(kw_only=True, slots=True)
class InjectedFault:
    """An injected fault, with the reports and the repairs that it requires."""

    #: When it was injected, in Unix seconds.
    at: float
    #: The expected report for each node.
    expected: Mapping[str, ExpectedFailure] = field(default_factory=dict[str, ExpectedFailure])
    #: Whether another node may be reported instead.
    any_node: bool = False
    #: Number of nodes that do not return without help.
    lost_nodes: int = 0
    #: Number of faults that this counts as.
    faults: int = 1
    #: Undoes effects that would otherwise last.
    heal: Callable[[], None] = lambda: None
    #: Whether steps may be lost because the last copy of some state was destroyed.
    may_lose_steps: bool = False
    #: Whether the job has ended and must be started again.
    ends_job: bool = False


class FaultInjector:
    """Injects faults of every kind into one job; all random choices follow from the seed."""

    def __init__(self, struck: ChaosJob, rng: random.Random) -> None:
        self.struck = struck
        self.rng = rng
        self._raised: list[tuple[float, str]] = []

    def inject(self, kind: str) -> InjectedFault | None:
        """Inject a fault at a random moment of a step; return None if this kind cannot be injected now."""
        time.sleep(self.rng.random() * 0.3)
        return KINDS[kind](self)

    # ---- one node ----

    def node_killed(self) -> InjectedFault:
        (node,) = self._choose_nodes(1)
        return InjectedFault(at=self.struck.kill_node(node), expected={node: LOST}, lost_nodes=1)

    def node_killed_at_a_phase(self) -> InjectedFault:
        (node,) = self._choose_nodes(1)
        return self._inject("kill", node, LOST, lost_nodes=1, phase=self.rng.choice(PHASES), worker=None)

    def node_exits(self) -> InjectedFault:
        (node,) = self._choose_nodes(1)
        return self._inject("exit", node, LOST, lost_nodes=1, worker=None)

    def agent_killed(self) -> InjectedFault:
        (node,) = self._choose_nodes(1)
        at = time.time()
        send_signal(self.struck.job.pids(node)[0])
        return InjectedFault(at=at, expected={node: LOST}, lost_nodes=1)

    def node_leaves(self) -> InjectedFault:
        (node,) = self._choose_nodes(1)
        at = time.time()
        send_signal(self.struck.job.pids(node)[0], signal.SIGTERM)
        return InjectedFault(at=at, expected={node: LOST}, lost_nodes=1)

    def node_stopped(self) -> InjectedFault:
        (node,) = self._choose_nodes(1)
        agent, workers = self.struck.job.pids(node)
        at = self.struck.job.signal_node(node, signal.SIGSTOP)

        def wake() -> None:
            for pid in (*workers, agent):
                send_signal(pid, signal.SIGCONT)

        return InjectedFault(at=at, expected={node: SILENT}, heal=wake)

    def link_down(self) -> InjectedFault:
        (node,) = self._choose_nodes(1)

        def end() -> None:
            self.struck.kill_node(node)

        return self._inject("link-down", node, SILENT, lost_nodes=1, heal=end, worker=None)

    def clock_jumps(self) -> InjectedFault:
        (node,) = self._choose_nodes(1)
        by = self.rng.choice((-CLOCK_S, CLOCK_S))

        def back() -> None:
            self.struck.request(lambda job: job.inject("clock-jump", node, by_s=-by))

        return self._inject("clock-jump", node, None, heal=back, worker=None, by_s=by)

    # ---- one process ----

    def process_killed(self) -> InjectedFault:
        (node,) = self._choose_nodes(1)
        at = time.time()
        send_signal(self.struck.worker_pid(node))
        return InjectedFault(at=at, expected={node: ENDED})

    def process_exits(self) -> InjectedFault:
        (node,) = self._choose_nodes(1)
        return self._inject("exit", node, ENDED)

    def process_stopped(self) -> InjectedFault:
        (node,) = self._choose_nodes(1)
        return self._inject("freeze", node, HANGS)

    def thread_hangs(self) -> InjectedFault:
        (node,) = self._choose_nodes(1)
        return self._inject("hang", node, HANGS)

    def exception(self) -> InjectedFault | None:
        """Raise an exception on one node.

        Return None if it would hit a third node within five minutes: the job would then blame the script and end.
        """
        (node,) = self._choose_nodes(1)
        before = {name for at, name in self._raised if at > time.time() - RAISED_WITHIN_S}
        if len(before) > 1 and node not in before:
            known = [name for name in self.struck.nodes() if name in before]
            if not known:
                return None
            node = self.rng.choice(known)
        self._raised.append((time.time(), node))
        return self._inject("raise", node, RAISED)

    def no_memory(self) -> InjectedFault:
        (node,) = self._choose_nodes(1)
        return self._inject("memory", node, NO_MEMORY)

    def connections_drop(self) -> InjectedFault:
        (node,) = self._choose_nodes(1)
        blow = self._inject("drop", node, BROKEN, phase="voted")
        blow.any_node = True
        return blow

    def slow(self) -> InjectedFault:
        return self._slow_down("slow", 2.0)

    def slow_link(self) -> InjectedFault:
        return self._slow_down("slow-link", 5.0)

    def disk_full(self) -> InjectedFault:
        """Fail a checkpoint write for lack of disk space, which is only reported; then kill a process of that node."""
        struck, place = self.struck, self.struck.event_count
        (node,) = self._choose_nodes(1)
        struck.job.inject("disk-full", node, worker=0)
        struck.save()
        struck.wait(CheckpointFailed, lambda e: e.node == node, since=place)
        at = time.time()
        send_signal(struck.worker_pid(node))
        return InjectedFault(at=at, expected={node: ENDED}, faults=2)

    def process_flaps(self) -> InjectedFault:
        """Kill a process, and kill its replacement as soon as that runs."""
        (node,) = self._choose_nodes(1)
        place, at = self.struck.event_count, time.time()
        send_signal(self.struck.worker_pid(node))
        self._wait_for_failure(node, place)
        self.struck.wait_recovered(place, 1)
        place = self.struck.event_count
        send_signal(self.struck.worker_pid(node))
        self._wait_for_failure(node, place)
        return InjectedFault(at=at, expected={node: ENDED}, faults=2)

    # ---- the coordinator ----

    def coordinator_killed(self) -> InjectedFault:
        return self._restart_coordinator(dict, 0)

    def coordinator_stopped(self) -> InjectedFault:
        at, pid = time.time(), self.struck.coordinator_pid()
        send_signal(pid, signal.SIGSTOP)
        time.sleep(AWAY_S)
        send_signal(pid, signal.SIGCONT)
        return InjectedFault(at=at)

    def coordinator_and_node(self) -> InjectedFault:
        (node,) = self._choose_nodes(1)

        def lose() -> dict[str, ExpectedFailure]:
            self.struck.kill_node(node)
            return {node: LOST_OR_SILENT}

        return self._restart_coordinator(lose, 1)

    def coordinator_and_process(self) -> InjectedFault:
        (node,) = self._choose_nodes(1)

        def lose() -> dict[str, ExpectedFailure]:
            send_signal(self.struck.worker_pid(node))
            return {node: ENDED}

        return self._restart_coordinator(lose, 0)

    def coordinator_in_a_recovery(self) -> InjectedFault:
        (node,) = self._choose_nodes(1)
        place, at = self.struck.event_count, self.struck.kill_node(node)
        self._wait_for_failure(node, place)
        send_signal(self.struck.coordinator_pid())
        self.struck.wait(CoordinatorRestarted, since=place)
        return InjectedFault(at=at, expected={node: LOST_OR_SILENT}, lost_nodes=1, faults=2)

    # ---- several at once ----

    def two_nodes(self) -> InjectedFault:
        return self._kill_nodes(2)

    def all_but_one(self) -> InjectedFault:
        return self._kill_nodes(3)

    def node_in_a_recovery(self) -> InjectedFault:
        first, second = self._choose_nodes(2)
        place, at = self.struck.event_count, self.struck.kill_node(first)
        self._wait_for_failure(first, place)
        self.struck.kill_node(second)
        return InjectedFault(at=at, expected={first: LOST, second: LOST}, lost_nodes=2, faults=2)

    def process_in_a_recovery(self) -> InjectedFault:
        first, second = self._choose_nodes(2)
        place, at = self.struck.event_count, time.time()
        send_signal(self.struck.worker_pid(first))
        self._wait_for_failure(first, place)
        send_signal(self.struck.worker_pid(second))
        return InjectedFault(at=at, expected={first: ENDED, second: ENDED}, faults=2)

    def storm(self) -> InjectedFault:
        """Kill one node, kill a process of a second and hang a thread of a third, all at once."""
        first, second, third = self._choose_nodes(3)
        place = self.struck.event_count
        self.struck.job.inject("hang", third, worker=0)
        at = self.struck.kill_node(first)
        send_signal(self.struck.worker_pid(second))
        hung = self.struck.worker_pid(third)

        def end() -> None:
            # If the other failures were detected first, the thread hangs in an abandoned generation and is not
            # detected.
            if not any(e.node == third for e in self.struck.events_since(FailureDetected, place)):
                send_signal(hung)

        taken = {first: LOST, second: ENDED, third: ENDED_OR_LATE}
        return InjectedFault(at=at, expected=taken, lost_nodes=1, faults=3, heal=end)

    # ---- who comes ----

    def joiner_killed(self) -> InjectedFault:
        place = self.struck.event_count
        self.struck.add_nodes(1)
        node = self.struck.joined_node(place)
        return InjectedFault(at=self.struck.kill_node(node), expected={node: LOST})

    def sender_killed(self) -> InjectedFault:
        """Kill a member while it sends its state to a joining node, which then replaces it."""
        node = self.struck.nodes()[0]
        blow = self._inject("kill", node, LOST, worker=None, phase="transfer")
        self.struck.add_nodes(1)
        return blow

    def one_comes_one_leaves(self) -> InjectedFault:
        place = self.struck.event_count
        self.struck.add_nodes(1)
        joined = self.struck.wait(NodesJoined, since=place)
        self.struck.wait(StepCommitted, lambda e: e.time > joined.time, since=place)
        (node,) = self._choose_nodes(1)
        return InjectedFault(at=self.struck.kill_node(node), expected={node: LOST}, faults=2)

    # ---- the last copy ----

    def all_processes(self) -> InjectedFault:
        """Kill all workers at once. Their agents survive, so state is left in node memory and on disk."""
        at, nodes = time.time(), self.struck.nodes()
        for node in nodes:
            send_signal(self.struck.worker_pid(node))
        return InjectedFault(
            at=at, expected=dict.fromkeys(nodes, ENDED_OR_LATE), faults=len(nodes), may_lose_steps=True
        )

    def all_processes_and_a_snapshot(self) -> InjectedFault:
        """Kill all workers after flipping a bit in each copy of a part of the newest snapshot.

        Recovery must use the next source of state.
        """
        place = self.struck.event_count
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

    def all_nodes(self) -> InjectedFault:
        """Kill all nodes. Their memory is lost too, so state is left on disk only."""
        at, nodes = time.time(), self.struck.nodes()
        for node in nodes:
            self.struck.kill_node(node)
        return InjectedFault(
            at=at, expected=dict.fromkeys(nodes, LOST), lost_nodes=len(nodes), faults=len(nodes), may_lose_steps=True
        )

    def all_nodes_and_the_newest_checkpoint(self) -> InjectedFault:
        """Truncate a file of the newest checkpoint, then kill all nodes. The checkpoint before it must be used."""
        place = self.struck.event_count
        for _ in range(2):
            self.struck.save()
            saved = self.struck.wait(CheckpointSaved, since=place)
            place = self.struck.job.events.index(saved) + 1
        largest = _largest_file(self.struck.checkpoints)
        os.truncate(largest, largest.stat().st_size // 2)
        return self.all_nodes()

    def corrupt_state(self) -> InjectedFault:
        """Change the state of one replica, so that the job ends because replicas diverged."""
        (node,) = self._choose_nodes(1)
        place, known = self.struck.event_count, self.struck.hashes.stat().st_size
        blow = self._inject("corrupt-state", node, None, ends_job=True, may_lose_steps=True)
        failed = self.struck.wait(JobFailed, since=place)
        if "replicas diverged" not in failed.why:
            raise AssertionError(f"the job failed for another reason: {failed.why}")
        self.struck.job.wait_exit(LONGEST_S)
        self.struck.corrupt.append((known, self.struck.hashes.stat().st_size))
        return blow

    # ---- inside ----

    def _choose_nodes(self, count: int) -> Sequence[str]:
        return self.rng.sample(self.struck.nodes(), count)

    def _inject(
        self,
        fault: str,
        node: str,
        expected: ExpectedFailure | None,
        *,
        lost_nodes: int = 0,
        heal: Callable[[], None] = lambda: None,
        ends_job: bool = False,
        may_lose_steps: bool = False,
        worker: int | None = 0,
        phase: str = "",
        by_s: float = 3600.0,
    ) -> InjectedFault:
        at = time.time()
        self.struck.job.inject(fault, node, worker=worker, phase=phase, by_s=by_s)
        by_node = {node: expected} if expected is not None else {}
        return InjectedFault(
            at=at, expected=by_node, lost_nodes=lost_nodes, heal=heal, ends_job=ends_job, may_lose_steps=may_lose_steps
        )

    def _slow_down(self, fault: str, times: float) -> InjectedFault:
        """Make a node slow for some steps, which must not be reported as a failure."""
        (node,) = self._choose_nodes(1)
        place, at = self.struck.event_count, time.time()
        self.struck.job.inject(fault, node, worker=0, times=times)
        self.struck.wait_recovered(place, 2 * SETTLE_STEPS)
        self.struck.job.inject(fault, node, worker=0, times=1.000001)
        return InjectedFault(at=at)

    def _restart_coordinator(self, lose: Callable[[], dict[str, ExpectedFailure]], lost_nodes: int) -> InjectedFault:
        place, at = self.struck.event_count, time.time()
        send_signal(self.struck.coordinator_pid())
        taken = lose()
        self.struck.wait(CoordinatorRestarted, since=place)
        return InjectedFault(at=at, expected=taken, lost_nodes=lost_nodes, faults=1 + len(taken))

    def _kill_nodes(self, count: int) -> InjectedFault:
        nodes, at = self._choose_nodes(count), time.time()
        for node in nodes:
            self.struck.kill_node(node)
        return InjectedFault(at=at, expected=dict.fromkeys(nodes, LOST), lost_nodes=count, faults=count)

    def _wait_for_failure(self, node: str, place: int) -> FailureDetected:
        return self.struck.wait(FailureDetected, lambda e: e.node == node, since=place)


def _largest_file(checkpoints: Path) -> Path:
    """Return the largest file of the newest checkpoint."""
    newest = checkpoints / find_checkpoints(LocalStorage(checkpoints))[-1].folder
    return max((path for path in newest.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


KINDS: Mapping[str, Callable[[FaultInjector], InjectedFault | None]] = {
    kind.__name__.replace("_", " "): kind
    for kind in (
        FaultInjector.node_killed,
        FaultInjector.node_killed_at_a_phase,
        FaultInjector.node_exits,
        FaultInjector.agent_killed,
        FaultInjector.node_leaves,
        FaultInjector.node_stopped,
        FaultInjector.link_down,
        FaultInjector.clock_jumps,
        FaultInjector.process_killed,
        FaultInjector.process_exits,
        FaultInjector.process_stopped,
        FaultInjector.thread_hangs,
        FaultInjector.exception,
        FaultInjector.no_memory,
        FaultInjector.connections_drop,
        FaultInjector.slow,
        FaultInjector.slow_link,
        FaultInjector.disk_full,
        FaultInjector.process_flaps,
        FaultInjector.coordinator_killed,
        FaultInjector.coordinator_stopped,
        FaultInjector.coordinator_and_node,
        FaultInjector.coordinator_and_process,
        FaultInjector.coordinator_in_a_recovery,
        FaultInjector.two_nodes,
        FaultInjector.all_but_one,
        FaultInjector.node_in_a_recovery,
        FaultInjector.process_in_a_recovery,
        FaultInjector.storm,
        FaultInjector.joiner_killed,
        FaultInjector.sender_killed,
        FaultInjector.one_comes_one_leaves,
        FaultInjector.all_processes,
        FaultInjector.all_processes_and_a_snapshot,
        FaultInjector.all_nodes,
        FaultInjector.all_nodes_and_the_newest_checkpoint,
        FaultInjector.corrupt_state,
    )
}
