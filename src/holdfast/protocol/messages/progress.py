"""What a worker's training thread is about, and what is said of that between agents and coordinator."""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from holdfast.protocol.messages.memory import MAX_MEMORY_SAMPLES, MemorySample
from holdfast.protocol.names import Count, Rate, Seconds, Struct, Text, WorkerId


class Activity(IntEnum):
    """What a training thread is about; those of a step's phases are called as these are (`Phase`)."""

    STARTING = 0  # in no generation yet
    AWAITING = 1  # the coordinator's word: its generation was stopped, or has ended
    ENTERING = 2  # a generation: its group is awaited
    FORWARD = 3
    LOADING = 4  # a checkpoint
    MOVING = 5  # experts
    RECEIVING = 6  # a member's state
    SCRIPT = 7  # the script's own code, outside of its micro-batches
    COMPUTE = 8  # a micro-batch, from fetching it to the end of its backward pass
    REDUCING = 9
    VOTED = 10
    APPLYING = 11
    SAVING = 12  # offering a step's state to whoever writes it, or bringing it together
    PAUSED = 13  # in `with job.pause(...)`
    FINISHED = 14
    ENDING = 15  # the script has raised, or ended itself: its traceback is made, its process is on its way out
    EVALUATING = 16  # a shard of an evaluation, or what others have of it
    WARMING = 17  # in shadow steps, which nobody waits for

    def __str__(self) -> str:
        """Return what people call it."""
        return self.name.lower()


ACTIVITIES: tuple[Activity, ...] = tuple(Activity)


class Stand(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="Stand"):
    """Where a worker's training thread stands: for `for_s` seconds it has been about `activity`.

    `limit_s`: for how long it may, learnt from what it took before; 0: nobody can say. `waits`: it waits in a
    collective, since `waits_s` seconds; then `for_s` is since it last looked whether that has ended. `stopped`: its
    process is (SIGSTOP).
    """

    worker: WorkerId
    generation: Count
    step: Count
    activity: Activity
    for_s: Seconds
    limit_s: Seconds = 0.0
    micro_batch: Count | None = None
    waits: bool = False
    waits_s: Seconds = 0.0
    stopped: bool = False

    @property
    def late(self) -> bool:
        """True where it should be through, or should have looked."""
        return 0.0 < self.limit_s < self.for_s


class Late(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="Late"):
    """A worker is late.

    `ended`: it is through with work that was late, or that the coordinator asked about (`WatchWork`); then the stand's
    `for_s` is how long that took.
    """

    stand: Stand
    ended: bool = False


class OwnTimes(Struct, frozen=True, kw_only=True, tag="OwnTimes"):
    """What a node's workers take, said every few seconds, and sooner where one takes longer than before.

    `compute_s`: how long each computes a micro-batch, lately. `computed`: how many each has since the last word, and
    the seconds that they took together. `slow`: how often since the last word something took
    1.1 times as long as usual, by what it was. `link_bytes_per_s`: how fast its data goes out to a peer, where known.
    """

    compute_s: Annotated[dict[WorkerId, Seconds], Meta(max_length=1024)]
    computed: Annotated[dict[WorkerId, tuple[Count, Seconds]], Meta(max_length=1024)] = msgspec.field(
        default_factory=dict[WorkerId, tuple[Count, Seconds]]
    )
    slow: Annotated[dict[Activity, Count], Meta(max_length=len(Activity))]
    link_bytes_per_s: Annotated[dict[WorkerId, Rate], Meta(max_length=1024)]


class Probe(Struct, frozen=True, kw_only=True, tag="Probe"):
    """The coordinator asks where an agent's workers stand."""

    number: Count


class Whereabouts(Struct, frozen=True, kw_only=True, tag="Whereabouts"):
    """The answer to a Probe; who is not there, or whose page says nothing, is left out."""

    number: Count
    stands: Annotated[tuple[Stand, ...], Meta(max_length=1024)] = ()


class EndHung(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="EndHung"):
    """The agent ends this worker, which seems to hang, and starts another.

    `on_trial`: the work may be slow. The kill uses up none of the node's restarts, unless a `CountHang` follows.
    """

    worker: WorkerId
    why: Text
    on_trial: bool = False


class CountHang(Struct, frozen=True, kw_only=True, tag="CountHang"):
    """The verdict on a worker that was ended `on_trial`: it hung. The agent counts the kill like any other failure."""

    worker: WorkerId
    why: Text


class WatchWork(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="WatchWork"):
    """A worker was ended at this work: each agent reports a worker that takes at least `for_s` for it."""

    step: Count
    activity: Activity
    for_s: Seconds
    micro_batch: Count | None = None


class TakeStacks(Struct, frozen=True, kw_only=True, tag="TakeStacks"):
    """Something hangs: the agent is to tell where its workers' threads stand in their programs, before they go on."""

    number: Count


class TakeMemory(Struct, frozen=True, kw_only=True, tag="TakeMemory"):
    """A generation has begun: the agent is to tell what its workers held and moved in the `seconds` up to now."""

    number: Count
    seconds: Seconds


class MemoryTaken(Struct, frozen=True, kw_only=True, tag="MemoryTaken"):
    """The answer to TakeMemory, oldest sample first."""

    number: Count
    samples: Annotated[tuple[MemorySample, ...], Meta(max_length=MAX_MEMORY_SAMPLES)] = ()


class Collective(Struct, frozen=True, kw_only=True, tag="Collective"):
    """One of a worker's newest waits in a collective of `size` ranks, its bytes here; `took_s` None: not over."""

    what: Text
    size: Count
    bytes: Count
    began_s: Seconds  # ago
    took_s: Seconds | None = None


class WorkerStack(Struct, frozen=True, kw_only=True, tag="WorkerStack"):
    """A worker's threads, as Python's faulthandler has them ("": it has not answered), and its newest collectives."""

    worker: WorkerId
    stack: Text = ""
    collectives: Annotated[tuple[Collective, ...], Meta(max_length=16)] = ()


class Stacks(Struct, frozen=True, kw_only=True, tag="Stacks"):
    """The answer to TakeStacks."""

    number: Count
    workers: Annotated[tuple[WorkerStack, ...], Meta(max_length=64)] = ()
