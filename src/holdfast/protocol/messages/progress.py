"""What a worker's training thread is about, and what is said of that between agents and coordinator."""

from __future__ import annotations

from enum import IntEnum

from holdfast.protocol.names import Count, Struct, WorkerId


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

    def __str__(self) -> str:
        """Return what people call it."""
        return self.name.lower()


ACTIVITIES: tuple[Activity, ...] = tuple(Activity)


class Late(Struct, frozen=True, kw_only=True):
    """A worker is about something for `for_s` seconds, longer than `limit_s`, which is learnt from what it took before.

    `stalled`: it waits in a collective, and for so long it has not looked whether that has ended.
    """

    worker: WorkerId
    generation: Count
    step: Count
    activity: Activity
    for_s: float
    limit_s: float
    micro_batch: Count | None = None
    stalled: bool = False
