"""The outputs of a worker's state machine: instructions to its shell, and tasks for the training thread."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.protocol.commit import Commit
from holdfast.protocol.messages.worker import WorkerMessage
from holdfast.protocol.plan import GenerationPlan
from holdfast.protocol.state import CheckpointSource, SnapshotSource

# ---- instructions: the shell must execute them, in order ----


@dataclass(frozen=True, slots=True)
class SendToCoordinator:
    """Send a message to the coordinator."""

    message: WorkerMessage


@dataclass(frozen=True, slots=True)
class Halt:
    """Interrupt the training thread: it abandons collectives and transfers at once."""


@dataclass(frozen=True, slots=True)
class Build:
    """Build the group of a plan in the background; if `pending`, its generation is not entered yet."""

    plan: GenerationPlan
    pending: bool


@dataclass(frozen=True, slots=True)
class Drop:
    """Drop the group of a generation that will never be entered."""

    generation: int


WorkerInstruction = SendToCoordinator | Halt | Build | Drop


# ---- tasks of the training thread ----


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait until something changes."""


@dataclass(frozen=True, slots=True)
class WarmUp:
    """Run shadow steps between `warming.start` and `warming.finish`, as long as `warming.is_due` is True."""


@dataclass(frozen=True, slots=True)
class Forward:
    """Apply the retained reduced gradients of `step` with this result, between begin_apply and finish_apply."""

    plan: GenerationPlan
    step: int
    commit: Commit


@dataclass(frozen=True, slots=True)
class Load:
    """Task for the worker's process: load this checkpoint or snapshot, then call `finish_load`."""

    plan: GenerationPlan
    source: CheckpointSource | SnapshotSource


@dataclass(frozen=True, slots=True)
class Move:
    """Move the experts: call `begin_move`, execute the rearrangement that it returns, then call `end_move`.

    Transfers that overlap the first step are only started. Call `finish_background_transfer` once they are complete and
    the step is reduced.
    """

    plan: GenerationPlan
    #: the members to which the state is sent meanwhile, and during the following tasks
    send_to: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Receive:
    """Wait for the state that was offered to `accept_push`, then call `begin_adoption` and `finish_receive`."""

    plan: GenerationPlan
    #: whether all local ranks of the replica group receive; none replaces a kept state before all have received theirs
    together: bool = False


@dataclass(frozen=True, slots=True)
class Enter:
    """Everything is here: call `finish_entering` once the group is ready."""

    plan: GenerationPlan
    #: the members to which the state is sent; computing may go on meanwhile, applying may not
    send_to: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StashState:
    """Stash the state in the memory of this node, then call `generations.record_stash`. Nothing is computed."""

    plan: GenerationPlan


#: The tasks that lead into a generation, in this order, each only if it is needed (docs/protocol.md, Entering).
Entering = Forward | Load | Move | Receive | Enter
#: The tasks that lead into a generation, or out of one in which nothing is computed.
Leading = Entering | StashState


@dataclass(frozen=True, slots=True)
class Compute:
    """Compute the gradients of these micro-batches of `step`; those in `summed` are already here."""

    step: int
    micro_batches: tuple[int, ...]
    summed: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Finish:
    """Save the state as at the end of the loop, because the job ends before its last step, then call `finish`."""

    #: whether a script requested this; then all members are present, and nothing limits the time
    asked: bool = False


@dataclass(frozen=True, slots=True)
class Done:
    """The job is over: the script may end."""


Task = Wait | WarmUp | Leading | Compute | Finish | Done
