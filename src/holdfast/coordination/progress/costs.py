"""What steps and migrations have cost so far: what the next ones are predicted from."""

from __future__ import annotations

from collections import deque
from enum import StrEnum
from statistics import median

from holdfast.coordination.progress.recovery_cost import RecoveryCost
from holdfast.coordination.transaction import Transaction

#: Until something was measured: bytes per second of a 10 Gbit/s network.
DEFAULT_BANDWIDTH = 1e9
#: What a switch takes beside the transfers, at the least: measured as a difference of two steps it may come out as
#: nothing, and then every trifle would be worth a switch.
LEAST_PAUSE_S = 0.1
#: Likewise a rebalance, whose experts travel beside its first step; until one was measured it counts as any switch.
LEAST_REBALANCE_S = 0.02
#: Smaller transfers measure latency.
_LEAST_BYTES = 1 << 20
_STEPS = 64
#: with fewer steps of a size nothing is said of it: the first have what was built and moved in them
_ENOUGH_STEPS = 8
#: of each kind so many measurements count
_NEWEST = 5


class Cost(StrEnum):
    """What was measured, in seconds if the name says nothing else; it is kept, whoever coordinates."""

    START = "start_s"  # from a standby's coming until its workers have built their model
    WARM_UP = "warm_s"  # a standby's shadow steps
    DECISION = "decide_s"  # from the stop of a generation until it is decided what comes after it
    BUILD = "build_s"  # of a generation's group
    SWAP = "swap_s"  # what a join takes of the steps, beside a step's own time
    TRANSFER = "transfer_s"  # a whole node's state, to one that had none
    STATE = "state_bytes"  # what it received
    HIT = "hit_s"  # a node was lost, and nobody took its place: from then to the first step, beside a usual one
    REPLACED = "replaced_s"  # likewise, and a standby did
    LAYOUT = "layout_s"  # from the stop for another layout to the first step under it, beside a usual one
    ROLLED_BACK = "rolled_back_s"  # likewise, and the job went back to what was saved: with what was done again
    LOSS = "lost_at"  # when nodes were lost, unix seconds


#: until something was measured
PRIORS = {
    Cost.START: 5.0,
    Cost.WARM_UP: 5.0,
    Cost.DECISION: 0.05,
    Cost.BUILD: 0.1,
    Cost.SWAP: LEAST_PAUSE_S,
    Cost.TRANSFER: 0.5,
    Cost.STATE: 0.0,
    Cost.HIT: 1.0,
    Cost.REPLACED: 1.0,
    Cost.LAYOUT: 10.0,
    Cost.ROLLED_BACK: 0.0,
    Cost.LOSS: 0.0,
}
#: what a recovery from a failure measures, by what it did
_RECOVERED = {"shrink": Cost.HIT, "replace": Cost.REPLACED}
#: the first loss is expected after so long
FIRST_LOSS_S = 3600.0
#: losses that lie closer together are one
_ONE_LOSS_S = 1.0


class MeasuredCosts:
    """Step times, bandwidth and pauses of this job; a coordinator that takes over measures those anew.

    What else moves and restarts have cost is in the record.
    """

    def __init__(self, transaction: Transaction | None = None) -> None:
        self._transaction = transaction
        #: what is written with the next measurement: a loss must not wait for a write
        self._unwritten: dict[str, tuple[float, ...]] = {}
        self.bandwidth = DEFAULT_BANDWIDTH
        self.pause_s = LEAST_PAUSE_S
        self._seconds: deque[float] = deque(maxlen=_STEPS)
        #: when they were committed, unix seconds
        self._times: deque[float] = deque(maxlen=_STEPS)
        #: by the number of workers
        self._by_world: dict[int, deque[float]] = {}

    @property
    def step_s(self) -> float:
        """The median of the last steps' seconds, 0 before the first."""
        return median(self._seconds) if self._seconds else 0.0

    def measured(self, cost: Cost, value: float) -> None:
        """Something took so long, or so much."""
        if self._transaction is None or value < 0:
            return
        newest = {str(cost): (*self._known(cost), value)[-_NEWEST:]}
        self._transaction.change(costs={**self._transaction.record.costs, **self._unwritten, **newest})
        self._unwritten.clear()

    def _keep_loss(self, recovery: RecoveryCost, committed: float) -> None:
        """Write down what a failure has cost."""
        if recovery.asked or recovery.swap:
            return
        kind = Cost.ROLLED_BACK if recovery.restart else _RECOVERED.get(recovery.action)
        if kind is not None:
            self.measured(kind, max(0.0, committed - recovery.failed - self.step_s))

    def of(self, cost: Cost) -> float:
        """Return what something costs: the median of what was measured last, before that a guess."""
        return median(known) if (known := self._known(cost)) else PRIORS[cost]

    def is_measured(self, cost: Cost) -> bool:
        """Tell whether `of` is more than a guess."""
        return bool(self._known(cost))

    def lost(self, now: float) -> None:
        """A node was lost."""
        times = self._known(Cost.LOSS)
        if not times or now - times[-1] > _ONE_LOSS_S:
            self._unwritten[Cost.LOSS] = (*times, now)[-_NEWEST:]

    def between_losses_s(self, now: float) -> float:
        """Return how long the job may expect to go on until it loses a node: by its last losses, and a guess beside."""
        if self._transaction is None:
            return FIRST_LOSS_S
        times = self._known(Cost.LOSS)
        if len(times) == _NEWEST:
            return (FIRST_LOSS_S + now - times[0]) / _NEWEST
        return (FIRST_LOSS_S + now - (self._transaction.record.run_since or now)) / (1 + len(times))

    def _known(self, cost: Cost) -> tuple[float, ...]:
        if self._transaction is None:
            return ()
        return self._unwritten.get(cost) or self._transaction.record.costs.get(cost, ())

    def step(self, seconds: float, time: float, world: int) -> None:
        """A step of so many workers took so long, and was committed then."""
        if seconds > 0:
            self._seconds.append(seconds)
            self._times.append(time)
            self._by_world.setdefault(world, deque(maxlen=_STEPS)).append(seconds)

    def step_of(self, world: int) -> float:
        """Return the median seconds of a step with so many workers, 0 where too few are known."""
        return self.paces().get(world, 0.0)

    def forget_steps(self) -> None:
        """Steps take another time from here on."""
        self._seconds.clear()
        self._times.clear()
        self._by_world.clear()

    def paces(self) -> dict[int, float]:
        """Return the median seconds of a step by the number of workers, where enough steps of it are known."""
        return {world: median(known) for world, known in self._by_world.items() if len(known) >= _ENOUGH_STEPS}

    def slowed_s(self, since: float) -> float:
        """Return how much longer than usual the steps took that were committed since then, all together."""
        steps = [seconds for seconds, time in zip(self._seconds, self._times, strict=True) if time > since]
        return max(0.0, sum(steps) - self.step_s * len(steps))

    def switched(self, recovery: RecoveryCost, committed: float) -> None:
        """A generation's first step is committed: what moved, and what the switch took beside that.

        Joins measure no bandwidth: there a stayer's transfer includes the wait for the joiner's dense state.
        """
        self._keep(recovery, committed)
        if recovery.action == "grow":
            return
        bytes_moved, seconds = recovery.most_bytes, recovery.transfer_s
        if bytes_moved >= _LEAST_BYTES and seconds > 0:
            self.bandwidth = bytes_moved / seconds
        if recovery.action == "rebalance":
            waited_s = max(0.0, seconds - self.step_s)  # (what comes beside the step takes as long as that for nothing)
            self.pause_s = max(LEAST_REBALANCE_S, committed - recovery.failed - self.step_s - waited_s)

    def _keep(self, recovery: RecoveryCost, committed: float) -> None:
        """Write down what a recovery, or a join, has measured."""
        if recovery.action == "grow" and recovery.swap:
            self.measured(Cost.SWAP, max(0.0, committed - recovery.failed - self.step_s))
        elif recovery.decided and recovery.regrouped and not recovery.restart:
            self.measured(Cost.DECISION, max(0.0, recovery.decided - recovery.detected))
            self.measured(Cost.BUILD, max(0.0, recovery.regrouped - recovery.decided - recovery.transfer_s))
        self._keep_loss(recovery, committed)
        if recovery.most_bytes and recovery.action in ("grow", "replace"):
            self.measured(Cost.TRANSFER, recovery.transfer_s)
            self.measured(Cost.STATE, recovery.most_bytes)
