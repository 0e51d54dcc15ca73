"""An emulated accelerator for whole micro-batches, and the models that it applies to."""

from __future__ import annotations

import pytest
import torch

from holdfast.errors import BadInputError
from holdfast.protocol.job_spec import ExperimentSpec
from holdfast.runtime.gradients.emulation import MicroBatchDelay, set_up_emulation
from holdfast.runtime.moe.layer.moe_layer import MoE


class Time:
    """A clock that advances with sleep and work."""

    def __init__(self) -> None:
        self.at = 0.0
        self.slept: list[float] = []

    def now(self) -> float:
        return self.at

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.at += seconds


def test_the_emulated_time_of_a_micro_batch_includes_its_real_work() -> None:
    time = Time()
    micro_batch = MicroBatchDelay(2.0, time.now, time.sleep)
    for work in (0.5, 0.0, 3.0):
        micro_batch.start()
        time.at += work
        micro_batch.sleep_remaining()
        time.at += 10.0  # The time between two micro-batches belongs to neither.
    assert time.slept == [1.5, 2.0]


def test_emulated_time_is_per_micro_batch_or_per_token_of_experts() -> None:
    dense, experts = torch.nn.Linear(2, 2), MoE(8, 8, 4, 2, seed=1)
    assert set_up_emulation(ExperimentSpec(), dense) is None
    assert set_up_emulation(ExperimentSpec(emulate_compute="0.1/micro-batch"), dense) is not None
    with pytest.raises(BadInputError, match=r"the model has none: give the time of a micro-batch, such as 0\.1/micro"):
        set_up_emulation(ExperimentSpec(emulate_compute="0.1/token"), dense)
    assert set_up_emulation(ExperimentSpec(emulate_compute="0.5/token"), experts) is None
    assert experts.emulation is not None
    assert experts.emulation.seconds_per_token == 0.5
