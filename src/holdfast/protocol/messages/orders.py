"""What the coordinator says to a worker, through its agent."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from holdfast.protocol.checkpoints.names import StoredFile
from holdfast.protocol.names import Count, KeyName, KeyValue, Seconds, Struct, Text
from holdfast.protocol.plan import Decision, GenerationPlan

#: checkpoints that one order has removed
MAX_PRUNED = 16
#: of all parts of a checkpoint
MAX_FILES = 1 << 15


class Begin(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="Begin"):
    """Leave whatever you are in and enter this generation; `assignment[unit]`: the micro-batches of its first step.

    `kept[unit]`: of the micro-batches that the places of a unit have named as summed, those that stay so; () for none
    of any. Only where a unit has several places: a worker alone sees for itself what of its own is still of use.
    """

    plan: GenerationPlan
    decision: Decision
    assignment: tuple[tuple[int, ...], ...] = ()
    kept: tuple[tuple[int, ...], ...] = ()


class Stop(Struct, frozen=True, kw_only=True, tag="Stop"):
    """Freeze in every generation up to this one, and report."""

    term: Count
    generation: Count


class LookAround(Struct, frozen=True, kw_only=True, tag="LookAround"):
    """All members of `generation` wait for each other: find out whom no connection can be made to, and complain."""

    generation: Count


class Prepare(Struct, frozen=True, kw_only=True, tag="Prepare"):
    """Build this group beside the one in use; go on training meanwhile."""

    plan: GenerationPlan


class Arm(Struct, frozen=True, kw_only=True, tag="Arm"):
    """All have built the pending group: raise the swap flag in the next commit operation."""

    term: Count
    generation: Count


class Disarm(Struct, frozen=True, kw_only=True, tag="Disarm"):
    """One that was to join is lost: lower the swap flag again, and say so, unless it brings about the swap."""

    term: Count
    generation: Count


class Void(Struct, frozen=True, kw_only=True, tag="Void"):
    """Forget the pending group. Once Arm was said, only where a member has said since that its flag stays down."""

    term: Count
    generation: Count


class Posted(Struct, frozen=True, kw_only=True, tag="Posted"):
    """Rendezvous: the keys that the members of `generation` have posted, or some of them."""

    generation: Count
    keys: Annotated[dict[KeyName, KeyValue], Meta(max_length=1 << 16)]


class AcceptCheckpoint(Struct, frozen=True, kw_only=True, tag="AcceptCheckpoint"):
    """What was written under this name, in this term and generation, is on the decided lineage.

    `files`: all of it, for its manifest, which whoever gets this is to write: with that it counts. () where it counts
    already. `seconds`, `stall_s`: what writing its parts took, to be told with that it is kept.
    """

    term: Count
    generation: Count
    step: Count
    name: Text
    files: Annotated[tuple[StoredFile, ...], Meta(max_length=MAX_FILES)] = ()
    seconds: Seconds = 0.0
    stall_s: Seconds = 0.0


class PruneCheckpoints(Struct, frozen=True, kw_only=True, tag="PruneCheckpoints"):
    """Remove these: the record knows newer ones that are whole, or they are on no decided lineage. `term`: of now.

    `remove`: else somebody else does that; whoever has written a part of one need not wait for it.
    """

    term: Count
    names: Annotated[tuple[Text, ...], Meta(max_length=MAX_PRUNED)]
    remove: bool = True


class AskCheckpoint(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="AskCheckpoint"):
    """A checkpoint is wanted: ask all for one after the step that passes next.

    `if_free`: it is time for one, so it is left out where the one before is still being written.
    """

    if_free: bool = False


#: Where in a step an injected fault may strike. `reducing` is after the first all-to-all was issued, `voted` after the
#: commit operation was, `applying` after the optimizer's step and before it is marked, `transfer` and `receiving` in
#: the middle of a state transfer, at the sender and at the receiver, `moving` while experts move.
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
    """Fault injection: die in the given way, now or where the step reaches the phase.

    Some are no death. `hold`: the training thread waits at the phase until the generation is over, whoever ends it;
    `hang`: it waits for ever; `slow`: from then on its micro-batches take so many `times` as long; `slow-link`: its
    data goes out so many times slower; `drop`: the connections of its groups break; `link-down`: nothing comes through
    them any more; `memory`: it meets a MemoryError; `disk-full`: from then on its checkpoints meet a full disk;
    `corrupt-state`: a bit of its parameters flips.
    """

    fault: Text
    whole_node: bool = True
    step: Count | None = None
    phase: Text = ""
    times: float = 3.0


class Warm(Struct, frozen=True, kw_only=True, tag="Warm"):
    """To a worker that is in no generation: go through shadow steps, so that its first real one is as fast as others'.

    Its own state is void afterwards. What comes before it is through (Begin, Prepare, Stop, JobDone) cuts it short.
    """

    term: Count


class StandBy(Struct, frozen=True, kw_only=True, tag="StandBy"):
    """To a worker that has left its generation in good order: it has no rank from here on, and is warm.

    Its state is void. What was said of generations up to this one does not concern it any more.
    """

    term: Count
    generation: Count


class JobDone(Struct, frozen=True, kw_only=True, tag="JobDone"):
    """Every member has finished: the script may end."""


#: what a worker's machine takes (coordination.worker); its agent makes it of what was said to the node
PendingOrder = Prepare | Arm | Disarm | Void
GenerationOrder = Begin | Stop | PendingOrder | Warm | StandBy | JobDone
#: what is said to one worker; it is for others in its process, but for Warm, StandBy, and a JobDone that comes late
WorkerOrder = AskCheckpoint | Inject | Warm | StandBy | JobDone
#: what is said to a node's agent, which writes checkpoints for its workers, and hands it on to them
CheckpointOrder = AcceptCheckpoint | PruneCheckpoints
Order = GenerationOrder | Posted | LookAround | WorkerOrder | CheckpointOrder
