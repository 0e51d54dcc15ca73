"""torchtitan's trainer, models and parallel dimensions, on replicas that join and leave (docs/torchtitan.md)."""

from __future__ import annotations

from holdfast.integrations.torchtitan.configs import layout_of, trial_on_cpu
from holdfast.integrations.torchtitan.dims import JobParallelDims
from holdfast.integrations.torchtitan.samples import TokenWindows
from holdfast.integrations.torchtitan.trainer import ElasticTrainer

__all__ = ["ElasticTrainer", "JobParallelDims", "TokenWindows", "layout_of", "trial_on_cpu"]
