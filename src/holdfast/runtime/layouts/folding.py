"""Reduces all ranks' tensors in rank order, so that every rank has the same result in every bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from holdfast.runtime.reduction.bucket import CHUNK, sum_versions

_ops: Any = dist.ReduceOp
_torch: Any = torch
_PAIRWISE: dict[str, Callable[..., Any]] = {
    "SUM": _torch.add,
    "PRODUCT": _torch.mul,
    "MIN": _torch.minimum,
    "MAX": _torch.maximum,
    "BAND": _torch.bitwise_and,
    "BOR": _torch.bitwise_or,
    "BXOR": _torch.bitwise_xor,
}


@dataclass(frozen=True, slots=True)
class Reduction:
    """One of torch's reductions over a group of `size`."""

    kind: str
    #: the factor of a sum
    scale: float = 1.0


def parse_reduction(op: Any, size: int) -> Reduction:
    """Convert torch's `ReduceOp`, or one of its constants, for a group of `size`. AVG becomes a sum with the factor
    1/size, and PREMUL_SUM a sum with its own factor; any other keeps its name, and is not checked.
    """
    # its constants are instances too, with another state
    state: tuple[Any, Any] = op.__getstate__() if type(op) is _ops else (op, None)
    kind, factor = state
    name: str = kind.name
    if name == "AVG":
        return Reduction("SUM", 1.0 / size)
    if name == "PREMUL_SUM":
        return Reduction("SUM", float(factor))
    return Reduction(name)


def fold(versions: Sequence[torch.Tensor], out: torch.Tensor, reduction: Reduction) -> None:
    """Reduce one or more flat tensors of one size into `out`, in this order, and apply the reduction's factor. More
    than two are reduced in chunks that fit into the cache.

    `out` may be one of the tensors if there are at most two.
    """
    if len(versions) <= 2 or out.numel() <= CHUNK:
        _fold(versions, out, reduction)
        return
    for start in range(0, out.numel(), CHUNK):
        part = slice(start, start + CHUNK)
        _fold([version[part] for version in versions], out[part], reduction)


def _fold(versions: Sequence[torch.Tensor], out: torch.Tensor, reduction: Reduction) -> None:
    """Reduce one or more tensors into `out`, in this order, and multiply by the reduction's factor.

    Floating-point sums are computed in float32 or wider, and rounded once to the dtype of `out`. Everything else is
    combined pairwise in that dtype.
    """
    if reduction.kind == "SUM" and out.is_floating_point():
        sum_versions(versions, out, reduction.scale)
        return
    pairwise = _PAIRWISE[reduction.kind]
    if len(versions) == 1:
        out.copy_(versions[0])
    else:
        pairwise(versions[0], versions[1], out=out)
    for version in versions[2:]:
        pairwise(out, version, out=out)
    if reduction.scale != 1.0:
        out.mul_(reduction.scale)
