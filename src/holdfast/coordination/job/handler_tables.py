"""Tables (input, job phase) -> handler. A pair that is in no table is a bug."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from holdfast.coordination.job.context import JobPhase

Handler = Callable[..., None]
Row = Mapping[JobPhase, Handler]


def handler_row(waiting: Handler, running: Handler, recovering: Handler, over: Handler) -> Row:
    """Return the handlers of one kind of input, by job phase."""
    return dict(zip(JobPhase, (waiting, running, recovering, over), strict=True))


def always(handler: Handler) -> Row:
    """Return a row with the same handler in every phase."""
    return handler_row(handler, handler, handler, handler)


def until_over(handler: Handler) -> Row:
    """Return a row that ignores the input once the job is over."""
    return handler_row(handler, handler, handler, ignore)


def ignore(*_: Any) -> None:
    """Do nothing: the input has no effect in this phase."""
