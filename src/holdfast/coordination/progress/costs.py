"""Measures the costs of steps, recoveries and migrations, and predicts the next ones from them."""

from __future__ import annotations

from collections import deque
from enum import StrEnum
from statistics import median

from holdfast.coordination.progress.recovery_cost import RecoveryCost
from holdfast.coordination.transaction import Transaction

#: the default, until something was measured: bytes per second of a 10 Gbit/s network
DEFAULT_BANDWIDTH = 1e9
#: The least pause of a switch besides its transfers. The pause is measured as a difference of two step times and may
#: come out as 0; then every trifle would justify a switch.
LEAST_PAUSE_S = 0.1
#: The same for a rebalance: its transfers overlap its first step. Until one was measured, it counts as any switch.
LEAST_REBALANCE_S = 0.02
#: smaller transfers measure the latency
_LEAST_BYTES = 1 << 20
_STEPS = 64
#: the number of steps of one world size from which a median is used; the first steps include setup and transfers
_ENOUGH_STEPS = 8
#: the number of measurements of each kind that are kept
_NEWEST = 5


class Cost(StrEnum):
    """A quantity that is measured, in seconds unless its name says otherwise. It is stored in the job's record."""

    #: from the arrival of a standby until its workers have built their model
    START = "start_s"
    #: a standby's shadow steps
    WARM_UP = "warm_s"
    #: from the stop of a generation to the decision about the next one
    DECISION = "decide_s"
    #: building the group of a generation
    BUILD = "build_s"
    #: the pause that a join causes, besides the step's own time
    SWAP = "swap_s"
    #: the transfer of a whole node's state to a node without one
    TRANSFER = "transfer_s"
    #: the size of that state
    STATE = "state_bytes"
    #: from the loss of a node that was not replaced to the first step, less a usual step
    HIT = "hit_s"
    #: the same, if a standby replaced the node
    REPLACED = "replaced_s"
    #: from the stop for another layout to the first step under it, less a usual step
    LAYOUT = "layout_s"
    #: the same after a rollback to a saved state, including the repeated steps
    ROLLED_BACK = "rolled_back_s"
    #: the times of losses of nodes, in Unix seconds
    LOSS = "lost_at"


#: estimates, until something was measured
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
#: the cost that a recovery measures, by its action
_RECOVERED = {"shrink": Cost.HIT, "replace": Cost.REPLACED}
#: the expected time until the first loss
FIRST_LOSS_S = 3600.0
#: losses closer together than this count as one
_ONE_LOSS_S = 1.0


class MeasuredCosts:
    """Step times, bandwidth and pauses of this job. A new coordinator measures these again.

    The other costs are stored in the job's record.
    """

    def __init__(self, transaction: Transaction | None = None) -> None:
        self._transaction = transaction
        #: measurements of losses to write with the next other one, so that a loss never waits for a write
        self._unwritten: dict[str, tuple[float, ...]] = {}
        self.bandwidth = DEFAULT_BANDWIDTH
        self.pause_s = LEAST_PAUSE_S
        self._seconds: deque[float] = deque(maxlen=_STEPS)
        #: when these steps were committed, in Unix seconds
        self._times: deque[float] = deque(maxlen=_STEPS)
        #: step times by the number of workers
        self._by_world: dict[int, deque[float]] = {}

    @property
    def step_s(self) -> float:
        """The median seconds of the last steps, or 0 before the first."""
        return median(self._seconds) if self._seconds else 0.0

    def add_measurement(self, cost: Cost, value: float) -> None:
        """Write a measurement to the record, of which the newest are kept: seconds, or bytes for `Cost.STATE`.

        Negative ones are ignored.
        """
        if self._transaction is None or value < 0:
            return
        newest = {str(cost): (*self._known(cost), value)[-_NEWEST:]}
        self._transaction.change(costs={**self._transaction.record.costs, **self._unwritten, **newest})
        self._unwritten.clear()

    def _keep_loss(self, recovery: RecoveryCost, committed: float) -> None:
        """Record the seconds that a failure cost beyond a step, by its kind: rolled back, or recovered by the action.

        Nothing is recorded for requested changes, joins and rebalances. `committed` is when the first step afterwards
        was.
        """
        if recovery.asked or recovery.swap:
            return
        kind = Cost.ROLLED_BACK if recovery.restart else _RECOVERED.get(recovery.action)
        if kind is not None:
            self.add_measurement(kind, max(0.0, committed - recovery.failed - self.step_s))

    def of(self, cost: Cost) -> float:
        """Return the median of the last measurements of a cost, or an estimate before the first."""
        return median(known) if (known := self._known(cost)) else PRIORS[cost]

    def is_measured(self, cost: Cost) -> bool:
        """Return whether a cost was measured, so that `of` is not just an estimate."""
        return bool(self._known(cost))

    def record_loss(self, now: float) -> None:
        """Record the time of the loss of a node; losses at almost the same time count once.

        It is written with the next other measurement.
        """
        times = self._known(Cost.LOSS)
        if not times or now - times[-1] > _ONE_LOSS_S:
            self._unwritten[Cost.LOSS] = (*times, now)[-_NEWEST:]

    def between_losses_s(self, now: float) -> float:
        """Return the expected seconds until the next loss of a node, from the last losses and a prior of
        `FIRST_LOSS_S`.
        """
        if self._transaction is None:
            return FIRST_LOSS_S
        times = self._known(Cost.LOSS)
        if len(times) == _NEWEST:
            return (FIRST_LOSS_S + now - times[0]) / _NEWEST
        return (FIRST_LOSS_S + now - (self._transaction.record.run_since or now)) / (1 + len(times))

    def _known(self, cost: Cost) -> tuple[float, ...]:
        """Return the newest measurements of a cost, oldest first, including ones that are not written yet."""
        if self._transaction is None:
            return ()
        return self._unwritten.get(cost) or self._transaction.record.costs.get(cost, ())

    def add_step(self, seconds: float, time: float, world: int) -> None:
        """Record the duration of a step with this many workers, which was committed at `time`.

        Ignore durations of 0, which are unknown.
        """
        if seconds > 0:
            self._seconds.append(seconds)
            self._times.append(time)
            self._by_world.setdefault(world, deque(maxlen=_STEPS)).append(seconds)

    def step_of(self, world: int) -> float:
        """Return the median seconds of a step with this many workers, or 0 if too few are known."""
        return self.paces().get(world, 0.0)

    def forget_steps(self) -> None:
        """Forget all step times, because steps take a different time now."""
        self._seconds.clear()
        self._times.clear()
        self._by_world.clear()

    def paces(self) -> dict[int, float]:
        """Return the median seconds of a step by the number of workers, for all numbers with enough steps."""
        return {world: median(known) for world, known in self._by_world.items() if len(known) >= _ENOUGH_STEPS}

    def slowed_s(self, since: float) -> float:
        """Return the total time by which the steps committed since then took longer than usual."""
        steps = [seconds for seconds, time in zip(self._seconds, self._times, strict=True) if time > since]
        return max(0.0, sum(steps) - self.step_s * len(steps))

    def record_switch(self, recovery: RecoveryCost, committed: float) -> None:
        """Record the cost of a recovery, join or rebalance, whose first step was committed at the time `committed`.

        The transfer also measures the bandwidth if it was large enough, and a rebalance measures the pause. A join
        measures neither: the transfers between its other members include waiting for the new node's dense state.
        """
        self._keep(recovery, committed)
        if recovery.action == "grow":
            return
        bytes_moved, seconds = recovery.most_bytes, recovery.transfer_s
        if bytes_moved >= _LEAST_BYTES and seconds > 0:
            self.bandwidth = bytes_moved / seconds
        if recovery.action == "rebalance":
            # The part of the transfer that overlaps the step costs nothing.
            waited_s = max(0.0, seconds - self.step_s)
            self.pause_s = max(LEAST_REBALANCE_S, committed - recovery.failed - self.step_s - waited_s)

    def _keep(self, recovery: RecoveryCost, committed: float) -> None:
        """Record the costs, in seconds or bytes, that a recovery or a join has measured.

        These are the time of a join, or of the decision and the building after a failure; the time that the failure
        cost; and, if a node has joined or was replaced, the transfer. `committed` is when the first step afterwards
        was.
        """
        if recovery.action == "grow" and recovery.swap:
            self.add_measurement(Cost.SWAP, max(0.0, committed - recovery.failed - self.step_s))
        elif recovery.decided and recovery.regrouped and not recovery.restart:
            self.add_measurement(Cost.DECISION, max(0.0, recovery.decided - recovery.detected))
            self.add_measurement(Cost.BUILD, max(0.0, recovery.regrouped - recovery.decided - recovery.transfer_s))
        self._keep_loss(recovery, committed)
        if recovery.most_bytes and recovery.action in ("grow", "replace"):
            self.add_measurement(Cost.TRANSFER, recovery.transfer_s)
            self.add_measurement(Cost.STATE, recovery.most_bytes)
