"""An emulated accelerator: expert computation takes a stated time per token (DESIGN.md 4).

Two cores cannot show load imbalance between ranks: whoever computes, all wait for the same cores. A rank that sleeps
for the time that its tokens would take lets the others go on, so that the slowest rank's load decides, as it does where
each rank has an accelerator of its own. A assignments on this rank, D model dimension.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.errors import BadInputError
from holdfast.runtime.tensors import apply

#: The backward pass multiplies twice where the forward pass multiplies once.
BACKWARD_FACTOR = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Emulation:
    """Lets expert computation take at least so long: `seconds_per_token` forward, twice that backward.

    The time that the computation really takes is part of it. now, sleep: of the clock, in seconds.
    """

    seconds_per_token: float
    now: Callable[[], float] = time.perf_counter
    sleep: Callable[[float], None] = time.sleep

    def __post_init__(self) -> None:
        """Check the time.

        Raises:
            BadInputError: it is negative or no number.
        """
        if not 0 <= self.seconds_per_token < float("inf"):
            raise BadInputError(
                f"the emulated time per token is {self.seconds_per_token}: it must be 0 (no emulation) or more seconds"
            )

    def run(self, compute: Callable[..., torch.Tensor], tokens_AD: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
        """Compute, forward now and backward later, no faster than stated.

        Args:
            compute: is given the tokens and `more`.
        """
        started = self.now()
        watch = _BackwardTimer(self, self.seconds_per_token * BACKWARD_FACTOR * tokens_AD.shape[0])
        # The backward pass comes by behind the experts first.
        out_AD = apply(_AtBackward, compute(apply(_AtBackward, tokens_AD, watch.stop), *more), watch.start)
        self.sleep_until_elapsed(started, self.seconds_per_token * tokens_AD.shape[0])
        return out_AD

    def sleep_until_elapsed(self, started: float, seconds: float) -> None:
        """Sleep for what is left of `seconds` from `started` on."""
        left = started + seconds - self.now()
        if left > 0:
            self.sleep(left)


class _BackwardTimer:
    """When a backward pass began, and how long it is to take."""

    def __init__(self, emulation: Emulation, seconds: float) -> None:
        self.started = 0.0
        self._emulation = emulation
        self._seconds = seconds

    def start(self) -> None:
        self.started = self._emulation.now()

    def stop(self) -> None:
        self._emulation.sleep_until_elapsed(self.started, self._seconds)


class _AtBackward(torch.autograd.Function):
    """Passes rows on, and calls something when the backward pass comes by."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, call: Callable[[], None]) -> torch.Tensor:
        ctx.call = call
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.call()
        return grads[0], None
