"""Orders of the coordinator to a worker, which its agent passes on."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from holdfast.protocol.checkpoints.names import StoredFile
from holdfast.protocol.names import Count, KeyName, KeyValue, Seconds, Struct, Text
from holdfast.protocol.plan import Decision, GenerationPlan

#: most checkpoints that one order removes
MAX_PRUNED = 16
#: most files of all parts of a checkpoint
MAX_FILES = 1 << 15


class Begin(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="Begin"):
    """Leave the current generation, and enter this one."""

    plan: GenerationPlan
    decision: Decision
    #: the micro-batches of the first step, by replica group
    assignment: tuple[tuple[int, ...], ...] = ()
    #: By replica group, which of the micro-batches that its workers have reported remain summed. Only for replica
    #: groups of several workers: a single worker knows which of its own still count. () for none.
    kept: tuple[tuple[int, ...], ...] = ()


class Stop(Struct, frozen=True, kw_only=True, tag="Stop"):
    """Freeze in every generation up to this one, and report."""

    term: Count
    generation: Count


class LookAround(Struct, frozen=True, kw_only=True, tag="LookAround"):
    """All members of `generation` wait for each other. Find out which members cannot be reached, and complain."""

    generation: Count


class Prepare(Struct, frozen=True, kw_only=True, tag="Prepare"):
    """Build this group next to the one in use, and continue training meanwhile."""

    plan: GenerationPlan


class Arm(Struct, frozen=True, kw_only=True, tag="Arm"):
    """All members have built the pending group. Raise the swap flag in the next commit operation."""

    term: Count
    generation: Count


class Disarm(Struct, frozen=True, kw_only=True, tag="Disarm"):
    """A joining member is lost. Lower the swap flag and send `Disarmed`, unless the swap happens first."""

    term: Count
    generation: Count


class Void(Struct, frozen=True, kw_only=True, tag="Void"):
    """Forget the pending group.

    After `Arm`, this is only sent if a member has sent `Disarmed`.
    """

    term: Count
    generation: Count


class Posted(Struct, frozen=True, kw_only=True, tag="Posted"):
    """Rendezvous: keys that members of `generation` have posted."""

    generation: Count
    keys: Annotated[dict[KeyName, KeyValue], Meta(max_length=1 << 16)]


class AcceptCheckpoint(Struct, frozen=True, kw_only=True, tag="AcceptCheckpoint"):
    """The checkpoint that was written under this name, in this term and generation, is on the decided lineage."""

    term: Count
    generation: Count
    step: Count
    name: Text
    #: All files of the checkpoint. The receiver writes the manifest with them, and then the checkpoint counts. () if it
    #: counts already.
    files: Annotated[tuple[StoredFile, ...], Meta(max_length=MAX_FILES)] = ()
    #: duration of the writes, for `CheckpointKept`
    seconds: Seconds = 0.0
    #: the longest stall of a worker, for `CheckpointKept`
    stall_s: Seconds = 0.0


class PruneCheckpoints(Struct, frozen=True, kw_only=True, tag="PruneCheckpoints"):
    """Remove these checkpoints: newer complete ones are recorded, or they are not on the decided lineage."""

    #: the current term
    term: Count
    names: Annotated[tuple[Text, ...], Meta(max_length=MAX_PRUNED)]
    #: False if another agent removes them; then writers of their parts need not wait for them
    remove: bool = True


class AskCheckpoint(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="AskCheckpoint"):
    """Ask all workers for a checkpoint after the next step that passes."""

    #: leave it out if the checkpoint before it is still being written
    if_free: bool = False


#: Points in a step at which a fault can be injected. `reducing`: after the first all-to-all was issued. `voted`: after
#: the commit operation was issued. `applying`: after the optimizer's step, before it is marked. `transfer`,
#: `receiving`: during a state transfer, at the sender and the receiver. `moving`: while experts move.
FAULT_PHASES = (
    "compute",
    "reducing",
    "ready",
    "voted",
    "passed",
    "applying",
    "forward",
    "transfer",
    "receiving",
    "moving",
)


class Inject(Struct, frozen=True, kw_only=True, tag="Inject"):
    """Fault injection: fail in the given way, now or when the step reaches the phase.

    `hold`: the training thread waits at the phase until the generation ends. `hang`: it waits forever. `slow`: its
    micro-batches take `times` as long. `slow-link`: its data is sent `times` slower. `drop`: the connections of its
    groups break. `link-down`: its connections stay open, and carry nothing. `memory`: it raises MemoryError.
    `disk-full`: its checkpoints meet a full disk. `corrupt-state`: one bit of its parameters flips. The others end the
    process.
    """

    fault: Text
    whole_node: bool = True
    step: Count | None = None
    phase: Text = ""
    times: float = 3.0


class Warm(Struct, frozen=True, kw_only=True, tag="Warm"):
    """To a worker in no generation: run shadow steps, so that its first real step is as fast as other workers' steps.

    Its state is void afterwards. `Begin`, `Prepare`, `Stop` and `JobDone` end the shadow steps early.
    """

    term: Count


class BecomeStandby(Struct, frozen=True, kw_only=True, tag="StandBy"):
    """To a worker that has left its generation in good order: it has no rank, and is warm.

    Its state is void. Earlier orders about generations up to this one no longer apply to it.
    """

    term: Count
    generation: Count


class JobDone(Struct, frozen=True, kw_only=True, tag="JobDone"):
    """All members have finished: the script may end."""


#: Inputs of the worker machine (coordination.worker). The agent makes them from the orders to its node.
PendingOrder = Prepare | Arm | Disarm | Void
GenerationOrder = Begin | Stop | PendingOrder | Warm | BecomeStandby | JobDone
#: Orders to one worker. `Warm`, `BecomeStandby`, and a late `JobDone` are for its machine, the rest for other parts.
WorkerOrder = AskCheckpoint | Inject | Warm | BecomeStandby | JobDone
#: Orders to the agent, which writes checkpoints for its workers. It passes them on to the workers.
CheckpointOrder = AcceptCheckpoint | PruneCheckpoints
Order = GenerationOrder | Posted | LookAround | WorkerOrder | CheckpointOrder
