"""Experts that are any modules: parameters stacked row by row, one call of the module for each expert's tokens.

For experts that the fast path (`stack.py`) does not support.

Shape letters: R rows, D model dimension, A assignments, sorted by row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import nn

from holdfast.errors import BadInputError
from holdfast.runtime.moe.experts.stack import ExpertStack, expert_generator
from holdfast.runtime.tensors import call_with_parameters, fork_rng, seed_all, split_tensor, to_ints

#: Makes one expert of (dim, hidden): a module that turns `(n, D)` into `(n, D)`, row by row.
ExpertFactory = Callable[[int, int], nn.Module]

_RANDOM = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout, nn.RReLU)


class ModuleExperts(ExpertStack):
    """Experts made by a factory."""

    def __init__(self, factory: ExpertFactory, dim: int, hidden: int, experts: int, *, seed: int, layer: int) -> None:
        """Make all experts, each with torch's randomness seeded by (seed, layer, expert), and stack their parameters.

        Args:
            factory: makes one expert from (dim, hidden).
            experts: number of experts in the whole job.

        Raises:
            BadInputError: the factory does not make modules, or makes modules without parameters, with buffers, with
                random numbers, with different parameters, or with shared ones.
        """
        if isinstance(factory, nn.Module) or not callable(factory):
            raise BadInputError(
                f"expert is {_describe_object(factory)}: give a factory, such as a class, that is called with "
                "(dim, hidden) for each expert and returns a module"
            )
        super().__init__(dim, experts)
        modules = [_make_expert(factory, dim, hidden, seed, layer, expert) for expert in range(experts)]
        values = [dict(module.named_parameters()) for module in modules]
        _check_modules(modules, values)
        #: the path of each stacked parameter within a module, by the name of the stack
        self._paths = {path.replace(".", "-"): path for path in values[0]}
        for name, path in self._paths.items():
            stack = torch.stack([parameters[path].detach() for parameters in values])
            self.register_parameter(name, nn.Parameter(stack))
        #: One module without weights, for all rows. In a tuple, so that its parameters are not registered here.
        self._template = (modules[0].to("meta"),)

    def train(self, mode: bool = True) -> ModuleExperts:
        """Set the mode of the module that computes all experts too, which is not registered as a child."""
        self._template[0].train(mode)
        super().train(mode)
        return self

    def forward(self, tokens_AD: torch.Tensor, row_ends_R: torch.Tensor) -> torch.Tensor:
        """Apply each expert on this rank to its tokens, `(A, D)`, by one call of the module with its weights. Experts
        without tokens are skipped.

        Args:
            tokens_AD: sorted by the expert's row in the stacked weights.
            row_ends_R: int32, the end of the tokens of each row.

        Raises:
            BadInputError: a module returned another shape than it was given.
        """
        with torch.autocast(tokens_AD.device.type, enabled=False):
            weights = {name: weight.to(tokens_AD.dtype) for name, weight in self.weights().items()}
            ends = to_ints(row_ends_R)
            sizes = [end - start for start, end in zip([0, *ends[:-1]], ends, strict=True)]
            done = [
                self._compute_expert(row, part_nD, weights)
                for row, part_nD in enumerate(split_tensor(tokens_AD, sizes))
                if part_nD.shape[0]
            ]
        return torch.cat(done) if done else tokens_AD * 0.0

    def _compute_expert(self, row: int, tokens_nD: torch.Tensor, weights: dict[str, torch.Tensor]) -> torch.Tensor:
        """Call the module with the weights of one row.

        Args:
            weights: the stacks, by name, in the dtype of the tokens.

        Raises:
            BadInputError: it does not return a tensor of the same shape.
        """
        (template,) = self._template
        out_nD = call_with_parameters(
            template, {path: weights[name][row] for name, path in self._paths.items()}, tokens_nD
        )
        if not isinstance(out_nD, torch.Tensor) or out_nD.shape != tokens_nD.shape:
            kind = tuple(out_nD.shape) if isinstance(out_nD, torch.Tensor) else type(out_nD).__name__
            raise BadInputError(
                f"an expert ({type(template).__name__}) returned {kind} for tokens of shape {tuple(tokens_nD.shape)}: "
                "it must return a tensor of the same shape"
            )
        return out_nD


def _make_expert(factory: ExpertFactory, dim: int, hidden: int, seed: int, layer: int, expert: int) -> nn.Module:
    """Make one expert, with torch's randomness seeded by (seed, layer, expert); the global generators stay unchanged.

    Raises:
        BadInputError: the factory does not return a module.
    """
    with fork_rng():
        seed_all(expert_generator(seed=seed, layer=layer, expert=expert).initial_seed())
        made = factory(dim, hidden)
    if not isinstance(cast(object, made), nn.Module):
        raise BadInputError(f"expert(dim, hidden) returned {_describe_object(made)}: it must return a module")
    return made


def _describe_object(given: object) -> str:
    return f"the module {type(given).__name__}" if isinstance(given, nn.Module) else repr(given)


def _check_modules(modules: Sequence[nn.Module], values: Sequence[dict[str, nn.Parameter]]) -> None:
    """Refuse modules that cannot be stacked, or that could give other results on another rank.

    Args:
        values: the parameters of each module, by path.

    Raises:
        BadInputError: a module has no parameters, a buffer or random numbers; or modules differ in names, shapes or
            dtypes, or share a parameter.
    """
    first, name = modules[0], type(modules[0]).__name__
    if not values[0]:
        raise BadInputError(f"an expert ({name}) has no parameters: there is nothing to train")
    buffers = [buffer for buffer, _ in first.named_buffers()]
    if buffers:
        raise BadInputError(
            f"an expert ({name}) has the buffer {buffers[0]!r}: only parameters move with an "
            "expert, so make it a parameter"
        )
    random = [type(module).__name__ for module in first.modules() if isinstance(module, _RANDOM)]
    if random:
        raise BadInputError(
            f"an expert ({name}) draws random numbers ({random[0]}): its results would depend on its rank; "
            "put the layer before or after the experts"
        )
    shapes = [{path: (p.shape, p.dtype) for path, p in parameters.items()} for parameters in values]
    for expert, own in enumerate(shapes):
        if own != shapes[0]:
            raise BadInputError(
                f"the factory's experts are not alike: the parameters of expert {expert} have other names, shapes or "
                "dtypes than those of expert 0"
            )
    owners: dict[int, int] = {}
    for expert, parameters in enumerate(values):
        for path, parameter in parameters.items():
            owner = owners.setdefault(id(parameter), expert)
            if owner != expert:
                raise BadInputError(
                    f"experts {owner} and {expert} of the factory share the parameter {path!r}: it must make a new "
                    "module at each call"
                )
