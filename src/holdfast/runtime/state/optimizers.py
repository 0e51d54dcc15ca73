"""The optimizers of a job, by name, and their state."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from holdfast.errors import BadInputError
from holdfast.runtime.state import tree
from holdfast.runtime.state.step_settings import is_scalar_tensor

#: the name of a job's only optimizer if the script does not name it
NAMELESS = ""
#: the key of named optimizers in a state; the state of a nameless one has its groups at the same level
_BY_NAME = "optimizers"
#: the key of one optimizer's state of each parameter
_STATE = "state"


class Optimizers:
    """One optimizer without a name, or several by name."""

    def __init__(self, given: Optimizer | Mapping[str, Optimizer]) -> None:
        """Check the optimizers.

        Raises:
            BadInputError: an object is not an optimizer that can be protected, or a parameter is in two of them.
        """
        found = cast(object, given)  # The script may pass any object.
        by_name = cast(Mapping[object, object], found) if isinstance(found, Mapping) else {NAMELESS: found}
        #: in the script's order
        self.by_name: dict[str, Optimizer] = {}
        for name, optimizer in by_name.items():
            if not isinstance(name, str) or (not name and found is not optimizer):
                raise BadInputError(f"optimizer={{{name!r}: ...}}: the name of an optimizer is a text, and not empty")
            self.by_name[name] = _check_optimizer(name, optimizer)
        if not self.by_name:
            raise BadInputError("optimizer is an empty mapping: there is nothing to train with")
        #: number of parameter groups of each optimizer at `protect`
        self._groups = {name: len(optimizer.param_groups) for name, optimizer in self.by_name.items()}
        #: the options of the groups at `protect`, by the optimizer's name
        self._options = {
            name: {option for group in optimizer.param_groups for option in group}
            for name, optimizer in self.by_name.items()
        }
        self._check_disjoint()

    def __iter__(self) -> Iterator[Optimizer]:
        """Iterate over the optimizers in the script's order."""
        return iter(self.by_name.values())

    @property
    def parameters(self) -> list[Parameter]:
        """The parameters of all optimizers."""
        return [parameter for optimizer in self for parameter in parameters_of(optimizer)]

    def find_owner(self, parameters: Iterable[Parameter]) -> Optimizer | None:
        """Return the optimizer that has some of these parameters, or None. If the job has a single optimizer, it is
        returned in any case.

        Raises:
            BadInputError: several optimizers have some of them.
        """
        if len(self.by_name) == 1:
            return next(iter(self))
        wanted = {id(parameter) for parameter in parameters}
        names = [
            name
            for name, one in self.by_name.items()
            if any(id(parameter) in wanted for parameter in parameters_of(one))
        ]
        if len(names) > 1:
            raise BadInputError(
                f"the experts of the model's MoE layers are in the optimizers {format_names(names)}: give all "
                "of them to one"
            )
        return self.by_name[names[0]] if names else None

    def settings(self) -> dict[tuple[str, int], dict[str, object]]:
        """Return the plain options that the script chose, by the optimizer's name and the number of the parameter
        group.

        Options that a schedule changes are left out; of a scheduled learning rate, the initial one counts.
        """
        return {
            (name, number): _script_options(group)
            for name, optimizer in self.by_name.items()
            for number, group in enumerate(optimizer.param_groups)
        }

    # ---- state ----

    def added_groups(self) -> dict[str, list[list[Parameter]]]:
        """Return the parameters of each group added since `protect`, by the optimizer's name, if it has any."""
        added = {name: one.param_groups[self._groups[name] :] for name, one in self.by_name.items()}
        return {name: [list(group["params"]) for group in groups] for name, groups in added.items() if groups}

    def restore_added_groups(self, added: Mapping[str, Sequence[Sequence[Parameter]]]) -> None:
        """Replace the groups added since `protect` by the groups added in a captured state; their options are adopted
        later. Do nothing if they are the same.

        Args:
            added: the parameters of each group, by the optimizer's name.

        Raises:
            ValueError: a parameter would be in two groups.
        """
        if _parameter_ids(self.added_groups()) == _parameter_ids(added):
            return
        for name, optimizer in self.by_name.items():
            del optimizer.param_groups[self._groups[name] :]
            for parameters in added.get(name, ()):
                # A group of named parameters takes others with names only; nothing but messages uses these.
                named, number = "param_names" in optimizer.param_groups[0], len(optimizer.param_groups)
                given = [(f"added.{number}.{n}", one) if named else one for n, one in enumerate(parameters)]
                optimizer.add_param_group({"params": given})

    def match_parameters(
        self, state: tree.Node, added: Mapping[str, Sequence[Sequence[Parameter]]] | None = None
    ) -> Iterator[tuple[Parameter, int]]:
        """Yield the parameter to which each tensor in a captured optimizer state belongs, and the tensor's index.
        Tensors of unknown parameters are left out.

        Args:
            added: the parameters of the state's groups that were added since `protect`, by the optimizer's name.
        """
        known = {
            (name, str(number)): parameter
            for name, optimizer in self.by_name.items()
            for number, parameter in enumerate(
                [
                    *_distinct_parameters(optimizer.param_groups[: self._groups[name]]),
                    *(parameter for group in (added or {}).get(name, ()) for parameter in group),
                ]
            )
        }
        for way, place in tree.tensor_paths(state):
            named = (NAMELESS, *way) if NAMELESS in self.by_name else way[1:]
            parameter = known.get((named[0], named[2])) if len(named) > 3 and named[1] == _STATE else None
            if parameter is not None:
                yield parameter, place

    def capture(self, apart: set[int]) -> dict[str, Any]:
        """Return options and state of all optimizers, by their names if they have names. Parameters are numbered in the
        order of the groups; tensors of the state are not copied.

        Args:
            apart: ids of parameters that are left out.
        """
        if NAMELESS in self.by_name:
            return _capture_state(self.by_name[NAMELESS], apart)
        return {_BY_NAME: {name: _capture_state(optimizer, apart) for name, optimizer in self.by_name.items()}}

    def describe_difference(self, state: tree.Node) -> str:
        """Return how the optimizers of a captured state differ from these, or "" if their names are the same."""
        theirs, mine = _captured_names(state), sorted(self.by_name)
        if theirs == mine:
            return ""
        return f"it has {_describe_names(theirs)}, but this job has {_describe_names(mine)}"

    def adopt(self, value: dict[str, Any], apart: set[int]) -> None:
        """Replace options and state of all optimizers with a captured state as it is: `Optimizer.load_state_dict` would
        cast it to the parameters' dtype.

        Args:
            value: as `capture` returns it.
            apart: ids of parameters whose state stays.

        Raises:
            ValueError, KeyError, TypeError, AttributeError: it does not fit.
        """
        named = value if NAMELESS in self.by_name else value[_BY_NAME]
        for name, optimizer in self.by_name.items():
            _adopt_state(optimizer, named if name == NAMELESS else named[name], apart, self._options[name])

    def state_tensors(self, apart: set[int]) -> Iterator[torch.Tensor]:
        """Yield the tensors of the optimizers' state, which `adopt` replaces.

        Args:
            apart: ids of parameters that are left out.
        """
        for optimizer in self:
            for parameter in _parameters_with_state(optimizer, apart):
                yield from (kept for kept in optimizer.state[parameter].values() if isinstance(kept, torch.Tensor))

    def _check_disjoint(self) -> None:
        """Refuse a parameter in two optimizers.

        Raises:
            BadInputError: there is one.
        """
        owner: dict[int, str] = {}
        for name, optimizer in self.by_name.items():
            for parameter in parameters_of(optimizer):
                other = owner.setdefault(id(parameter), name)
                if other != name:
                    raise BadInputError(
                        f"a parameter of shape {tuple(parameter.shape)} is in the optimizers {other!r} and {name!r}: "
                        "each step updates one of them, so a parameter belongs to one"
                    )


def parameters_of(optimizer: Optimizer) -> list[Parameter]:
    """Return the parameters of an optimizer in the order of its groups, each once."""
    return _distinct_parameters(optimizer.param_groups)


def unknown_parameter_message(parameter: torch.Tensor) -> str:
    """Return the refusal of a parameter group with a parameter that the protected model does not have."""
    return (
        f"a parameter group added to the optimizer has a parameter of shape {tuple(parameter.shape)} that the model "
        "given to job.protect() does not have, so no other worker can receive it: make all parameters before "
        "job.protect(), with requires_grad_(False) on parameters to be trained later"
    )


def format_names(names: Iterable[str]) -> str:
    """Return names as an enumeration for messages."""
    return ", ".join(repr(name) for name in names)


def required_arguments(method: Any) -> list[str]:
    """Return the names of a method's arguments without a default, except for its object."""
    _, *arguments = inspect.signature(method).parameters.values()
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [one.name for one in arguments if one.default is inspect.Parameter.empty and one.kind not in kinds]


def _distinct_parameters(groups: Iterable[dict[str, Any]]) -> list[Parameter]:
    return list(dict.fromkeys(parameter for group in groups for parameter in group["params"]))


def _parameter_ids(groups: Mapping[str, Sequence[Sequence[Parameter]]]) -> dict[str, list[list[int]]]:
    return {name: [[id(parameter) for parameter in group] for group in each] for name, each in groups.items() if each}


def _script_options(group: dict[str, Any]) -> dict[str, object]:
    """Return a group's plain options by name, sorted, with tensors of one element as floats. With a schedule, `lr` is
    the initial learning rate; momentum and betas are left out if a schedule changes them.
    """
    scheduled = {"lr"} if "initial_lr" in group else set[str]()
    scheduled |= {"momentum", "betas"} if "max_momentum" in group else set()
    plain = (bool, int, float, str, tuple, type(None))
    return {
        {"initial_lr": "lr"}.get(name, name): float(value) if isinstance(value, torch.Tensor) else value
        for name, value in sorted(group.items())
        if name not in scheduled
        and (isinstance(value, plain) or (isinstance(value, torch.Tensor) and value.numel() == 1))
    }


def _check_optimizer(name: str, optimizer: object) -> Optimizer:
    """Return an optimizer that can be protected; `name` is its name in messages, or "".

    Raises:
        BadInputError: it is not a torch optimizer, its step() needs an argument such as a closure, it needs sparse
            gradients, or it has its own state_dict().
    """
    owner = f"optimizer {name!r}" if name else "optimizer"
    if not isinstance(optimizer, Optimizer):
        raise BadInputError(
            f"{owner} is a {type(optimizer).__name__}: give a torch.optim.Optimizer, or several by name, such as "
            'optimizer={"generator": a, "critic": b}'
        )
    kind = type(optimizer)
    if arguments := required_arguments(kind.step):
        raise BadInputError(
            f"{owner} is a {kind.__name__}; its step() needs a {arguments[0]}: it computes gradients several times a "
            "step, unknown to other workers; use one without such an argument, such as AdamW"
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise BadInputError(
            f"{owner} is a SparseAdam, which needs sparse gradients, and holdfast reduces gradients as dense ones: "
            "use Adam or AdamW, and leave sparse=True out of the embeddings"
        )
    if kind.state_dict is not Optimizer.state_dict:  # wrappers keep state elsewhere
        raise BadInputError(
            f"{owner} is a {kind.__name__} with its own state_dict(): only plain torch optimizers can be protected"
        )
    return optimizer


def _captured_names(state: tree.Node) -> list[str]:
    """Return the names of the optimizers of a captured state, sorted; `[NAMELESS]` for a single one without a name."""
    for key, inner in state.items if isinstance(state, tree.Mapping) else ():
        if key == _BY_NAME and isinstance(inner, tree.Mapping):
            return sorted(str(name) for name, _ in inner.items)
    return [NAMELESS]


def _describe_names(names: list[str]) -> str:
    return "one optimizer without a name" if names == [NAMELESS] else f"the optimizers {format_names(names)}"


def _capture_state(optimizer: Optimizer, apart: set[int]) -> dict[str, Any]:
    """Return an optimizer's options by group, and its state by the parameter's number in the order of the groups, as
    state_dict() does. Tensors of the state are not copied.

    Args:
        apart: ids of parameters that are left out.
    """
    # A tensor such as the learning rate is cloned: the script may change it in place while the state is sent or saved.
    groups = [
        {
            key: value.clone() if is_scalar_tensor(value) else value
            for key, value in sorted(group.items())
            if key not in ("params", "param_names")
        }
        for group in optimizer.param_groups
    ]
    state = {
        number: dict(sorted(optimizer.state[parameter].items()))
        for number, parameter in enumerate(parameters_of(optimizer))
        if parameter in optimizer.state and id(parameter) not in apart
    }
    return {"groups": groups, _STATE: state}


def _parameters_with_state(optimizer: Optimizer, apart: set[int]) -> list[torch.Tensor]:
    """Return the parameters that have optimizer state, including parameters no longer in a group."""
    keys = [cast(object, key) for key in optimizer.state]
    return [key for key in keys if isinstance(key, torch.Tensor) and id(key) not in apart]


def _adopt_state(optimizer: Optimizer, value: dict[str, Any], apart: set[int], protected: set[str]) -> None:
    """Replace an optimizer's options and state with received ones; the tensors are used as they are.

    Args:
        value: as `_capture_state` returns it.
        apart: ids of parameters whose state stays.
        protected: the options that the groups had at `protect`. Others that the script has added since are removed,
            unless they are in the received state.

    Raises:
        ValueError: the parameter groups or their options belong to another optimizer.
    """
    groups = optimizer.param_groups
    if len(value["groups"]) != len(groups):
        raise ValueError(f"{len(value['groups'])} parameter groups, but the optimizer has {len(groups)}")
    for group, saved in zip(groups, value["groups"], strict=True):
        for option in group.keys() - saved.keys() - protected - optimizer.defaults.keys():
            del group[option]
        # Versions of torch and schedulers add options. Only of another optimizer, each side lacks options of the other.
        unknown, missing = saved.keys() - group.keys(), group.keys() - saved.keys() - {"params", "param_names"}
        if unknown and missing:
            ours, theirs = ", ".join(sorted(missing)), ", ".join(sorted(unknown))
            raise ValueError(f"another optimizer's: its options include {theirs}, but {ours} are needed")
    parameters = parameters_of(optimizer)
    for group, saved in zip(groups, value["groups"], strict=True):
        group.update(saved)
    for parameter in _parameters_with_state(optimizer, apart):
        del optimizer.state[parameter]
    for number, state in value[_STATE].items():
        optimizer.state[parameters[number]] = state
