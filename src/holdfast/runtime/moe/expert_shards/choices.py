"""Number of choices of each expert in a step: counted here, summed in the reduction, used in apply.

All numbers are integers, so their sum does not depend on the order of ranks. The biases that follow from it are the
same in every bit on every rank, also after a recovery.

Axes: E experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from holdfast.runtime.groups.communicator import Communicator
from holdfast.runtime.groups.sums import finish_sums, start_sums
from holdfast.runtime.moe.gates.balancing import BalancingBias
from holdfast.runtime.moe.layer.expert_layer import ExpertLayer
from holdfast.runtime.moe.layer.rounds import StepState
from holdfast.runtime.reduction.squares import GradientSummary
from holdfast.runtime.tensors import split_tensor, to_ints


class RoutingChoices:
    """The choices of all layers that balance by a bias; reduced together with the gradients."""

    over_all_workers = True

    def __init__(self, layers: Sequence[ExpertLayer], state: StepState) -> None:
        """Read the counts of the layers from their shared state."""
        self._biases: dict[int, tuple[BalancingBias, int]] = {
            number: (layer.balancing, layer.experts.experts)
            for number, layer in enumerate(layers)
            if layer.balancing is not None
        }
        self._state = state
        self._totals: dict[int, torch.Tensor] = {}

    def reduce_scatter(self, comm: Communicator, scale: float) -> GradientSummary:
        """Sum the choices of all ranks, and keep the sums for `use_reduced`; `scale` is only for gradients.

        All ranks must call it. Nothing is sent if no layer has a bias.

        Returns:
            An empty summary, because choices are not gradients.

        Raises:
            HaltedError, PeerLostError: abandoned or failed. The local choices are intact.
        """
        if self._biases:
            mine = [count for layer in self._biases for count in self._local_counts(layer)]
            # Sent as float64, which is exact up to 2**53, like all counts in the step result.
            total = torch.tensor(finish_sums(start_sums(comm, mine, "routing choices")), dtype=torch.int64)
            sizes = [experts for _, experts in self._biases.values()]
            self._totals = dict(zip(self._biases, split_tensor(total, sizes), strict=True))
        return GradientSummary()

    def all_gather(self, comm: Communicator, factor: float) -> None:
        """Do nothing: every rank has the sums already, and they are not clipped."""

    def use_reduced(self) -> None:
        """Update the biases by the whole step's choices; called once, in apply."""
        for layer, total_E in self._totals.items():
            self._biases[layer][0].update(total_E)
        self._totals = {}

    def _local_counts(self, layer: int) -> list[int]:
        """Return this rank's choices of each expert in this attempt; zeros if the layer was not used."""
        counted_E = self._state.choices.get(layer)
        return to_ints(counted_E) if counted_E is not None else [0] * self._biases[layer][1]
