"""torchtitan's metrics for a job. The worker that has rank 0 at the time logs them."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import torch

from holdfast.integrations.torchtitan.package import import_module

_metrics: Any = import_module("components.metrics")
_tools: Any = import_module("tools.utils")
_MetricsProcessor: Any = _metrics.MetricsProcessor


class _NoMemory:
    """Replaces torchtitan's monitor of GPU memory. Reports zeros."""

    def get_peak_stats(self) -> Any:
        return _metrics.DeviceMemStats(0.0, 0.0, 0.0, 0.0, 0, 0)

    def reset_peak_stats(self) -> None:
        """Do nothing."""


class CpuMetrics(_MetricsProcessor):
    """torchtitan's `MetricsProcessor` for machines without a GPU: logs neither memory nor the share of peak FLOP/s."""

    def __init__(
        self, config: Any, *, parallel_dims: Any, dump_folder: str, pp_schedule: str, config_dict: Any
    ) -> None:
        """Initialize as torchtitan does, except for the GPU."""
        self.logger = self._build_metric_logger(
            config=config,
            parallel_dims=parallel_dims,
            dump_folder=dump_folder,
            pp_schedule=pp_schedule,
            config_dict=config_dict,
        )
        self.parallel_dims, self.config = parallel_dims, config
        self.device_memory_monitor = _NoMemory()
        self.color = _tools.NoColor() if config.disable_color_printing else _tools.Color()
        self.gpu_peak_flops = float("inf")
        self.has_quantization = True  # torchtitan then does not log the share of peak FLOP/s.
        self.ntokens_since_last_log = 0
        self.data_loading_times: list[float] = []
        self.time_last_log = time.perf_counter()
        self.num_flops_per_token = -1
        self.optimizers = self.model_parts = None


class StepLine(NamedTuple):
    """The results of a step, over all workers."""

    #: number of the step
    number: int
    loss: float
    #: largest loss of a part of a micro-batch
    largest: float
    #: norm of the gradients
    norm: float
    #: tokens of all steps so far
    tokens: int
    #: torchtitan's metrics of the learning rate schedule
    rates: dict[str, float]


class JobMetrics:
    """Decides when this worker logs a step. torchtitan's processor is created at the first step that it logs."""

    def __init__(self, config: Any, parallel_dims: Any, device: torch.device, flops_per_token: int) -> None:
        """Start counting. Nothing is logged yet."""
        self._config, self._dims, self._device = config, parallel_dims, device
        self._flops = flops_per_token
        self._processor: Any = None
        self._tokens, self._waits = 0, list[float]()
        self._since = time.perf_counter()

    def is_logged(self, step: int) -> bool:
        """Whether torchtitan would log a step. The same on all workers."""
        return step == 1 or step % self._config.metrics.log_freq == 0

    def count_micro_batch(self, tokens: int, seconds: float) -> None:
        """Count a loaded micro-batch of this many tokens, after a wait of `seconds`."""
        self._tokens += tokens
        self._waits.append(seconds)

    def log_step(self, line: StepLine, *, rank: int, trainer: Any) -> None:
        """Log the results of a step if this worker has rank 0. On every worker, start to count tokens, waits and time
        again from zero.

        Args:
            trainer: gives its optimizers and model to torchtitan's processor, which the first call with rank 0 creates.
        """
        if rank == 0:
            if self._processor is None:
                self._processor = self._make_processor(trainer)
            self._processor.ntokens_since_last_log = self._tokens
            self._processor.data_loading_times = self._waits or [0.0]
            self._processor.time_last_log = self._since
            rates = {"n_tokens_seen": line.tokens, **line.rates}
            self._processor.log(line.number, line.loss, line.largest, line.norm, extra_metrics=rates)
        self._tokens, self._waits, self._since = 0, [], time.perf_counter()

    def close(self) -> None:
        """Write metrics that are not yet written."""
        if self._processor is not None:
            self._processor.close()

    def _make_processor(self, trainer: Any) -> Any:
        """Build the config's metrics processor, or `CpuMetrics` on a CPU, for the trainer's optimizers and model."""
        config = self._config
        given = {"parallel_dims": self._dims, "dump_folder": config.dump_folder, "config_dict": config.to_dict()}
        given["pp_schedule"] = config.parallelism.pipeline_parallel_schedule
        made: Any = CpuMetrics(config.metrics, **given) if self._device.type == "cpu" else config.metrics.build(**given)
        made.num_flops_per_token = self._flops
        made.optimizers, made.model_parts = trainer.optimizers, trainer.model_parts
        return made
