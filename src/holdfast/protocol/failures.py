"""The kinds of failure that are told apart, who sees them, and how much of the job they take along."""

from __future__ import annotations

from enum import IntEnum, StrEnum


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
    TIMEOUT = "timeout"  # a collective, or a report, that was waited for in vain


class Severity(IntEnum):
    """What a failure takes out of the job."""

    NODE = 1  # it is out; its agent may bring it back
    PROCESS = 2  # it starts again on its node
    RETRY = 3  # nothing: the same members try again
