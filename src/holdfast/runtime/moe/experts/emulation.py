"""An emulated accelerator: expert computation takes a stated time per token (DESIGN.md 4).

Ranks that share two cores cannot show load imbalance: all of them wait for the same cores. A rank that sleeps for the
time of its tokens leaves the cores to the others. The slowest rank's load then decides, as if each rank had its own
accelerator.

Shape letters: A assignments on this rank, D model dimension.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.errors import BadInputError
from holdfast.runtime.tensors import apply_function

#: The backward pass multiplies twice where the forward pass multiplies once.
BACKWARD_FACTOR = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Emulation:
    """Slows expert computation down to `seconds_per_token` forward, and twice that backward.

    The time that the computation really takes is included.
    """

    seconds_per_token: float
    #: the clock, in seconds
    now: Callable[[], float] = time.perf_counter
    #: sleeps for a number of seconds
    sleep: Callable[[float], None] = time.sleep

    def __post_init__(self) -> None:
        """Check the time.

        Raises:
            BadInputError: it is negative, infinite or NaN.
        """
        if not 0 <= self.seconds_per_token < float("inf"):
            raise BadInputError(
                f"the emulated time per token is {self.seconds_per_token}: it must be 0 (no emulation) or more seconds"
            )

    def run(self, compute: Callable[..., torch.Tensor], tokens_AD: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
        """Return `compute(tokens, *more)`, and sleep so that forward now and backward later are no faster than stated.

        Args:
            compute: computes the experts; differentiable.
        """
        started = self.now()
        watch = _BackwardTimer(self, self.seconds_per_token * BACKWARD_FACTOR * tokens_AD.shape[0])
        # The backward pass reaches the output of the experts first.
        out_AD = apply_function(
            _AtBackward, compute(apply_function(_AtBackward, tokens_AD, watch.stop), *more), watch.start
        )
        self.sleep_until_elapsed(started, self.seconds_per_token * tokens_AD.shape[0])
        return out_AD

    def sleep_until_elapsed(self, started: float, seconds: float) -> None:
        """Sleep until `seconds` have passed since `started`."""
        left = started + seconds - self.now()
        if left > 0:
            self.sleep(left)


class _BackwardTimer:
    """Measures a backward pass and sleeps until it has taken `seconds`."""

    def __init__(self, emulation: Emulation, seconds: float) -> None:
        self.started = 0.0
        self._emulation = emulation
        self._seconds = seconds

    def start(self) -> None:
        self.started = self._emulation.now()

    def stop(self) -> None:
        self._emulation.sleep_until_elapsed(self.started, self._seconds)


class _AtBackward(torch.autograd.Function):
    """Returns its rows unchanged, and calls a function when the backward pass reaches it."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, call: Callable[[], None]) -> torch.Tensor:
        ctx.call = call
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.call()
        return grads[0], None
