"""The modules of transformers that hold a layer's experts, and the storage of their weights.

E experts, D model dimension, H hidden size. Each has a gate and an up projection, stored as one, and a down projection.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from holdfast import BadInputError, StackedExperts


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertForm:
    """How a class stores its experts."""

    #: names of its parameters, by their names in `StackedExperts`
    parameters: Mapping[str, str]
    #: whether the matrices are stored as in nn.Linear
    outputs_first: bool


_LINEAR = ExpertForm(parameters={"w1": "gate_up_proj", "w2": "down_proj"}, outputs_first=True)
_BIASED = ExpertForm(
    parameters={"w1": "gate_up_proj", "w2": "down_proj", "b1": "gate_up_proj_bias", "b2": "down_proj_bias"},
    outputs_first=False,
)

#: Storage by class. Each is tested: forward, backward, and conversion in both directions.
FORMS: Mapping[str, ExpertForm] = {
    "MixtralExperts": _LINEAR,
    "Qwen2MoeExperts": _LINEAR,
    "Qwen3MoeExperts": _LINEAR,
    "DeepseekV2Experts": _LINEAR,
    "DeepseekV3Experts": _LINEAR,
    "OlmoeExperts": _LINEAR,
    "GptOssExperts": _BIASED,
}


def make_stack(experts: nn.Module, name: str) -> StackedExperts:
    """Return the experts as a stack of the module's own parameters: the same objects in their layout, without a copy.

    The activation between the projections stays the module's.

    Args:
        experts: a module of a class in `FORMS`.
        name: the module's name, for messages.

    Raises:
        BadInputError: weights are missing, not loaded, of another number of experts, or do not fit each other.
    """
    kind, module = type(experts).__name__, _untyped(experts)
    form = FORMS[kind]
    weights: dict[str, Any] = {role: getattr(experts, path, None) for role, path in form.parameters.items()}
    lacking = [path for role, path in form.parameters.items() if not isinstance(weights[role], nn.Parameter)]
    if lacking:
        raise BadInputError(f"{name} has no parameter {lacking[0]!r}: its weights do not match {kind}")
    if any(weight.is_meta for weight in weights.values()):
        raise BadInputError(f"the weights of {name} are not loaded yet (they are on the meta device): load them first")
    try:
        stack = StackedExperts(**weights, between=module._apply_gate, outputs_first=form.outputs_first)
    except BadInputError as error:
        raise BadInputError(f"{name}: {error}") from None
    if stack.experts != module.num_experts:
        raise BadInputError(
            f"{name} is for {module.num_experts} experts, but its weights are of {stack.experts}: they do not match"
        )
    return stack


def _untyped(module: nn.Module) -> Any:
    return module
