"""All that crosses a socket or lies on a disk, and an example of each kind.

`examples_of` makes them from the descriptions of the types, the same ones in every process.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import Enum
from typing import Any, get_args

import msgspec
from msgspec import inspect

from holdfast.coordination.agent.kept_steps import KeptStep
from holdfast.protocol.events import AnyEvent
from holdfast.protocol.layouts.group_messages import UnitWord
from holdfast.protocol.messages.agent import AgentMessage, CoordinatorMessage
from holdfast.protocol.messages.orders import WorkerOrder
from holdfast.protocol.messages.worker import WorkerMessage
from holdfast.protocol.pool.events import AnyPoolEvent
from holdfast.protocol.pool.record import PoolRecord
from holdfast.protocol.record import Record

#: the formats of MessagePack and of JSON, by name
MESSAGES: dict[str, Any] = {
    "agent to coordinator": AgentMessage,
    "coordinator to agent": CoordinatorMessage,
    "worker to agent": WorkerMessage,
    "agent to worker": WorkerOrder,
    "words of a unit": UnitWord,
    "kept steps": KeptStep,
    "record of a job": Record,
    "record of a pool": PoolRecord,
}
LINES: dict[str, Any] = {"events of a job": AnyEvent, "events of a pool": AnyPoolEvent}


def examples_of(format_type: Any) -> Iterator[tuple[str, msgspec.Struct]]:
    """Yield values of each kind of a format, with names. Each kind of each union in a field is in one of them.

    The name of a message is its tag, and that of an event its class's, as the files were written.
    """
    seen: set[type] = set()
    for kind in get_args(format_type) or (format_type,):
        maker, config = Maker(0), kind.__struct_config__
        name = config.tag if config.tag and config.tag_field != "event" else kind.__name__
        yield name, maker.value(inspect.type_info(kind), "")
        seen |= maker.made
        for variant in range(1, maker.widest):
            other = Maker(variant)
            value = other.value(inspect.type_info(kind), "")
            if other.made - seen:
                yield f"{name} {variant + 1}", value
                seen |= other.made


class Maker:
    """Makes values from the description of their type, with other values than the defaults.

    Args:
        variant: which kind of each union is chosen; None counts as no kind.
    """

    def __init__(self, variant: int) -> None:
        self._variant = variant
        #: kinds of the largest union so far
        self.widest = 1
        #: the classes of all values
        self.made: set[type] = set()

    def value(self, kind: inspect.Type, field: str) -> Any:
        """Return a value of a type. `field`: the name of the field with this type."""
        match kind:
            case inspect.Metadata(type=described):
                return self.value(described, field)
            case inspect.StructType(cls=cls, fields=fields):
                self.made.add(cls)
                return cls(**{one.name: self.value(one.type, one.name) for one in fields})
            case inspect.UnionType(types=several):
                kinds = [one for one in several if not isinstance(one, inspect.NoneType)]
                self.widest = max(self.widest, len(kinds))
                return self.value(kinds[self._variant % len(kinds)], field)
            case inspect.VarTupleType(item_type=inspect.UnionType(types=several)):
                return tuple(self.value(one, field) for one in several if not isinstance(one, inspect.NoneType))
            case inspect.VarTupleType(item_type=item):
                return (self.value(item, field),)
            case inspect.FrozenSetType(item_type=item):
                return frozenset((self.value(item, field),))
            case inspect.TupleType(item_types=items):
                return tuple(self.value(item, field) for item in items)
            case inspect.DictType(key_type=key, value_type=of):
                return {self.value(key, field): self.value(of, field)}
            case inspect.EnumType(cls=cls):
                return list[Enum](cls)[-1]
            case inspect.LiteralType(values=values):
                return values[-1]
            case _:
                return _scalar(kind, field)


def _scalar(kind: inspect.Type, field: str) -> Any:
    match kind:
        case inspect.StrType(pattern=pattern, min_length=least):
            return _text(pattern or "", field, least or 0)
        case inspect.BytesType(min_length=least):
            return bytes(range(1, 1 + max(least or 0, 3)))
        case inspect.IntType(ge=least, le=most):
            return min(max(3, int(least or 0)), int(most) if most is not None else 3)
        case inspect.FloatType(le=most):
            return min(0.75, float(most) if most is not None else 0.75)
        case inspect.BoolType():
            return True
        case inspect.AnyType():
            return "any"
        case _:
            raise NotImplementedError(f"{field} is a {kind}: say here how to make one")


def _text(pattern: str, field: str, least: int) -> str:
    """Return a text that fits a pattern."""
    name = f"{field or 'text'}-1".replace("_", "-").ljust(least, "x")
    known = (name, "node-1/0/ab12", "step-00000005-t1-g1-ab12cd34", "ab12cd34", "ab12cd34" * 8, "other")
    return next(text for text in known if re.search(pattern, text))
