"""Experts that live on any ranks, in any number of copies: tokens go to them and come back weighted.

Shape letters: T tokens, D model dimension, E experts, N ranks, K experts per token, A assignments (T*K), R rows of
stacked weights.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from holdfast.errors import BadInputError
from holdfast.planning import DispatchScheme, scheme_named
from holdfast.planning.arrays import IntArray
from holdfast.runtime.groups.communicator import LocalCommunicator
from holdfast.runtime.moe.experts.emulation import Emulation
from holdfast.runtime.moe.experts.expert_clock import ExpertClock
from holdfast.runtime.moe.experts.stack import ExpertStack
from holdfast.runtime.moe.gates.balancing import BalancingBias
from holdfast.runtime.moe.gates.gate import check_expert_numbers
from holdfast.runtime.moe.hosts import LayerPlacement, count_layer_replicas
from holdfast.runtime.moe.kernels.choose import kernels_for
from holdfast.runtime.moe.kernels.interface import DispatchInputs, TokenKernels
from holdfast.runtime.moe.layer import capacity
from holdfast.runtime.moe.layer import token_exchange as exchange
from holdfast.runtime.moe.layer.rounds import StepState
from holdfast.runtime.moe.layer.same_tokens import TokenSplit, check_no_dtensor
from holdfast.runtime.moe.layer.token_exchange import Channel, Route
from holdfast.runtime.options import check_real

#: What crosses the wire, as numbers; 0 is a rank that only serves.
_DTYPES = (None, torch.float32, torch.bfloat16, torch.float16, torch.float64)
_HEADER = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Binding:
    """The group that a layer works in, its place among the model's MoE layers, and who hosts what."""

    channel: Channel
    #: What the layers of this worker know of the step under way, as the channel does.
    state: StepState
    index: int
    #: R, replicas per expert and rank, `(E, N)`.
    replicas: IntArray
    scheme: DispatchScheme
    #: What plans and moves the rows; None: the fastest for their device and dtype.
    kernels: TokenKernels | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class _GatheredCounts:
    """What the ranks' headers say together: assignments per expert and source `(E, N)`, and the dtype of the tokens."""

    tokens_EN: torch.Tensor
    #: The same summed over the sources, on the host, `(E,)`.
    loads: IntArray
    dtype: torch.dtype


class ExpertLayer(nn.Module):
    """A layer of experts, whoever chooses among them.

    Built in a script it is complete: all experts live here. In a job, holdfast binds it to a group and a placement,
    and keeps only some of them.
    """

    def __init__(
        self,
        experts: ExpertStack,
        *,
        dispatch: str = "interval",
        capacity_factor: float | None = None,
        balancing: BalancingBias | None = None,
    ) -> None:
        """Make the layer.

        Args:
            experts: all of them.
            dispatch: how tokens are shared among an expert's replicas: "interval" (evenly, in few messages),
                "proportional" (evenly, in proportion: Lazarus, Algorithm 1) or "minmax" (so that the busiest rank
                computes as few as possible).
            capacity_factor: an expert takes so many times its even share of a micro-batch's tokens; those beyond do
                without it. None: all that are sent to it.
            balancing: the gate's bias, where it is balanced without a loss.

        Raises:
            BadInputError: there is no such dispatch, or the capacity is not above 0.
        """
        super().__init__()
        check_real(capacity_factor=0.0 if capacity_factor is None else capacity_factor)
        if capacity_factor is not None and not 0 < capacity_factor < math.inf:
            raise BadInputError(
                f"capacity_factor is {capacity_factor}: it must be above 0 (1 is an expert's even share of a "
                "micro-batch), or None for no limit"
            )
        self.experts = experts
        self.scheme = scheme_named(dispatch)
        self.capacity_factor = capacity_factor
        self.balancing = balancing
        #: An emulated accelerator; None: expert computation takes as long as it takes.
        self.emulation: Emulation | None = None
        #: Other places of this unit that have the same tokens; None: there are none.
        self.token_split: TokenSplit | None = None
        #: Measures the experts' computation; None: nobody asks.
        self.clock: ExpertClock | None = None
        #: What the gate asks to add to the loss, of the last forward, a scalar; 0 where it asks for nothing.
        self.aux_loss = torch.zeros(())
        state = StepState()
        self.binding = Binding(
            channel=Channel(comm=LocalCommunicator(), state=state),
            state=state,
            index=0,
            replicas=np.ones((experts.experts, 1), dtype=np.int64),
            scheme=self.scheme,
        )

    def bind(
        self,
        channel: Channel,
        placement: LayerPlacement,
        *,
        index: int = 0,
        scheme: DispatchScheme | None = None,
        kernels: TokenKernels | None = None,
    ) -> None:
        """Work in another group from now on. The experts must be here already (`shards.py`, `migrate.py`).

        Args:
            channel: the group, and the state that all layers of the model share.
            placement: this layer's experts per rank.
            index: this layer's place among the model's MoE layers.
            scheme: how surplus tokens find free capacity; by default the layer's own (`dispatch`).
            kernels: what plans and moves the rows; by default the fastest for their device and dtype.

        Raises:
            ValueError: the placement is not that of this group, or an expert that it says is not here.
        """
        replicas = count_layer_replicas(placement, self.experts.experts)
        if len(placement) != channel.size:
            raise ValueError(f"a placement over {len(placement)} ranks does not fit a group of {channel.size}")
        mine = tuple(sorted(set(placement[channel.rank])))
        # More may live here while a migration is under way: they are sent no tokens.
        if not set(mine) <= set(self.experts.hosted):
            raise ValueError(f"layer {index}: experts {self.experts.hosted} live here, the placement says {mine}")
        self.binding = Binding(
            channel=channel,
            state=channel.state,
            index=index,
            replicas=replicas,
            scheme=scheme or self.scheme,
            kernels=kernels,
        )

    def apply_experts(self, tokens: torch.Tensor, chosen_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
        """Return the experts' weighted outputs, `(..., D)` like the tokens; zeros where the step is void.

        Args:
            chosen_TK: experts of each token, int64.
            weights_TK: theirs.

        Raises:
            BadInputError: not this layer's turn, or the ranks do not agree about dtype or gradients.
        """
        binding, same = self.binding, self.token_split
        binding.channel.enter_layer(binding.index)
        tokens_TD, count = tokens.reshape(-1, tokens.shape[-1]), chosen_TK.shape[0]
        mine = slice(0, count)
        if same is not None:
            same.check_same_tokens(tokens_TD)
            mine = same.own_slice(count)
            tokens_TD, weights_TK = same.split(tokens_TD, weights_TK)
        if self.balancing is not None and torch.is_grad_enabled():
            chosen_A = chosen_TK[mine].reshape(-1)
            binding.state.micro_batch_choices[binding.index] = torch.bincount(chosen_A, minlength=self.experts.experts)
        mixed_TD = self._apply_within_capacity(tokens_TD, chosen_TK, mine, weights_TK, _wire_dtype(tokens))
        if mixed_TD is None:
            mixed_TD = _zero_output(tokens_TD, weights_TK)
        if binding.channel.size > 1 and mixed_TD.requires_grad:
            binding.state.output = get_gradient_edge(mixed_TD), mixed_TD.detach().new_zeros(()).expand(mixed_TD.shape)
        if same is not None:
            mixed_TD = same.join(mixed_TD, count)
        return mixed_TD.view(tokens.shape)

    def _apply_within_capacity(
        self,
        tokens_TD: torch.Tensor,
        chosen_TK: torch.Tensor,
        mine: slice,
        weights_TK: torch.Tensor,
        dtype: torch.dtype,
    ) -> torch.Tensor | None:
        """Return the weighted outputs of those tokens that are this place's, `(T, D)`; None where the step is void.

        Args:
            chosen_TK: experts of all tokens: those that came to an expert first find room there.
            mine: which tokens are this place's; `tokens_TD`, `weights_TK`: theirs.
        """
        if self.capacity_factor is None:
            return self._exchange_and_compute(tokens_TD, chosen_TK[mine], weights_TK, dtype)
        count, top_k = weights_TK.shape
        kept_M = capacity.select_assignments(chosen_TK, self.experts.experts, self.capacity_factor)
        first = mine.start * top_k
        kept_M = kept_M[(kept_M >= first) & (kept_M < mine.stop * top_k)] - first
        chosen_M1, weights_M1 = (x.reshape(-1)[kept_M].unsqueeze(1) for x in (chosen_TK[mine], weights_TK))
        kept_MD = capacity.gather_kept(tokens_TD, kept_M, top_k)
        mixed_MD = self._exchange_and_compute(kept_MD, chosen_M1, weights_M1, dtype)
        return None if mixed_MD is None else capacity.sum_kept(mixed_MD, kept_M, count, top_k)

    def serve(self) -> torch.Tensor:
        """Take part in a forward of the other ranks without tokens of one's own.

        Returns:
            `(0, D)`: its backward takes part in theirs.
        """
        device, dtype = self.experts.device, self.experts.dtype
        none_TD = torch.empty((0, self.experts.dim), device=device, dtype=dtype)
        none_TK = torch.empty((0, 1), dtype=torch.int64, device=device)
        self.binding.channel.enter_layer(self.binding.index)
        served_TD = self._exchange_and_compute(none_TD, none_TK, none_TK.to(dtype), None)
        return none_TD.requires_grad_() if served_TD is None else served_TD

    def _exchange_and_compute(
        self, tokens_TD: torch.Tensor, chosen_TK: torch.Tensor, weights_TK: torch.Tensor, dtype: torch.dtype | None
    ) -> torch.Tensor | None:
        """Return the weighted outputs of each token's experts, `(T, D)`; None where the step is void."""
        assigned_A = chosen_TK.reshape(-1)
        agreement = self._gather_counts(torch.bincount(assigned_A, minlength=self.experts.experts), dtype)
        if agreement is None:
            return None
        self.binding.state.add_loads(self.binding.index, agreement.loads)
        binding = self.binding
        kernels = binding.kernels or kernels_for(tokens_TD.device, agreement.dtype)
        movement = kernels.plan(
            DispatchInputs(
                assigned_A=assigned_A,
                tokens_EN=agreement.tokens_EN,
                replicas=binding.replicas,
                rank=binding.channel.rank,
                row_experts=self.experts.row_experts,
                scheme=binding.scheme,
            )
        )
        if torch.is_grad_enabled() and not tokens_TD.requires_grad:
            # The backward exchange must run on every rank, or on none.
            tokens_TD = tokens_TD.detach().requires_grad_()
        route = Route(channel=binding.channel, movement=movement, kernels=kernels, top_k=chosen_TK.shape[1])
        by_row_AD = exchange.to_experts(tokens_TD.to(agreement.dtype), route)
        done_AD = self._compute(by_row_AD, movement.row_ends)
        return exchange.from_experts(done_AD, weights_TK, route, tokens_TD.dtype)

    def _compute(self, tokens_AD: torch.Tensor, row_ends_R: torch.Tensor) -> torch.Tensor:
        """Return what the experts make of their rows, `(A, D)`; what is void counts for nothing, and is not timed."""
        if self.binding.state.void is not None:
            return self.experts(tokens_AD, row_ends_R)
        if self.clock is None or not torch.is_grad_enabled():  # (it measures forward and backward)
            return self._compute_emulated(tokens_AD, row_ends_R)
        return self.clock.run(self._compute_emulated, tokens_AD, row_ends_R)

    def _compute_emulated(self, tokens_AD: torch.Tensor, row_ends_R: torch.Tensor) -> torch.Tensor:
        if self.emulation is None:
            return self.experts(tokens_AD, row_ends_R)
        return self.emulation.run(self.experts, tokens_AD, row_ends_R)

    def _gather_counts(self, counts_E: torch.Tensor, dtype: torch.dtype | None) -> _GatheredCounts | None:
        """Gather the counts, with what must be the same on all ranks; None where the step is void."""
        gradients = 1 + int(torch.is_grad_enabled())
        serving = dtype is None
        head = [self.binding.index, 0, 0] if serving else [self.binding.index, _DTYPES.index(dtype), gradients]
        header = torch.cat([torch.tensor(head, dtype=torch.int64).to(counts_E.device), counts_E])
        gathered = self.binding.channel.all_gather(header)
        if gathered is None:
            return None
        table = gathered.cpu().numpy()
        return _GatheredCounts(
            tokens_EN=gathered[:, _HEADER:].T,
            loads=table[:, _HEADER:].sum(axis=0),
            dtype=self._common_dtype(table[:, :_HEADER]),
        )

    def _common_dtype(self, heads: IntArray) -> torch.dtype:
        """Return the dtype of the tokens on the wire; all ranks raise together where they disagree."""
        active = heads[heads[:, 1] > 0]
        if (heads[:, 0] != heads[0, 0]).any() or (active != active[:1]).any():
            raise BadInputError(
                "the ranks call different MoE layers, or with different dtypes or gradient modes "
                f"(layer, dtype, mode per rank): {heads.tolist()}; every rank must run the same forward pass"
            )
        dtype = _DTYPES[int(active[0, 1])] if len(active) else None
        return dtype or self.experts.dtype


class ElasticExperts(ExpertLayer):
    """Experts for a model that has its own router: it says which experts each token uses, and with which weight."""

    def forward(self, tokens_TD: torch.Tensor, chosen_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
        """Return the weighted outputs of each token's experts, `(T, D)`, in the tokens' dtype.

        Args:
            tokens_TD: of one micro-batch.
            chosen_TK: experts of each token, int64.
            weights_TK: theirs.

        Raises:
            BadInputError: the shapes do not fit, there is no such expert, it is not this layer's turn, or the ranks do
                not agree about dtype or gradients.
        """
        check_no_dtensor(tokens_TD)
        dim = self.experts.dim
        if (
            tokens_TD.dim() != 2
            or tokens_TD.shape[1] != dim
            or chosen_TK.shape != weights_TK.shape
            or chosen_TK.shape[:-1] != tokens_TD.shape[:1]
        ):
            raise BadInputError(
                f"the experts are given tokens {tuple(tokens_TD.shape)}, chosen experts {tuple(chosen_TK.shape)} and "
                f"weights {tuple(weights_TK.shape)}: they must be (T, {dim}), (T, K) and (T, K)"
            )
        check_expert_numbers(chosen_TK, "in front of the experts", self.experts.experts)
        return self.apply_experts(tokens_TD, chosen_TK, weights_TK)


def _zero_output(tokens: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
    """Return zeros like the tokens, which depend on all that a result would depend on.

    FSDP2 moves the gradients of those parameters that have one: all places of a unit must come to the same, be the step
    void at one of them and not yet at another.
    """
    return tokens * 0.0 + (weights_TK.sum() * 0.0).to(tokens.dtype)


def _wire_dtype(tokens: torch.Tensor) -> torch.dtype:
    """Return the dtype that tokens travel and are computed in: autocast's where it is on."""
    kind = tokens.device.type
    if torch.is_autocast_enabled(kind) and tokens.dtype != torch.float64:
        return torch.get_autocast_dtype(kind)
    return tokens.dtype


def moe_layers(model: nn.Module) -> list[ExpertLayer]:
    """Return a model's layers of experts in the order of registration, in which they must be called."""
    return [module for module in model.modules() if isinstance(module, ExpertLayer)]


def expert_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that differ from rank to rank, and that the dense reduction must leave out."""
    return [weight for layer in moe_layers(model) for weight in layer.experts.weights().values()]


def serve_round(layers: Sequence[ExpertLayer]) -> None:
    """Take part in one micro-batch of the other ranks, forward and backward, without one of one's own.

    This is the surplus round of a rank whose micro-batches are used up: it sends no token and adds exact zeros; the
    gradients of its experts grow by what the other ranks' tokens ask for. Nothing else of the model is touched.

    Raises:
        BadInputError: the ranks do not agree about the forward pass.
    """
    with torch.enable_grad():
        served = [layer.serve() for layer in layers]
    for out_AD in reversed(served):
        torch.autograd.backward(out_AD, torch.zeros_like(out_AD))
