"""What the coordinator's machine asks its shell to do, in order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from holdfast.protocol.events import AnyEvent
from holdfast.protocol.messages.agent import CoordinatorMessage
from holdfast.protocol.pool.sharing import JobStands
from holdfast.protocol.record import Record

if TYPE_CHECKING:
    from holdfast.coordination.experts.searching import Search  # its imports take half a second that no command needs


@dataclass(frozen=True, slots=True)
class Persist:
    """Compare-and-swap the record; if another coordinator was there first, stop at once: nothing after this counts."""

    record: Record


@dataclass(frozen=True, slots=True)
class Emit:
    """Append to the journal."""

    event: AnyEvent


@dataclass(frozen=True, slots=True)
class Send:
    """Send to an agent; a connection that is gone is no error (Disconnected follows)."""

    connection: int
    message: CoordinatorMessage


@dataclass(frozen=True, slots=True)
class Broadcast:
    """Send the same message to several agents, each once; it is encoded once for all of them."""

    connections: tuple[int, ...]
    message: CoordinatorMessage


@dataclass(frozen=True, slots=True)
class Close:
    """Close a connection after what was sent."""

    connection: int


@dataclass(frozen=True, slots=True)
class EndJob:
    """The job is over; the coordinator ends once the agents are gone, a few seconds later at most."""

    exit_code: int
    why: str


@dataclass(frozen=True, slots=True)
class PlanExperts:
    """Call the search's `solve` beside everything else, and feed what it returns as Planned.

    It may take any time, or never return. A new search makes the one before worthless.
    """

    search: Search


@dataclass(frozen=True, slots=True)
class TellPool:
    """Tell the pool in which the job runs how the job stands; where nobody can be told it is said again."""

    stands: JobStands


Instruction = Persist | Emit | Send | Broadcast | Close | EndJob | PlanExperts | TellPool
