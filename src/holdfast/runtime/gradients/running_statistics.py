"""Buffers that the forward pass changes: BatchNorm's running statistics and the like, as one process would have them.

Each micro-batch begins with the state's values, in tensors of its own: those of the state are never written to outside
of apply, whatever is sent or saved meanwhile. What it has made of them by the time of its backward is its note. A
running statistic is linear in what a batch adds, running = (1 - m) running + m batch. So from before and after follows
what the micro-batch has added, and inside apply all M are added to the state's in their order, as forward passes one
behind the other would. What runs again in backward (activation checkpointing) is not counted a second time.

A power iteration (spectral_norm) depends on the weights alone, which stay as they are through a step: one a step is in
force, however many micro-batches it has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.utils import parametrizations
from torch.nn.utils.spectral_norm import SpectralNorm

from holdfast.errors import BadInputError
from holdfast.runtime.notes import NoteSource
from holdfast.runtime.tensors import copy_each, from_array, named_modules, to_ints

_Values = NDArray[np.float64]
_BATCH_NORMS = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d)
_INSTANCE_NORMS = (torch.nn.InstanceNorm1d, torch.nn.InstanceNorm2d, torch.nn.InstanceNorm3d)
_STATISTICS = ("running_mean", "running_var")
_COUNT = "num_batches_tracked"


class _Note(msgspec.Struct, frozen=True, array_like=True):
    """A note: of each layer how often it was called, and with which momentum (no number: a mean of all); all values."""

    calls: list[int]
    momenta: list[float]
    values: bytes


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Note)


class _StatisticsLayer:
    """A module that changes buffers of its own.

    names: of those with values. count: of the one that counts its calls, "" where none does. linear: the values are
    running statistics, else they are what the last call has made of them.
    """

    def __init__(
        self, module: torch.nn.Module, prefix: str, names: Sequence[str], *, count: str = "", linear: bool
    ) -> None:
        self.module: Any = module
        self.prefix = prefix
        self.names, self.count, self.linear = tuple(names), count, linear
        buffers = dict(module.named_buffers(recurse=False))
        #: the state's tensors, and those of a micro-batch
        self.own = [buffers[name] for name in self.buffers]
        self.scratch = [tensor.detach().clone() for tensor in self.own]
        self.numel = sum(tensor.numel() for tensor in self.own[: len(self.names)])

    @property
    def buffers(self) -> tuple[str, ...]:
        """The names of all its buffers here, the one that counts behind the others."""
        return (*self.names, self.count) if self.count else self.names

    @property
    def momentum(self) -> float:
        """How much of what is new counts; no number for a mean of all."""
        momentum = self.module.momentum if self.linear else None
        return math.nan if momentum is None and self.count else float(momentum or 0.0)

    def set_buffers(self, tensors: Sequence[torch.Tensor]) -> None:
        """Let the module's buffers be these."""
        for name, tensor in zip(self.buffers, tensors, strict=True):
            self.module._buffers[name] = tensor


class RunningStatistics(NoteSource):
    """The buffers of a model that its forward pass changes in a way that can be combined."""

    def __init__(self, model: torch.nn.Module) -> None:
        """Take over those of the model's layers.

        Raises:
            BadInputError: a layer's statistics cannot be combined.
        """
        self._layers = [layer for prefix, module in named_modules(model) for layer in _find_layers(prefix, module)]
        counted = [layer for layer in self._layers if layer.count]
        self._own = [tensor for layer in self._layers for tensor in layer.own[: len(layer.names)]]
        self._own_counts = [layer.own[-1] for layer in counted]
        self._scratch = [tensor for layer in self._layers for tensor in layer.scratch[: len(layer.names)]]
        self._scratch_counts = [layer.scratch[-1] for layer in counted]
        #: in which a note's values travel: all that a buffer holds
        wide = any(tensor.dtype == torch.float64 for tensor in self._own)
        self._dtype = torch.float64 if wide else torch.float32
        #: of layers that do not count by themselves, how often they were called in the micro-batch at hand
        self._calls: dict[int, int] = {}
        self._counting = self._inside = False
        self._made: tuple[torch.Tensor, list[int]] | None = None
        #: values and counts that are to be in force once the step has passed; None: those that are
        self._next: tuple[_Values, list[int]] | None = None
        for number, layer in enumerate(self._layers):
            if not layer.count:
                layer.module.register_forward_hook(self._make_call_hook(number))

    @contextmanager
    def preserve(self) -> Generator[None]:
        """Let a forward pass that is no micro-batch's change nothing."""
        self.on_micro_batch_start(0, 0)
        try:
            yield
        finally:
            self.on_attempt_start()

    @property
    def state(self) -> dict[str, torch.Tensor]:
        """The state's tensors, by their names in the model; while a micro-batch is computed the model has others."""
        return {
            f"{layer.prefix}.{name}" if layer.prefix else name: tensor
            for layer in self._layers
            for name, tensor in zip(layer.buffers, layer.own, strict=True)
        }

    def on_attempt_start(self) -> None:
        self._restore_buffers()

    @torch.no_grad()
    def on_micro_batch_start(self, step: int, micro_batch: int) -> None:
        if not self._layers:
            return
        copy_each([*self._scratch, *self._scratch_counts], [*self._own, *self._own_counts])
        for layer in self._layers:
            layer.set_buffers(layer.scratch)
        self._calls = {}
        self._counting = self._inside = True

    def on_forward_done(self) -> None:
        if self._inside:  # (backward may run parts of the forward pass again, which counts once)
            self._counting = False
            self._made = _flatten(self._scratch, self._dtype), to_ints(_flatten(self._scratch_counts, torch.int64))

    def make_note(self) -> bytes:
        made, self._made = self._made, None
        self._restore_buffers()
        if made is None:
            return b""
        values, counts = made
        before = to_ints(_flatten(self._own_counts, torch.int64))
        further = iter(count - own for count, own in zip(counts, before, strict=True))
        calls = [
            next(further) if layer.count else self._calls.get(number, 0) for number, layer in enumerate(self._layers)
        ]
        if not any(calls):
            return b""
        return _encoder.encode(_Note(calls, [layer.momentum for layer in self._layers], _to_bytes(values)))

    def merge(self, notes: Sequence[bytes], of_ranks: Sequence[bytes]) -> None:
        self._next = None
        made = [_decoder.decode(note) for note in notes if note]
        if not made:
            return
        dtype = np.float64 if self._dtype == torch.float64 else np.float32
        after = [np.frombuffer(one.values, dtype=dtype).astype(np.float64) for one in made]
        now = np.frombuffer(_to_bytes(_flatten(self._own, torch.float64)), dtype=np.float64).copy()
        counts, known, place = list[int](), iter(to_ints(_flatten(self._own_counts, torch.int64))), 0
        for number, layer in enumerate(self._layers):
            part, place = slice(place, place + layer.numel), place + layer.numel
            calls = [one.calls[number] for one in made]
            count = next(known) if layer.count else 0
            if layer.count:
                counts.append(count + sum(calls))
            if layer.linear:
                momenta = [one.momenta[number] for one in made]
                now[part] = _combine(now[part], [values[part] for values in after], calls, momenta, count)
            elif any(calls):
                now[part] = next(values[part] for values, times in zip(after, calls, strict=True) if times)
        self._next = now, counts

    @torch.no_grad()
    def apply(self) -> None:
        if self._next is None:
            return
        (values, counts), self._next, place = self._next, None, 0
        for tensor in self._own:
            tensor.copy_(from_array(values[place : place + tensor.numel()]).view(tensor.shape))
            place += tensor.numel()
        for tensor, count in zip(self._own_counts, counts, strict=True):
            tensor.fill_(count)

    def _make_call_hook(self, number: int) -> Callable[..., None]:
        def called(*_: object) -> None:
            if self._counting and self._layers[number].module.training:
                self._calls[number] = self._calls.get(number, 0) + 1

        return called

    def _restore_buffers(self) -> None:
        for layer in self._layers if self._inside else ():
            layer.set_buffers(layer.own)
        self._counting = self._inside = False


def _find_layers(prefix: str, module: torch.nn.Module) -> Iterator[_StatisticsLayer]:
    """Yield what of a module can be combined.

    Raises:
        BadInputError: it has running statistics of which that is not known.
    """
    place, kind = f"module {prefix!r} is a {type(module).__name__}", type(module)
    known = {name for name, _ in module.named_buffers(recurse=False)}
    if isinstance(module, _BATCH_NORMS + _INSTANCE_NORMS) and known >= set(_STATISTICS):
        plain = _BATCH_NORMS[0] if isinstance(module, _BATCH_NORMS) else _INSTANCE_NORMS[0]
        if kind.forward is plain.forward:
            counts = plain is _BATCH_NORMS[0] and _COUNT in known
            yield _StatisticsLayer(module, prefix, _STATISTICS, count=_COUNT if counts else "", linear=True)
        elif module.training:
            raise BadInputError(
                f"{place} with a forward pass of its own: whether its running statistics can be combined is not known; "
                f"use {plain.__name__[:-2]} of torch.nn, or track_running_stats=False"
            )
    untyped: Any = module
    for hook in untyped._forward_pre_hooks.values():
        if isinstance(hook, SpectralNorm):
            yield _StatisticsLayer(module, prefix, (f"{hook.name}_u", f"{hook.name}_v"), linear=False)
    if isinstance(module, _SPECTRAL_NORM) and known >= {"_u", "_v"}:
        yield _StatisticsLayer(module, prefix, ("_u", "_v"), linear=False)


# (torch has a name for what makes these, and none for what is made)
_parametrizations: Any = parametrizations
_SPECTRAL_NORM: type[torch.nn.Module] = _parametrizations._SpectralNorm


def _combine(
    state: _Values, after: Sequence[_Values], calls: Sequence[int], momenta: Sequence[float], count: int
) -> _Values:
    """Return a running statistic after micro-batches that have each made `after` of the state's, one behind the other.

    Args:
        calls: of each, how often it went through the layer. momenta: with which momentum, no number: a mean of all.
        count: of the batches that are in the state's.
    """
    now, done = state, count
    for made, times, momentum in zip(after, calls, momenta, strict=True):
        if times and math.isnan(momentum):
            added = made * (count + times) - state * count
            now = (now * done + added) / (done + times)
        elif times:
            kept = math.prod([1.0 - momentum] * times)
            now = now * kept + (made - state * kept)
        done += times
    return now


def _flatten(tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Return a copy of all values, one behind the other."""
    return torch.cat([tensor.detach().flatten().to(dtype) for tensor in tensors or [torch.empty(0)]])


def _to_bytes(values: torch.Tensor) -> bytes:
    return values.cpu().numpy().tobytes()
