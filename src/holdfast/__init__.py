"""Keeps large PyTorch training jobs running through failures."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.errors import BadInputError, HoldfastError, JobFailedError, StepUseError, UnreachableError

if TYPE_CHECKING:
    from holdfast.protocol.layouts.layout import Layout
    from holdfast.runtime.data.datasets import Stream
    from holdfast.runtime.moe.experts.stack import StackedExperts
    from holdfast.runtime.moe.gates.balancing import BalancingBias
    from holdfast.runtime.moe.gates.gate import Choice, TopKGate
    from holdfast.runtime.moe.layer.expert_layer import ElasticExperts
    from holdfast.runtime.moe.layer.moe_layer import MoE
    from holdfast.runtime.session.job import Job, init
    from holdfast.runtime.session.step import Step

__all__ = [
    "BadInputError",
    "BalancingBias",
    "Choice",
    "ElasticExperts",
    "HoldfastError",
    "Job",
    "JobFailedError",
    "Layout",
    "MoE",
    "StackedExperts",
    "Step",
    "StepUseError",
    "Stream",
    "TopKGate",
    "UnreachableError",
    "init",
]

_HOMES = {
    "BalancingBias": "holdfast.runtime.moe.gates.balancing",
    "Choice": "holdfast.runtime.moe.gates.gate",
    "ElasticExperts": "holdfast.runtime.moe.layer.expert_layer",
    "Job": "holdfast.runtime.session.job",
    "Layout": "holdfast.protocol.layouts.layout",
    "MoE": "holdfast.runtime.moe.layer.moe_layer",
    "StackedExperts": "holdfast.runtime.moe.experts.stack",
    "Step": "holdfast.runtime.session.step",
    "Stream": "holdfast.runtime.data.datasets",
    "TopKGate": "holdfast.runtime.moe.gates.gate",
    "init": "holdfast.runtime.session.job",
}


def __getattr__(name: str) -> object:
    """Return `__version__` or a public name of the runtime. The runtime, and with it torch, is imported only now.

    Raises:
        AttributeError: the name is not public.
    """
    if name == "__version__":
        import importlib.metadata

        return importlib.metadata.version("holdfast")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
