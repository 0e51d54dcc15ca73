"""The errors that users see, and the exit codes that go with them."""

from __future__ import annotations

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
#: no answer, or an unknown job or node
EXIT_UNREACHABLE = 3
#: the request cannot be carried out at present
EXIT_REFUSED = 4
#: a mistake of ours, or a machine that fails
EXIT_OUR_FAULT = 70
#: ended from outside: a request, a time limit, SIGTERM
EXIT_ENDED = 75
#: Ctrl-C
EXIT_INTERRUPTED = 130

#: exit codes of a job's process after these signals, by name
EXIT_AFTER_SIGNAL = {"SIGINT": EXIT_INTERRUPTED, "SIGTERM": EXIT_ENDED, "SIGHUP": EXIT_ENDED}


class HoldfastError(Exception):
    """Base of all our errors. `exit_code` is the exit code of the command line."""

    exit_code = EXIT_FAILED


class BadInputError(HoldfastError, ValueError):
    """The user's input is wrong: the message says what, with which value, and what to do."""

    exit_code = EXIT_BAD_INPUT


class StepUseError(BadInputError):
    """The training loop does not use a step as it has to be used; the message says how."""


class UnreachableError(HoldfastError):
    """No answer, or an unknown job or node. The message says where it was searched."""

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
    """The job cannot continue. The message says why."""


class TracebackElsewhereError(Exception):
    """The place at which an exception was raised in another process. It is the cause of the same exception here.

    `frames`: file and line of each frame, the outermost first.
    """

    frames: tuple[tuple[str, int], ...] = ()
