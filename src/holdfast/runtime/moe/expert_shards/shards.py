"""The expert shard store: weights and optimizer state of this rank's experts, row by row.

An expert's rows can be read, replaced and rearranged. This module does not communicate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import msgspec
import torch
from torch import nn
from torch.optim import Optimizer

from holdfast.errors import BadInputError
from holdfast.runtime.moe.layer.expert_layer import ExpertLayer
from holdfast.runtime.state.tree import dtype_of


class RowSpec(msgspec.Struct, frozen=True, array_like=True):
    """The name, shape and type of one stacked tensor: one row per expert that a rank holds."""

    weight: str
    #: the optimizer's name for the tensor, "" for the weight itself
    key: str
    dtype: str
    #: of one row
    shape: tuple[int, ...]

    @property
    def name(self) -> str:
        """The tensor's name in checkpoints: w1, w1.exp_avg, ..."""
        return f"{self.weight}.{self.key}" if self.key else self.weight

    @property
    def nbytes(self) -> int:
        """Size of one row."""
        return torch.Size(self.shape).numel() * dtype_of(self.dtype).itemsize


class ValueSpec(msgspec.Struct, frozen=True, array_like=True):
    """One optimizer value that all rows share, such as `step`."""

    weight: str
    key: str
    #: "" for a plain number
    dtype: str
    value: int | float | bool | None


class LayerSpec(msgspec.Struct, frozen=True, array_like=True):
    """All tensors that one layer has per expert, and the values that its experts share."""

    rows: tuple[RowSpec, ...]
    values: tuple[ValueSpec, ...]

    @property
    def weights(self) -> tuple[RowSpec, ...]:
        """The weights of an expert, without optimizer state."""
        return tuple(row for row in self.rows if not row.key)

    @property
    def nbytes(self) -> int:
        """Size of one expert with its optimizer state."""
        return sum(row.nbytes for row in self.rows)


class ExpertShards:
    """The stacked tensors of all MoE layers."""

    def __init__(self, layers: Sequence[ExpertLayer], optimizer: Optimizer | None = None) -> None:
        """Use these layers, and the optimizer that has their state, if any."""
        self.layers = list(layers)
        self._optimizer = optimizer

    @property
    def hosted(self) -> tuple[tuple[int, ...], ...]:
        """The experts on this rank, per layer, ascending."""
        return tuple(layer.experts.hosted for layer in self.layers)

    @property
    def expert_counts(self) -> tuple[int, ...]:
        """Number of experts of each layer in the whole job."""
        return tuple(layer.experts.experts for layer in self.layers)

    def describe(self, layer: int) -> LayerSpec:
        """Return the specification of a layer's tensors and values.

        Raises:
            BadInputError: the optimizer has state that is neither one row per expert nor one value.
        """
        rows: list[RowSpec] = []
        values: list[ValueSpec] = []
        for name, weight in self._weights(layer).items():
            rows.append(_row_spec(name, "", weight))
            for key, value in sorted(self._state(weight).items()):
                if _is_stacked(value, weight):
                    rows.append(_row_spec(name, key, value))
                else:
                    values.append(_value_spec(name, key, value))
        return LayerSpec(tuple(rows), tuple(values))

    def row(self, layer: int, expert: int, spec: RowSpec) -> torch.Tensor:
        """Return one expert's live row of one tensor, a view without autograd. The expert must be on this rank."""
        return self._stack_of(layer, spec)[self.layers[layer].experts.row(expert)]

    def assign_rows(self, layer: int, experts: Sequence[int], rows: int) -> tuple[int, ...]:
        """Return the expert of each row, -1 for none, if these distinct experts get this many rows."""
        return _assign_rows(self.layers[layer].experts.row_experts, sorted(experts), rows)

    def set_optimizer_state(self, layer: int, spec: LayerSpec) -> None:
        """Give the optimizer the state of a specification: missing stacks become zero, shared values are set.

        Stacks that exist are not changed. Does nothing without an optimizer.
        """
        weights = self._weights(layer)
        if self._optimizer is None:
            return
        for row in spec.rows:
            weight = weights[row.weight]
            state: dict[str, Any] = self._optimizer.state[weight] if row.key else {}
            if row.key and row.key not in state:
                shape = (weight.shape[0], *row.shape)
                state[row.key] = torch.zeros(shape, dtype=dtype_of(row.dtype), device=weight.device)
        for value in spec.values:
            state = self._optimizer.state[weights[value.weight]]
            if not value.dtype:
                state[value.key] = value.value
            elif value.key in state:
                state[value.key].fill_(value.value)
            else:
                state[value.key] = torch.tensor(value.value, dtype=dtype_of(value.dtype))

    @torch.no_grad()
    def rearrange(
        self,
        layer: int,
        experts: Sequence[int],
        *,
        rows: int | None = None,
        arrived: Mapping[tuple[int, str], torch.Tensor] | None = None,
    ) -> None:
        """Keep exactly these experts on this rank, in the weights and in the optimizer's state.

        An expert that stays keeps its row, a new one gets a free one, and unused rows become zero. The weights'
        gradients are dropped.

        Args:
            layer: index of the layer.
            experts: distinct, each of them already here or in `arrived`.
            rows: new number of rows; by default the present number, or more if the experts need it.
            arrived: rows of new experts by (expert, name of the tensor).

        Raises:
            ValueError: an expert is neither here nor in `arrived`, or there are more experts than rows.
        """
        module, arrived = self.layers[layer].experts, arrived or {}
        wanted = sorted(set(experts))
        received = {expert for expert, _ in arrived}
        unknown = [expert for expert in wanted if expert not in received and expert not in module.row_experts]
        room = max(module.rows, len(wanted)) if rows is None else rows
        if unknown or len(wanted) > room:
            raise ValueError(f"layer {layer}: experts {wanted} in {room} rows: {unknown} are not here")
        old, new = module.row_experts, self.assign_rows(layer, wanted, room)
        spec = self.describe(layer)
        for row in spec.rows:
            stack = _rearrange_stack(self._stack_of(layer, row), old, new)
            for place, expert in enumerate(new):
                if (expert, row.name) in arrived:
                    stack[place].copy_(arrived[expert, row.name])
            self._set_stack(layer, row, stack)
        module.row_experts = new
        for moe in self.layers:
            # Otherwise it would keep a graph alive that has the weights in their old shape.
            moe.aux_loss = moe.aux_loss.detach()

    # ---- inside ----

    def _weights(self, layer: int) -> dict[str, nn.Parameter]:
        return self.layers[layer].experts.weights()

    def _state(self, weight: nn.Parameter) -> dict[str, object]:
        return self._optimizer.state.get(weight, {}) if self._optimizer is not None else {}

    def _stack_of(self, layer: int, spec: RowSpec) -> torch.Tensor:
        """Return the stack of a weight, or of its optimizer state, as `spec` names it, without autograd."""
        weight = self._weights(layer)[spec.weight]
        tensor = self._state(weight)[spec.key] if spec.key else weight
        assert isinstance(tensor, torch.Tensor)
        return tensor.detach()

    def _set_stack(self, layer: int, spec: RowSpec, stack: torch.Tensor) -> None:
        """Replace a stack in the optimizer's state, or a weight's data; a weight's gradient is dropped."""
        weight = self._weights(layer)[spec.weight]
        if spec.key:
            assert self._optimizer is not None
            self._optimizer.state[weight][spec.key] = stack
            return
        weight.grad = None
        if weight.data_ptr() != stack.data_ptr() or weight.shape != stack.shape:
            replace_data(weight, stack)


def replace_data(weight: nn.Parameter, data: torch.Tensor) -> None:
    """Replace a parameter's data, maybe by another shape, even if old graphs of it are still alive.

    A live graph holds the parameter's gradient accumulator, which has the old shape; only a change of dtype makes torch
    drop it.
    """
    other = torch.float16 if data.dtype != torch.float16 else torch.float32
    weight.grad = None
    weight.data = torch.empty(0, dtype=other, device=data.device)
    weight.data = data


def _assign_rows(old: tuple[int, ...], wanted: Sequence[int], rows: int) -> tuple[int, ...]:
    """Return the expert of each row, -1 for none, if the `wanted` experts get this many rows.

    Experts that stay keep their row if it still exists, others fill free rows in order.
    """
    keep = [expert if expert in wanted else -1 for expert in old[:rows]]
    keep += [-1] * (rows - len(keep))
    newcomers = iter([expert for expert in wanted if expert not in keep])
    return tuple(expert if expert >= 0 else next(newcomers, -1) for expert in keep)


def _rearrange_stack(stack: torch.Tensor, old: tuple[int, ...], new: tuple[int, ...]) -> torch.Tensor:
    """Return the stack with its rows in the new order; rows of experts that are new here are zero.

    If no expert changes its row, and the number of rows stays, it is the same tensor, changed in place.

    Args:
        old, new: the expert of each row, -1 for none.
    """
    moved = any(expert >= 0 and expert in old and old.index(expert) != place for place, expert in enumerate(new))
    if len(old) != len(new) or moved:
        fresh = stack.new_zeros((len(new), *stack.shape[1:]))
        for place, expert in enumerate(new):
            if expert in old and expert >= 0:
                fresh[place].copy_(stack[old.index(expert)])
        return fresh
    for place, expert in enumerate(new):
        if old[place] != expert:
            stack[place].zero_()
    return stack


def _is_stacked(value: object, weight: nn.Parameter) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape[0] == weight.shape[0]


def _row_spec(weight: str, key: str, tensor: torch.Tensor) -> RowSpec:
    return RowSpec(weight, key, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape[1:]))


def _value_spec(weight: str, key: str, value: object) -> ValueSpec:
    """Return the description of an optimizer value that all experts share: a number, None, or a tensor of one element.

    Raises:
        BadInputError: it is something else.
    """
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        number = value.item()
        assert isinstance(number, int | float)
        return ValueSpec(weight, key, str(value.dtype).removeprefix("torch."), number)
    if value is None or isinstance(value, int | float):
        return ValueSpec(weight, key, "", value)
    kind = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
    raise BadInputError(
        f"the optimizer's state {key!r} of expert weights is {kind}: experts can move only with an optimizer whose "
        "state is one row per expert, or one number"
    )
