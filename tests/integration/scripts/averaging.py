"""A hook for `after_apply` that keeps a moving average of some weights in `extra`, and may raise."""

from __future__ import annotations

from torch.nn import Module
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from holdfast.runtime.session.job import Job
from holdfast.runtime.session.step import Step


class Averaging:
    """An `after_apply` hook that raises at one step (0: never) on one rank (None: on all ranks)."""

    def __init__(self, job: Job, module: Module, raise_at: int, raise_on: int | None) -> None:
        self.average = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        self._job = job
        self._module = module
        self._raise_at = raise_at
        self._raise_on = raise_on

    def __call__(self, step: Step) -> None:
        if step.number == self._raise_at and self._raise_on in (None, self._job.rank):
            raise ZeroDivisionError("of the script")
        self.average.update_parameters(self._module)
