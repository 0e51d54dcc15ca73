"""Routing that follows a recorded trace: the gate decisions of a real training run, as in Lazarus 6.1.

The trace contains tokens per expert, `tokens[iteration, layer, expert]`, and the iterations' numbers.

Shape letters: I iterations, L layers, T tokens, E experts.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from holdfast.errors import BadInputError
from holdfast.runtime.data.randomness import derive_seed
from holdfast.runtime.tensors import from_array

#: Layers of one micro-batch draw from streams this far apart.
_LAYER_STREAM = 1_000_003


class TraceRouting:
    """Draws each token's experts from the loads of one layer; see `Routing`.

    A micro-batch's experts are a pure function of (seed, step, micro-batch, layer). So a micro-batch that is repeated
    after a failure, on any rank, goes to the same experts.
    """

    def __init__(
        self, loads: NDArray[np.float64], iterations: NDArray[np.int64], top_k: int, *, seed: int, stride: float
    ) -> None:
        """Use one layer's loads `(I, E)`; `RoutingTrace.layer_routing` checks and passes them."""
        self._iterations = iterations
        self._top_k = top_k
        self._seed = seed
        self._stride = stride
        # The Gumbel trick draws without replacement, in proportion to the loads. Experts without load are drawn last.
        with np.errstate(divide="ignore"):
            self._log_loads = np.log(loads)

    def assign(self, step: int, micro_batch: int, tokens: int) -> torch.Tensor:
        """Draw the experts of each token, `(T, top_k)`, in proportion to the loads of the recorded iteration whose
        number is nearest to `step` times the stride; the earlier one if two are equally near.

        They depend only on seed, step and micro-batch, and are all different within a row. Experts without load are
        drawn last.
        """
        place = int(np.abs(self._iterations - step * self._stride).argmin())
        key = derive_seed(self._seed, step, micro_batch)
        noise = np.random.Generator(np.random.Philox(key=key)).gumbel(size=(tokens, self._log_loads.shape[1]))
        ranking = np.argsort(-(self._log_loads[place] + noise), axis=1, kind="stable")
        return from_array(np.ascontiguousarray(ranking[:, : self._top_k]).astype(np.int64))


class RoutingTrace:
    """A checked trace."""

    def __init__(self, tokens: ArrayLike, iterations: ArrayLike, *, name: str = "the routing trace") -> None:
        """Check and keep a trace.

        Args:
            tokens: per iteration, layer and expert, `(I, L, E)`, not negative.
            iterations: their numbers, ascending, `(I,)`.
            name: for error messages.

        Raises:
            BadInputError: an array has another shape or no numbers, a load is negative or not finite, or the iterations
                do not ascend.
        """
        loads, numbers = np.asarray(tokens), np.asarray(iterations)
        if loads.ndim != 3 or loads.size == 0 or not np.issubdtype(loads.dtype, np.number):
            raise BadInputError(f"{name}: tokens has shape {loads.shape}, it must be [iteration, layer, expert]")
        if numbers.shape != loads.shape[:1] or not np.issubdtype(numbers.dtype, np.number):
            raise BadInputError(
                f"{name}: iterations has shape {numbers.shape} for {loads.shape[0]} iterations of tokens: give one "
                "number for each"
            )
        self._loads = loads.astype(np.float64)
        bad = ~np.isfinite(self._loads) | (self._loads < 0)
        if bad.any():
            place = tuple(int(index) for index in np.argwhere(bad)[0])
            raise BadInputError(f"{name}: tokens[{', '.join(map(str, place))}] is {loads[place]}: it must be 0 or more")
        self._iterations = numbers.astype(np.int64)
        if (np.diff(self._iterations) <= 0).any():
            raise BadInputError(f"{name}: iterations must ascend")
        self._name = name

    @classmethod
    def read(cls, path: Path) -> RoutingTrace:
        """Read a `.npz` file with `tokens` and `iterations`.

        Raises:
            BadInputError: the file cannot be read, or does not contain a trace.
        """
        try:
            with np.load(path, allow_pickle=False) as arrays:
                missing = [key for key in ("tokens", "iterations") if key not in arrays]
                if missing:
                    raise BadInputError(f"{path} holds {sorted(arrays)}: {' and '.join(missing)} is missing")
                return cls(arrays["tokens"], arrays["iterations"], name=str(path))
        except BadInputError:
            raise
        except (OSError, ValueError, AttributeError, EOFError) as error:  # np.load raises these for other files
            raise BadInputError(f"{path} cannot be read as a routing trace (.npz): {error}") from None

    def check_model(self, layers: int, experts: int) -> None:
        """Refuse a model that the trace does not fit; a trace may have more layers than the model.

        Raises:
            BadInputError: another number of experts, or too few layers.
        """
        _, recorded_layers, recorded_experts = self._loads.shape
        if recorded_experts != experts or recorded_layers < layers:
            raise BadInputError(
                f"{self._name} has {recorded_layers} layers of {recorded_experts} experts, the model has {layers} "
                f"layers of {experts}: give a model of {recorded_experts} experts and at most {recorded_layers} layers"
            )

    def layer_loads(self, layer: int) -> NDArray[np.float64]:
        """Return the recorded loads of a layer, `(I, E)`; an iteration without tokens counts as uniform."""
        loads = self._loads[:, layer]
        return np.where(loads.sum(axis=1, keepdims=True) > 0, loads, 1.0)

    def layer_routing(self, layer: int, top_k: int, *, seed: int = 0, stride: float = 1.0) -> TraceRouting:
        """Return the routing of one layer of a model.

        Args:
            top_k: experts per token.
            seed: of the draw.
            stride: recorded iterations per step of the model; the nearest recorded iteration is used.

        Raises:
            BadInputError: the trace has no such layer, fewer experts than top_k, or the stride is not positive.
        """
        _, layers, experts = self._loads.shape
        if not 0 <= layer < layers or not 1 <= top_k <= experts:
            raise BadInputError(f"{self._name} has {layers} layers of {experts} experts: no layer {layer}, top {top_k}")
        if not 0 < stride < float("inf"):
            raise BadInputError(f"the routing trace's stride is {stride}: it must be above 0")
        stream = seed * _LAYER_STREAM + layer
        return TraceRouting(self.layer_loads(layer), self._iterations, top_k, seed=stream, stride=stride)
