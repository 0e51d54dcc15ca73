"""Summarizes one micro-batch for the comparison between nodes, without changing the script's state."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import random
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch

from holdfast.protocol.batch_summary import MAX_PARTS, BatchSummary, PartSummary
from holdfast.runtime.data.loading import MicroBatchLoader
from holdfast.runtime.state.memory import host_bytes

logger = logging.getLogger(__name__)

#: Of a larger tensor this many elements are summed, evenly spaced.
_SUMMED = 1 << 16
#: Sums per tensor. Each element is added with a sign of its own in each of them.
_SUMS = 4


def summarize_data(loader: MicroBatchLoader) -> BatchSummary:
    """Fetch micro-batch 0 of step 1 in this process, and return its summary. The global random generators stay
    unchanged.

    Return () for streams, because reading one advances it, and if fetching fails, which is only logged.
    """
    if loader.streams is not None:
        return ()
    try:
        with _preserve_generators():
            batch = loader.fetch_whole(1, 0)
    except Exception as error:  # noqa: BLE001 - if the error persists, the training loop raises it again
        logger.info("the data are not compared between nodes, because fetching failed: %r", error)
        return ()
    return summarize_batch(batch)


def summarize_batch(batch: Any) -> BatchSummary:
    """Return one summary for each tensor, array, number, string or other value inside nested lists, tuples and
    mappings, in their order; at most `MAX_PARTS`.
    """
    parts: list[PartSummary] = []
    for name, leaf in _iter_leaves(batch, ""):
        if len(parts) == MAX_PARTS:
            break
        parts.append(_summarize_leaf(name[:256], leaf))
    return tuple(parts)


def _iter_leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the path and the value of each leaf inside nested mappings and sequences; strings and bytes are leaves.

    Args:
        name: the path of `value`, with which all paths begin; "" for the whole batch.
    """
    if isinstance(value, Mapping):
        for key, one in cast(Mapping[Any, Any], value).items():
            yield from _iter_leaves(one, f"{name}[{key!r}]")
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        for place, one in enumerate(cast(Sequence[Any], value)):
            yield from _iter_leaves(one, f"{name}[{place}]")
    else:
        yield name or "(the only one)", value


def _summarize_leaf(name: str, leaf: Any) -> PartSummary:
    """Return the summary of one value: its form (dtype and shape, or the type's name), and sums of floating-point
    numbers or a hash of integers, strings and bytes. Other values, and tensors that are sparse or quantized, only have
    a form. Of an absolute path only the last component counts.
    """
    if isinstance(leaf, float | np.ndarray | np.generic):
        try:
            leaf = torch.as_tensor(cast(Any, leaf))
        except (TypeError, ValueError):  # An array of objects, or with negative strides.
            return PartSummary(name=name, form="ndarray")
    if isinstance(leaf, torch.Tensor):
        form = f"{str(leaf.dtype).removeprefix('torch.')} {'x'.join(map(str, leaf.shape)) or 'scalar'}"[:256]
        if leaf.layout is not torch.strided or leaf.is_quantized:
            return PartSummary(name=name, form=form)
        if leaf.is_floating_point() or leaf.is_complex():
            return _summarize_floats(name, form, leaf.detach())
        return PartSummary(name=name, form=form, digest=_digest(bytes(host_bytes(leaf))))
    if isinstance(leaf, str) and os.path.isabs(leaf):
        leaf = os.path.basename(leaf)  # Nodes may have the same file in different folders.
    form = type(cast(object, leaf)).__name__[:256]
    if isinstance(leaf, str | bytes | int):
        return PartSummary(name=name, form=form, digest=_digest(repr(leaf).encode()))
    return PartSummary(name=name, form=form)


def _summarize_floats(name: str, form: str, tensor: torch.Tensor) -> PartSummary:
    """Return the summary of a floating-point or complex tensor, of about `_SUMMED` evenly spaced elements if it has
    more: sums with random signs and the norm, both without infinities and NaNs, and a hash of which elements are
    finite, or "" if all are.
    """
    flat = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    flat = flat.reshape(-1)
    values = flat[:: max(1, flat.numel() // _SUMMED)].to("cpu", torch.float64).numpy()
    finite = np.isfinite(values)
    values = np.where(finite, values, 0.0)
    signs = np.random.default_rng(values.size).integers(0, 2, (_SUMS, values.size)) * 2.0 - 1.0
    digest = "" if finite.all() else _digest(np.packbits(finite).tobytes())
    sums = tuple(float(one) for one in signs @ values)
    return PartSummary(name=name, form=form, digest=digest, sums=sums, norm=float(np.linalg.norm(values)))


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


@contextlib.contextmanager
def _preserve_generators() -> Generator[None]:
    """Return a context that restores the global generators of torch (on the host), Python and numpy at its end."""
    ours, pythons, numpys = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(ours)
        random.setstate(pythons)
        np.random.set_state(numpys)
