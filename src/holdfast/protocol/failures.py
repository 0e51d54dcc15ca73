"""The kinds of failure that are told apart, who sees them, what they take out of the job, how they are classed; what is
seen of workers that hang."""

from __future__ import annotations

from enum import IntEnum, StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from holdfast.protocol.names import Struct


class FailureKind(StrEnum):
    CONNECTION_LOST = "connection_lost"  # to the agent; or between workers, where nothing says whose fault it is
    LEASE_EXPIRED = "lease_expired"  # no sign of life from the agent
    PROCESS_EXIT = "process_exit"  # a worker's process ended
    EXCEPTION = "exception"  # the script, or the optimizer, raised
    HANG = "hang"  # the agent lives, but a worker does not answer, or does not go on


class Detector(StrEnum):
    """Who saw a failure."""

    NODE_HEALTH = "node_health"  # the coordinator: an agent's connection or its lease
    PROCESS = "process"  # an agent: its workers' processes
    EXCEPTION = "exception"  # a worker: the script or a collective raised
    STATISTICS = "statistics"  # what usually takes a moment has taken far longer, while others wait
    TIMEOUT = "timeout"  # a collective, or a report, that was waited for in vain


class Severity(IntEnum):
    """What a failure takes out of the job."""

    NODE = 1  # it is out; its agent may bring it back
    PROCESS = 2  # it starts again on its node
    RETRY = 3  # nothing: the same members try again


#: rules of one site: all of them are told to every agent in one message
MAX_RULES = 256


class FailureRule(Struct, frozen=True, kw_only=True, tag="FailureRule"):
    r"""One line of the table of failures (Unicron, Table 1): what it is that says so, and how bad that is.

    pattern: a regular expression, looked for in `KIND: DETAIL`, upper and lower case alike. status: the class; `\1` in
    it stands for what the first group of the pattern has found. detector: only what was seen so; "": however.
    """

    pattern: Annotated[str, Meta(min_length=1, max_length=500)]
    status: Annotated[str, Meta(pattern=r"^[a-z0-9_\\]{1,64}$(?!\n)")]
    severity: Severity
    detector: Detector | None = None


class SeenWait(msgspec.Struct, frozen=True, kw_only=True):
    """One of a worker's newest waits in a collective of `size` ranks; `took_s` None: it was not over."""

    what: str
    size: int
    bytes: int
    began_s: float  # ago
    took_s: float | None


class SeenWorker(msgspec.Struct, frozen=True, kw_only=True):
    """Where a worker's training thread stood, and for how long; `waits`: for the others, in a collective."""

    worker: str
    step: int
    phase: str
    for_s: float
    waits: bool
    micro_batch: int | None
    collectives: tuple[SeenWait, ...]


class SharedStack(msgspec.Struct, frozen=True, kw_only=True):
    """Threads of these workers as Python's faulthandler has them, a line each; the same for all of them."""

    workers: tuple[str, ...]
    lines: tuple[str, ...]
