"""Functions for all MoE layers of a model: bind them to a group, and list the dense parameters."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from holdfast.planning import DispatchScheme
from holdfast.runtime.groups.communicator import Communicator
from holdfast.runtime.moe.hosts import Placement
from holdfast.runtime.moe.layer.expert_layer import ExpertLayer, moe_layers
from holdfast.runtime.moe.layer.rounds import StepState
from holdfast.runtime.moe.layer.token_exchange import Channel

#: Tokens, results, and the gradients of both.
EXCHANGES_PER_LAYER = 4


def bind_layers(
    layers: Sequence[ExpertLayer], comm: Communicator, placement: Placement, *, scheme: DispatchScheme | None = None
) -> StepState:
    """Bind all MoE layers of a model to a group and a placement.

    Args:
        layers: in the order of registration (`moe_layers`).
        comm: the group of all members.
        placement: per layer and rank; the experts must already be on their ranks.
        scheme: matches surplus tokens with free capacity; by default each layer's own scheme.

    Returns:
        The state that the layers share: the caller starts micro-batches there, and checks whether the step is void.

    Raises:
        ValueError: the placement does not fit the group, or the experts on this rank.
    """
    exchanges = EXCHANGES_PER_LAYER * len(layers) if comm.size > 1 else 0
    state = StepState(layers=max(len(layers), 1), expected_exchanges=exchanges)
    channel = Channel(comm=comm, state=state)
    for index, (layer, held) in enumerate(zip(layers, placement, strict=True)):
        layer.bind(channel, held, index=index, scheme=scheme)
    return state


def dense_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that are the same on every rank: all except the experts' own."""
    experts = {id(weight) for layer in moe_layers(model) for weight in layer.experts.weights().values()}
    return [parameter for parameter in model.parameters() if id(parameter) not in experts]
