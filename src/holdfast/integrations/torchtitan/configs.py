"""The use of torchtitan's configuration by a job: layout, check of unsupported settings, trials on CPUs."""

from __future__ import annotations

from typing import Any

from holdfast import BadInputError, Layout
from holdfast.integrations.torchtitan.package import import_module

#: settings of torchtitan that must be 1, and the remedy
_ONE = {
    "data_parallel_replicate_degree": "there are as many replicas as nodes have room for, which holdfast keeps equal",
    "pipeline_parallel_degree": "pipeline stages cannot be trained yet; spread the model by shards and tensors",
    "context_parallel_degree": "contexts cannot be spread yet; spread the model by shards and tensors",
    "expert_parallel_degree": "experts that may be lost with a node are holdfast.MoE's (docs/experts.md)",
}


def layout_of(config: Any) -> Layout:
    """Return how the workers of a node share one replica, for `holdfast.init(layout=...)`.

    Args:
        config: a `Trainer.Config`. Its data_parallel_shard_degree and tensor_parallel_degree are used.

    Raises:
        BadInputError: another kind of parallelism is set, or the number of shards is not given.
    """
    parallelism = config.parallelism
    for name, instead in _ONE.items():
        if getattr(parallelism, name) != 1:
            raise BadInputError(f"parallelism.{name} is {getattr(parallelism, name)}, and must be 1: {instead}")
    shard = parallelism.data_parallel_shard_degree
    if shard < 1:
        raise BadInputError(
            f"parallelism.data_parallel_shard_degree is {shard}, so it depends on the number of "
            "workers, which changes: give the number of workers of a node that share one replica, or 1"
        )
    return Layout(shard=shard, tensor=parallelism.tensor_parallel_degree)


def check_config(config: Any) -> None:
    """Check that the config asks for nothing that the job does itself or cannot do.

    Raises:
        BadInputError: a setting must be changed. The message names it and the remedy.
    """
    if config.model_spec is None:
        raise BadInputError("config.model_spec is None: take a config of torchtitan's registries, or set one")
    if config.model_spec.post_optimizer_build_fn is not None:
        raise BadInputError(
            f"{config.model_spec.name} balances its experts by a hook of its optimizer, which only sees one "
            "replica: a job cannot train its experts; see holdfast.MoE (docs/experts.md)"
        )
    training = config.training
    if training.global_batch_size < 1:
        raise BadInputError(
            f"training.global_batch_size is {training.global_batch_size}, so it depends on the number "
            "of workers, which changes: give the number of samples of a step"
        )
    refused = {
        "checkpoint.enable": (config.checkpoint.enable, "the job saves its state: give --checkpoint-dir to it instead"),
        "validator.enable": (
            config.validator.enable,
            "let the job evaluate: trainer.protect(data), then job.evaluate()",
        ),
        "profiler.enable_profiling": (config.profiler.enable_profiling, "use torch.profiler around a loop of your own"),
        "profiler.enable_memory_snapshot": (
            config.profiler.enable_memory_snapshot,
            "call torch's own functions for it",
        ),
        "training.enable_cpu_offload": (training.enable_cpu_offload, "parameters must be on the worker's device"),
    }
    for name, (given, instead) in refused.items():
        if given:
            raise BadInputError(f"{name} is {given}, and must be False: {instead}")


def trial_on_cpu(config: Any) -> Any:
    """Change a config in place so that its model can be trained on a CPU, for trials. Return it.

    torch has no backward pass of FlexAttention on CPUs, and no varlen attention at all. Both are replaced by
    `scaled_dot_product_attention` over the full window, also across the documents in it. All computation is in float32,
    and nothing is compiled.
    """
    attention = import_module("models.common.attention")
    plain = attention.ScaledDotProductAttention.Config
    for kind in (attention.FlexAttention.Config, attention.VarlenAttention.Config):
        for _, found, parent, name in list(config.model_spec.traverse(kind)):
            replaced = plain(sharding_config=found.sharding_config)
            setattr(parent, name, replaced)
    config.training.mixed_precision_param = "float32"
    config.compile.enable = False
    return config
