"""What a worker's machine asks of its shell: instructions at once, and the task of the training thread."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.protocol.commit import Commit
from holdfast.protocol.messages.worker import WorkerMessage
from holdfast.protocol.plan import GenerationPlan
from holdfast.protocol.state import CheckpointSource, SnapshotSource

# ---- instructions: what the shell must do, in order ----


@dataclass(frozen=True, slots=True)
class Tell:
    """Send to the coordinator."""

    message: WorkerMessage


@dataclass(frozen=True, slots=True)
class Halt:
    """Interrupt the training thread: collectives and transfers are abandoned at once."""


@dataclass(frozen=True, slots=True)
class Build:
    """Build the group of a plan in the background; `pending` ones are not entered yet."""

    plan: GenerationPlan
    pending: bool


@dataclass(frozen=True, slots=True)
class Drop:
    """Forget the group of a generation that will never be entered."""

    generation: int


WorkerInstruction = Tell | Halt | Build | Drop


# ---- tasks: what the training thread is to do now ----


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing until something changes."""


@dataclass(frozen=True, slots=True)
class WarmUp:
    """Go through shadow steps, between `warming.begin` and `warming.end`, for as long as `warming.due`."""


@dataclass(frozen=True, slots=True)
class Forward:
    """Apply the retained reduced gradients of `step` with this v, between begin_apply and applied_step."""

    plan: GenerationPlan
    step: int
    commit: Commit


@dataclass(frozen=True, slots=True)
class Load:
    """Load this checkpoint, or this snapshot, then call `loaded`."""

    plan: GenerationPlan
    source: CheckpointSource | SnapshotSource


@dataclass(frozen=True, slots=True)
class Move:
    """Take up the placement of the experts: `moving`, what it says to do, `moved`.

    What travels beside the first step is only begun; once all of it is here, and the step reduced: `brought`.

    send_to: meanwhile, and during what follows, push the state to these members.
    """

    plan: GenerationPlan
    send_to: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Receive:
    """Wait for the state that is on its way since `pushed`, then call `adopting` and `received`.

    together: all places of the unit do so. None gives up a state that it keeps before each has what it is sent.
    """

    plan: GenerationPlan
    together: bool = False


@dataclass(frozen=True, slots=True)
class Enter:
    """All is here: call `entered` once the group stands.

    send_to: push the state to these members; compute may go on meanwhile, apply may not.
    """

    plan: GenerationPlan
    send_to: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PutAway:
    """Nothing is computed: put the state into the memory of this node, then call `generations.has_put_away`."""

    plan: GenerationPlan


#: What leads into a generation, in this order, each only where it is needed (docs/protocol.md, Entering).
Entering = Forward | Load | Move | Receive | Enter
#: What leads into a generation, and out of one in which nothing is computed.
Leading = Entering | PutAway


@dataclass(frozen=True, slots=True)
class Compute:
    """Compute the gradients of these micro-batches of `step`; `summed` ones are there already."""

    step: int
    micro_batches: tuple[int, ...]
    summed: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Finish:
    """The job ends before its last step: save what is here, as at the end of the loop, then call `finish`.

    `asked`: a script has asked for that; all members are there, and nobody is in a hurry.
    """

    asked: bool = False


@dataclass(frozen=True, slots=True)
class Done:
    """The job is over: the script may end."""


Task = Wait | WarmUp | Leading | Compute | Finish | Done
