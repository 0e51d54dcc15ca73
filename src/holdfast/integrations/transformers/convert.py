"""Conversion of models to elastic experts and back, in place. Routers, shared experts and names do not change.

Only the modules of the routed experts are replaced. The parameters stay the same objects. An optimizer can therefore be
made before or after the conversion, and its saved state fits both.
"""

from __future__ import annotations

import re
from typing import Any, TypeVar

from torch import nn

from holdfast import BadInputError, BalancingBias, ElasticExperts, MoE
from holdfast.integrations.transformers.forms import FORMS, make_stack

Model = TypeVar("Model", bound=nn.Module)

#: The buffer of DeepSeek-V3's gate that is added to its scores for the choice alone.
_BIAS = "e_score_correction_bias"
_LOOKS_LIKE_EXPERTS = re.compile("expert|moe|mixture", re.IGNORECASE)


class _ConvertedExperts(ElasticExperts):
    """Elastic experts that keep the module that they replace."""

    def __init__(self, original: nn.Module, name: str, *, dispatch: str, balancing: BalancingBias | None) -> None:
        super().__init__(make_stack(original, name), dispatch=dispatch, balancing=balancing)
        #: in a tuple, so that its parameters are not registered a second time
        self._original = (original,)

    def check_all_hosted(self, name: str) -> None:
        """Check that all experts are on this worker.

        Raises:
            BadInputError: some are on other workers only.
        """
        missing = sorted(set(range(self.experts.experts)) - set(self.experts.hosted))
        if missing:
            raise BadInputError(
                f"{name}: experts {missing} of {self.experts.experts} live on other workers: let one process alone "
                "resume from the job's checkpoint, and make that model plain"
            )

    def restore_original(self) -> nn.Module:
        """Return the original module with the current weights. This module must no longer be used."""
        stack, (original,) = self.experts, self._original
        rows = [stack.row(expert) for expert in range(stack.experts)]
        if rows != list(range(stack.rows)):
            for weight in stack.weights().values():
                weight.data = weight.data[rows]
        return original


def elastic_experts(model: Model, *, dispatch: str = "interval", bias_rate: float = 0.0) -> Model:
    """Replace the experts of a model by elastic experts, which can live on any nodes of a job, in several copies.

    Supported are Mixtral, Qwen2-MoE, Qwen3-MoE, DeepSeek-V2 and -V3, OLMoE and gpt-oss, made from a config or loaded
    from disk. All workers must make the same model: load the same weights, or call `torch.manual_seed` before making
    it.

    Args:
        model: changed in place.
        dispatch: how tokens are distributed among an expert's replicas (see `holdfast.MoE`).
        bias_rate: by how much the bias of DeepSeek-V3's gates moves at each step, to balance the experts without a loss
            (transformers itself never moves it); 0: not at all.

    Returns:
        The model.

    Raises:
        BadInputError: the model has no experts, experts of an unknown class, or weights that do not match; or
            bias_rate is set and a gate has no bias.
    """
    names = [name for name, module in _named_modules(model) if type(module).__name__ in FORMS]
    strange = _find_unknown_experts(model)
    if strange or not names:
        raise BadInputError(_describe_unknown(model, strange))
    layers = [
        _ConvertedExperts(
            model.get_submodule(name), name, dispatch=dispatch, balancing=_make_balancing(model, name, bias_rate)
        )
        for name in names
    ]
    for name, layer in zip(names, layers, strict=True):
        model.set_submodule(name, layer)
    return model


def plain_experts(model: Model) -> Model:
    """Convert an elastic model back, for `save_pretrained` and for programs that do not know holdfast.

    Args:
        model: changed in place. All of its experts must be on this worker, as in a script that runs alone.

    Returns:
        The model.

    Raises:
        BadInputError: it has no elastic experts, or some are on other workers only.
    """
    found = [(name, module) for name, module in _named_modules(model) if isinstance(module, _ConvertedExperts)]
    if not found:
        raise BadInputError(f"{type(model).__name__} has no elastic experts: call elastic_experts(model) first")
    for name, layer in found:
        layer.check_all_hosted(name)
    for name, layer in found:
        model.set_submodule(name, layer.restore_original())
    return model


def _named_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    untyped: Any = model
    return list(untyped.named_modules())


def _make_balancing(model: nn.Module, name: str, rate: float) -> BalancingBias | None:
    """Return the balancing bias of the gate next to the experts `name`, or None if the rate is 0.

    Raises `BadInputError` if there is no gate with DeepSeek-V3's buffer.
    """
    if not rate:
        return None
    block: Any = model.get_submodule(name.rpartition(".")[0])
    gate = getattr(block, "gate", None)
    if not isinstance(gate, nn.Module) or _BIAS not in dict(gate.named_buffers()):
        raise BadInputError(f"bias_rate is {rate}, but the gate next to {name} has no buffer {_BIAS!r}: leave it out")
    return BalancingBias(gate=gate, name=_BIAS, rate=rate)


def _find_unknown_experts(model: nn.Module) -> list[str]:
    """Return modules that seem to hold experts but are of an unknown class, each with its class."""
    return [
        f"{name} is a {type(module).__name__}"
        for name, module in _named_modules(model)
        if re.search("Experts?$", type(module).__name__) and type(module).__name__ not in FORMS
    ]


def _describe_unknown(model: nn.Module, strange: list[str]) -> str:
    """Return the reason why a model cannot be converted: elastic already, experts of an unknown class, or no experts.

    If `strange` is empty, modules whose class names look like experts are named instead.
    """
    known = f"supported are {', '.join(FORMS)}"
    if any(isinstance(module, MoE | ElasticExperts) for _, module in _named_modules(model)):
        return f"{type(model).__name__} has elastic experts already: there is nothing to convert"
    alike = strange or [
        f"{name} is a {type(module).__name__}"
        for name, module in _named_modules(model)
        if name and _LOOKS_LIKE_EXPERTS.search(_remove_family_name(module))
    ]
    if alike:
        return f"{alike[0]}, and experts of this class are not supported: {known}"
    return f"{type(model).__name__} has no experts: {known}"


def _remove_family_name(module: nn.Module) -> str:
    """Return the name of the module's class, without the prefix of its model family if `FORMS` has that family.

    Otherwise the "Moe" in Qwen2MoeAttention would look like experts.
    """
    name = type(module).__name__
    families = (form.removesuffix("Experts") for form in FORMS)
    return name.removeprefix(next((family for family in families if name.startswith(family)), ""))
