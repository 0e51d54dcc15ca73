"""All MoE layers of a model at once: bind them, and say what the job must know about them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from holdfast.planning import DispatchScheme
from holdfast.runtime.groups.communicator import Communicator
from holdfast.runtime.moe.hosts import Placement
from holdfast.runtime.moe.layer.expert_layer import ExpertLayer, moe_layers
from holdfast.runtime.moe.layer.rounds import StepState
from holdfast.runtime.moe.layer.token_exchange import Channel

#: Tokens out, results back, and the gradients of both.
EXCHANGES_PER_LAYER = 4


def bind_layers(
    layers: Sequence[ExpertLayer], comm: Communicator, placement: Placement, *, scheme: DispatchScheme | None = None
) -> StepState:
    """Bind all MoE layers of a model to a group and a placement.

    Args:
        layers: in the order of registration (`moe_layers`).
        comm: the group of all members.
        placement: per layer and rank; the experts must be here already.
        scheme: how surplus tokens find free capacity; by default each layer's own.

    Returns:
        The state that the layers share: tell it what begins, and ask it whether the step is void.

    Raises:
        ValueError: the placement fits neither the group nor what is here.
    """
    exchanges = EXCHANGES_PER_LAYER * len(layers) if comm.size > 1 else 0
    state = StepState(layers=max(len(layers), 1), expected_exchanges=exchanges)
    channel = Channel(comm=comm, state=state)
    for index, (layer, held) in enumerate(zip(layers, placement, strict=True)):
        layer.bind(channel, held, index=index, scheme=scheme)
    return state


def dense_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that are the same on every rank: all but the experts'."""
    experts = {id(weight) for layer in moe_layers(model) for weight in layer.experts.weights().values()}
    return [parameter for parameter in model.parameters() if id(parameter) not in experts]
