"""What steps and migrations have cost so far: what the next ones are predicted from."""

from __future__ import annotations

from collections import deque
from statistics import median

from holdfast.coordination.progress.recovery_cost import RecoveryCost

#: Until something was measured: bytes per second of a 10 Gbit/s network.
DEFAULT_BANDWIDTH = 1e9
#: What a switch takes beside the transfers, at the least: measured as a difference of two steps it may come out as
#: nothing, and then every trifle would be worth a switch.
LEAST_PAUSE_S = 0.1
#: Smaller transfers measure latency.
_LEAST_BYTES = 1 << 20
_STEPS = 64


class MeasuredCosts:
    """Step times, bandwidth and pauses of this job; a coordinator that takes over measures anew."""

    def __init__(self) -> None:
        self.bandwidth = DEFAULT_BANDWIDTH
        self.pause_s = LEAST_PAUSE_S
        self._seconds: deque[float] = deque(maxlen=_STEPS)
        #: when they were committed, unix seconds
        self._times: deque[float] = deque(maxlen=_STEPS)

    @property
    def step_s(self) -> float:
        """The median of the last steps' seconds, 0 before the first."""
        return median(self._seconds) if self._seconds else 0.0

    def step(self, seconds: float, time: float) -> None:
        """A step took so long, and was committed then."""
        if seconds > 0:
            self._seconds.append(seconds)
            self._times.append(time)

    def slowed_s(self, since: float) -> float:
        """Return how much longer than usual the steps took that were committed since then, all together."""
        steps = [seconds for seconds, time in zip(self._seconds, self._times, strict=True) if time > since]
        return max(0.0, sum(steps) - self.step_s * len(steps))

    def switched(self, recovery: RecoveryCost, committed: float) -> None:
        """A generation's first step is committed: what moved, and what the switch took beside that.

        Joins measure nothing: there a stayer's transfer includes the wait for the joiner's dense state.
        """
        if recovery.action == "grow":
            return
        bytes_moved, seconds = recovery.most_bytes, recovery.transfer_s
        if bytes_moved >= _LEAST_BYTES and seconds > 0:
            self.bandwidth = bytes_moved / seconds
        if recovery.action == "rebalance":
            pause_s = committed - recovery.failed - self.step_s - bytes_moved / self.bandwidth
            self.pause_s = max(LEAST_PAUSE_S, pause_s)
