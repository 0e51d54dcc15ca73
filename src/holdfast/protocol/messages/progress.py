"""The activity of training threads, and messages about it between agents and coordinator."""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from holdfast.protocol.messages.memory import MAX_MEMORY_SAMPLES, MemorySample
from holdfast.protocol.names import Count, Rate, Seconds, Struct, Text, WorkerId


class Activity(IntEnum):
    """The activity of a training thread. Those that are phases of a step have the names of `Phase`."""

    #: in no generation yet
    STARTING = 0
    #: Waits for the coordinator: its generation was stopped, or has ended.
    AWAITING = 1
    #: waits for the group of a generation
    ENTERING = 2
    FORWARD = 3
    #: loads a checkpoint
    LOADING = 4
    #: moves experts
    MOVING = 5
    #: receives the state of a member
    RECEIVING = 6
    #: runs code of the script outside of micro-batches
    SCRIPT = 7
    #: computes a micro-batch, from fetching it to the end of its backward pass
    COMPUTE = 8
    REDUCING = 9
    VOTED = 10
    APPLYING = 11
    #: copies or gathers a step's state for a checkpoint or snapshot
    SAVING = 12
    #: in `with job.pause(...)`
    PAUSED = 13
    FINISHED = 14
    #: The script has raised or ended, and its process is about to end.
    ENDING = 15
    #: computes a shard of an evaluation, or gathers results
    EVALUATING = 16
    #: in shadow steps, for which no worker waits
    WARMING = 17

    def __str__(self) -> str:
        """Return the name in lower case."""
        return self.name.lower()


ACTIVITIES: tuple[Activity, ...] = tuple(Activity)


class ThreadActivity(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="Stand"):
    """The activity of a worker's training thread, and its duration."""

    worker: WorkerId
    generation: Count
    step: Count
    activity: Activity
    #: seconds in this activity; if it waits in a collective, seconds since it last polled that
    for_s: Seconds
    #: the limit, learned from earlier durations, or 0 if unknown
    limit_s: Seconds = 0.0
    micro_batch: Count | None = None
    #: whether it waits in a collective
    waits: bool = False
    #: seconds since it has waited
    waits_s: Seconds = 0.0
    #: whether its process is stopped (SIGSTOP)
    stopped: bool = False

    @property
    def is_late(self) -> bool:
        """Whether the activity takes longer than its limit."""
        return 0.0 < self.limit_s < self.for_s


class Late(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="Late"):
    """To the coordinator: a worker's activity takes longer than expected, or has ended after it did."""

    stand: ThreadActivity
    #: whether it has ended work that was late, or that `WatchWork` names; then the stand's `for_s` is the duration of
    #: that work
    ended: bool = False


class OwnTimes(Struct, frozen=True, kw_only=True, tag="OwnTimes"):
    """Times of a node's workers, sent every few seconds, and earlier if a worker takes longer than before."""

    #: recent seconds per micro-batch of each worker
    compute_s: Annotated[dict[WorkerId, Seconds], Meta(max_length=1024)]
    #: micro-batches of each worker since the last message, and their seconds together
    computed: Annotated[dict[WorkerId, tuple[Count, Seconds]], Meta(max_length=1024)] = msgspec.field(
        default_factory=dict[WorkerId, tuple[Count, Seconds]]
    )
    #: how often an activity took 1.1 times its usual duration since the last message
    slow: Annotated[dict[Activity, Count], Meta(max_length=len(Activity))]
    #: bytes per second that a worker sends to a peer, if known
    link_bytes_per_s: Annotated[dict[WorkerId, Rate], Meta(max_length=1024)]


class Probe(Struct, frozen=True, kw_only=True, tag="Probe"):
    """The coordinator asks for the activities of an agent's workers."""

    number: Count


class ProbeAnswer(Struct, frozen=True, kw_only=True, tag="Whereabouts"):
    """The answer to a Probe. Workers that are not there, or have no readable page, are left out."""

    number: Count
    stands: Annotated[tuple[ThreadActivity, ...], Meta(max_length=1024)] = ()


class EndHung(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="EndHung"):
    """The agent ends this worker, which seems to hang, and starts another process."""

    worker: WorkerId
    why: Text
    #: whether the work may be slow: the kill does not count as a restart unless `CountHang` follows
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
    """Training hangs: the agent sends the stacks of its workers' threads."""

    number: Count


class TakeMemory(Struct, frozen=True, kw_only=True, tag="TakeMemory"):
    """A generation has begun: the agent sends its workers' memory and traffic of the last `seconds`."""

    number: Count
    seconds: Seconds


class MemoryTaken(Struct, frozen=True, kw_only=True, tag="MemoryTaken"):
    """The answer to TakeMemory, oldest sample first."""

    number: Count
    samples: Annotated[tuple[MemorySample, ...], Meta(max_length=MAX_MEMORY_SAMPLES)] = ()


class Collective(Struct, frozen=True, kw_only=True, tag="Collective"):
    """A recent wait of a worker in a collective of `size` ranks."""

    what: Text
    size: Count
    #: bytes on this worker
    bytes: Count
    #: seconds since it began
    began_s: Seconds
    #: duration, or None if it is not over
    took_s: Seconds | None = None


class WorkerStack(Struct, frozen=True, kw_only=True, tag="WorkerStack"):
    """The stacks of a worker's threads, and its newest collectives."""

    worker: WorkerId
    #: as Python's faulthandler prints them; "" if the worker has not answered
    stack: Text = ""
    collectives: Annotated[tuple[Collective, ...], Meta(max_length=16)] = ()


class Stacks(Struct, frozen=True, kw_only=True, tag="Stacks"):
    """The answer to TakeStacks."""

    number: Count
    workers: Annotated[tuple[WorkerStack, ...], Meta(max_length=64)] = ()
