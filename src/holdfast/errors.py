"""The errors that users see, and the exit codes that go with them."""

from __future__ import annotations

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
#: nobody answers; there is no such job, or no such node
EXIT_UNREACHABLE = 3
#: what was asked for cannot be done as things stand now
EXIT_REFUSED = 4
#: a mistake of ours, or a machine that fails
EXIT_OUR_FAULT = 70
#: ended from outside: a request, a time limit, SIGTERM
EXIT_ENDED = 75
#: Ctrl-C
EXIT_INTERRUPTED = 130

#: what a job's process ends with after these signals, by name
EXIT_AFTER_SIGNAL = {"SIGINT": EXIT_INTERRUPTED, "SIGTERM": EXIT_ENDED, "SIGHUP": EXIT_ENDED}


class HoldfastError(Exception):
    """Base of all errors of ours; `exit_code` is what the command line ends with."""

    exit_code = EXIT_FAILED


class BadInputError(HoldfastError, ValueError):
    """The user's input is wrong: the message says what, with which value, and what to do."""

    exit_code = EXIT_BAD_INPUT


class StepUseError(BadInputError):
    """The training loop does not use a step as it has to be used; the message says how."""


class UnreachableError(HoldfastError):
    """Nobody answers, or there is no such job or node; the message says where it was looked for."""

    exit_code = EXIT_UNREACHABLE


class RefusedError(HoldfastError):
    """What was asked for makes sense, but not as things stand now; the message says why."""

    exit_code = EXIT_REFUSED


class SupersededError(HoldfastError):
    """Another coordinator leads this job: this one must not say another word."""


class OutdatedStoreError(HoldfastError):
    """The store is older than the job, for example restored from a backup. Nothing was stopped; a person must act."""

    exit_code = EXIT_BAD_INPUT


class JobFailedError(HoldfastError):
    """The job cannot go on: the message says what was lost."""


class TracebackElsewhereError(Exception):
    """Where something was raised in another process: the cause of the same exception here.

    `frames`: file and line of each frame there, the outermost first.
    """

    frames: tuple[tuple[str, int], ...] = ()
