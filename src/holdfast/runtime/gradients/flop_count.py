"""How many FLOP a micro-batch takes, forward and backward: counted while one is computed, by torch's own formulas.

Every operation passes through a `TorchDispatchMode`, which calls it as it is and looks its formula up among those of
`torch.utils.flop_counter`. (FlopCounterMode itself breaks operations up and hooks modules: a micro-batch that is
trained on is left alone.) Nothing is said where an operation multiplies and has no formula, comes from elsewhere than
torch, or works on other tensors than torch's plain ones; nor where anything was compiled in this process: within a mode
it would not run as compiled, and never would again. Kernels that are launched past torch are not seen.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode,  # pyright: ignore[reportPrivateUsage] (there is no other way to ask)
)
from torch.utils.flop_counter import flop_registry

#: those of which nothing is multiplied, or next to nothing, have other names
_MULTIPLIES = re.compile(
    r"mm|matmul|^linear|conv(?!ert)|attention|rnn|lstm(?!_cell)|gru(?!_cell)|linalg|fft|cdist|euclidean_dist|trilinear|sparse|mkldnn"
    r"|cholesky|addmv|addr|^mv$|^dot$|^vdot$|lu_solve|triangular_solve|inverse|_gmm"
)
#: what torch's own operations are called; of others nobody knows what they do
_NAMESPACES = ("aten", "prim", "prims", "profiler", "c10d", "_c10d_functional")
_PLAIN = (torch.Tensor, torch.nn.Parameter)

Shape = torch.Size


class FlopCounter:
    """Counts between `begin` and `end`, in the thread that calls them, and what its backward passes run elsewhere."""

    def __init__(self) -> None:
        """Count nothing yet."""
        self._mode: _CountingMode | None = None

    @property
    def is_counting(self) -> bool:
        """Whether operations are being counted."""
        return self._mode is not None

    def start(self) -> None:
        """Count from here on, where that disturbs nothing."""
        if self._mode is None and not may_be_compiled():
            self._mode = _CountingMode()
            self._mode.__enter__()

    def stop(self) -> int | None:
        """Count no more; return the FLOP since `begin`, None where they are not known."""
        mode, self._mode = self._mode, None
        if mode is None:
            return None
        if _get_current_dispatch_mode() is not mode:
            mode.stopped = True  # (a script has begun a mode of its own, and not left it: ours lies below that)
            return None
        mode.__exit__(None, None, None)  # pyright: ignore[reportUnknownMemberType] (torch has no types for it)
        return None if mode.unknown or may_be_compiled() else mode.flop


class FirstRoundCounter:
    """Counts what the first round of a generation's second step takes here, where the plan asks for that.

    In the first step a joiner may have no share, others what was kept of one; and whatever is made lazily is made.
    """

    def __init__(self) -> None:
        """Begin in no generation."""
        self._count = FlopCounter()
        self._generation = self._first_step = 0
        self._due = False

    def start_attempt(self, generation: int, step: int, *, asked: bool) -> None:
        """An attempt at a step begins. `asked`: the generation's plan has this worker count."""
        self._count.stop()  # (of one that a script has left by an exception)
        if generation != self._generation:
            self._generation, self._first_step = generation, step
        self._due = asked and step == self._first_step + 1

    def start_round(self) -> None:
        """A micro-batch is at hand, or the others' are: of the first round it is counted what that takes."""
        if self._due:
            self._count.start()

    def stop_round(self) -> int | None:
        """It is over: return the FLOP of the first round, None where it was another, or they are not known."""
        self._due = False
        return self._count.stop()


class _CountingMode(TorchDispatchMode):
    """Lets every operation pass as it is."""

    #: (they are passed on like all others, and are unknown)
    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self.flop = 0
        #: operations of which nobody knows what they take
        self.unknown: set[str] = set()
        #: nothing is counted any more
        self.stopped = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if self.stopped:
            return out
        if any(kind not in _PLAIN for kind in types) or getattr(func, "overloadpacket", None) is None:
            self.unknown.add(str(func))
        else:
            self._add_flop(func, args, kwargs, out)
        return out

    def _add_flop(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> None:
        packet = func.overloadpacket
        formula = flop_registry.get(packet)
        if formula is not None:
            self.flop += int(formula(*args, **kwargs, out_val=out))
            return
        own = _OWN.get(str(packet))
        if own is not None:
            self.flop += own(*pytree.tree_map(_replace_by_shape, args))
        elif func.namespace not in _NAMESPACES or _MULTIPLIES.search(func._schema.name.split("::")[1]):
            self.unknown.add(str(func))


def may_be_compiled() -> bool:
    """Tell whether anything in this process was given to torch.compile, or that cannot be said."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo is None:
        return False
    backends = getattr(dynamo, "cached_backends", None)
    return backends is None or any(backend is not None for backend in backends.values())


def _replace_by_shape(value: Any) -> Any:
    return value.shape if isinstance(value, torch.Tensor) else value


def _grouped_mm_flop(first: Shape, second: Shape, *_: Any) -> int:
    """Return the FLOP of products of which each is a group of rows, or of columns, with a matrix of its own.

    `(A, X)` and `(R, X, Y)`, or `(X, A)` and `(A, Y)`: each of the rows, or columns, is in one group.
    """
    groups = first[0] if len(first) == len(second) == 3 else 1
    return 2 * groups * first[-2] * first[-1] * second[-1]


def _attention_flop(query: Shape, key: Shape, value: Shape, *_: Any) -> int:
    *many, queries, depth = query
    return 2 * _multiply(many) * queries * key[-2] * (depth + value[-1])


def _attention_backward_flop(_grad: Shape, query: Shape, key: Shape, value: Shape, *_: Any) -> int:
    """Return the FLOP of five products: the scores once more, then what they, values, keys and queries get."""
    *many, queries, depth = query
    return 2 * _multiply(many) * queries * key[-2] * (3 * depth + 2 * value[-1])


def _multiply(sizes: list[int]) -> int:
    result = 1
    for size in sizes:
        result *= size
    return result


def _vector_flop(first: Shape, *_: Any) -> int:
    return 2 * _multiply(list(first))


#: what torch has no formula for, by shapes
_OWN: dict[str, Callable[..., int]] = {
    "aten._grouped_mm": _grouped_mm_flop,
    "aten.mv": _vector_flop,
    "aten.dot": _vector_flop,
    "aten._scaled_dot_product_flash_attention_for_cpu": _attention_flop,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward_flop,
}
