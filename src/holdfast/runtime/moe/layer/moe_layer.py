"""The MoE layer: usable alone, and over any group and placement that it is bound to.

Shape letters: T tokens, D model dimension, H hidden size, E experts, N ranks, K experts per token, A assignments (T*K),
R rows of stacked weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from holdfast.errors import BadInputError
from holdfast.planning import DispatchScheme, scheme_named
from holdfast.planning.arrays import IntArray
from holdfast.runtime.groups.communicator import LocalCommunicator
from holdfast.runtime.moe.holding.hosts import LayerPlacement, replicas_of
from holdfast.runtime.moe.kernels.choose import kernels_for
from holdfast.runtime.moe.kernels.interface import Question, TokenKernels
from holdfast.runtime.moe.layer import token_exchange as exchange
from holdfast.runtime.moe.layer.emulation import Emulation
from holdfast.runtime.moe.layer.expert_clock import ExpertClock
from holdfast.runtime.moe.layer.experts import Activation, Experts
from holdfast.runtime.moe.layer.gate import Gate
from holdfast.runtime.moe.layer.rounds import StepState
from holdfast.runtime.moe.layer.routing import Routing
from holdfast.runtime.moe.layer.token_exchange import Channel, Route

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
class _Agreement:
    """What the ranks' headers say together: assignments per expert and source `(E, N)`, and the dtype of the tokens."""

    tokens_EN: torch.Tensor
    #: The same summed over the sources, on the host, `(E,)`.
    loads: IntArray
    dtype: torch.dtype


class MoE(nn.Module):
    """A feed-forward block of which each token uses `top_k` of `experts`.

    Built in a script it is complete: all experts live here. In a job, holdfast binds it to a group and a placement,
    and keeps only some of them.
    """

    def __init__(
        self,
        dim: int,
        hidden: int,
        experts: int,
        top_k: int = 2,
        *,
        activation: Activation = F.gelu,
        aux_loss: float = 0.0,
        seed: int | None = None,
        layer: int = 0,
        routing: Routing | None = None,
        dispatch: str = "interval",
    ) -> None:
        """Make the layer.

        Args:
            dim, hidden: of the tokens, and inside each expert.
            experts: how many there are in the whole job.
            top_k: how many of them each token uses.
            activation: between an expert's two matrices.
            aux_loss: coefficient of the load-balancing loss in `self.aux_loss`; add that to your loss.
            seed: of the weights; by default drawn from torch's own generator, so that `torch.manual_seed` fixes it.
            layer: tells layers of one seed apart.
            routing: fixed assignments in place of the gate's choice.
            dispatch: how tokens are shared among an expert's replicas: "interval" (evenly, in few messages),
                "proportional" (evenly, in proportion: Lazarus, Algorithm 1) or "minmax" (so that the busiest rank
                computes as few as possible).

        Raises:
            BadInputError: a number is out of range, or there is no such dispatch.
        """
        super().__init__()
        if min(dim, hidden, experts) < 1 or not 1 <= top_k <= experts:
            raise BadInputError(
                f"MoE(dim={dim}, hidden={hidden}, experts={experts}, top_k={top_k}): all must be at least 1, and top_k "
                "at most experts"
            )
        if seed is None:
            seed = int(torch.randint(1 << 62, ()))
        self.top_k = top_k
        self.routing = routing
        self.scheme = scheme_named(dispatch)
        #: An emulated accelerator; None: expert computation takes as long as it takes.
        self.emulation: Emulation | None = None
        #: Measures the experts' computation; None: nobody asks.
        self.clock: ExpertClock | None = None
        gate_seed = torch.Generator().manual_seed((seed * 1_000_003 + layer) % (1 << 63))
        self.gate = Gate(dim, experts, top_k, aux_loss, gate_seed)
        self.experts = Experts(dim, hidden, experts, activation, seed=seed, layer=layer)
        #: The load-balancing loss of the last forward, a scalar; 0 without a coefficient.
        self.aux_loss = torch.zeros(())
        state = StepState()
        self.binding = Binding(
            channel=Channel(comm=LocalCommunicator(), state=state),
            state=state,
            index=0,
            replicas=np.ones((experts, 1), dtype=np.int64),
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
        replicas = replicas_of(placement, self.gate.experts)
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

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the experts' weighted outputs, `(..., D)` like the tokens.

        Raises:
            BadInputError: not this layer's turn, or the ranks do not agree about dtype or gradients.
        """
        state = self.binding.state
        self.binding.channel.enter(self.binding.index)
        tokens_TD = tokens.reshape(-1, tokens.shape[-1])
        chosen_TK = None
        if self.routing is not None:
            chosen_TK = self.routing.assign(state.step, state.micro_batch, tokens_TD.shape[0]).to(tokens.device)
        choice = self.gate(tokens_TD, chosen_TK)
        self.aux_loss = choice.aux_loss
        mixed_TD = self._through_experts(tokens_TD, choice.experts, choice.weights, _wire_dtype(tokens))
        return tokens * 0.0 if mixed_TD is None else mixed_TD.view(tokens.shape)

    def serve(self) -> torch.Tensor:
        """Take part in a forward of the other ranks without tokens of one's own.

        Returns:
            `(0, D)`: its backward takes part in theirs.
        """
        weight = self.experts.w1
        none_TD = weight.new_empty((0, self.experts.dim))
        none_TK = torch.empty((0, self.top_k), dtype=torch.int64, device=weight.device)
        self.binding.channel.enter(self.binding.index)
        served_TD = self._through_experts(none_TD, none_TK, none_TK.to(weight.dtype), None)
        return none_TD.requires_grad_() if served_TD is None else served_TD

    def _through_experts(
        self, tokens_TD: torch.Tensor, chosen_TK: torch.Tensor, weights_TK: torch.Tensor, dtype: torch.dtype | None
    ) -> torch.Tensor | None:
        """Return the weighted outputs of each token's experts, `(T, D)`; None where the step is void."""
        assigned_A = chosen_TK.reshape(-1)
        agreement = self._agree(torch.bincount(assigned_A, minlength=self.gate.experts), dtype)
        if agreement is None:
            return None
        self.binding.state.count(self.binding.index, agreement.loads)
        binding, experts = self.binding, self.experts
        kernels = binding.kernels or kernels_for(tokens_TD.device, agreement.dtype)
        movement = kernels.plan(
            Question(
                assigned_A=assigned_A,
                tokens_EN=agreement.tokens_EN,
                replicas=binding.replicas,
                rank=binding.channel.rank,
                row_experts=experts.row_experts,
                scheme=binding.scheme,
            )
        )
        if torch.is_grad_enabled() and not tokens_TD.requires_grad:
            # The backward exchange must run on every rank, or on none.
            tokens_TD = tokens_TD.detach().requires_grad_()
        route = Route(channel=binding.channel, movement=movement, kernels=kernels, top_k=self.top_k)
        by_row_AD = exchange.to_experts(tokens_TD.to(agreement.dtype), route)
        done_AD = self._compute(by_row_AD, movement.row_ends)
        return exchange.from_experts(done_AD, weights_TK, route, tokens_TD.dtype)

    def _compute(self, tokens_AD: torch.Tensor, row_ends_R: torch.Tensor) -> torch.Tensor:
        """Return what the experts make of their rows, `(A, D)`; what is void counts for nothing, and is not timed."""
        if self.binding.state.void is not None:
            return self.experts(tokens_AD, row_ends_R)
        if self.clock is None:
            return self._on_accelerator(tokens_AD, row_ends_R)
        return self.clock.run(self._on_accelerator, tokens_AD, row_ends_R)

    def _on_accelerator(self, tokens_AD: torch.Tensor, row_ends_R: torch.Tensor) -> torch.Tensor:
        if self.emulation is None:
            return self.experts(tokens_AD, row_ends_R)
        return self.emulation.run(self.experts, tokens_AD, row_ends_R)

    def _agree(self, counts_E: torch.Tensor, dtype: torch.dtype | None) -> _Agreement | None:
        """Gather the counts, with what must be the same on all ranks; None where the step is void."""
        gradients = 1 + int(torch.is_grad_enabled())
        serving = dtype is None
        head = [self.binding.index, 0, 0] if serving else [self.binding.index, _DTYPES.index(dtype), gradients]
        header = torch.cat([torch.tensor(head, dtype=torch.int64).to(counts_E.device), counts_E])
        gathered = self.binding.channel.all_gather(header)
        if gathered is None:
            return None
        table = gathered.cpu().numpy()
        return _Agreement(
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
        return dtype or self.experts.w1.dtype


def _wire_dtype(tokens: torch.Tensor) -> torch.dtype:
    """Return the dtype that tokens travel and are computed in: autocast's where it is on."""
    kind = tokens.device.type
    if torch.is_autocast_enabled(kind) and tokens.dtype != torch.float64:
        return torch.get_autocast_dtype(kind)
    return tokens.dtype


def moe_layers(model: nn.Module) -> list[MoE]:
    """Return a model's MoE layers in the order of registration, in which they must be called."""
    return [module for module in model.modules() if isinstance(module, MoE)]


def expert_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that differ from rank to rank, and that the dense reduction must leave out."""
    return [weight for layer in moe_layers(model) for weight in layer.experts.weights().values()]


def serve_round(layers: Sequence[MoE]) -> None:
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
