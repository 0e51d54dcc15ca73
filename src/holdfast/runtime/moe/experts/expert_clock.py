"""Measures how long the experts take per token, so that new placements are planned with real times.

Only the forward pass is measured; the backward pass multiplies twice as much.

Shape letters: A assignments on this rank, D model dimension.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import torch

from holdfast.runtime.moe.experts.emulation import BACKWARD_FACTOR

#: Weight of all earlier measurements after each new one: about the last hundred count.
_FADING = 0.99


class ExpertClock:
    """Measures expert computation; one clock for all layers of a worker.

    Args:
        now: a monotonic clock, in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._seconds = 0.0
        self._tokens = 0.0
        #: on CUDA: the events before and after each measured call, and its tokens
        self._pending: deque[tuple[torch.cuda.Event, torch.cuda.Event, int]] = deque()

    @property
    def token_s(self) -> float:
        """Seconds per token, forward and backward; 0 before anything was measured."""
        return (1.0 + BACKWARD_FACTOR) * self._seconds / self._tokens if self._tokens else 0.0

    def run(self, compute: Callable[..., torch.Tensor], tokens_AD: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
        """Return `compute(tokens, *more)`, and measure the time of this forward pass, unless there are no tokens.

        On CUDA, a later call reads the time, so that the host does not wait.
        """
        if not tokens_AD.shape[0]:
            return compute(tokens_AD, *more)
        if tokens_AD.device.type == "cuda":
            return self._run_on_device(compute, tokens_AD, *more)
        started = self._now()
        out_AD = compute(tokens_AD, *more)
        self._add_measurement(self._now() - started, tokens_AD.shape[0])
        return out_AD

    def _run_on_device(
        self, compute: Callable[..., torch.Tensor], tokens_AD: torch.Tensor, *more: torch.Tensor
    ) -> torch.Tensor:
        """Compute between two CUDA events, and add the times of earlier calls that have ended on the device.

        The host does not wait.
        """
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        out_AD = compute(tokens_AD, *more)
        after.record()
        self._pending.append((before, after, tokens_AD.shape[0]))
        while self._pending and self._pending[0][1].query():
            before, after, tokens = self._pending.popleft()
            self._add_measurement(before.elapsed_time(after) / 1e3, tokens)
        return out_AD

    def _add_measurement(self, seconds: float, tokens: int) -> None:
        """Add a measurement; earlier ones count a little less each time."""
        self._seconds = _FADING * self._seconds + seconds
        self._tokens = _FADING * self._tokens + tokens
