"""The experts of this rank with everything that belongs to them, row by row: weights and optimizer state.

An expert's rows can be read, replaced and rearranged here; nothing in this module talks to anybody.
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
    """One stacked tensor: `key` is the optimizer's name for it, "" for the weight itself; `shape` is one row's."""

    weight: str
    key: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def name(self) -> str:
        """What the tensor is called in checkpoints: w1, w1.exp_avg, ..."""
        return f"{self.weight}.{self.key}" if self.key else self.weight

    @property
    def nbytes(self) -> int:
        """Size of one row."""
        return torch.Size(self.shape).numel() * dtype_of(self.dtype).itemsize


class ValueSpec(msgspec.Struct, frozen=True, array_like=True):
    """One value of the optimizer's that all rows share, such as `step`; dtype "" for a plain number."""

    weight: str
    key: str
    dtype: str
    value: int | float | bool | None


class LayerSpec(msgspec.Struct, frozen=True, array_like=True):
    """All that one layer keeps per expert, and beside the experts."""

    rows: tuple[RowSpec, ...]
    values: tuple[ValueSpec, ...]

    @property
    def weights(self) -> tuple[RowSpec, ...]:
        """The expert itself, without what the optimizer keeps of it."""
        return tuple(row for row in self.rows if not row.key)

    @property
    def nbytes(self) -> int:
        """Size of one expert with its optimizer state."""
        return sum(row.nbytes for row in self.rows)


class ExpertShards:
    """The stacked tensors of all MoE layers."""

    def __init__(self, layers: Sequence[ExpertLayer], optimizer: Optimizer | None = None) -> None:
        """Take note of the layers and of the optimizer that holds their state, if any."""
        self.layers = list(layers)
        self._optimizer = optimizer

    @property
    def hosted(self) -> tuple[tuple[int, ...], ...]:
        """The experts that live here, per layer, ascending."""
        return tuple(layer.experts.hosted for layer in self.layers)

    @property
    def expert_counts(self) -> tuple[int, ...]:
        """How many experts each layer has in the whole job."""
        return tuple(layer.experts.experts for layer in self.layers)

    def describe(self, layer: int) -> LayerSpec:
        """Say what a layer keeps.

        Raises:
            BadInputError: the optimizer keeps something that belongs neither to a row nor to all of them.
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
        """Return one expert's row of one tensor, the live one."""
        return self._stack_of(layer, spec)[self.layers[layer].experts.row(expert)]

    def assign_rows(self, layer: int, experts: Sequence[int], rows: int) -> tuple[int, ...]:
        """Return the expert of each row, -1 for none, once exactly these distinct ones live in so many rows."""
        return _assign_rows(self.layers[layer].experts.row_experts, sorted(experts), rows)

    def adopt(self, layer: int, spec: LayerSpec) -> None:
        """Let the optimizer have the state that `spec` names: missing stacks are zero, values are set."""
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
        """Let exactly these experts live here from now on.

        An expert that stays keeps its row; a new one takes a free one; rows not in use become zero.

        Args:
            layer: which one.
            experts: distinct, each of them here already or in `arrived`.
            rows: room for experts from now on; by default as it is, or as much as they need.
            arrived: rows of new experts by (expert, name of the tensor).

        Raises:
            ValueError: an expert is neither here nor in `arrived`, or there are more than rows.
        """
        module, arrived = self.layers[layer].experts, arrived or {}
        wanted = sorted(set(experts))
        came = {expert for expert, _ in arrived}
        unknown = [expert for expert in wanted if expert not in came and expert not in module.row_experts]
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
            # It would keep a graph alive that knows the weights in their old shape.
            moe.aux_loss = moe.aux_loss.detach()

    # ---- inside ----

    def _weights(self, layer: int) -> dict[str, nn.Parameter]:
        return self.layers[layer].experts.weights()

    def _state(self, weight: nn.Parameter) -> dict[str, object]:
        return self._optimizer.state.get(weight, {}) if self._optimizer is not None else {}

    def _stack_of(self, layer: int, spec: RowSpec) -> torch.Tensor:
        weight = self._weights(layer)[spec.weight]
        tensor = self._state(weight)[spec.key] if spec.key else weight
        assert isinstance(tensor, torch.Tensor)
        return tensor.detach()

    def _set_stack(self, layer: int, spec: RowSpec, stack: torch.Tensor) -> None:
        weight = self._weights(layer)[spec.weight]
        if spec.key:
            assert self._optimizer is not None
            self._optimizer.state[weight][spec.key] = stack
            return
        weight.grad = None
        if weight.data_ptr() != stack.data_ptr() or weight.shape != stack.shape:
            replace_data(weight, stack)


def replace_data(weight: nn.Parameter, data: torch.Tensor) -> None:
    """Give a parameter other data, maybe of another shape, though old graphs of it may still be alive.

    A live graph holds the parameter's gradient accumulator, which knows the old shape; only a change of dtype makes
    torch forget it.
    """
    other = torch.float16 if data.dtype != torch.float16 else torch.float32
    weight.grad = None
    weight.data = torch.empty(0, dtype=other, device=data.device)
    weight.data = data


def _assign_rows(old: tuple[int, ...], wanted: Sequence[int], rows: int) -> tuple[int, ...]:
    """Return the expert of each row: those that stay keep theirs where it still exists, the others fill up."""
    keep = [expert if expert in wanted else -1 for expert in old[:rows]]
    keep += [-1] * (rows - len(keep))
    newcomers = iter([expert for expert in wanted if expert not in keep])
    return tuple(expert if expert >= 0 else next(newcomers, -1) for expert in keep)


def _rearrange_stack(stack: torch.Tensor, old: tuple[int, ...], new: tuple[int, ...]) -> torch.Tensor:
    """Return the stack with its rows in the new order: in place where no expert changes its row."""
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
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        number = value.item()
        assert isinstance(number, int | float)
        return ValueSpec(weight, key, str(value.dtype).removeprefix("torch."), number)
    if value is None or isinstance(value, int | float):
        return ValueSpec(weight, key, "", value)
    what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
    raise BadInputError(
        f"the optimizer's state {key!r} of expert weights is {what}: experts can move only with an optimizer whose "
        "state is one row per expert, or one number"
    )
