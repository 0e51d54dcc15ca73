"""The instructions of an agent's machine to its shell, which executes them in order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from holdfast.protocol.layouts.group_messages import UnitAnswer
from holdfast.protocol.messages.agent import AgentMessage, ProbeAddress, WantedPart
from holdfast.protocol.messages.orders import AcceptCheckpoint, Order, PruneCheckpoints
from holdfast.protocol.messages.progress import Probe, TakeMemory, TakeStacks
from holdfast.protocol.state import SnapshotPart


@dataclass(frozen=True, slots=True)
class SendToCoordinator:
    """Send a message to the connected coordinator."""

    message: AgentMessage


@dataclass(frozen=True, slots=True)
class Replay:
    """Send these messages as the connection allows, before all messages that are sent from now on."""

    messages: Iterator[AgentMessage]


@dataclass(frozen=True, slots=True)
class SendToWorkers:
    """Send an order, or an answer about their replica group, to these workers. Ignore workers that have ended."""

    workers: tuple[str, ...]
    order: Order | UnitAnswer


@dataclass(frozen=True, slots=True)
class StartWorker:
    """Start a new process as this worker. Kill an older process of its local rank without reporting its end."""

    worker: str


@dataclass(frozen=True, slots=True)
class KillHung:
    """Kill this worker's process; its end must be reported as a hang, with this reason."""

    worker: str
    why: str


@dataclass(frozen=True, slots=True)
class AnswerRequest:
    """Answer the coordinator's question about the workers or an address: pass the answer to `send_seen`."""

    ask: Probe | TakeStacks | TakeMemory | ProbeAddress


@dataclass(frozen=True, slots=True)
class FetchParts:
    """Fetch these parts of other nodes' snapshots, and stop fetching others. Call `on_part_fetched` for each."""

    wanted: tuple[WantedPart, ...]


@dataclass(frozen=True, slots=True)
class DropParts:
    """Free the memory of these snapshot parts. `why` is for people, or "" if newer parts replace them."""

    parts: tuple[SnapshotPart, ...]
    why: str = ""


@dataclass(frozen=True, slots=True)
class AdmitReaders:
    """Allow readers with this key to read the snapshot parts of this node."""

    key: bytes


@dataclass(frozen=True, slots=True)
class OpenSnapshotMemory:
    """Open memory for snapshot parts and call `on_memory_opened` with the parts found there: a job may change its
    layout.
    """


@dataclass(frozen=True, slots=True)
class UpdateCheckpoints:
    """Seal a checkpoint, or remove some. The answer is passed to `on_worker_message`."""

    order: AcceptCheckpoint | PruneCheckpoints


@dataclass(frozen=True, slots=True)
class Reconnect:
    """Close the connection and look for the coordinator again. `blame`: whether this counts as a failure."""

    why: str
    blame: bool = True


@dataclass(frozen=True, slots=True)
class EndAgent:
    """End the remaining workers, then the agent. `alone`: whether only this agent can report why."""

    exit_code: int
    why: str = ""
    alone: bool = False


SnapshotWork = FetchParts | DropParts | AdmitReaders | OpenSnapshotMemory
AgentInstruction = (
    SendToCoordinator
    | Replay
    | SendToWorkers
    | StartWorker
    | KillHung
    | AnswerRequest
    | SnapshotWork
    | UpdateCheckpoints
    | Reconnect
    | EndAgent
)
