"""Counts the FLOP of a micro-batch, forward and backward, while it is computed, by torch's formulas.

Every operation passes through a `TorchDispatchMode`, which calls it unchanged and looks up its formula in
`torch.utils.flop_counter`. torch's FlopCounterMode is not used, because it decomposes operations and hooks modules,
which would change training.

The count is unknown if an operation multiplies and has no formula, is not torch's, or uses tensor subclasses. It is
also unknown if anything was compiled in this process, because compiled code would not run as compiled under a mode, and
never would again. Kernels launched outside of torch are not seen.
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
    _get_current_dispatch_mode,  # pyright: ignore[reportPrivateUsage] (torch has no public function)
)
from torch.utils.flop_counter import flop_registry

#: names of operations that multiply a significant amount
_MULTIPLIES = re.compile(
    r"mm|matmul|^linear|conv(?!ert)|attention|rnn|lstm(?!_cell)|gru(?!_cell)|linalg|fft|cdist|euclidean_dist|trilinear|sparse|mkldnn"
    r"|cholesky|addmv|addr|^mv$|^dot$|^vdot$|lu_solve|triangular_solve|inverse|_gmm"
)
#: namespaces of torch's operations; the FLOP of other operations are unknown
_NAMESPACES = ("aten", "prim", "prims", "profiler", "c10d", "_c10d_functional")
_PLAIN = (torch.Tensor, torch.nn.Parameter)

Shape = torch.Size


class FlopCounter:
    """Counts between `start` and `stop`: operations of the calling thread, and its backward passes on other threads."""

    def __init__(self) -> None:
        """Start without counting."""
        self._mode: _CountingMode | None = None

    @property
    def is_counting(self) -> bool:
        """Whether operations are being counted."""
        return self._mode is not None

    def start(self) -> None:
        """Start counting; nothing if it counts already, or if something in this process may be compiled."""
        if self._mode is None and not may_be_compiled():
            self._mode = _CountingMode()
            self._mode.__enter__()

    def stop(self) -> int | None:
        """Stop counting, and return the FLOP since `start`. Return None if it was not counting, if an operation had no
        known formula, if the script has not left a dispatch mode of its own, or if something may be compiled now.
        """
        mode, self._mode = self._mode, None
        if mode is None:
            return None
        if _get_current_dispatch_mode() is not mode:
            mode.stopped = True  # The script has entered its own mode and not left it, so this one cannot be left.
            return None
        mode.__exit__(None, None, None)  # pyright: ignore[reportUnknownMemberType] (torch has no types for it)
        return None if mode.unknown or may_be_compiled() else mode.flop


class FirstRoundCounter:
    """Counts this worker's FLOP in the first round of a generation's second step, if the plan asks for it.

    The first step is not typical: a joiner may have no share, others may keep finished work, and lazy objects are
    created.
    """

    def __init__(self) -> None:
        """Start without a generation."""
        self._count = FlopCounter()
        self._generation = self._first_step = 0
        self._due = False

    def start_attempt(self, generation: int, step: int, *, asked: bool) -> None:
        """Discard an unfinished count, and decide whether this attempt's first round is counted: in the generation's
        second step, if `asked`.

        Args:
            asked: whether the generation's plan makes this worker count.
        """
        self._count.stop()  # An exception in the script may have left the last round.
        if generation != self._generation:
            self._generation = generation
            self._first_step = step
        self._due = asked and step == self._first_step + 1

    def start_round(self) -> None:
        """Start counting, if this is the first round of an attempt that is counted. A round has an own micro-batch, or
        only serves others.
        """
        if self._due:
            self._count.start()

    def stop_round(self) -> int | None:
        """End a round: return the FLOP counted in it, or None if it was not counted or they are unknown. Later rounds
        of the attempt are not counted.
        """
        self._due = False
        return self._count.stop()


class _CountingMode(TorchDispatchMode):
    """Calls every operation unchanged, and adds its FLOP."""

    #: higher-order operators are called like all others, and count as unknown
    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self.flop = 0
        #: operations without a known formula
        self.unknown: set[str] = set()
        #: whether counting has ended although the mode could not be left
        self.stopped = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call an operation, add its FLOP, and return its result. Tensor subclasses and higher-order operators count as
        unknown.
        """
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
        """Add an operation's FLOP by torch's formula, or by one of `_OWN`. Without a formula, it counts as unknown if
        it multiplies a significant amount or is not torch's; else as 0.
        """
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
    """Return whether something in this process may have been passed to torch.compile: also True if that cannot be found
    out.
    """
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo is None:
        return False
    backends = getattr(dynamo, "cached_backends", None)
    return backends is None or any(backend is not None for backend in backends.values())


def _replace_by_shape(value: Any) -> Any:
    return value.shape if isinstance(value, torch.Tensor) else value


def _grouped_mm_flop(first: Shape, second: Shape, *_: Any) -> int:
    """Return the FLOP of a grouped product: each group of rows, or of columns, times its own matrix.

    `(A, X)` and `(R, X, Y)`, or `(X, A)` and `(A, Y)`: each row, or column, belongs to one group.
    """
    groups = first[0] if len(first) == len(second) == 3 else 1
    return 2 * groups * first[-2] * first[-1] * second[-1]


def _attention_flop(query: Shape, key: Shape, value: Shape, *_: Any) -> int:
    """Return the FLOP of attention: the scores of queries and keys, `(..., rows, depth)`, and their product with the
    values.
    """
    *many, queries, depth = query
    return 2 * _multiply(many) * queries * key[-2] * (depth + value[-1])


def _attention_backward_flop(_grad: Shape, query: Shape, key: Shape, value: Shape, *_: Any) -> int:
    """Return the FLOP of five products: the scores again, and the gradients of scores, values, keys and queries."""
    *many, queries, depth = query
    return 2 * _multiply(many) * queries * key[-2] * (3 * depth + 2 * value[-1])


def _multiply(sizes: list[int]) -> int:
    """Return the product of the sizes; 1 without sizes."""
    result = 1
    for size in sizes:
        result *= size
    return result


def _vector_flop(first: Shape, *_: Any) -> int:
    return 2 * _multiply(list(first))


#: formulas that torch does not have, by shapes
_OWN: dict[str, Callable[..., int]] = {
    "aten._grouped_mm": _grouped_mm_flop,
    "aten.mv": _vector_flop,
    "aten.dot": _vector_flop,
    "aten._scaled_dot_product_flash_attention_for_cpu": _attention_flop,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward_flop,
}
