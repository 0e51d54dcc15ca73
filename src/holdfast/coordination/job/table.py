"""Tables of (what is heard, where the job stands) -> handler. A pair that no table has is a fault of the code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from holdfast.coordination.job.parts import JobState

Handler = Callable[..., None]
Row = Mapping[JobState, Handler]


def row(waiting: Handler, running: Handler, recovering: Handler, over: Handler) -> Row:
    """Return the handlers of one kind of input, by the state that it finds the job in."""
    return dict(zip(JobState, (waiting, running, recovering, over), strict=True))


def always(handler: Handler) -> Row:
    """Return the row of what is handled alike in all states."""
    return row(handler, handler, handler, handler)


def while_it_goes_on(handler: Handler) -> Row:
    """Return the row of what is of no consequence once the job is over."""
    return row(handler, handler, handler, ignore)


def ignore(*_: Any) -> None:
    """Do nothing: it is of no consequence in this state."""
