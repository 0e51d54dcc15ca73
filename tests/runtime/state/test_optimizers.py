"""Several optimizers as part of the state, and refused optimizers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.optim import SGD, AdamW

from holdfast.errors import BadInputError
from holdfast.runtime.state import tree
from holdfast.runtime.state.state import StateMismatchError, TrainingState, state_hash


def make(names: Sequence[str], *, steps: int = 0) -> TrainingState:
    """Return two layers with one optimizer each, or (without names) one for both."""
    torch.manual_seed(steps)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1))
    kinds: list[Callable[..., Any]] = [AdamW, SGD]
    by_name = {
        name: kind(layer.parameters(), lr=0.1) for name, kind, layer in zip(names, kinds, model, strict=bool(names))
    }
    state = TrainingState(model, by_name or SGD(model.parameters(), lr=0.1, momentum=0.9))
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        for optimizer in state.optimizers:
            optimizer.step()
    return state


def copy(source: TrainingState, target: TrainingState) -> None:
    view = source.capture()
    tensors = target.prepare(view.manifest)
    with torch.no_grad():
        for here, there in zip(tensors, view.tensors, strict=True):
            here.copy_(there)
    target.adopt(view.manifest, tensors)


@pytest.mark.parametrize("names", [(), ("a", "b"), ("groups", "state")])
def test_the_state_of_all_optimizers_is_copied_exactly(names: Sequence[str]) -> None:
    source, target = make(names, steps=3), make(names)
    for optimizer in source.optimizers:
        optimizer.param_groups[0]["lr"] *= 0.5
    copy(source, target)
    assert state_hash(source.capture()) == state_hash(target.capture())
    assert target.optimizers.settings() == source.optimizers.settings()
    assert [group["lr"] for group in target.optimizers.settings().values()] == [0.05] * max(len(names), 1)


@pytest.mark.parametrize("names", [(), ("a", "b"), ("state", "optimizers")])
def test_optimizer_tensors_are_matched_to_their_parameters(names: Sequence[str]) -> None:
    state = make(names, steps=1)
    view = state.capture()
    found = [(id(parameter), place) for parameter, place in state.optimizers.match_parameters(view.manifest.optimizer)]
    wanted = [
        (id(parameter), place)
        for one in state.optimizers
        for parameter, kept in one.state.items()
        for place, tensor in enumerate(view.tensors)
        for thing in kept.values()
        if isinstance(thing, torch.Tensor) and tensor.data_ptr() == thing.data_ptr()
    ]
    assert wanted
    assert sorted(found) == sorted(wanted)


@pytest.mark.parametrize("state", [{}, torch.ones(1), [torch.ones(1)], {"state": torch.ones(1)}, {"a": {"b": {}}}])
@pytest.mark.parametrize("names", [(), ("a", "b")])
def test_a_state_that_is_not_an_optimizer_state_matches_no_parameter(names: Sequence[str], state: Any) -> None:
    assert list(make(names).optimizers.match_parameters(tree.pack(state, lambda tensor: 0, "state"))) == []


@pytest.mark.parametrize(
    ("theirs", "mine", "words"),
    [
        ((), ("a", "b"), "it has one optimizer without a name, but this job has the optimizers 'a', 'b'"),
        (("groups", "state"), (), "it has the optimizers 'groups', 'state', but this job has one optimizer without"),
        (("a", "b"), ("a", "c"), "the optimizers 'a', 'b', but this job has the optimizers 'a', 'c'"),
    ],
)
def test_the_state_of_other_optimizers_is_refused(theirs: Sequence[str], mine: Sequence[str], words: str) -> None:
    with pytest.raises(StateMismatchError, match=words):
        make(mine).prepare(make(theirs, steps=1).capture().manifest)


def test_the_order_of_optimizer_names_does_not_matter() -> None:
    source = make(("a", "b"), steps=1)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1))
    target = TrainingState(model, {"b": SGD(model[1].parameters()), "a": AdamW(model[0].parameters())})
    copy(source, target)
    assert target.optimizers.by_name["a"].state[model[0].weight]["step"] == 1


class Wrapped(SGD):
    """An optimizer that keeps its state elsewhere."""

    def state_dict(self) -> dict[str, Any]:
        return {}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (lambda ps: [SGD(ps), SGD(ps)], "optimizer is a list: give a torch.optim.Optimizer, or several by name"),
        (lambda ps: {"a": None}, "optimizer 'a' is a NoneType: give"),
        (lambda ps: {}, "an empty mapping"),
        (lambda ps: {"": SGD(ps)}, "the name of an optimizer is a text, and not empty"),
        (lambda ps: {1: SGD(ps)}, "the name of an optimizer is a text, and not empty"),
        (lambda ps: {"a": SGD(ps), "b": SGD(ps[:1])}, r"shape \(2, 2\) is in the optimizers 'a' and 'b'"),
        (
            lambda ps: torch.optim.SparseAdam(list(ps)),
            "SparseAdam, which needs sparse gradients, .*leave sparse=True out",
        ),
        (lambda ps: torch.optim.LBFGS(ps), r"LBFGS; its step\(\) needs a closure: .* use one without"),
        (lambda ps: Wrapped(ps), r"Wrapped with its own state_dict\(\): only plain"),
    ],
)
def test_invalid_optimizers_are_refused_in_one_line(given: Callable[[Any], Any], words: str) -> None:
    model = torch.nn.Linear(2, 2)
    with pytest.raises(BadInputError, match=words) as caught:
        TrainingState(model, given(list(model.parameters())))
    assert "\n" not in str(caught.value)
