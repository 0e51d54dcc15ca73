"""Read files and options of users into a declared struct. Each error is one line.

A key is the path of a field, such as `checkpoint.every`. If a key has several values, the caller chooses one before it
builds the struct.
"""

from __future__ import annotations

import dataclasses
import difflib
import errno
import math
import os
import stat
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast, get_args, get_type_hints

import msgspec
from msgspec import Struct, inspect

from holdfast.errors import BadInputError
from holdfast.storage import is_url
from holdfast.units import parse_duration, parse_hours, parse_size, parse_work_time

S = TypeVar("S", bound=Struct)
_Extra = Mapping[str, Any]
_NOTHING: _Extra = {}
#: most characters of a bad value in a message
_MOST_SHOWN = 60
#: most keys that a message lists
_MOST_LISTED = 16
#: most bytes of a file that people write
_MOST_BYTES = 1 << 20


def _work_time(text: str) -> str:
    parse_work_time(text)
    return text.strip()


#: For each unit, a function that parses a text (or checks it, if the text stays), and a description of valid texts.
_UNITS: dict[str, tuple[Callable[[str], float | str], str]] = {
    "seconds": (parse_duration, "a number of seconds, or a time such as 90s, 15m or 4h"),
    "hours": (parse_hours, "a number of hours, or a time such as 90m, 300h or 40d"),
    "bytes per second": (parse_size, "bytes in a second, such as 200MB or 1GiB"),
    "per work": (_work_time, "seconds for each token or micro-batch, such as 0.0005/token or 0.1/micro-batch"),
}


@dataclass(frozen=True, slots=True)
class Given:
    """A value with its name in messages, such as `--nodes` or `job.toml: max_nodes`."""

    value: object
    name: str
    #: whether it comes from the command line, which passes numbers as text
    text: bool = False
    #: folder to which a relative path belongs
    folder: str = ""


@dataclass(frozen=True, slots=True)
class Key:
    """The declaration of one key of a TOML or JSON document."""

    name: str
    #: the struct of the field
    owner: type[Struct]
    hint: Any
    default: object
    kind: inspect.Type
    description: str
    extra: _Extra

    @property
    def is_flag(self) -> bool:
        """Whether it is true or false."""
        return isinstance(self.kind, inspect.BoolType)

    @property
    def choices(self) -> tuple[object, ...]:
        """The allowed values, or () if the key is not a choice."""
        return get_args(get_args(self.hint)[0]) if isinstance(self.kind, inspect.LiteralType) else ()


def keys_of(struct: type[Struct], prefix: str = "") -> dict[str, Key]:
    """Return all keys of a struct and its sections, in order."""
    return {key.name: key for key in _keys(struct, prefix)}


def _keys(struct: type[Struct], prefix: str) -> Iterator[Key]:
    """Yield the key of each field of a struct, nested structs included; `prefix` is the section with its dot, or ""."""
    hints = get_type_hints(struct, include_extras=True)
    declared = inspect.type_info(struct)
    assert isinstance(declared, inspect.StructType)
    for field in declared.fields:
        kind, name = field.type, f"{prefix}{field.name}"
        if isinstance(kind, inspect.StructType):
            yield from _keys(kind.cls, f"{name}.")
            continue
        description, extra = "", _NOTHING
        if isinstance(kind, inspect.Metadata):
            metadata = cast(Any, kind)  # Its own types are incomplete.
            description = str((metadata.extra_json_schema or _NOTHING).get("description", ""))
            kind, extra = kind.type, metadata.extra or _NOTHING
        yield Key(name, struct, hints[field.name], field.default, kind, description, extra)


def schema_of(struct: type[Struct]) -> dict[str, Any]:
    """Return the JSON schema of a file for a struct. A number with a unit may also be a string, such as "15m"."""
    schema = msgspec.json.schema(struct)
    for key in keys_of(struct).values():
        if "unit" in key.extra and not isinstance(key.kind, inspect.StrType):
            field = key.name.rpartition(".")[2]
            schema["$defs"][key.owner.__name__]["properties"][field]["type"] = ["number", "string"]
    return schema


def read_toml(path: Path, struct: type[Struct]) -> dict[str, Given]:
    """Read the keys of a TOML file for a struct. The values are not checked yet.

    Raises:
        BadInputError: the file cannot be read, or is not TOML, or has a key that the struct lacks.
    """
    document = load_toml(path)
    known = keys_of(struct)
    sections = {name.rpartition(".")[0] for name in known} - {""}
    folder = os.path.dirname(path)
    found: dict[str, Given] = {}
    for name, value in _flatten(document, sections, str(path)):
        check_known(name, known, f"{path}: {name}")
        found[name] = Given(value, f"{path}: {name}", folder=folder)
    return found


def open_given(path: Path) -> BinaryIO:
    """Open a user's file for reading.

    It may be a pipe, such as `<(command)` in a shell. A pipe without a writer counts as empty.

    Raises:
        OSError: the file cannot be opened, or is a device, which may never end.
    """
    return open(path, "rb", opener=_open_without_waiting)


def _open_without_waiting(path: str, flags: int) -> int:
    """Open a file, for `open`. A pipe without a writer must not block, and a device is refused.

    Raises:
        OSError: the file cannot be opened, or is a device.
    """
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is a device: give a file", path)
    os.set_blocking(descriptor, True)
    return descriptor


def load_toml(path: Path) -> dict[str, Any]:
    """Return the contents of a TOML file.

    Raises:
        BadInputError: the file cannot be read, is not TOML, is nested too deeply, or is larger than `_MOST_BYTES`.
    """
    try:
        with open_given(path) as file:
            data = file.read(_MOST_BYTES + 1)
        if len(data) > _MOST_BYTES:
            raise BadInputError(f"{path}: is larger than {_MOST_BYTES} bytes: give a file that a person has written")
        return tomllib.loads(data.decode("utf-8-sig"))
    except BadInputError:
        raise
    except OSError as error:
        raise BadInputError(f"{path}: cannot be read: {error.strerror}") from None
    except RecursionError:
        raise BadInputError(f"{path}: is not valid TOML: lists or tables within each other too deep to read") from None
    except ValueError as error:  # of TOML, of UTF-8, and of numbers with thousands of digits
        raise BadInputError(f"{path}: is not valid TOML: {str(error).splitlines()[0]}") from None


def _flatten(document: Mapping[str, Any], sections: set[str], file: str) -> Iterator[tuple[str, Any]]:
    """Yield the keys of a TOML document with their values; those in a section as `section.key`.

    Raises:
        BadInputError: a key contains a dot, or a section is not a table.
    """
    for name, value in document.items():
        if "." in name:  # Only a key in quotes contains a dot.
            raise BadInputError(f'{file}: "{name}" is one key with a dot: leave the quotes out')
        if name not in sections:
            yield name, value
            continue
        if not isinstance(value, dict):
            raise BadInputError(f"{file}: {name} is {shorten(value)}: it must be a section, [{name}]")
        yield from ((f"{name}.{key}", inner) for key, inner in cast(_Extra, value).items())


def check_known(name: str, known: Collection[str], said: str, where: str = "") -> None:
    """Refuse an unknown key. The message names a similar key, or all keys if they are few, or a list of keys.

    Args:
        said: the key, as the message names it.
        where: the command or the page that lists the keys, or "".

    Raises:
        BadInputError: the key is not known.
    """
    if name not in known:
        near = difflib.get_close_matches(name[:_MOST_SHOWN], known, n=1)
        said = said.replace(name, name[:_MOST_SHOWN] + "...") if len(name) > _MOST_SHOWN else said
        said = said if said.isprintable() else repr(said)
        if near:
            raise BadInputError(f"{said} is not known; the nearest one is {near[0]}")
        listed = f"; {where} lists the keys" if where else ""
        few = f": give one of {', '.join(sorted(known))}" if len(known) <= _MOST_LISTED else listed
        raise BadInputError(f"{said} is not known{few}")


def build_struct(struct: type[S], given: Mapping[str, Given]) -> S:
    """Return a struct with the given values, checked and converted, and defaults for all other keys.

    Unknown keys are ignored.

    Raises:
        BadInputError: a value breaks its rule; the message is about the first one.
    """
    tree: dict[str, Any] = {}
    for name, key in keys_of(struct).items():
        if name in given:
            *sections, last = name.split(".")
            branch = tree
            for section in sections:
                branch = branch.setdefault(section, {})
            branch[last] = convert_value(key, given[name])
    return msgspec.convert(tree, struct)


def convert_value(key: Key, given: Given) -> object:
    """Convert a value to the type of its key: parse text, apply units, and join paths with the file's folder.

    A URL stays as it is if the key allows URLs.

    Raises:
        BadInputError: the value breaks the key's rule.
    """
    value = given.value
    try:
        if given.text and isinstance(value, str):
            value = _from_text(key, value)
        if "unit" in key.extra and isinstance(value, str):
            value = _UNITS[key.extra["unit"]][0](value)
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError("not finite")
        value = msgspec.convert(value, key.hint)
    except (msgspec.ValidationError, ValueError):
        raise BadInputError(f"{given.name} is {_describe_value(key, given)}: it must be {describe_rule(key)}") from None
    if "path" in key.extra and value:
        if "\0" in str(value):
            raise BadInputError(f"{given.name} is {_describe_value(key, given)}: no path can hold a NUL")
        return value if "url" in key.extra and is_url(str(value)) else os.path.join(given.folder, str(value))
    return value


def _from_text(key: Key, text: str) -> object:
    """Parse text as a TOML value, unless the key is a text, a choice, or has a unit.

    Text that is not TOML is returned as it is.
    """
    if "unit" in key.extra or (isinstance(key.kind, inspect.StrType | inspect.LiteralType) and key.name != "format"):
        return text
    try:
        return tomllib.loads(f"value = {text}")["value"] if text.isprintable() else text
    except (ValueError, RecursionError):
        return text


def _describe_value(key: Key, given: Given) -> str:
    """Return a value for a message: a number from the command line as it was written, else shortened and quoted."""
    words = isinstance(key.kind, inspect.StrType | inspect.LiteralType) and "unit" not in key.extra
    text = str(given.value)
    return text if given.text and not words and _is_number(text) and len(text) <= _MOST_SHOWN else shorten(given.value)


def _is_number(text: str) -> bool:
    """Return whether a text is a number."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def shorten(value: object) -> str:
    """Return a bad value for a message, shortened if it is long."""
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else text[:_MOST_SHOWN] + "..."


def describe_rule(key: Key) -> str:
    """Return the rule for a key's value in words, such as "a whole number from 1 to 8" or "one of auto, off"."""
    kind = key.kind
    if "unit" in key.extra:
        limits = _describe_range(kind) if isinstance(kind, inspect.FloatType) and kind.le is not None else ""
        return _UNITS[key.extra["unit"]][1] + (f", {limits.lstrip(' ,')}" if limits else "")
    match kind:
        case inspect.LiteralType():
            return f"{'' if len(key.choices) == 1 else 'one of '}{', '.join(map(str, key.choices))}"
        case inspect.BoolType():
            return "true or false"
        case inspect.UnionType(types=types):
            return ", or ".join(
                ", ".join(map(str, one.values))
                if isinstance(one, inspect.LiteralType)
                else describe_rule(dataclasses.replace(key, kind=one))
                for one in types
            )
        case inspect.IntType() | inspect.FloatType():
            return f"a {'whole ' if isinstance(kind, inspect.IntType) else ''}number{_describe_range(kind)}"
        case inspect.VarTupleType(item_type=item) | inspect.ListType(item_type=item):
            one = item.type if isinstance(item, inspect.Metadata) else item
            if not isinstance(one, inspect.IntType | inspect.FloatType):
                return "a list of texts"
            return f"a list of {'whole ' if isinstance(one, inspect.IntType) else ''}numbers{_describe_range(one)}"
        case inspect.StrType(pattern=str()):
            return "letters, digits, dots and dashes, at most 64"
        case _:
            return "text"


def _describe_range(kind: inspect.IntType | inspect.FloatType) -> str:
    """Return the limits of a number in words that follow "a number", such as " from 1 to 8" or ", 0 or more".

    "" without a lower limit, or if the only limit is exclusive.
    """
    if kind.ge is not None and kind.le is not None:
        return f" from {_format_number(kind.ge)} to {_format_number(kind.le)}"
    if kind.gt is not None and kind.le is not None:
        return f" above {_format_number(kind.gt)}, {_format_number(kind.le)} at most"
    return f", {_format_number(kind.ge)} or more" if kind.ge is not None else ""


def _format_number(number: float) -> str:
    return str(int(number) if number == int(number) else number)
