"""Prometheus metrics of a job, computed from the events of its journal.

Every coordinator that reads the whole journal computes the same values.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import inf, nan

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from holdfast.observability.accounts.time_ledger import TimeLedger
from holdfast.protocol.events import (
    CheckpointSaved,
    FailureDetected,
    GenerationStarted,
    JournalRepaired,
    NodeLeft,
    NodesJoined,
    ReadEvent,
    Rebalanced,
    Recovered,
    StepCommitted,
    StepSkipped,
)

#: The content type of the answer to a scrape.
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0, inf)

Family = GaugeMetricFamily | CounterMetricFamily | HistogramMetricFamily

_GAUGES = {
    "step": "Newest step that every member has applied",
    "loss": "Loss of the newest committed step",
    "world_size": "Workers in the newest generation",
    "term": "Number of this coordinator",
    "generation": "Number of the newest generation",
}
#: Values of a metric by label values, without the job name.
_Values = Mapping[tuple[str, ...], float]
#: Counters by name: help text and labels.
_COUNTERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "steps_committed": ("Steps committed", ()),
    "samples_committed": ("Samples of committed steps", ()),
    "skipped_steps": ("Committed steps that changed no parameter, not counting those of a loss scale", ()),
    "messages_refused": ("Messages refused: malformed, oversized, out of turn", ()),
    "checkpoints_saved": ("Checkpoints accepted", ()),
    "failures": ("Failures detected", ("kind", "severity")),
    "recoveries": ("Recoveries", ("action", "source")),
    "moved_bytes": ("Bytes that workers have received, by what for", ("what",)),
}


def _known(value: float | None) -> _Values:
    """Return the values of a metric without labels. An unknown value gives no sample."""
    return {} if value is None else {(): value}


@dataclass(frozen=True, kw_only=True, slots=True)
class Slowness:
    """How slow the slowest worker and link are compared with the median of the others. No event contains this."""

    #: Time of a micro-batch of the slowest worker, divided by the median of the others; None if unknown.
    worker: float | None = None
    #: Median rate of the other links, divided by the rate of the slowest; None if unknown.
    link: float | None = None
    #: Number of times that something took longer than usual, by phase.
    slow: Mapping[str, int] = field(default_factory=dict[str, int])


class _Histogram:
    def __init__(self) -> None:
        self.sum = 0.0
        self._counts = [0] * len(_SECONDS)

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(_SECONDS, seconds)] += 1
        self.sum += seconds

    def buckets(self) -> Iterator[tuple[str, float]]:
        """Yield each upper bound in seconds, as Prometheus writes it, with the number of observations up to it."""
        total = 0
        for bound, count in zip(_SECONDS, self._counts, strict=True):
            total += count
            yield "+Inf" if bound == inf else str(bound), total


class Metrics(Collector):
    """The metrics of one job, in their own registry. Refused messages and connections are counted by this process."""

    def __init__(self, job: str) -> None:
        self.registry = CollectorRegistry()
        self.ledger = TimeLedger()
        self._job = job
        #: Time up to which the ledger is reported, in unix seconds; None for the time of the newest event.
        self._until: float | None = None
        self._here: set[str] = set()
        self._members: frozenset[str] = frozenset()
        self._gauges: dict[str, float] = {}
        self._counts: Counter[tuple[str, ...]] = Counter()
        self._saved_at: float | None = None
        self._agents = 0
        self.slowness: Callable[[], Slowness] = Slowness
        self._step_s, self._down_s = _Histogram(), _Histogram()
        self.registry.register(self)

    def observe(self, event: ReadEvent) -> None:
        """Update gauges, counters, histograms and the time ledger from an event of the journal.

        Steps that a repaired journal has lost are counted, too.
        """
        gauges, counts = self._gauges, self._counts
        gauges["term"] = event.term
        # The generation of an event is 0 before the first generation and after the loss of all members.
        gauges["generation"] = event.generation or gauges.get("generation", 0)
        self.ledger.add_event(event)
        match event:
            case StepCommitted():
                gauges["step"], gauges["loss"] = event.step, nan if event.loss is None else event.loss
                counts["steps_committed",] += 1
                counts["samples_committed",] += event.samples
                self._step_s.observe(event.step_s)
            case StepSkipped():
                counts["skipped_steps",] += 1
            case NodesJoined() | NodeLeft() | GenerationStarted():
                self._count_nodes(event)
            case FailureDetected():
                counts["failures", event.kind, str(event.severity)] += 1
            case Recovered():
                counts["recoveries", event.action, event.state_source] += 1
                counts["moved_bytes", "recovery"] += event.moved_bytes
                self._down_s.observe(event.down_s)
            case Rebalanced():
                counts["moved_bytes", "rebalance"] += event.moved_bytes
            case CheckpointSaved():
                counts["checkpoints_saved",] += 1
                self._saved_at = event.time
            case JournalRepaired():
                gauges["step"], steps = event.to_step, max(0, event.to_step - event.from_step)
                counts["steps_committed",] += steps
                counts["samples_committed",] += steps * event.step_samples
            case _:
                pass

    def set_connected_agents(self, agents: int) -> None:
        """Set the number of connected agents."""
        self._agents = agents

    def count_refused_message(self) -> None:
        """Count a message that was refused."""
        self._counts["messages_refused",] += 1

    def exposition(self, now: float | None = None) -> bytes:
        """Return all metrics in the Prometheus text format, as of `now` in unix seconds or as of the newest event."""
        self._until = now
        return generate_latest(self.registry)

    def collect(self) -> Iterable[Family]:
        """Yield all current metrics for the Prometheus registry: gauges, event counters, histograms, the job's time."""
        yield from self._collect_gauges()
        for name, (text, labels) in _COUNTERS.items():
            found = {key[1:]: float(count) for key, count in self._counts.items() if key[0] == name}
            yield self._counter(name, text, labels, found if labels else {(): 0.0, **found})
        yield self._histogram("step_duration_seconds", "Time from one committed step to the next", self._step_s)
        yield self._histogram("recovery_down_seconds", "From a failure to the next committed step", self._down_s)
        yield from self._collect_time_metrics()

    def _collect_gauges(self) -> Iterator[Family]:
        """Yield the gauges: the job's position, slowest worker and link, connections, last checkpoint, nodes by state.

        Also the counter of slow phases that agents reported.
        """
        for name, text in _GAUGES.items():
            yield self._gauge(name, text, _known(self._gauges.get(name)))
        slowness = self.slowness()
        slowest = "A micro-batch's time of the slowest worker / the others' median"
        yield self._gauge("slowest_worker_ratio", slowest, _known(slowness.worker))
        yield self._gauge("slowest_link_ratio", "The others' median rate / that of the slowest", _known(slowness.link))
        slow = {(phase,): float(count) for phase, count in slowness.slow.items()}
        yield self._counter("slow", "What took 1.1 times as long as usual, as agents saw it", ("phase",), slow)
        yield self._gauge("agent_connections", "Agents connected now", {(): self._agents})
        saved_at = "When a checkpoint was accepted last"
        yield self._gauge("last_checkpoint_timestamp_seconds", saved_at, _known(self._saved_at))
        training = len(self._here & self._members)
        nodes = {("training",): training, ("waiting",): len(self._here) - training}
        yield self._gauge("nodes", "Nodes: training in the newest generation, or waiting to", nodes, ("state",))

    def _collect_time_metrics(self) -> Iterator[Family]:
        """Yield the seconds by cause and node-seconds, and the ratios and FLOP that follow from them.

        Unknown ones have no value.
        """
        account, settled = self.ledger.account(self._until), self.ledger.settled(self._until)
        seconds = {(str(cause),): value for cause, value in settled.items()}
        yield self._counter("time_seconds", "The job's time, by what it went into", ("cause",), seconds)
        yield self._counter("node_seconds", "Time of nodes that were there", (), {(): account.node_hours * 3600})
        may_be_known = (
            ("effective_time_ratio", "Share of the time in which the job trained (ETTR)", account.ettr),
            ("goodput_ratio", "Samples that count / the full, undisturbed job's", account.goodput),
            ("mfu_ratio", "FLOP delivered / what the accelerators could have", account.mfu),
            ("flop_delivered", "FLOP of the samples that count", account.flop_delivered),
        )
        for name, text, value in may_be_known:
            yield self._gauge(name, text, _known(value))

    def _gauge(self, name: str, text: str, values: _Values, labels: tuple[str, ...] = ()) -> Family:
        """Return the gauge `holdfast_<name>` with a value for each tuple of label values.

        The job's name is put before `labels` and before each tuple.
        """
        family = GaugeMetricFamily(f"holdfast_{name}", text, labels=("job_name", *labels))
        for key, value in values.items():
            family.add_metric((self._job, *key), value)
        return family

    def _counter(self, name: str, text: str, labels: tuple[str, ...], values: _Values) -> Family:
        """Return the counter `holdfast_<name>` with a value for each tuple of label values.

        The job's name is put before `labels` and before each tuple.
        """
        family = CounterMetricFamily(f"holdfast_{name}", text, labels=("job_name", *labels))
        for key, value in values.items():
            family.add_metric((self._job, *key), value)
        return family

    def _histogram(self, name: str, text: str, observed: _Histogram) -> Family:
        """Return the histogram `holdfast_<name>` in Prometheus' form, with the job's name as its only label."""
        family = HistogramMetricFamily(f"holdfast_{name}", text, labels=("job_name",))
        family.add_metric((self._job,), list(observed.buckets()), observed.sum)
        return family

    def _count_nodes(self, event: NodesJoined | NodeLeft | GenerationStarted) -> None:
        """Update the nodes that are present, and with a generation its members and the number of workers."""
        match event:
            case NodesJoined():
                self._here.update(event.names)
            case NodeLeft():
                self._here.discard(event.node)
            case GenerationStarted():
                self._gauges["world_size"] = event.world_size
                self._members = frozenset(event.members)
                self._here |= self._members  # The journal may have lost their nodes_joined events.
