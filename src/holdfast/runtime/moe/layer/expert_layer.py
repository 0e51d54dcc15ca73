"""A layer of experts on any ranks, in any number of copies: sends tokens to them and combines their outputs.

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
from holdfast.runtime.moe.kernels.interface import DispatchInputs, TokenKernels
from holdfast.runtime.moe.kernels.kernel_choice import kernels_for
from holdfast.runtime.moe.layer import capacity
from holdfast.runtime.moe.layer import token_exchange as exchange
from holdfast.runtime.moe.layer.rounds import StepState
from holdfast.runtime.moe.layer.same_tokens import TokenSplit, check_no_dtensor
from holdfast.runtime.moe.layer.token_exchange import Channel, Route
from holdfast.runtime.options import check_numbers

#: dtypes by their numbers in the header; 0 is a rank without own tokens
_DTYPES = (None, torch.float32, torch.bfloat16, torch.float16, torch.float64)
_HEADER = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Binding:
    """The group and the placement of a layer, and its index among the model's MoE layers."""

    channel: Channel
    #: the state of the step that all layers of this worker share, as in `channel`
    state: StepState
    index: int
    #: R, replicas per expert and rank, `(E, N)`.
    replicas: IntArray
    scheme: DispatchScheme
    #: plans and moves the rows; None for the fastest for their device and dtype
    kernels: TokenKernels | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class _GatheredCounts:
    """The result of gathering the ranks' headers."""

    #: assignments per expert and source rank, `(E, N)`
    tokens_EN: torch.Tensor
    #: their sums over the sources, on the host, `(E,)`
    loads: IntArray
    #: of the tokens
    dtype: torch.dtype


class ExpertLayer(nn.Module):
    """A layer of experts; a subclass or the caller chooses the experts of each token.

    In a script it is complete: all experts are local. In a job, holdfast binds it to a group and a placement, and keeps
    only some of them.
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
            dispatch: division of tokens among an expert's replicas: "interval" (evenly, in few messages),
                "proportional" (evenly, in proportion: Lazarus, Algorithm 1) or "minmax" (the busiest rank computes as
                few tokens as possible).
            capacity_factor: an expert computes at most this many times its even share of a micro-batch's tokens;
                surplus tokens skip it. None for no limit.
            balancing: the gate's bias, if it balances without a loss.

        Raises:
            BadInputError: the dispatch is unknown, or the capacity is not above 0.
        """
        super().__init__()
        check_numbers(capacity_factor=0.0 if capacity_factor is None else capacity_factor)
        if capacity_factor is not None and not 0 < capacity_factor < math.inf:
            raise BadInputError(
                f"capacity_factor is {capacity_factor}: it must be above 0 (1 is an expert's even share of a "
                "micro-batch), or None for no limit"
            )
        self.experts = experts
        self.scheme = scheme_named(dispatch)
        self.capacity_factor = capacity_factor
        self.balancing = balancing
        #: an emulated accelerator, or None
        self.emulation: Emulation | None = None
        #: splits tokens that other local ranks of this replica group have, too; None without such ranks
        self.token_split: TokenSplit | None = None
        #: measures the experts' computation, or None
        self.clock: ExpertClock | None = None
        #: the gate's term of the loss in the last forward, a scalar
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
        """Use another group and placement from now on. The experts must be on this rank (`shards.py`, `migrate.py`).

        Args:
            channel: the group, and the state that all layers of the model share.
            placement: this layer's experts per rank.
            index: this layer's index among the model's MoE layers.
            scheme: matches surplus tokens with free capacity; by default the layer's own (`dispatch`).
            kernels: plans and moves the rows; by default the fastest for their device and dtype.

        Raises:
            ValueError: the placement does not fit the group, or one of its experts is not on this rank.
        """
        replicas = count_layer_replicas(placement, self.experts.experts)
        if len(placement) != channel.size:
            raise ValueError(f"a placement over {len(placement)} ranks does not fit a group of {channel.size}")
        mine = tuple(sorted(set(placement[channel.rank])))
        # During a migration there may be more experts, which get no tokens.
        if not set(mine) <= set(self.experts.hosted):
            raise ValueError(f"layer {index}: experts {self.experts.hosted} are here, but its placement has {mine}")
        self.binding = Binding(
            channel=channel,
            state=channel.state,
            index=index,
            replicas=replicas,
            scheme=scheme or self.scheme,
            kernels=kernels,
        )

    def apply_experts(self, tokens: torch.Tensor, chosen_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
        """Send tokens to their experts; return the weighted outputs, shaped like the tokens; zeros if the step is void.

        Assignments beyond the capacity are dropped. With gradients, choices are counted for the balancing bias. If
        other local ranks have the same tokens, each sends its share of them.

        Args:
            chosen_TK: experts of each token, int64.
            weights_TK: their weights.

        Raises:
            BadInputError: another layer should be called, or the ranks do not agree about dtype or gradients.
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
        """Return the weighted outputs of this local rank's tokens, `(T, D)`, or None if the step is void.

        Assignments beyond the capacity of an expert are dropped, and add zero.

        Args:
            tokens_TD, weights_TK: this local rank's tokens and weights.
            chosen_TK: experts of all tokens, because the capacity is filled in the order of all tokens.
            mine: the tokens of this local rank.
            dtype: in which tokens are sent and computed.
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
        """Take part in a forward pass of the other ranks without own tokens: compute the experts of this rank.

        Returns:
            `(0, D)`: its backward takes part in the other ranks' backward.

        Raises:
            BadInputError: another layer should be called, or the ranks do not agree about dtype or gradients.
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
        """Return the weighted outputs of each token's experts, `(T, D)`, or None if the step is void.

        Gathers all ranks' counts, adds them to the loads, sends the tokens to the experts, computes, and returns the
        results.

        Args:
            dtype: in which tokens are sent and computed; None for a rank that only serves.

        Raises:
            BadInputError: the ranks do not agree about layer, dtype or gradients.
        """
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
        """Return the experts' outputs for their rows, `(A, D)`.

        The clock measures them, unless the step is void or there are no gradients; the emulation slows them unless it
        is void.
        """
        if self.binding.state.void is not None:
            return self.experts(tokens_AD, row_ends_R)
        if self.clock is None or not torch.is_grad_enabled():  # The time per token includes the backward pass.
            return self._compute_emulated(tokens_AD, row_ends_R)
        return self.clock.run(self._compute_emulated, tokens_AD, row_ends_R)

    def _compute_emulated(self, tokens_AD: torch.Tensor, row_ends_R: torch.Tensor) -> torch.Tensor:
        """Return the experts' outputs for their rows, slowed down if an accelerator is emulated."""
        if self.emulation is None:
            return self.experts(tokens_AD, row_ends_R)
        return self.emulation.run(self.experts, tokens_AD, row_ends_R)

    def _gather_counts(self, counts_E: torch.Tensor, dtype: torch.dtype | None) -> _GatheredCounts | None:
        """Gather all ranks' counts of assignments, and check that they agree about layer, dtype and gradient mode.

        Args:
            counts_E: this rank's assignments per expert.
            dtype: of this rank's tokens; None for a rank that only serves.

        Returns:
            The counts and the common dtype, or None if the step is void.

        Raises:
            BadInputError: the ranks disagree.
        """
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
        """Return the dtype of the tokens on the wire; that of the experts if no rank has tokens.

        Args:
            heads: layer, number of the dtype and gradient mode of each rank, `(N, 3)`; a rank that only serves has
                dtype 0.

        Raises:
            BadInputError: the ranks disagree; all ranks raise it together.
        """
        active = heads[heads[:, 1] > 0]
        if (heads[:, 0] != heads[0, 0]).any() or (active != active[:1]).any():
            raise BadInputError(
                "the ranks call different MoE layers, or with different dtypes or gradient modes "
                f"(layer, dtype, mode per rank): {heads.tolist()}; every rank must run the same forward pass"
            )
        dtype = _DTYPES[int(active[0, 1])] if len(active) else None
        return dtype or self.experts.dtype


class ElasticExperts(ExpertLayer):
    """Experts for a model with its own router, which chooses the experts and weights of each token."""

    def forward(self, tokens_TD: torch.Tensor, chosen_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
        """Return the weighted outputs of each token's experts, `(T, D)`, in the tokens' dtype.

        They are zeros if the step is void.

        Args:
            tokens_TD: of one micro-batch.
            chosen_TK: experts of each token, int64.
            weights_TK: their weights.

        Raises:
            BadInputError: the shapes do not fit, an expert does not exist, another layer should be called, or the ranks
                do not agree about dtype or gradients.
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
        check_expert_numbers(chosen_TK, "before the experts", self.experts.experts)
        return self.apply_experts(tokens_TD, chosen_TK, weights_TK)


def _zero_output(tokens: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
    """Return zeros like the tokens, with the autograd dependencies of a real result.

    FSDP2 reduces the gradients of parameters that have one. So all local ranks of a replica group must have gradients
    of the same parameters, even if the step is void on only some of them.
    """
    return tokens * 0.0 + (weights_TK.sum() * 0.0).to(tokens.dtype)


def _wire_dtype(tokens: torch.Tensor) -> torch.dtype:
    """Return the dtype in which tokens are sent and computed: autocast's if it is enabled, else their own. float64
    always stays.
    """
    kind = tokens.device.type
    if torch.is_autocast_enabled(kind) and tokens.dtype != torch.float64:
        return torch.get_autocast_dtype(kind)
    return tokens.dtype


def moe_layers(model: nn.Module) -> list[ExpertLayer]:
    """Return a model's layers of experts in the order of registration, in which they must be called."""
    return [module for module in model.modules() if isinstance(module, ExpertLayer)]


def expert_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that differ between ranks, and are not part of the dense reduction."""
    return [weight for layer in moe_layers(model) for weight in layer.experts.weights().values()]


def serve_round(layers: Sequence[ExpertLayer]) -> None:
    """Take part in one micro-batch of the other ranks, forward and backward, without an own micro-batch.

    A rank without further micro-batches sends no tokens and adds exact zeros. The gradients of its experts grow by the
    other ranks' tokens. The rest of the model is not used.

    Raises:
        BadInputError: the ranks do not agree about the forward pass.
    """
    with torch.enable_grad():
        served = [layer.serve() for layer in layers]
    for out_AD in reversed(served):
        torch.autograd.backward(out_AD, torch.zeros_like(out_AD))
