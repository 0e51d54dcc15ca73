"""A job that lives through losses and arrivals under a policy, MODELLED: what it trains, and where its time goes.

The policy says which nodes train, how long a step takes, and whether a loss is survived; the costs say for how long
training stands still. A step that a failure strikes is done again. A failure during a recovery begins it anew. With a
restart everything after the newest checkpoint is lost. Arrivals are gathered until none has come for a while; with a
failure all who are there are taken in, but by policies that do not.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from holdfast.planning.arrays import IntArray
from holdfast.planning.availability import Batch, Window

#: a rate that is drawn is the mean over so many seconds
SMOOTHED_S = 60.0
_NEVER = math.inf


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """For how long training stands still, in seconds; intervals in steps (0: never)."""

    #: a live recovery, and a change of placement or world without a failure
    reconfigure_s: float
    rebalance_s: float
    #: from a failure until all train again, from a checkpoint that is loaded
    restart_s: float
    save_s: float
    checkpoint_every: int
    rebalance_every: int = 0
    #: none has come for so long: then arrivals are taken in
    gather_s: float = 120.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Formation:
    """Who trains, in order, and at what pace until further notice."""

    nodes: tuple[str, ...]
    samples: int
    step_s: Callable[[int], float]
    #: what the nodes hold: replicas `(L, E, N)`, or which chunk of all experts
    counts: IntArray | None = None
    chunks: Mapping[str, int] = field(default_factory=dict[str, int])


class Policy(Protocol):
    """How a system uses nodes; `step` is where the job stands, for loads that change."""

    @property
    def name(self) -> str: ...
    @property
    def restarts_to_grow(self) -> bool:
        """Whether it takes arrivals in by a restart."""
        ...

    def begin(self, nodes: tuple[str, ...], step: int) -> Formation | None:
        """Return who of `nodes` trains, from a checkpoint; None: they are too few."""
        ...

    def lose(self, before: Formation, alive: tuple[str, ...], step: int) -> Formation | None:
        """Return who goes on of those `alive`; None: state is lost, or it restarts always."""
        ...

    def grow(self, before: Formation, alive: tuple[str, ...], step: int) -> Formation:
        """Return who trains when others are there; the same formation: nothing changes."""
        ...

    def rebalance(self, before: Formation, step: int) -> Formation:
        """Return the formation for the loads of now; the same one: nothing changes."""
        ...

    def same_pace(self, step: int) -> int:
        """Return how many steps from `step` on take as long as this one."""
        ...


@dataclass(slots=True)
class Lived:
    """What became of it: samples that count, and all seconds by what they were spent on."""

    samples: int = 0
    steps: int = 0
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict[str, float](float))
    restarts: int = 0
    reconfigurations: int = 0
    #: (seconds, samples that count) wherever that changes its pace
    course: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])

    def share(self, *causes: str) -> float:
        """Return the share of all time that went there."""
        return sum(self.seconds[cause] for cause in causes) / max(sum(self.seconds.values()), 1e-12)


#: what time goes to, in the order in which it is shown
CAUSES = ("effective", "checkpoint", "restart", "lost", "reconfigure", "rebalance", "wait")


class ModelledJob:
    """One job under one policy through one availability trace, to its end or until enough samples are trained."""

    def __init__(self, policy: Policy, costs: Costs, window: Window, enough: float = _NEVER) -> None:
        self._policy, self._costs, self._window, self._enough = policy, costs, window, enough
        self._now, self._step, self._samples = 0.0, 0, 0
        #: (step, samples) of the newest checkpoint, and seconds trained since
        self._saved, self._since = (0, 0), 0.0
        #: seconds that the next step has had already
        self._under_way: float = 0.0
        self._alive = dict.fromkeys(window.start_nodes)
        self._formation = policy.begin(tuple(self._alive), 0)
        #: what training stands still for, and until when
        self._busy: list[tuple[str, float]] = []
        self._gather_at = _NEVER
        self._lived = Lived(course=[(0, 0)])

    def run(self) -> Lived:
        """Live through it."""
        pending = list(self._window.batches)[::-1]
        while self._now < self._window.seconds and self._samples < self._enough:
            coming = pending[-1].seconds if pending else _NEVER
            until = min(coming, self._gather_at, self._window.seconds)
            self._pass(until)
            if self._now >= self._window.seconds or self._now < until:
                continue
            if self._now >= coming:
                self._happen(pending.pop())
            elif self._now >= self._gather_at:
                self._gather_at = _NEVER
                self._take_in()
        self._lived.samples, self._lived.steps = self._samples, self._step
        self._lived.seconds["effective"] += self._since + self._under_way
        self._mark()
        return self._lived

    # ---- time passes ----

    def _pass(self, until: float) -> None:
        """Let time pass, at the most until then."""
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
        """Train to the next step at which something is due, or as far as whole steps go."""
        step_s = formation.step_s(self._step)
        self._under_way = min(self._under_way, step_s)
        due = self._step + self._policy.same_pace(self._step)
        for every in (self._costs.checkpoint_every, self._costs.rebalance_every):
            if every:
                due = min(due, (self._step // every + 1) * every)
        due = min(due, self._step + max(1, math.ceil(min(self._enough - self._samples, 1e15) / formation.samples)))
        steps = min(due - self._step, int((until - self._now + self._under_way) / step_s + 1e-9))
        self._mark()
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
        self._mark()

    def _at_boundary(self, formation: Formation) -> None:
        costs = self._costs
        if costs.checkpoint_every and self._step % costs.checkpoint_every == 0:
            self._busy.append(("checkpoint", self._ready() + costs.save_s))
            self._lived.seconds["effective"] += self._since
            self._saved, self._since = (self._step, self._samples), 0.0
        if costs.rebalance_every and self._step % costs.rebalance_every == 0:
            after = self._policy.rebalance(formation, self._step)
            if after is not formation:
                self._formation = after
                self._busy.append(("rebalance", self._ready() + costs.rebalance_s))

    def _ready(self) -> float:
        return self._busy[-1][1] if self._busy else self._now

    def _spend(self, cause: str, seconds: float) -> None:
        self._mark()
        self._lived.seconds[cause] += max(0.0, seconds)
        self._now += max(0.0, seconds)
        self._mark()

    def _mark(self) -> None:
        if self._lived.course[-1] != (self._now, self._samples):
            self._lived.course.append((self._now, self._samples))

    # ---- nodes come and go ----

    def _happen(self, batch: Batch) -> None:
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
            after = None if restarting else self._policy.lose(formation, tuple(self._alive), self._step)
            if after is None:
                self._restart()
            else:
                self._formation = after
                self._lived.reconfigurations += 1
                self._busy = [("reconfigure", self._now + self._costs.reconfigure_s)]

    def _restart(self) -> None:
        """Go back to the newest checkpoint, with whoever is there."""
        self._mark()
        self._lived.seconds["lost"] += self._since + self._under_way
        (self._step, self._samples), self._since, self._under_way = self._saved, 0.0, 0.0
        self._formation = self._policy.begin(tuple(self._alive), self._step)
        self._busy = [("restart", self._now + self._costs.restart_s)]
        self._lived.restarts += 1
        self._gather_at = _NEVER
        self._mark()

    def _take_in(self) -> None:
        """Use those who have come, if the policy has a use for them."""
        formation, alive = self._formation, tuple(self._alive)
        if formation is None:
            self._restart()
        elif self._policy.restarts_to_grow:
            larger = self._policy.begin(alive, self._step)
            if larger is not None and len(larger.nodes) > len(formation.nodes):
                self._restart()
        else:
            after = self._policy.grow(formation, alive, self._step)
            if after is not formation:
                self._formation = after
                self._busy.append(("reconfigure", self._ready() + self._costs.reconfigure_s))


def rates(lived: Lived, every: float = SMOOTHED_S) -> tuple[list[float], list[float]]:
    """Return times, and samples per second around them, the means over `every` seconds; 0 where more were undone."""
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
