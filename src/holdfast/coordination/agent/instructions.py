"""What an agent's machine asks of its shell, in order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from holdfast.protocol.layouts.group_messages import UnitAnswer
from holdfast.protocol.messages.agent import AgentMessage, ProbeAddress, WantedPart
from holdfast.protocol.messages.orders import AcceptCheckpoint, Order, PruneCheckpoints
from holdfast.protocol.messages.progress import Probe, TakeMemory, TakeStacks
from holdfast.protocol.state import SnapshotPart


@dataclass(frozen=True, slots=True)
class Say:
    """Send to the coordinator on the connection that stands."""

    message: AgentMessage


@dataclass(frozen=True, slots=True)
class Replay:
    """Send these as there is room for them, and before all that is said from now on."""

    messages: Iterator[AgentMessage]


@dataclass(frozen=True, slots=True)
class Pass:
    """Hand an order, or the agent's own word of their unit, to these workers; one that is gone is no error."""

    workers: tuple[str, ...]
    order: Order | UnitAnswer


@dataclass(frozen=True, slots=True)
class StartWorker:
    """Fill the place of this worker with a new process; one that is there is killed, its end is of no interest."""

    worker: str


@dataclass(frozen=True, slots=True)
class KillHung:
    """Kill this worker's process. Its end is to be told as a hang, with this reason."""

    worker: str
    why: str


@dataclass(frozen=True, slots=True)
class Answer:
    """Find out what the coordinator asks for, of the workers or of an address, then call `seen` with the answer."""

    ask: Probe | TakeStacks | TakeMemory | ProbeAddress


@dataclass(frozen=True, slots=True)
class FetchParts:
    """Bring these parts of other nodes' snapshots here, and no others any more; say `fetched` of each that has come."""

    wanted: tuple[WantedPart, ...]


@dataclass(frozen=True, slots=True)
class ForgetParts:
    """Give back the memory of these parts of snapshots; `why`, for people: "" where newer ones take their place."""

    parts: tuple[SnapshotPart, ...]
    why: str = ""


@dataclass(frozen=True, slots=True)
class AdmitReaders:
    """Whoever knows this key may read the parts of snapshots that lie here."""

    key: bytes


@dataclass(frozen=True, slots=True)
class OpenMemory:
    """Have room for parts of snapshots, and say `opened` with what lies there: a job may change its layout."""


@dataclass(frozen=True, slots=True)
class Stow:
    """Have a checkpoint count, or remove some, where they lie; the answer is said by `worker_said`."""

    order: AcceptCheckpoint | PruneCheckpoints


@dataclass(frozen=True, slots=True)
class Reconnect:
    """Give the connection up and look for the coordinator again. `blame`: somebody did something wrong."""

    why: str
    blame: bool = True


@dataclass(frozen=True, slots=True)
class EndAgent:
    """End the workers that are left, then the agent. `alone`: nobody else says why."""

    exit_code: int
    why: str = ""
    alone: bool = False


SnapshotWork = FetchParts | ForgetParts | AdmitReaders | OpenMemory
AgentInstruction = Say | Replay | Pass | StartWorker | KillHung | Answer | SnapshotWork | Stow | Reconnect | EndAgent
