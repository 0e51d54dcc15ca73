"""The MoE layer: a router, a gate that sees its logits, experts on any ranks, and optional shared experts.

Shape letters: T tokens, D model dimension, E experts, K experts per token.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from holdfast.errors import BadInputError
from holdfast.runtime.moe.experts.module_experts import ExpertFactory, ModuleExperts
from holdfast.runtime.moe.experts.stack import Activation, draw_experts
from holdfast.runtime.moe.gates.gate import TopKGate, check_choice
from holdfast.runtime.moe.gates.router import Router, jitter_stream
from holdfast.runtime.moe.gates.routing import Routing
from holdfast.runtime.moe.layer.expert_layer import ExpertLayer
from holdfast.runtime.moe.layer.same_tokens import check_no_dtensor
from holdfast.runtime.options import check_integers

#: layers of one seed
_MOST_LAYERS = 1 << 32


class MoE(ExpertLayer):
    """A feed-forward block in which each token uses `top_k` of `experts`.

    In a script it is complete: all experts are local. In a job, holdfast binds it to a group and a placement, and keeps
    only some of them.
    """

    def __init__(
        self,
        dim: int,
        hidden: int,
        experts: int,
        top_k: int = 2,
        *,
        gated: bool = False,
        activation: Activation | None = None,
        expert: ExpertFactory | None = None,
        gate: nn.Module | None = None,
        shared: nn.Module | None = None,
        capacity_factor: float | None = None,
        aux_loss: float = 0.0,
        jitter: float = 0.0,
        seed: int | None = None,
        layer: int = 0,
        routing: Routing | None = None,
        dispatch: str = "interval",
    ) -> None:
        """Make the layer.

        Args:
            dim, hidden: size of the tokens, and size inside each expert.
            experts, top_k: number of experts in the whole job, and number of experts that each token uses.
            gated: an expert has a third matrix that gates the input of its last one (SwiGLU).
            activation: inside an expert; by default GELU, or SiLU for gated experts.
            expert: makes an expert from (dim, hidden): any module that turns `(n, dim)` into `(n, dim)` row by row. It
                replaces the two built-in kinds, which are faster.
            gate: turns the router's logits into a `Choice`; by default `TopKGate(experts, top_k, aux_loss=aux_loss)`.
            shared: a module for all tokens; its output is added to the experts', and every worker has all of it.
            capacity_factor, dispatch: see `ExpertLayer`.
            aux_loss: coefficient of the load-balancing loss in `self.aux_loss`; add that to your loss.
            jitter: during training, the router sees tokens times noise from 1 - jitter to 1 + jitter.
            seed: of the weights; by default drawn from torch's generator, so that `torch.manual_seed` determines it.
            layer: distinguishes layers with the same seed.
            routing: fixed assignments that replace the gate's choice.

        Raises:
            BadInputError: an option is out of range, has a wrong type, excludes another one, or `expert` does not make
                a module.
        """
        dim, hidden, experts, top_k = _check_sizes(dim, hidden, experts, top_k)
        seed, layer = _check_seed(seed, layer)
        if gate is not None and aux_loss:
            raise BadInputError(f"aux_loss={aux_loss} is the default gate's: give it to the gate that you pass")
        if expert is not None and (gated or activation is not None):
            raise BadInputError("gated and activation are of the built-in experts: leave them out, or expert")
        if expert is None:
            activation = _check_activation(activation, gated)
            stack = draw_experts(dim, hidden, experts, activation, gate=gated, seed=seed, layer=layer)
        else:
            stack = ModuleExperts(expert, dim, hidden, experts, seed=seed, layer=layer)
        gate = TopKGate(experts, top_k, aux_loss=aux_loss) if gate is None else gate
        balancing = getattr(gate, "balancing", None)
        super().__init__(stack, dispatch=dispatch, capacity_factor=capacity_factor, balancing=balancing)
        self.top_k = top_k
        self.routing = routing
        generator = torch.Generator().manual_seed((seed * 1_000_003 + layer) % (1 << 63))
        self.router = Router(dim, experts, jitter=jitter, generator=generator)
        self.gate = gate
        self.shared = shared

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Route the tokens; return the experts' weighted outputs, shaped like the tokens, plus the shared module's.

        Sets `aux_loss`. A fixed routing replaces the gate's choice.

        Raises:
            BadInputError: the tokens do not fit, the gate's result is not a choice, the shared module's output has
                another shape, another layer should be called, or the ranks do not agree about dtype or gradients.
        """
        check_no_dtensor(tokens)
        if tokens.shape[-1:] != (self.experts.dim,) or not tokens.is_floating_point():
            raise BadInputError(
                f"the layer is given tokens {tuple(tokens.shape)} of {tokens.dtype}: they must be "
                f"(..., {self.experts.dim}), floating-point numbers"
            )
        tokens_TD = tokens.reshape(-1, tokens.shape[-1])
        count, state = tokens_TD.shape[0], self.binding.state
        place = (state.seed, state.step, state.micro_batch, self.binding.index, state.part)
        logits_TE = self.router(tokens_TD, jitter_stream(*place) if self.router.jitter else 0)
        if self.routing is None:
            answer = self.gate(logits_TE)
        else:
            of_all_TK = self.routing.assign(state.step, state.micro_batch, count * state.parts)
            answer = self.gate(logits_TE, of_all_TK[count * state.part :][:count].to(tokens.device))
        choice = check_choice(answer, self.gate, tokens=count, top_k=self.top_k, experts=self.experts.experts)
        self.aux_loss = choice.aux_loss
        mixed = self.apply_experts(tokens, choice.experts, choice.weights)
        return mixed if self.shared is None else mixed + self._compute_shared(self.shared, tokens)

    def _compute_shared(self, shared: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        """Return the shared module's output for all tokens.

        Raises:
            BadInputError: it has another shape than the tokens.
        """
        output: torch.Tensor = shared(tokens)
        if output.shape != tokens.shape:
            raise BadInputError(
                f"the shared module {type(shared).__name__} returned {tuple(output.shape)} for tokens "
                f"{tuple(tokens.shape)}: it must return a tensor of the same shape"
            )
        return output


def _check_sizes(dim: int, hidden: int, experts: int, top_k: int) -> tuple[int, int, int, int]:
    """Return the sizes as Python integers.

    Raises:
        BadInputError: one is not an integer or below 1, or `top_k` is above `experts`.
    """
    check_integers(dim=dim, hidden=hidden, experts=experts, top_k=top_k)
    if min(dim, hidden, experts) < 1 or not 1 <= top_k <= experts:
        raise BadInputError(
            f"MoE(dim={dim}, hidden={hidden}, experts={experts}, top_k={top_k}): all must be at least 1, and top_k at "
            "most experts"
        )
    return int(dim), int(hidden), int(experts), int(top_k)


def _check_seed(seed: int | None, layer: int) -> tuple[int, int]:
    """Return seed and layer number, which determine the weights, as Python integers.

    Without a seed, one is drawn from torch's global generator.

    Raises:
        BadInputError: one is not an integer, or the layer number is out of range.
    """
    seed = int(torch.randint(1 << 62, ())) if seed is None else seed
    check_integers(seed=seed, layer=layer)
    if not 0 <= layer < _MOST_LAYERS:
        raise BadInputError(f"layer is {layer}: it must be 0 or more, and below {_MOST_LAYERS}")
    return int(seed), int(layer)


def _check_activation(activation: Activation | None, gated: bool) -> Activation:
    """Return the activation; by default GELU, or SiLU for gated experts.

    Raises:
        BadInputError: it cannot be called.
    """
    if activation is None:
        return F.silu if gated else F.gelu
    if not callable(activation):
        raise BadInputError(
            f"activation is {activation!r}: it must be a function from tensor to tensor, such as "
            "torch.nn.functional.gelu"
        )
    return activation
