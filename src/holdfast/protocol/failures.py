"""Kinds, detectors, severities and classes of failures; observations of workers that hang."""

from __future__ import annotations

from enum import IntEnum, StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from holdfast.protocol.names import Struct


class FailureKind(StrEnum):
    """What was noticed about a failed node or worker."""

    #: to the agent; or between workers, if no worker can be blamed
    CONNECTION_LOST = "connection_lost"
    #: no sign of life from the agent
    LEASE_EXPIRED = "lease_expired"
    #: a worker's process has ended
    PROCESS_EXIT = "process_exit"
    #: the script or the optimizer has raised an exception
    EXCEPTION = "exception"
    #: the agent lives, but a worker does not answer or continue
    HANG = "hang"


class Detector(StrEnum):
    """The detector of a failure."""

    NODE_HEALTH = "node_health"  # the coordinator: an agent's connection or its lease
    PROCESS = "process"  # an agent: its workers' processes
    EXCEPTION = "exception"  # a worker: the script or a collective raised
    #: the coordinator: an activity took far longer than usual, while other workers waited
    STATISTICS = "statistics"
    #: a collective or a report did not come in time
    TIMEOUT = "timeout"


class Severity(IntEnum):
    """The part of the job that a failure removes."""

    #: the node is removed; its agent may connect again
    NODE = 1
    #: the process restarts on its node
    PROCESS = 2
    #: the same members try again
    RETRY = 3


#: most rules of a site; each agent gets all of them in one message
MAX_RULES = 256


class FailureRule(Struct, frozen=True, kw_only=True, tag="FailureRule"):
    """One row of the table of failure classes (Unicron, Table 1)."""

    #: a regular expression that is searched for in `KIND: DETAIL`, ignoring case
    pattern: Annotated[str, Meta(min_length=1, max_length=500)]
    #: The class. A backslash with a digit stands for that group of the pattern.
    status: Annotated[str, Meta(pattern=r"^[a-z0-9_\\]{1,64}$(?!\n)")]
    severity: Severity
    #: only failures with this detector, or None for all
    detector: Detector | None = None


class SeenWait(msgspec.Struct, frozen=True, kw_only=True):
    """A recent wait of a worker in a collective of `size` ranks."""

    what: str
    size: int
    bytes: int
    #: seconds since it began
    began_s: float
    #: duration, or None if it was not over
    took_s: float | None


class SeenWorker(msgspec.Struct, frozen=True, kw_only=True):
    """The activity of a worker's training thread."""

    worker: str
    step: int
    phase: str
    #: its duration in seconds
    for_s: float
    #: whether it waits in a collective
    waits: bool
    micro_batch: int | None
    collectives: tuple[SeenWait, ...]


class SharedStack(msgspec.Struct, frozen=True, kw_only=True):
    """Stacks of threads, equal for all these workers, as Python's faulthandler prints them."""

    workers: tuple[str, ...]
    lines: tuple[str, ...]
