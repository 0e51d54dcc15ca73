"""MODELS a job through losses and arrivals of nodes under a policy: its trained samples, and how its time is spent.

The policy chooses the training nodes, the duration of a step, and whether a loss is survived. The costs define how long
training stops. A step interrupted by a failure is repeated. A failure during a recovery restarts the recovery. A
restart loses everything after the newest checkpoint. Arrivals are collected until no node has arrived for a while. A
failure adds all waiting nodes at once, unless the policy restarts to grow.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from holdfast.planning.arrays import IntArray
from holdfast.planning.availability import Batch, Window

#: A drawn rate is the mean over this many seconds.
SMOOTHED_S = 60.0
_NEVER = math.inf


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """How long training stops, in seconds; intervals are in steps (0 for never)."""

    #: A live recovery, or a change of placement or world without a failure.
    reconfigure_s: float
    #: A rebalancing of experts.
    rebalance_s: float
    #: From a failure until all nodes train again from a loaded checkpoint.
    restart_s: float
    save_s: float
    checkpoint_every: int
    rebalance_every: int = 0
    #: Waiting nodes are added once no other node has arrived for this time.
    gather_s: float = 120.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Formation:
    """The training nodes in order, and their pace until the next change."""

    nodes: tuple[str, ...]
    samples: int
    step_s: Callable[[int], float]
    #: Replicas on the nodes, `(L, E, N)`, if the policy has replicas.
    counts: IntArray | None = None
    #: The chunk of all experts on each node, if the policy has chunks.
    chunks: Mapping[str, int] = field(default_factory=dict[str, int])


class Policy(Protocol):
    """How a system uses nodes; `step` is the current step of the job, for loads that change."""

    @property
    def name(self) -> str: ...
    @property
    def restarts_to_grow(self) -> bool:
        """Whether it adds nodes by a restart."""
        ...

    def form(self, nodes: tuple[str, ...], step: int) -> Formation | None:
        """Return the formation of `nodes` that trains from a checkpoint, or None if they are too few."""
        ...

    def shrink(self, before: Formation, alive: tuple[str, ...], step: int) -> Formation | None:
        """Return the formation of the `alive` nodes that continues, or None if a restart is needed."""
        ...

    def grow(self, before: Formation, alive: tuple[str, ...], step: int) -> Formation:
        """Return the formation with more nodes, or the same one if nothing changes."""
        ...

    def rebalance(self, before: Formation, step: int) -> Formation:
        """Return the formation for the current loads, or the same one if nothing changes."""
        ...

    def steps_at_same_pace(self, step: int) -> int:
        """Return the number of steps from `step` on that take as long as this one."""
        ...


@dataclass(slots=True)
class JobResult:
    """The result of a job: samples that count, and seconds by cause."""

    samples: int = 0
    steps: int = 0
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict[str, float](float))
    restarts: int = 0
    reconfigurations: int = 0
    #: Pairs (seconds, samples that count) at each change of pace.
    course: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])

    def share(self, *causes: str) -> float:
        """Return the share of all time that these causes took."""
        return sum(self.seconds[cause] for cause in causes) / max(sum(self.seconds.values()), 1e-12)


#: The causes in the order in which they are shown.
CAUSES = ("effective", "checkpoint", "restart", "lost", "reconfigure", "rebalance", "wait")


class ModelledJob:
    """One job under one policy through one availability trace, until its end or until enough samples are trained."""

    def __init__(self, policy: Policy, costs: Costs, window: Window, enough: float = _NEVER) -> None:
        self._policy, self._costs, self._window, self._enough = policy, costs, window, enough
        self._now, self._step, self._samples = 0.0, 0, 0
        #: (step, samples) of the newest checkpoint, and seconds trained since.
        self._saved, self._since = (0, 0), 0.0
        #: Seconds already spent on the next step.
        self._under_way: float = 0.0
        self._alive = dict.fromkeys(window.start_nodes)
        self._formation = policy.form(tuple(self._alive), 0)
        #: Why training is stopped, and until when.
        self._busy: list[tuple[str, float]] = []
        self._gather_at = _NEVER
        self._lived = JobResult(course=[(0, 0)])

    def run(self) -> JobResult:
        """Run the job to its end."""
        pending = list(self._window.batches)[::-1]
        while self._now < self._window.seconds and self._samples < self._enough:
            coming = pending[-1].seconds if pending else _NEVER
            until = min(coming, self._gather_at, self._window.seconds)
            self._advance(until)
            if self._now >= self._window.seconds or self._now < until:
                continue
            if self._now >= coming:
                self._apply_batch(pending.pop())
            elif self._now >= self._gather_at:
                self._gather_at = _NEVER
                self._add_waiting_nodes()
        self._lived.samples, self._lived.steps = self._samples, self._step
        self._lived.seconds["effective"] += self._since + self._under_way
        self._record_course()
        return self._lived

    # ---- passage of time ----

    def _advance(self, until: float) -> None:
        """Advance the time, at most until the given moment."""
        if self._formation is None:
            self._spend("wait", until - self._now)
        elif self._busy:
            cause, ready = self._busy[0]
            self._spend(cause, min(ready, until) - self._now)
            if self._now >= ready:
                self._busy.pop(0)
        else:
            self._train(self._formation, until)

    def _train(self, formation: Formation, until: float) -> None:
        """Train to the next step at which something is due, or as many full steps as fit."""
        step_s = formation.step_s(self._step)
        self._under_way = min(self._under_way, step_s)
        due = self._step + self._policy.steps_at_same_pace(self._step)
        for every in (self._costs.checkpoint_every, self._costs.rebalance_every):
            if every:
                due = min(due, (self._step // every + 1) * every)
        due = min(due, self._step + max(1, math.ceil(min(self._enough - self._samples, 1e15) / formation.samples)))
        steps = min(due - self._step, int((until - self._now + self._under_way) / step_s + 1e-9))
        self._record_course()
        if steps:
            self._step += steps
            self._samples += steps * formation.samples
            self._now += steps * step_s - self._under_way
            self._since += steps * step_s
            self._under_way = 0.0
        if self._step < due:
            self._under_way += until - self._now
            self._now = until
        else:
            self._at_boundary(formation)
        self._record_course()

    def _at_boundary(self, formation: Formation) -> None:
        costs = self._costs
        if costs.checkpoint_every and self._step % costs.checkpoint_every == 0:
            self._busy.append(("checkpoint", self._ready_at() + costs.save_s))
            self._lived.seconds["effective"] += self._since
            self._saved, self._since = (self._step, self._samples), 0.0
        if costs.rebalance_every and self._step % costs.rebalance_every == 0:
            after = self._policy.rebalance(formation, self._step)
            if after is not formation:
                self._formation = after
                self._busy.append(("rebalance", self._ready_at() + costs.rebalance_s))

    def _ready_at(self) -> float:
        return self._busy[-1][1] if self._busy else self._now

    def _spend(self, cause: str, seconds: float) -> None:
        self._record_course()
        self._lived.seconds[cause] += max(0.0, seconds)
        self._now += max(0.0, seconds)
        self._record_course()

    def _record_course(self) -> None:
        if self._lived.course[-1] != (self._now, self._samples):
            self._lived.course.append((self._now, self._samples))

    # ---- changes of nodes ----

    def _apply_batch(self, batch: Batch) -> None:
        gone = {event.node for event in batch.events if not event.add}
        for event in batch.events:
            if event.add:
                self._alive[event.node] = None
            else:
                self._alive.pop(event.node, None)
        if any(event.add for event in batch.events):
            self._gather_at = self._now + self._costs.gather_s
        formation = self._formation
        if formation is None:
            if any(event.add for event in batch.events):
                self._restart()
        elif gone & set(formation.nodes):
            self._lived.seconds["lost"] += self._under_way
            self._under_way = 0.0
            restarting = any(cause == "restart" for cause, _ in self._busy)
            after = None if restarting else self._policy.shrink(formation, tuple(self._alive), self._step)
            if after is None:
                self._restart()
            else:
                self._formation = after
                self._lived.reconfigurations += 1
                self._busy = [("reconfigure", self._now + self._costs.reconfigure_s)]

    def _restart(self) -> None:
        """Go back to the newest checkpoint, with all available nodes."""
        self._record_course()
        self._lived.seconds["lost"] += self._since + self._under_way
        (self._step, self._samples), self._since, self._under_way = self._saved, 0.0, 0.0
        self._formation = self._policy.form(tuple(self._alive), self._step)
        self._busy = [("restart", self._now + self._costs.restart_s)]
        self._lived.restarts += 1
        self._gather_at = _NEVER
        self._record_course()

    def _add_waiting_nodes(self) -> None:
        """Add the waiting nodes, if the policy can use them."""
        formation, alive = self._formation, tuple(self._alive)
        if formation is None:
            self._restart()
        elif self._policy.restarts_to_grow:
            larger = self._policy.form(alive, self._step)
            if larger is not None and len(larger.nodes) > len(formation.nodes):
                self._restart()
        else:
            after = self._policy.grow(formation, alive, self._step)
            if after is not formation:
                self._formation = after
                self._busy.append(("reconfigure", self._ready_at() + self._costs.reconfigure_s))


def rates(lived: JobResult, every: float = SMOOTHED_S) -> tuple[list[float], list[float]]:
    """Return times and samples per second around them, as means over `every` seconds; 0 if more samples were undone."""
    end = lived.course[-1][0]
    times: list[float] = []
    found: list[float] = []
    place, before = 0, 0.0
    for number in range(1, int(end / every) + 1):
        at = number * every
        while place + 1 < len(lived.course) and lived.course[place + 1][0] <= at:
            place += 1
        (t0, s0), (t1, s1) = lived.course[place], lived.course[min(place + 1, len(lived.course) - 1)]
        now = s0 + (s1 - s0) * (at - t0) / (t1 - t0) if t1 > t0 else float(s0)
        times.append(at - every / 2)
        found.append(max(0.0, now - before) / every)
        before = now
    return times, found
