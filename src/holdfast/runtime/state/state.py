"""The training state: parameters, buffers, optimizers, and the objects that the user adds with `extra`.

State is one list of tensors and a manifest that describes them and contains all other values. The list is the same on
every replica, byte for byte, so it can be sent, saved, hashed and compared without knowledge of the model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
from msgspec.structs import replace
from torch.optim import Optimizer

from holdfast.errors import BadInputError
from holdfast.runtime.dtensor.local import (
    TensorPlacement,
    is_dtensor,
    local_of,
    placement_of,
    wrap_by_placement,
    wrap_like,
)
from holdfast.runtime.state import tree
from holdfast.runtime.state.extra_watch import ExtraWatch
from holdfast.runtime.state.memory import ReusableMemory, host_bytes
from holdfast.runtime.state.optimizers import Optimizers, unknown_parameter_message
from holdfast.runtime.state.step_settings import StepSettings
from holdfast.runtime.tensors import has_extra_state, named_modules, strip_wrapper_prefixes

MAX_TENSORS = 1 << 20


class TensorSpec(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """One tensor of the state."""

    name: str
    dtype: str
    #: of the local part, if the tensor is spread over a replica group
    shape: tuple[int, ...]
    #: whether it is in host memory, not on the model's device
    host: bool
    #: global shape of a spread tensor
    whole: tuple[int, ...] = ()
    #: placements of a spread tensor in words, as in `TensorPlacement`
    placed: str = ""

    @property
    def description(self) -> str:
        """The tensor's dtype, shape and placement in words."""
        spread = f", spread as {self.placed}" if self.placed else ""
        return f"{self.dtype} of shape {self.whole or self.shape}{spread}{'' if self.host else ', on a device'}"


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The description of a list of tensors: first parameters, then buffers, then the tensors of the trees."""

    tensors: tuple[TensorSpec, ...]
    parameters: int
    buffers: int
    optimizer: tree.Node
    extra: dict[str, tree.Node]
    #: the parameters that do not require a gradient, by index; None in a state saved before this was recorded
    frozen: tuple[int, ...] | None = None
    #: parameter groups added since `protect`, by the optimizer's name: the indices of their parameters
    added_groups: dict[str, tuple[tuple[int, ...], ...]] = {}

    @property
    def global_manifest(self) -> Manifest:
        """The manifest for all local ranks of a replica group: spread tensors have their global shapes."""
        specs = (replace(one, shape=one.whole if one.placed else one.shape, whole=()) for one in self.tensors)
        return replace(self, tensors=tuple(specs))


class StateMismatchError(Exception):
    """A received state does not fit the objects of this worker; the message says where."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StateView:
    """The present state, without copies."""

    manifest: Manifest
    #: the live tensors
    tensors: list[torch.Tensor]
    #: the spread ones as DTensors, by index in `tensors`
    spread: dict[int, torch.Tensor] = field(default_factory=dict[int, torch.Tensor])

    @property
    def nbytes(self) -> int:
        """Size of all tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)


class TrainingState:
    """The objects that hold the state of a job; captures, receives and adopts states."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Optimizer | Mapping[str, Optimizer],
        extra: Mapping[str, Any] | None = None,
        *,
        apart: Iterable[torch.nn.Parameter] = (),
        buffers: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """Check the objects.

        Args:
            optimizer: one, or several by name.
            apart: parameters that are not part of this state, with their optimizer state: experts differ between ranks.
            buffers: by name, buffers of the model that are state even while the model uses others.

        Raises:
            BadInputError: the state of an object cannot be read or set.
        """
        self.model = model
        self.optimizers = Optimizers(optimizer)
        self.extra = dict(extra or {})
        for name, thing in self.extra.items():
            if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
                raise BadInputError(
                    f"extra[{name!r}] is a {type(thing).__name__}: it needs state_dict() and load_state_dict()"
                )
        self.watch = ExtraWatch(self.extra)
        #: paths of the tensors that each extra object has at `protect`
        self._initial_paths = {
            name: {way for way, _ in tree.tensors_by_path(thing.state_dict(), f"extra[{name!r}]")}
            for name, thing in self.extra.items()
        }
        self._modules = named_modules(model)
        for name, module in self._modules:
            if has_extra_state(module):
                raise BadInputError(f"module {name!r} has extra state: pass an object that saves it as extra={{...}}")
        self._apart = {id(parameter) for parameter in apart}
        named = model.named_parameters()
        self._parameters = {strip_wrapper_prefixes(name): p for name, p in named if id(p) not in self._apart}
        self._set_buffers = dict(buffers or {})
        #: unused tensors of optimizers, for their memory
        self._recycled: list[torch.Tensor] = []
        self._check_optimizers()
        #: the settings before the step in progress
        self.settings = StepSettings(self.optimizers, self._parameters.values())

    def capture(self) -> StateView:
        """Return the present state of model, optimizers and extra objects: the live tensors, without copies, and a
        manifest that describes them and has all other values.

        Raises:
            BadInputError: a tensor is not dense, a value has an unsupported type, or an optimizer has a parameter that
                the model does not have.
        """
        tensors: list[torch.Tensor] = []
        specs: list[TensorSpec] = []
        spread: dict[int, torch.Tensor] = {}

        def add(name: str, tensor: torch.Tensor) -> int:
            if tensor.layout is not torch.strided or tensor.is_quantized:
                raise BadInputError(f"{name} is a {tensor.layout} tensor: state must be dense")
            if is_dtensor(tensor):
                spread[len(tensors)] = tensor
            specs.append(_make_spec(name, tensor))
            tensors.append(local_of(tensor).detach())
            return len(tensors) - 1

        own = self.model_tensors()
        for name, tensor in own:
            add(name, tensor)
        captured = self.optimizers.capture(self._apart)
        optimizer = tree.pack(captured, lambda t: add("optimizer", t), "optimizer state")
        extra = {
            name: tree.pack(thing.state_dict(), lambda t, name=name: add(f"extra.{name}", t), f"extra[{name!r}]")
            for name, thing in self.extra.items()
        }
        manifest = Manifest(
            tensors=tuple(specs),
            parameters=len(self._parameters),
            buffers=len(own) - len(self._parameters),
            optimizer=optimizer,
            extra=extra,
            frozen=tuple(self.frozen_parameters()),
            added_groups=self._added_groups(),
        )
        return StateView(manifest=manifest, tensors=tensors, spread=spread)

    def model_tensors(self) -> list[tuple[str, torch.Tensor]]:
        """Return the model's tensors that are state, by name: parameters first, then buffers."""
        return [*self._parameters.items(), *self._state_buffers().items()]

    def frozen_parameters(self) -> dict[int, str]:
        """Return the names of the parameters that do not require a gradient now, by index."""
        return {n: name for n, (name, one) in enumerate(self._parameters.items()) if not one.requires_grad}

    def requires_gradient(self) -> bytes:
        """Return one byte per parameter: whether it requires a gradient. Called in every step."""
        return bytes([parameter.requires_grad for parameter in self._parameters.values()])

    def is_sent(self, parameter: torch.nn.Parameter) -> bool:
        """Whether a parameter and its optimizer state are the same on all workers of a role."""
        return id(parameter) not in self._apart

    def added_parameters(self, manifest: Manifest) -> dict[str, list[list[torch.nn.Parameter]]]:
        """Return the parameters of a state's groups that were added since `protect`, by the optimizer's name.

        Raises:
            StateMismatchError: an index or an optimizer is unknown.
        """
        known = list(self._parameters.values())
        indices = [n for groups in manifest.added_groups.values() for group in groups for n in group]
        unknown = manifest.added_groups.keys() - self.optimizers.by_name.keys()
        if unknown or any(not 0 <= n < len(known) for n in indices):
            raise StateMismatchError("its added parameter groups name parameters or optimizers that do not exist here")
        return {name: [[known[n] for n in group] for group in groups] for name, groups in manifest.added_groups.items()}

    def recycle_memory(self, tensors: Iterable[torch.Tensor]) -> None:
        """Keep the memory of unused optimizer tensors for the next received state."""
        self._recycled = [local_of(tensor) for tensor in tensors]

    def prepare(self, manifest: Manifest, *, separate: bool = False) -> list[torch.Tensor]:
        """Return tensors to receive a state into: the model's own, and for the optimizers and `extra` new ones, in
        memory of unused tensors if possible.

        Args:
            separate: leave the present state unchanged until `adopt`: new tensors also for the model, in host memory.

        Raises:
            StateMismatchError: the state has other parameters, buffers, optimizers or extra objects, its manifest is
                inconsistent, or it does not fit into memory.
        """
        own = self.model_tensors()
        if len(manifest.tensors) > MAX_TENSORS:
            raise StateMismatchError(f"{len(manifest.tensors)} tensors are more than {MAX_TENSORS}")
        if (manifest.parameters, manifest.buffers) != (len(self._parameters), len(own) - len(self._parameters)):
            raise StateMismatchError(
                f"it has {manifest.parameters} parameters and {manifest.buffers} buffers, but this model has "
                f"{len(self._parameters)} and {len(own) - len(self._parameters)}"
            )
        if sorted(manifest.extra) != sorted(self.extra):
            raise StateMismatchError(f"it has extra {sorted(manifest.extra)}, but this job has {sorted(self.extra)}")
        if other := self.optimizers.describe_difference(manifest.optimizer):
            raise StateMismatchError(other)
        self.added_parameters(manifest)
        if any(not 0 <= n < manifest.parameters for n in manifest.frozen or ()):
            raise StateMismatchError("it freezes parameters that do not exist here")
        trees = [manifest.optimizer, *manifest.extra.values()]
        named = sorted(place for node in trees for place in tree.tensor_places(node))
        if named != list(range(len(own), len(manifest.tensors))):
            raise StateMismatchError("its trees do not name each tensor once")
        targets: list[torch.Tensor] = []
        for spec, (name, tensor) in zip(manifest.tensors, own, strict=False):
            if spec != _make_spec(name, tensor):
                raise StateMismatchError(
                    f"{name} is {_make_spec(name, tensor).description} here and {spec.description} there"
                )
            targets.append(_allocate(spec, torch.device("cpu")) if separate else local_of(tensor).detach())
        device = self._device()
        kept = [local_of(tensor) for tensor in self.optimizers.state_tensors(self._apart)]
        used = ReusableMemory([] if separate else [*self._recycled, *kept], without=targets)
        self._recycled = []
        for spec in manifest.tensors[len(own) :]:
            targets.append(_allocate(spec, device, used))
        return targets

    def adopt(self, manifest: Manifest, tensors: list[torch.Tensor]) -> None:
        """Make a received state the present one: tensors, parameter groups, which parameters require a gradient,
        optimizers and extra objects.

        Args:
            tensors: the filled tensors of `prepare`.

        Raises:
            StateMismatchError: the values do not fit the objects; some may have been changed.
        """
        self.watch.clear()
        self._copy_received(tensors)
        try:
            whole = self._restore_placement(manifest, tensors)
            self.optimizers.restore_added_groups(self.added_parameters(manifest))
            self._restore_frozen(manifest.frozen)
            self.optimizers.adopt(tree.unpack(manifest.optimizer, whole), self._apart)
            for name, node in manifest.extra.items():
                self.extra[name].load_state_dict(tree.unpack(node, whole))
            self.settings.save()
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise StateMismatchError(f"{type(error).__name__}: {error}") from error

    def buffer_versions(self) -> dict[str, tuple[int, int]]:
        """Return identity and version counter of each buffer, which change if it is written to or replaced.

        Only for the modules that the model had when this object was made, and without the `buffers` given there.
        """
        return {
            name: (id(buffer), buffer._version)
            for prefix, module in self._modules
            for name, buffer in module.named_buffers(prefix, recurse=False, remove_duplicate=False)
            if name not in self._set_buffers
        }

    def find_nan(self) -> str:
        """Return the name of a parameter of the model that contains a NaN, or "".

        State from memory or disk may have correct checksums and still contain a NaN; then it cannot be used.
        """
        for name, parameter in self.model.named_parameters():
            if parameter.is_floating_point() and bool(torch.isnan(local_of(parameter).detach()).any()):
                return name
        return ""

    # ---- inside ----

    def _restore_frozen(self, frozen: tuple[int, ...] | None) -> None:
        """Freeze the parameters with these indices, and unfreeze all others; changed ones lose their gradient. None
        changes nothing.
        """
        if frozen is None:
            return
        without = set(frozen)
        for number, parameter in enumerate(self._parameters.values()):
            if parameter.requires_grad == (number in without):
                parameter.requires_grad_(number not in without)
                parameter.grad = None

    def _added_groups(self) -> dict[str, tuple[tuple[int, ...], ...]]:
        """Return the indices of the parameters in each group added since `protect`, by the optimizer's name.

        Raises:
            BadInputError: a parameter is not the model's.
        """
        index = {id(parameter): number for number, parameter in enumerate(self._parameters.values())}
        added = self.optimizers.added_groups()
        for parameter in (one for groups in added.values() for group in groups for one in group):
            if id(parameter) not in index:
                raise BadInputError(unknown_parameter_message(parameter))
        return {name: tuple(tuple(index[id(p)] for p in group) for group in groups) for name, groups in added.items()}

    @torch.no_grad()
    def _copy_received(self, tensors: list[torch.Tensor]) -> None:
        """Copy received tensors into the model's own, except for tensors that were received in place."""
        for (_, own), received in zip(self.model_tensors(), tensors, strict=False):
            here = local_of(own)
            if received.data_ptr() != here.data_ptr():
                here.copy_(received)

    def _restore_placement(self, manifest: Manifest, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return received tensors, spread ones as DTensors with their placement, on the mesh of a present tensor.

        Raises:
            ValueError: no present tensor has a mesh for a placement.
        """
        here = [*self.capture().spread.values()] if any(spec.placed for spec in manifest.tensors) else []
        spread = {placement_of(tensor): tensor for tensor in here}
        placed = {placement.placed: tensor for placement, tensor in spread.items()}  # regardless of shape
        found: list[torch.Tensor] = []
        for spec, tensor in zip(manifest.tensors, tensors, strict=True):
            how = TensorPlacement(spec.whole, spec.placed)
            like = spread.get(how, placed.get(how.placed)) if how.placed else None
            # An optimizer's own tensor, such as a mean of rows, may have a placement that no other tensor has.
            again = wrap_like(tensor, like, how.whole) if like is not None else tensor
            again = wrap_by_placement(tensor, how, here) if how.placed and like is None else again
            if again is None:
                raise ValueError(f"{spec.name} has a placement that no tensor here has: {spec.placed}")
            found.append(again)
        return found

    def find_late_tensor(self) -> str:
        """Return the path of a tensor in `extra` that a fresh process could not place, or "".

        Such a tensor was made after `protect`, is spread or has the shape of a model's tensor, and does not have the
        name of a parameter.
        """
        own = self.model_tensors()
        named, shapes = {name for name, _ in own}, {tuple(tensor.shape) for _, tensor in own if tensor.dim()}
        for name, thing in self.extra.items():
            for way, tensor in tree.tensors_by_path(thing.state_dict(), f"extra[{name!r}]"):
                known = way in self._initial_paths[name] or (way[-1:] and way[-1] in named)
                if not known and (is_dtensor(tensor) or tuple(tensor.shape) in shapes):
                    return f"extra[{name!r}]: {'.'.join(way)}"
        return ""

    def _state_buffers(self) -> dict[str, torch.Tensor]:
        return {
            strip_wrapper_prefixes(name): self._set_buffers.get(name, buffer)
            for name, buffer in self.model.named_buffers()
        }

    def _device(self) -> torch.device:
        return next((parameter.device for parameter in self._parameters.values()), torch.device("cpu"))

    def check_parameters(self) -> None:
        """Check that the model still has the parameters that were protected.

        Raises:
            BadInputError: a parameter was replaced, so the new one would never be trained.
        """
        known = self._known_ids()
        for name, parameter in self.model.named_parameters():
            if id(parameter) not in known:
                raise BadInputError(
                    f"parameter {strip_wrapper_prefixes(name)!r} is not the one that job.protect() was given: call "
                    "functions that replace parameters (fully_shard, parallelize_module) before the optimizer is made"
                )

    def _known_ids(self) -> set[int]:
        return {id(parameter) for parameter in self._parameters.values()} | self._apart

    def _check_optimizers(self) -> None:
        """Refuse optimizers with parameters that the model does not have.

        Raises:
            BadInputError: there are such parameters.
        """
        known = self._known_ids()
        if any(id(parameter) not in known for parameter in self.optimizers.parameters):
            raise BadInputError(
                "the optimizer has parameters that are not the model's: protect its model, and make it after all "
                "functions that replace parameters (fully_shard, parallelize_module, job.materialize)"
            )


def _make_spec(name: str, tensor: torch.Tensor) -> TensorSpec:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorSpec(name, dtype, tuple(local_of(tensor).shape), tensor.device.type == "cpu", *placement_of(tensor))


def _allocate(spec: TensorSpec, device: torch.device, used: ReusableMemory | None = None) -> torch.Tensor:
    """Return a tensor with undefined values for a spec: from `used` if it has one of this kind, else new; on the host
    if the spec says so, else on `device`.

    Raises:
        StateMismatchError: its dtype is unknown, or there is not enough memory.
    """
    device = torch.device("cpu") if spec.host else device
    try:
        dtype = tree.dtype_of(spec.dtype)
        found = used.pop_tensor(spec.shape, dtype, device) if used is not None else None
        return found if found is not None else torch.empty(spec.shape, dtype=dtype, device=device)
    except (ValueError, RuntimeError) as error:
        raise StateMismatchError(f"{spec.name}: {error}") from error


def state_hash(view: StateView) -> str:
    """Return a hash of the whole state, in hexadecimal: tensors, their names and shapes, and all other values."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(msgspec.msgpack.encode(view.manifest))
    for tensor in view.tensors:
        digest.update(host_bytes(tensor))
    return digest.hexdigest()
