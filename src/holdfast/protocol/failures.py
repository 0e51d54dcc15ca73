"""The kinds of failure that are told apart."""

from __future__ import annotations

from enum import StrEnum


class FailureKind(StrEnum):
    CONNECTION_LOST = "connection_lost"  # to the agent; or between workers, where nothing says whose fault it is
    LEASE_EXPIRED = "lease_expired"  # no sign of life from the agent
    PROCESS_EXIT = "process_exit"  # a worker's process ended
    EXCEPTION = "exception"  # the script, or the optimizer, raised
    HANG = "hang"  # the agent lives, but a worker does not answer, or does not go on
