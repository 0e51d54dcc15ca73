"""Buffers that the forward pass changes, such as BatchNorm's running statistics, with the results of one process.

Each micro-batch starts with a copy of the state's buffers. The state's own buffers are only written in apply, so they
can be sent or saved at any time. The copies after the forward pass are the micro-batch's note.

A running statistic is linear in a batch's contribution: running = (1 - m) running + m batch. So the contribution of a
micro-batch follows from the values before and after. In apply, all M contributions are added to the state in their
order, as consecutive forward passes would add them. Forward computation that backward repeats (activation
checkpointing) is not counted again.

A power iteration (spectral_norm) depends only on the weights, which do not change during a step. So one iteration per
step is used, independent of the number of micro-batches.
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
from holdfast.runtime.micro_batch_notes import NoteSource
from holdfast.runtime.tensors import copy_each, from_array, named_modules, to_ints

_Values = NDArray[np.float64]
_BATCH_NORMS = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d)
_INSTANCE_NORMS = (torch.nn.InstanceNorm1d, torch.nn.InstanceNorm2d, torch.nn.InstanceNorm3d)
_STATISTICS = ("running_mean", "running_var")
_COUNT = "num_batches_tracked"


class _Note(msgspec.Struct, frozen=True, array_like=True):
    """The note of a micro-batch."""

    #: calls of each layer
    calls: list[int]
    #: each layer's momentum, or NaN for a mean of all batches
    momenta: list[float]
    #: all values of all buffers
    values: bytes


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Note)


class _StatisticsLayer:
    """A module that changes its buffers in the forward pass."""

    def __init__(
        self, module: torch.nn.Module, prefix: str, names: Sequence[str], *, count: str = "", linear: bool
    ) -> None:
        self.module: Any = module
        self.prefix = prefix
        #: names of the buffers with values
        self.names = tuple(names)
        #: name of the buffer that counts calls, or ""
        self.count = count
        #: whether the values are running statistics; if not, they are the values after the last call
        self.linear = linear
        buffers = dict(module.named_buffers(recurse=False))
        #: the state's tensors
        self.own = [buffers[name] for name in self.buffers]
        #: copies for a micro-batch
        self.scratch = [tensor.detach().clone() for tensor in self.own]
        self.numel = sum(tensor.numel() for tensor in self.own[: len(self.names)])

    @property
    def buffers(self) -> tuple[str, ...]:
        """The names of all its buffers here; the call counter is the last one."""
        return (*self.names, self.count) if self.count else self.names

    @property
    def momentum(self) -> float:
        """Weight of a new batch; NaN for a mean of all batches; 0.0 if the layer has no running statistics."""
        momentum = self.module.momentum if self.linear else None
        return math.nan if momentum is None and self.count else float(momentum or 0.0)

    def set_buffers(self, tensors: Sequence[torch.Tensor]) -> None:
        """Replace the module's buffers by these tensors."""
        for name, tensor in zip(self.buffers, tensors, strict=True):
            self.module._buffers[name] = tensor


class RunningStatistics(NoteSource):
    """The buffers of a model that its forward pass changes and that can be combined over micro-batches."""

    def __init__(self, model: torch.nn.Module) -> None:
        """Manage the buffers of the model's layers.

        Raises:
            BadInputError: a layer's statistics cannot be combined.
        """
        self._layers = [layer for prefix, module in named_modules(model) for layer in _find_layers(prefix, module)]
        counted = [layer for layer in self._layers if layer.count]
        self._own = [tensor for layer in self._layers for tensor in layer.own[: len(layer.names)]]
        self._own_counts = [layer.own[-1] for layer in counted]
        self._scratch = [tensor for layer in self._layers for tensor in layer.scratch[: len(layer.names)]]
        self._scratch_counts = [layer.scratch[-1] for layer in counted]
        # A note's values are sent in a dtype that loses nothing.
        wide = any(tensor.dtype == torch.float64 for tensor in self._own)
        self._dtype = torch.float64 if wide else torch.float32
        #: calls in the present micro-batch, by the number of the layer, if the layer has no counter
        self._calls: dict[int, int] = {}
        self._counting = self._inside = False
        self._made: tuple[torch.Tensor, list[int]] | None = None
        #: values and counts for `apply`, or None for no change
        self._next: tuple[_Values, list[int]] | None = None
        for number, layer in enumerate(self._layers):
            if not layer.count:
                layer.module.register_forward_hook(self._make_call_hook(number))

    @contextmanager
    def preserve(self) -> Generator[None]:
        """Return a context for forward passes that are not of micro-batches: they change copies of the buffers, which
        are dropped at its end, and the state's buffers stay unchanged.
        """
        self.on_micro_batch_start(0, 0)
        try:
            yield
        finally:
            self.on_attempt_start()

    @property
    def state(self) -> dict[str, torch.Tensor]:
        """The state's tensors by their names in the model; during a micro-batch the model uses copies."""
        return {
            f"{layer.prefix}.{name}" if layer.prefix else name: tensor
            for layer in self._layers
            for name, tensor in zip(layer.buffers, layer.own, strict=True)
        }

    def on_attempt_start(self) -> None:
        self._restore_buffers()

    @torch.no_grad()
    def on_micro_batch_start(self, step: int, micro_batch: int) -> None:
        """Give the layers copies of the state's buffers for this micro-batch, and start to count calls."""
        if not self._layers:
            return
        copy_each([*self._scratch, *self._scratch_counts], [*self._own, *self._own_counts])
        for layer in self._layers:
            layer.set_buffers(layer.scratch)
        self._calls = {}
        self._counting = self._inside = True

    def on_forward_done(self) -> None:
        """Keep the buffers' values and call counters for the note, and stop counting calls."""
        if self._inside:  # Backward may repeat parts of the forward pass, which must not count again.
            self._counting = False
            self._made = _flatten(self._scratch, self._dtype), to_ints(_flatten(self._scratch_counts, torch.int64))

    def make_note(self) -> bytes:
        """Give the layers the state's buffers again. Return the calls and the momentum of each layer and the values of
        all buffers after the forward pass, encoded, or b"" if no layer was called.
        """
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
        """Compute the buffers after all micro-batches, for `apply`: running statistics add each micro-batch's
        contribution in order, call counters add the calls, and a power iteration is taken from the first micro-batch
        that made it. Without notes, nothing will change.
        """
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
        """Write the values and call counters that `merge` computed into the state's buffers. Do nothing if it computed
        none, or if they are written already.
        """
        if self._next is None:
            return
        (values, counts), self._next, place = self._next, None, 0
        for tensor in self._own:
            tensor.copy_(from_array(values[place : place + tensor.numel()]).view(tensor.shape))
            place += tensor.numel()
        for tensor, count in zip(self._own_counts, counts, strict=True):
            tensor.fill_(count)

    def _make_call_hook(self, number: int) -> Callable[..., None]:
        """Return a forward hook that counts the calls of the layer `number`: only in training mode, and only during the
        forward pass of a micro-batch.
        """

        def called(*_: object) -> None:
            if self._counting and self._layers[number].module.training:
                self._calls[number] = self._calls.get(number, 0) + 1

        return called

    def _restore_buffers(self) -> None:
        """Give the layers the state's buffers again, if they use copies, and stop counting calls."""
        for layer in self._layers if self._inside else ():
            layer.set_buffers(layer.own)
        self._counting = self._inside = False


def _find_layers(prefix: str, module: torch.nn.Module) -> Iterator[_StatisticsLayer]:
    """Yield one entry for the running statistics of a BatchNorm or InstanceNorm module, and one for each power
    iteration of spectral_norm. Other modules have none.

    Raises:
        BadInputError: a subclass with a forward pass of its own has running statistics, and is in training mode.
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


# torch has no public name for this class.
_parametrizations: Any = parametrizations
_SPECTRAL_NORM: type[torch.nn.Module] = _parametrizations._SpectralNorm


def _combine(
    state: _Values, after: Sequence[_Values], calls: Sequence[int], momenta: Sequence[float], count: int
) -> _Values:
    """Return a running statistic after consecutive micro-batches, each of which has turned `state` into its `after`.

    Args:
        after: of each micro-batch, its values.
        calls: of each micro-batch, how often it called the layer.
        momenta: of each micro-batch, its momentum, or NaN for a mean of all.
        count: number of batches in the state's value.
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
    """Return a copy of all values, concatenated."""
    return torch.cat([tensor.detach().flatten().to(dtype) for tensor in tensors or [torch.empty(0)]])


def _to_bytes(values: torch.Tensor) -> bytes:
    return values.cpu().numpy().tobytes()
