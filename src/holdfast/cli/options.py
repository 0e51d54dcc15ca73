"""Groups of options that several commands share."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
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

#: characters of a script that are searched for the names of its own options
_MOST_SCRIPT = 1 << 20


class OptionGroup(Protocol):
    """Several options that become one value."""

    def parameters(self) -> list[inspect.Parameter]:
        """Return one parameter for each option."""
        ...

    def collect(self, values: Mapping[str, Any]) -> object:
        """Return the value of the group from the values of its parameters, by name."""
        ...


@dataclasses.dataclass(frozen=True)
class _DataclassGroup:
    """The group of a dataclass in which each field is an option."""

    kind: type[Any]

    def parameters(self) -> list[inspect.Parameter]:
        hints = get_type_hints(self.kind, include_extras=True)
        return [_parameter(field.name, field.default, hints[field.name]) for field in dataclasses.fields(self.kind)]

    def collect(self, values: Mapping[str, Any]) -> object:
        return self.kind(**values)


def _parameter(name: str, default: object, annotation: object) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def option_names(command: Callable[..., None]) -> frozenset[str]:
    """Return the long options, such as `--nodes`, of a command and its option groups. Arguments are left out."""
    found = set[str]()
    for parameter in inspect.signature(with_option_groups(command)).parameters.values():
        declared = [one for one in get_args(parameter.annotation)[1:] if hasattr(one, "param_decls")]
        if not any(type(one).__name__ == "ArgumentInfo" for one in declared):
            # In `Annotated`, typer takes the first name for the default.
            given = [name for one in declared for name in (one.default, *(one.param_decls or ()))]
            names = [name for name in given if isinstance(name, str) and name.startswith("-")]
            found |= {name for name in names or [f"--{parameter.name.replace('_', '-')}"] if name.startswith("--")}
    return frozenset(found)


def warn_of_misplaced(command: Callable[..., None], name: str, script: str, args: Sequence[str]) -> None:
    """Warn of options of this command that stand after the script: they are passed to the script.

    No warning for words after `--`, for an option with a name that occurs in the script's text, or if the script cannot
    be read.

    Args:
        name: the name of the command.
        script: path of the script.
        args: the arguments for the script.
    """
    known = option_names(command)
    words = [word.partition("=")[0] for word in itertools.takewhile(lambda word: word != "--", args)]
    misplaced = [word for word in dict.fromkeys(words) if word in known]
    if not misplaced:
        return
    try:
        with open(script, encoding="utf-8", errors="replace") as file:
            text = file.read(_MOST_SCRIPT)
    except OSError:
        return  # a script that cannot be read is refused later, with its own message
    for word in misplaced:
        if word not in text:
            print(
                f"holdfast: {word} stands after the script and is passed to it: if it is meant for "
                f"`holdfast {name}`, put it before {os.path.basename(script)}",
                file=sys.stderr,
                flush=True,
            )


def with_option_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command with the options of its groups in place of the parameters that take the groups.

    A parameter takes a group if its annotation is a dataclass of options, or is annotated with an OptionGroup. The new
    command collects the options of each group into one value, and calls the old one.
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
        """Collect the options of each group into one value, and call the command."""
        for name, group in groups.items():
            mine = {parameter.name: values.pop(parameter.name) for parameter in group.parameters()}
            values[name] = group.collect(mine)
        command(**values)

    with_options.__signature__ = own.replace(parameters=shown)
    with_options.__annotations__ = {parameter.name: parameter.annotation for parameter in shown}
    with_options.__doc__ = command.__doc__
    return with_options


def _group_of(annotation: Any) -> OptionGroup | None:
    """Return the option group of a parameter's annotation, or None if it is a single option."""
    if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
        return _DataclassGroup(annotation)
    if get_origin(annotation) is Annotated:
        return next((one for one in get_args(annotation)[1:] if hasattr(one, "collect")), None)
    return None
