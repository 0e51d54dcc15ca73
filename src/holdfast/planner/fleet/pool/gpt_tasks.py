"""Step times of the GPT-3 models of Unicron's evaluation on nodes of 8 A800 GPUs, from a model of ours.

The paper's Figure 4 shows such curves without numbers, and T_necessary is not printed. ASSUMED here:

Sequences have 2,048 tokens, and the global batch is that of GPT-3's own table. One sequence is a micro-batch. It needs
72 L h^2 s (1 + s / 6h + V / 12 L h) FLOP, by Megatron's formula without recomputation.

A GPU computes at `BUSY` of its peak of 312 TFLOP/s, and at `TENSOR` of that if layers are cut in 2, 4 or 8.

18 bytes of state for each parameter and 34 s h L bytes of activations must fit in `ROOM`. The fastest way to cut a
model that fits is used: tensor parallelism within a node, stages that divide its layers, the rest data parallel. Some
GPUs may stay idle.

Gradients of 4 bytes are summed at the end of the step, over 12.5 GB/s for each GPU (four NICs of 200 Gbit/s a node). No
computation overlaps with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from math import inf

from holdfast.planner.fleet.pool.tasks import FleetTask

GPUS, PEAK, BUSY, ROOM = 8, 312e12, 0.62, 74e9
TENSOR = {1: 1.0, 2: 0.96, 4: 0.9, 8: 0.8}
SEQUENCE, WORDS = 2048, 51200
NETWORK_BYTES_S = 12.5e9


@dataclass(frozen=True, kw_only=True, slots=True)
class GptModel:
    """A GPT-3 model."""

    name: str
    layers: int
    #: h, the hidden size
    width: int
    #: sequences of a global batch
    batch: int

    @property
    def parameters(self) -> float:
        """Number of parameters."""
        return 12.0 * self.layers * self.width**2 + WORDS * self.width

    @property
    def flop(self) -> float:
        """FLOP of one sequence, forward and backward."""
        shape = 1 + SEQUENCE / (6 * self.width) + WORDS / (12 * self.layers * self.width)
        return 72.0 * self.layers * self.width**2 * SEQUENCE * shape


MODELS = {
    model.name: model
    for model in (
        GptModel(name="1.3B", layers=24, width=2048, batch=512),
        GptModel(name="7B", layers=32, width=4096, batch=1024),
        GptModel(name="13B", layers=40, width=5120, batch=1024),
        GptModel(name="70B", layers=80, width=8192, batch=1536),
        GptModel(name="175B", layers=96, width=12288, batch=1536),
    )
}
_CASE_2 = ("1.3B", "1.3B", "1.3B", "7B", "7B", "13B")
_RISING = (0.5, 0.8, 1.1, 1.4, 1.7, 2.0)
#: Unicron, Table 3: models and weights of six jobs, by case
TABLE_3: dict[int, tuple[tuple[str, ...], tuple[float, ...]]] = {
    1: (("7B",) * 6, (1.0,) * 6),
    2: (_CASE_2, (1.0,) * 6),
    3: (("7B",) * 6, _RISING),
    4: (_CASE_2, _RISING),
    5: (_CASE_2, _RISING[::-1]),
}


def make_table_3_jobs(case: int, nodes: int) -> list[FleetTask]:
    """Return the six jobs of a case, 1 to 5, of Unicron's Table 3, with step times for up to `nodes` nodes."""
    sizes, weights = TABLE_3[case]
    names = (f"{size}-{place}" for place, size in enumerate(sizes, 1))
    return [
        make_gpt_job(name, MODELS[size], weight, nodes)
        for name, size, weight in zip(names, sizes, weights, strict=True)
    ]


def make_mixed_jobs(jobs: int, nodes: int) -> list[FleetTask]:
    """Return this many jobs: copies of the six of Table 3's case 5, under other names."""
    sizes, weights = TABLE_3[5]
    return [make_gpt_job(f"j{at:03d}", MODELS[sizes[at % 6]], weights[at % 6], nodes) for at in range(jobs)]


def make_gpt_job(name: str, model: GptModel, weight: float, nodes: int) -> FleetTask:
    """Return a job that trains a model on up to `nodes` nodes. Its least number is the smallest that the model fits on.

    Raises:
        BadInputError: the model does not fit on `nodes` nodes.
    """
    step_s = tuple(0.0 if seconds == inf else seconds for seconds in estimate_steps_s(model, nodes))
    least = next((held for held, seconds in enumerate(step_s, 1) if seconds), 1)
    return FleetTask(name=name, step_s=step_s, flop=model.flop * model.batch, weight=weight, least=least)


def estimate_steps_s(model: GptModel, nodes: int) -> Sequence[float]:
    """Return the seconds of a step with 1..nodes nodes, or inf if the model does not fit."""
    return estimate_steps_on_gpus_s(model, GPUS * nodes)[GPUS - 1 :: GPUS]


@cache
def estimate_steps_on_gpus_s(model: GptModel, gpus: int) -> Sequence[float]:
    """Return the seconds of a step with 1..gpus GPUs, or inf if the model does not fit."""
    return tuple(min(_step_times_s(model, held), default=inf) for held in range(1, gpus + 1))


def _step_times_s(model: GptModel, gpus: int) -> Iterator[float]:
    """Yield the estimated seconds of a step for each tensor and pipeline cut that fits into memory and the `gpus`."""
    stages = [count for count in range(1, model.layers + 1) if model.layers % count == 0]
    for tensor, share in TENSOR.items():
        for pipeline in stages:
            replicas = min(gpus // (tensor * pipeline), model.batch)
            if replicas and _bytes_per_gpu(model, tensor, pipeline) <= ROOM:
                yield _estimate_step_s(model, tensor * pipeline, pipeline, replicas, share)


def _bytes_per_gpu(model: GptModel, tensor: int, pipeline: int) -> float:
    """Return the bytes of a GPU's parameters, optimizer state and activations under these cuts of the model."""
    activations = 34.0 * SEQUENCE * model.width * model.layers / tensor
    return 18.0 * model.parameters / (tensor * pipeline) + activations


def _estimate_step_s(model: GptModel, cut: int, pipeline: int, replicas: int, share: float) -> float:
    """Return the seconds of a step: micro-batches, the pipeline's fill, and the gradients' all-reduce.

    Args:
        cut: number of GPUs that hold one replica.
        pipeline: number of its stages.
        share: efficiency of the tensor cut, as a factor of the speed.
    """
    micro_s = model.flop / (cut * PEAK * BUSY * share)
    rounds = -(-model.batch // replicas)
    summed_s = 2 * 4 * model.parameters / cut / NETWORK_BYTES_S * (replicas - 1) / replicas
    return (rounds + pipeline - 1) * micro_s + summed_s
