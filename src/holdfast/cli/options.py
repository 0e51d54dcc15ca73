"""Options that several commands share are declared once, as a group, and given to each command that takes them."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Protocol, get_args, get_origin, get_type_hints

#: the panels of `holdfast run --help`
JOB, RECOVERY, EXPERTS, OUTPUT, CONNECTION, EXPERIMENTS = (
    "Job",
    "Recovery",
    "Experts",
    "Output",
    "Connection",
    "Experiments",
)


class OptionGroup(Protocol):
    """Several options that become one value."""

    def parameters(self) -> list[inspect.Parameter]:
        """Return one parameter for each option."""
        ...

    def collect(self, values: Mapping[str, Any]) -> object:
        """Return what the command gets for the values of these parameters, by name."""
        ...


@dataclasses.dataclass(frozen=True)
class _Fields:
    """The group of a dataclass whose fields are options."""

    kind: type[Any]

    def parameters(self) -> list[inspect.Parameter]:
        hints = get_type_hints(self.kind, include_extras=True)
        return [_parameter(field.name, field.default, hints[field.name]) for field in dataclasses.fields(self.kind)]

    def collect(self, values: Mapping[str, Any]) -> object:
        return self.kind(**values)


def _parameter(name: str, default: object, annotation: object) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of its groups, in place of the parameters that take them.

    A parameter takes a group if its annotation is a dataclass of options, or is annotated with an OptionGroup.
    """
    own = inspect.signature(command, eval_str=True)
    groups = {name: group for name, p in own.parameters.items() if (group := _group_of(p.annotation)) is not None}
    shown: list[inspect.Parameter] = []
    for name, parameter in own.parameters.items():
        if name in groups:
            shown += groups[name].parameters()
        else:
            shown.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))

    def with_options(**values: Any) -> None:
        for name, group in groups.items():
            mine = {parameter.name: values.pop(parameter.name) for parameter in group.parameters()}
            values[name] = group.collect(mine)
        command(**values)

    with_options.__signature__ = own.replace(parameters=shown)
    with_options.__annotations__ = {parameter.name: parameter.annotation for parameter in shown}
    with_options.__doc__ = command.__doc__
    return with_options


def _group_of(annotation: Any) -> OptionGroup | None:
    if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
        return _Fields(annotation)
    if get_origin(annotation) is Annotated:
        return next((one for one in get_args(annotation)[1:] if hasattr(one, "collect")), None)
    return None
