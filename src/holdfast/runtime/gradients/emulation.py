"""An emulated accelerator for whole micro-batches: each takes a stated time, and almost no CPU (DESIGN.md 4).

Ranks that share CPU cores show neither the cost of a smaller world nor a slow rank: however the work is divided, it
takes as long. A rank that sleeps for the time of its micro-batches leaves the cores to the others.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from holdfast.errors import BadInputError
from holdfast.protocol.job_spec import ExperimentSpec
from holdfast.runtime.moe.experts.emulation import Emulation
from holdfast.runtime.moe.layer.expert_layer import moe_layers


class MicroBatchDelay:
    """Emulates a slower device: makes a micro-batch take at least a stated time, from its data until its gradients.

    The time of the real computation is included.

    Args:
        seconds: Time per micro-batch.
        now: The clock, in seconds.
        sleep: Sleeps for a number of seconds.
    """

    def __init__(
        self, seconds: float, now: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._seconds = seconds
        self._now = now
        self._sleep = sleep
        self._started = 0.0

    def start(self) -> None:
        """Start the clock; called when the micro-batch's data are available."""
        self._started = self._now()

    def sleep_remaining(self) -> None:
        """Sleep for the rest of the time; called when the micro-batch's gradients are available."""
        left = self._started + self._seconds - self._now()
        if left > 0:
            self._sleep(left)


def set_up_emulation(experiments: ExperimentSpec, model: torch.nn.Module) -> MicroBatchDelay | None:
    """Emulate the time that `--emulate-compute` states. A time per token is set on all MoE layers; a time per
    micro-batch is returned as a delay.

    Returns:
        The delay of each micro-batch, or None if times are per token or nothing is emulated.

    Raises:
        BadInputError: a time per token is stated for a model without experts.
    """
    emulated = experiments.emulated
    if not emulated.seconds:
        return None
    if emulated.unit == "micro-batch":
        return MicroBatchDelay(emulated.seconds)
    layers = moe_layers(model)
    if not layers:
        raise BadInputError(
            f"--emulate-compute {experiments.emulate_compute} is for experts of MoE layers, and the model has none: "
            "give the time of a micro-batch, such as 0.1/micro-batch"
        )
    for layer in layers:
        layer.emulation = Emulation(seconds_per_token=emulated.seconds)
    return None
