"""The errors that users see, and the exit codes that go with them."""

from __future__ import annotations

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130


class HoldfastError(Exception):
    """Base of all errors of ours; `exit_code` is what the command line ends with."""

    exit_code = EXIT_FAILED


class BadInputError(HoldfastError, ValueError):
    """The user's input is wrong: the message says what, with which value, and what to do."""

    exit_code = EXIT_BAD_INPUT


class StepUseError(BadInputError):
    """The training loop does not use a step as it has to be used; the message says how."""


class JobFailedError(HoldfastError):
    """The job cannot go on: the message says what was lost."""
