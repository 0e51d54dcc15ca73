"""Tests that messages of members cannot make the record or a coordinator table grow without bound.

Valid messages of every type arrive from nodes with always new names, with texts of the maximum length.
"""

from __future__ import annotations

import random
import types
from collections import deque
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any, get_args

import msgspec
import pytest
from machinery import Job, attach, hello, w
from msgspec import inspect

from holdfast.coordination import membership
from holdfast.coordination.failures import escalation as ladder
from holdfast.coordination.failures import suspects
from holdfast.coordination.inputs import Disconnected, Received, Tick
from holdfast.protocol import record as limits
from holdfast.protocol.messages import any_side as msg
from holdfast.protocol.names import MAX_MESSAGE_BYTES

#: etcd accepts writes of 1.5 MB, compressed; the texts sent here hardly compress
RECORD_BYTES = 1_400_000
#: the largest size that the bounds allow for a table
TABLE = 1000
ENCODER = msgspec.msgpack.Encoder()
DECODER = msgspec.msgpack.Decoder(msg.AgentMessage)


class Hostile:
    """Makes valid messages of a type from its description, with values that a hostile member would choose."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.count = 0

    def value(self, kind: inspect.Type, field: str) -> Any:
        """Return a value of a type."""
        match kind:
            case inspect.StructType(cls=cls, fields=fields):
                return cls(**{one.name: self.value(one.type, one.name) for one in fields})
            case inspect.UnionType(types=several):
                return self.value(self.random.choice(several), field)
            case inspect.VarTupleType(item_type=item, min_length=least):
                return tuple(self.value(item, field) for _ in range(max(least or 0, self.random.choice([0, 1, 2]))))
            case inspect.TupleType(item_types=items):
                return tuple(self.value(item, field) for item in items)
            case inspect.DictType(key_type=key, value_type=of):
                return {self.value(key, field): self.value(of, field) for _ in range(2)}
            case inspect.NoneType():
                return None
            case _:
                return self.scalar(kind, field)

    def scalar(self, kind: inspect.Type, field: str) -> Any:
        """Return a value of a scalar type."""
        match kind:
            case inspect.EnumType(cls=cls):
                return self.random.choice(list[Enum](cls))
            case inspect.LiteralType(values=values):
                return self.random.choice(list(values))
            case inspect.StrType():
                return self.text(field, kind)
            case inspect.BytesType(min_length=least):
                return self.random.randbytes(least or 8)
            case inspect.IntType(ge=least, le=most):
                high = min(int(most) if most is not None else 1 << 40, self.random.choice([1, 3, 1 << 20]))
                return self.random.randint(int(least or 0), max(high, int(least or 0)))
            case inspect.FloatType(ge=least):
                return max(float(least or 0.0), self.random.choice([0.0, 0.5]))
            case inspect.BoolType():
                return self.random.random() < 0.5
            case _:
                pytest.fail(f"{field} is a {kind}: say here how to make one")

    def text(self, field: str, kind: inspect.StrType) -> str:
        """Return a new, unique text of the maximum length."""
        self.count += 1
        unique = f"{self.count:08x}{self.random.randbytes(24).hex()}"
        if field in ("worker", "unreachable", "workers") or "/[0-9]" in (kind.pattern or ""):
            return f"{unique[:20]}/0/{unique[:16]}"
        if field == "name" and kind.pattern is None:
            step = self.random.randint(1, 1 << 20)
            return f"step-{step:08d}-t1-g1-{unique[:8]}"
        if field == "sha256":
            return unique.ljust(64, "0")[:64]
        if field == "session":
            return unique[:16]
        length = kind.max_length or 60
        return (unique * (length // len(unique) + 1))[:length]


def tables(root: object) -> Iterator[tuple[str, int]]:
    """Yield the path and size of each container that is reachable from an object's attributes."""
    seen: set[int] = set()
    left: list[tuple[str, object]] = [("", root)]
    while left:
        where, one = left.pop()
        if id(one) in seen or isinstance(one, str | bytes | int | float | Enum | type | types.ModuleType | None):
            continue
        seen.add(id(one))
        inside: list[tuple[str, object]] = []
        if isinstance(one, Mapping):
            inside = [(f"{where}[]", value) for value in one.values()]
        elif isinstance(one, list | tuple | set | frozenset | deque):
            inside = [(f"{where}[]", value) for value in one]
        elif type(one).__module__.startswith("holdfast."):
            names = {name for cls in type(one).__mro__ for name in getattr(cls, "__slots__", ())}
            names |= set(getattr(type(one), "__struct_fields__", ())) | set(getattr(one, "__dict__", {}))
            inside = [(f"{type(one).__name__}.{name}", getattr(one, name, None)) for name in names]
        if isinstance(one, Mapping | list | tuple | set | frozenset | deque):
            yield where, len(one)
        left += inside


def check(job: Job) -> None:
    """Check that the record fits and that no table exceeds its bound."""
    size = len(ENCODER.encode(job.machine.record))
    assert size < RECORD_BYTES, size
    large = {where: size for where, size in tables(job.machine) if size > TABLE}
    assert not large


def send(job: Job, number: int, message: msg.AgentMessage) -> None:
    data = ENCODER.encode(message)
    assert len(data) <= MAX_MESSAGE_BYTES
    job.feed(Received(number, DECODER.decode(data)))


KINDS = [kind for kind in get_args(msg.AgentMessage) if kind is not msg.FromWorker]
WORKER_KINDS = list(get_args(msg.WorkerMessage))


def job_of_three() -> Job:
    """Return a training job of three nodes."""
    job = Job(nodes=3).start(saves=True)
    job.step(1)
    return job


def forget(job: Job) -> None:
    job.records, job.events = job.records[-1:], job.events[-1:]


@pytest.mark.parametrize("kind", [*KINDS, *WORKER_KINDS], ids=lambda kind: kind.__name__)
def test_messages_of_each_type_leave_record_and_tables_bounded(kind: type[Any]) -> None:
    job, hostile = job_of_three(), Hostile(1)
    described = inspect.type_info(kind)
    for k in range(150):
        message = hostile.value(described, kind.__name__)
        if kind is msg.Hello:
            job._number += 1
            at_home = {"protocol": msg.PROTOCOL, "job": "job", "digest": "script", "term": 0}
            send(job, job._number, msgspec.structs.replace(message, **at_home))
            job.feed(Disconnected(job._number))
        else:
            node = next((node for node in ("n2", "n1") if job.machine.members.on(job.connections[node])), "")
            if not node:
                job, k = job_of_three(), 0
                node = "n2"
            if kind in WORKER_KINDS:
                changes: dict[str, Any] = {"worker": w(node)}
                fields = kind.__struct_fields__
                changes |= {"generation": 1} if "generation" in fields else {}
                changes |= {"step": 1} if "step" in fields else {}
                message = msg.FromWorker(message=msgspec.structs.replace(message, **changes))
            send(job, job.connections[node], message)
        if k % 10 == 0:
            job.feed(Tick(), 0.1)
        forget(job)
    check(job)


def test_the_oldest_evaluations_are_forgotten_beyond_the_limit() -> None:
    """Reproducer record_grows.py."""
    job = job_of_three()
    kept = msg.EvaluationResult(name="validation", step=1, samples=1, metrics={})
    for k in range(60):
        names = [f"e{k}-{n}".ljust(60, "x") for n in range(15)]
        results = (kept, *(msg.EvaluationResult(name=name, step=1, samples=1, metrics={}) for name in names))
        job.deliver(msg.EvaluationDone(worker=w("n2"), generation=1, results=results))
        forget(job)
    assert len(job.machine.record.evaluated) == limits.MAX_EVALUATIONS
    newer = msgspec.structs.replace(kept, step=1, name="again")
    job.deliver(msg.EvaluationDone(worker=w("n2"), generation=1, results=(newer,)))
    job.deliver(msg.EvaluationDone(worker=w("n1"), generation=1, results=(newer,)))
    assert [*job.machine.record.evaluated][-1] == "again"
    check(job)


def test_the_oldest_unfit_nodes_are_forgotten_beyond_the_limit() -> None:
    """Reproducer record_grows.py."""
    job, hostile = Job(nodes=3).start(), Hostile(2)
    for k in range(limits.MAX_LISTED + 100):
        reason = hostile.random.randbytes(4000).hex()
        unfit = msgspec.structs.replace(hello("n3"), node=f"x{k}".ljust(64, "y"), host=f"h{k}".ljust(256, "z"))
        job.connect(msgspec.structs.replace(unfit, unfit=reason, session=f"{k:08x}"))
        forget(job)
    quarantined = job.machine.record.quarantined
    assert len(quarantined) == limits.MAX_LISTED
    assert quarantined[-1].node.startswith(f"x{limits.MAX_LISTED + 99}")
    assert {len(one.why) for one in quarantined} == {limits.MAX_REASON}
    check(job)


def test_nodes_that_connect_and_leave_under_new_names_leave_tables_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (membership, ladder, suspects):
        monkeypatch.setattr(module, "_KEPT", TABLE // 2)
    job = Job(nodes=1).start()
    for k in range(1200):
        job._number += 1
        name = f"x{k}"
        job.feed(Received(job._number, msgspec.structs.replace(hello("n3"), node=name, session=f"{k:08x}")))
        job.feed(Received(job._number + 1_000_000, msgspec.structs.replace(hello("n4"), node=name)))
        job.connections[name] = job._number
        job.deliver(attach(w(name)))
        job.feed(Disconnected(job._number))
        if k % 100 == 0:
            job.feed(Tick(), 0.1)
        forget(job)
        job.connections.clear()
        job.plans.clear()
    check(job)


def test_a_record_with_all_lists_full_fits_into_one_write() -> None:
    """All lists have their maximum length, with texts that do not compress."""
    hostile = Hostile(3)

    def text(length: int) -> str:
        return hostile.random.randbytes(length).hex()[:length]

    nodes = [text(64) for _ in range(limits.MAX_NODES_KEPT)]
    listed = nodes[: limits.MAX_LISTED]
    whys = [{"node": node, "host": text(256), "why": text(limits.MAX_REASON), "since": 1e9} for node in listed]
    full = limits.Record(
        schema=limits.SCHEMA,
        job="job",
        term=1,
        evaluated={text(60): 1 << 40 for _ in range(limits.MAX_EVALUATIONS)},
        quarantined=tuple(limits.Quarantined(**why) for why in whys),
        given_up=tuple(limits.GivenUp(**why, step=1 << 40) for why in whys),
        drained=tuple(limits.Departure(node=node, since=1e9) for node in nodes),
        standbys=tuple(limits.Standby(node=node, agent_pid=1 << 20) for node in nodes),
    )
    assert len(ENCODER.encode(full)) < RECORD_BYTES
