from __future__ import annotations

from collections import Counter, OrderedDict, deque
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import BadInputError
from holdfast.runtime.state import tree
from holdfast.runtime.state.state import Manifest, StateMismatchError, TrainingState, state_hash

plain = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5) | st.binary(max_size=5)
)
keys = st.booleans() | st.integers(-(2**60), 2**60) | st.text(max_size=5)
values = st.recursive(
    plain,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.lists(inner, max_size=3).map(deque)
        | st.dictionaries(keys, inner, max_size=3)
        | st.dictionaries(keys, inner, max_size=3).map(OrderedDict)
        | st.dictionaries(keys, st.integers(0, 9), max_size=3).map(Counter)
        | st.sets(st.integers(), max_size=3)
    ),
    max_leaves=12,
)


def same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return [*a] == [*b] and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple | deque):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


@given(values)
def test_packed_trees_are_serialized_without_changes(value: Any) -> None:
    node = tree.pack(value, lambda tensor: pytest.fail("no tensor here"), "value")
    data = msgspec.msgpack.encode(node)
    assert same(tree.unpack(msgspec.msgpack.decode(data, type=tree.Node), []), value)


@given(st.binary(max_size=200))
def test_garbage_is_not_unpacked_as_a_tree(data: bytes) -> None:
    try:
        node = msgspec.msgpack.decode(data, type=tree.Node)
        tree.unpack(node, [])
    except (msgspec.DecodeError, ValueError, TypeError):
        return


def test_values_that_cannot_be_packed_are_named() -> None:
    with pytest.raises(BadInputError, match=r"extra\['a'\]\['deep'\]\[...\] is a function"):
        tree.pack({"deep": [lambda: 0]}, lambda tensor: 0, "extra['a']")


def make(width: int = 4, optimizer: str = "adam", steps: int = 0, scheduler: bool = True) -> TrainingState:
    torch.manual_seed(steps + width)
    model = torch.nn.Sequential(torch.nn.Linear(3, width), torch.nn.LayerNorm(width), torch.nn.Linear(width, 1))
    model.register_buffer("mask", torch.rand(5), persistent=False)
    # This is channels_last memory: neither contiguous nor readable in place.
    model.register_parameter("odd", torch.nn.Parameter(torch.rand(4, 3).t()))
    model.to(torch.bfloat16 if optimizer == "bf16" else torch.float32)
    made: torch.optim.Optimizer
    if optimizer == "sgd":
        made = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    else:
        made = torch.optim.AdamW(model.parameters(), lr=0.1, betas=(0.8, 0.9))
    schedule = torch.optim.lr_scheduler.MultiStepLR(made, milestones=[2, 2, 5])
    state = TrainingState(model, made, {"schedule": schedule} if scheduler else {})
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        made.step()
        schedule.step()
    return state


def copy(source: TrainingState, target: TrainingState) -> None:
    view = source.capture()
    manifest = msgspec.msgpack.decode(msgspec.msgpack.encode(view.manifest), type=Manifest)
    tensors = target.prepare(manifest)
    with torch.no_grad():
        for here, there in zip(tensors, view.tensors, strict=True):
            here.copy_(there)
    target.adopt(manifest, tensors)


@pytest.mark.parametrize("optimizer", ["adam", "sgd", "bf16"])
def test_a_new_replica_that_adopts_a_state_is_identical(optimizer: str) -> None:
    source, target = make(steps=3, optimizer=optimizer), make(steps=0, optimizer=optimizer)
    assert state_hash(source.capture()) != state_hash(target.capture())
    copy(source, target)
    assert state_hash(source.capture()) == state_hash(target.capture())
    for state in (source, target):
        for parameter in state.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        state.optimizers.by_name[""].step()
        state.extra["schedule"].step()
    assert state_hash(source.capture()) == state_hash(target.capture())
    assert target.extra["schedule"].get_last_lr() == source.extra["schedule"].get_last_lr()


def test_optimizer_state_keeps_its_dtype_with_low_precision_parameters() -> None:
    """Optimizer.load_state_dict would cast float32 moments to the parameters' bfloat16."""
    source, target = make(optimizer="bf16", steps=1), make(optimizer="bf16")
    parameter = next(source.model.parameters())
    source.optimizers.by_name[""].state[parameter]["exp_avg"] = torch.randn(parameter.shape, dtype=torch.float32)
    copy(source, target)
    received = target.optimizers.by_name[""].state[next(target.model.parameters())]["exp_avg"]
    assert received.dtype is torch.float32
    assert received.equal(source.optimizers.by_name[""].state[parameter]["exp_avg"])


def test_any_changed_bit_changes_the_hash() -> None:
    state = make(steps=2)
    before = state_hash(state.capture())
    for tensor in state.capture().tensors:
        kept = tensor.clone()
        tensor[(-1,) * tensor.dim()] += 1
        assert state_hash(state.capture()) != before
        tensor.copy_(kept)
        assert state_hash(state.capture()) == before
    state.optimizers.by_name[""].param_groups[0]["lr"] *= 2
    assert state_hash(state.capture()) != before


def test_the_state_of_another_model_is_refused() -> None:
    manifest = make(width=4).capture().manifest
    with pytest.raises(StateMismatchError, match=r"0\.weight"):
        make(width=5).prepare(manifest)
    with pytest.raises(StateMismatchError, match="extra"):
        make(scheduler=False).prepare(manifest)


def test_the_state_of_another_optimizer_is_refused() -> None:
    """SGD would adopt Adam's state and silently start without momentum."""
    with pytest.raises(StateMismatchError, match=r"another optimizer.s: its options include .*betas.*, but dampening"):
        copy(make(steps=1), make(optimizer="sgd"))
    newer, older = make(steps=1), make()
    newer.optimizers.by_name[""].param_groups[0]["option_of_a_later_torch"] = True
    copy(newer, older)
    assert older.optimizers.by_name[""].param_groups[0]["option_of_a_later_torch"] is True


def test_a_manifest_with_wrong_tensors_is_refused() -> None:
    state = make(steps=1)
    manifest = state.capture().manifest
    shorter = msgspec.structs.replace(manifest, tensors=manifest.tensors[:-1])
    with pytest.raises(StateMismatchError, match="each tensor once"):
        state.prepare(shorter)
    last = manifest.tensors[-1]
    for wrong in (
        msgspec.structs.replace(last, dtype="load"),
        msgspec.structs.replace(last, shape=(1 << 60,)),
        msgspec.structs.replace(last, shape=(-1,)),
    ):
        with pytest.raises(StateMismatchError):
            state.prepare(msgspec.structs.replace(manifest, tensors=(*manifest.tensors[:-1], wrong)))


def test_a_wrong_extra_and_a_foreign_optimizer_are_named() -> None:
    model, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    with pytest.raises(BadInputError, match=r"extra\['x'\] is a int"):
        TrainingState(model, torch.optim.SGD(model.parameters()), {"x": 3})
    with pytest.raises(BadInputError, match="not the model's"):
        TrainingState(model, torch.optim.SGD(other.parameters()))
