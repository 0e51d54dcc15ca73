"""Numbers for Prometheus, made from the same events that the journal holds."""

from __future__ import annotations

from math import nan

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from holdfast.protocol.events import (
    AnyEvent,
    CheckpointSaved,
    FailureDetected,
    GenerationStarted,
    NodeLeft,
    NodesJoined,
    Rebalanced,
    Recovered,
    StepCommitted,
)

#: What a scrape's answer says about its format.
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0)


class Metrics:
    """The metrics of one coordinator, in a registry of their own. Counters start at zero with the process."""

    def __init__(self, job: str) -> None:
        self.registry = CollectorRegistry()
        self._job = job
        self._here: set[str] = set()
        self._members: frozenset[str] = frozenset()
        self._step = self._gauge("step", "Newest step that every member has applied")
        self._loss = self._gauge("loss", "Loss of the newest committed step")
        self._world = self._gauge("world_size", "Workers in the newest generation")
        self._nodes = self._gauge("nodes", "Nodes: training in the newest generation, or waiting to", "state")
        self._term = self._gauge("term", "Number of this coordinator")
        self._generation = self._gauge("generation", "Number of the newest generation")
        self._connections = self._gauge("agent_connections", "Agents connected now")
        self._saved_at = self._gauge("last_checkpoint_timestamp_seconds", "When a checkpoint was accepted last")
        self._steps = self._counter("steps_committed", "Steps committed")
        self._samples = self._counter("samples_committed", "Samples of committed steps")
        self._refused = self._counter("messages_refused", "Messages refused: malformed, oversized, out of turn")
        self._failures = self._counter("failures", "Failures detected", "kind", "severity")
        self._recoveries = self._counter("recoveries", "Recoveries", "action", "source")
        self._moved = self._counter("moved_bytes", "Bytes that workers have received, by what for", "what")
        self._checkpoints = self._counter("checkpoints_saved", "Checkpoints accepted")
        self._step_s = self._histogram("step_duration_seconds", "Time from one committed step to the next")
        self._down_s = self._histogram("recovery_down_seconds", "From a failure to the next committed step")

    def observe(self, event: AnyEvent) -> None:
        """Take in one event of the journal."""
        self._term.labels(self._job).set(event.term)
        self._generation.labels(self._job).set(event.generation)
        match event:
            case StepCommitted():
                self._step.labels(self._job).set(event.step)
                self._loss.labels(self._job).set(nan if event.loss is None else event.loss)
                self._steps.labels(self._job).inc()
                self._samples.labels(self._job).inc(event.samples)
                self._step_s.labels(self._job).observe(event.step_s)
            case NodesJoined() | NodeLeft() | GenerationStarted():
                self._count_nodes(event)
            case FailureDetected():
                self._failures.labels(self._job, event.kind, str(event.severity)).inc()
            case Recovered():
                self._recoveries.labels(self._job, event.action, event.state_source).inc()
                self._moved.labels(self._job, "recovery").inc(event.moved_bytes)
                self._down_s.labels(self._job).observe(event.down_s)
            case Rebalanced():
                self._moved.labels(self._job, "rebalance").inc(event.moved_bytes)
            case CheckpointSaved():
                self._checkpoints.labels(self._job).inc()
                self._saved_at.labels(self._job).set(event.time)
            case _:
                pass

    def connected(self, agents: int) -> None:
        """Say how many agents are connected."""
        self._connections.labels(self._job).set(agents)

    def refused(self) -> None:
        """Count a message that was refused."""
        self._refused.labels(self._job).inc()

    def exposition(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def _count_nodes(self, event: NodesJoined | NodeLeft | GenerationStarted) -> None:
        match event:
            case NodesJoined():
                self._here.update(event.names)
            case NodeLeft():
                self._here.discard(event.node)
            case GenerationStarted():
                self._world.labels(self._job).set(event.world_size)
                self._members = frozenset(event.members)
                self._here |= self._members  # (those from before this coordinator's start have not joined anew)
        self._nodes.labels(self._job, "training").set(len(self._here & self._members))
        self._nodes.labels(self._job, "waiting").set(len(self._here - self._members))

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"holdfast_{name}", text, ("job_name", *labels), registry=self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"holdfast_{name}", text, ("job_name", *labels), registry=self.registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(f"holdfast_{name}", text, ("job_name",), registry=self.registry, buckets=_SECONDS)
