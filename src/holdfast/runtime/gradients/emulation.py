"""An emulated accelerator for whole micro-batches: each takes a stated time, and next to no processor (DESIGN.md 4).

Cores that all ranks share show neither what a smaller world costs nor that one rank is slow: however the work is shared
out, to them it is the same. A rank that sleeps for what its micro-batches would take leaves the cores to the others.
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
    """Lets a micro-batch take at least so many seconds, from when its data are here until its gradients are.

    The time that the computation really takes is part of it. now, sleep: of the clock, in seconds.
    """

    def __init__(
        self, seconds: float, now: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        """Have none under way."""
        self._seconds = seconds
        self._now = now
        self._sleep = sleep
        self._started = 0.0

    def start(self) -> None:
        """Its data are here."""
        self._started = self._now()

    def sleep_remaining(self) -> None:
        """Its gradients are here: sleep for what is left."""
        left = self._started + self._seconds - self._now()
        if left > 0:
            self._sleep(left)


def set_up_emulation(experiments: ExperimentSpec, model: torch.nn.Module) -> MicroBatchDelay | None:
    """Let the model's experts take their time, where it is stated for each token.

    Returns:
        What lets each micro-batch take its time, where it is stated for these.

    Raises:
        BadInputError: it is stated for each token of a model that has no experts.
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
