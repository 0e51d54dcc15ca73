"""Finds the workers or nodes that stop the training: they compute, or do not answer, while others wait.

Pure: the same evidence gives the same result.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from holdfast.coordination.timing.times import FAILURE, FLOOR_S, UNKNOWN_S
from holdfast.protocol.messages.progress import Activity, ThreadActivity
from holdfast.protocol.names import node_of

#: Activities in which a worker waits for others outside of collectives.
WAITING = frozenset({Activity.AWAITING, Activity.ENTERING, Activity.RECEIVING, Activity.FINISHED})
#: What a user can do if work was slow and the worker did not hang.
_REMEDIES = {
    Activity.COMPUTE: (
        "if samples may take this long to load, load them ahead with `num_workers`; other slow code belongs between "
        "steps, in `with job.pause(...)`"
    ),
    Activity.SCRIPT: "if the script may take this long between steps, put that code into `with job.pause(...)`",
}
#: Activities with durations that cannot be compared between workers.
NOT_COMPARABLE = frozenset({Activity.STARTING, Activity.PAUSED, Activity.WARMING})


@dataclass(frozen=True, kw_only=True, slots=True)
class Standstill:
    """The evidence about a generation that makes no progress."""

    #: its workers, by rank
    members: Sequence[str]
    #: activities of the workers, as far as their agents have answered
    stands: Mapping[str, ThreadActivity]
    #: nodes that have not answered
    silent: Collection[str] = ()
    #: workers that wait, by their reports
    idle: Collection[str] = ()
    #: workers that have not entered the generation
    outside: Collection[str] = ()
    #: whether it takes longer than any step should
    overdue: bool = False
    #: whether it takes longer than a stopped process may hold up others
    waits_for_stopped: bool = False
    #: seconds that an operation of all members may take
    together_s: float = 0.0
    #: an activity without a learned limit is not late before this many seconds
    unknown_s: float = UNKNOWN_S


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """The suspects for a standstill of the training, if any."""

    #: workers that hang
    hung: tuple[ThreadActivity, ...] = ()
    #: nodes that do not answer
    silent: tuple[str, ...] = ()
    #: whether all workers wait, without a suspect
    network: bool = False


def judge_standstill(still: Standstill) -> Finding:
    """Return the causes of a standstill: hung workers, silent nodes, or the network if all workers wait.

    Silent nodes, the network, and workers that stay outside the group are named only if the standstill is overdue. The
    finding is empty if no node waits. If hung and silent nodes together are more than the waiting ones, no hung worker
    is named; if the silent nodes alone are, no silent node either.
    """
    stands = [still.stands[worker] for worker in still.members if worker in still.stands]
    lasts_s = min((_waiting_time_s(stand) for stand in stands if is_waiting(stand)), default=0.0)
    at_work = (stand for stand in stands if stand.worker not in still.idle)
    hung = tuple(
        stand for stand in at_work if _is_hung(stand, still) or _is_far_slower(stand, lasts_s, still.unknown_s)
    )
    if still.overdue and any(stand.waits for stand in stands):
        # Workers can wait in a collective only if the group of some other worker exists.
        hung += tuple(stand for stand in stands if stand.worker in still.outside and _stays_outside(stand))
    waiting = {node_of(worker) for worker in still.idle}
    waiting |= {node_of(stand.worker) for stand in stands if is_waiting(stand) and stand not in hung}
    silent = tuple(dict.fromkeys(node_of(w) for w in still.members if node_of(w) in still.silent))
    nodes = {node_of(stand.worker) for stand in hung}
    if hung and len(nodes | {*silent}) <= max(1, len(waiting)) and waiting:
        return Finding(hung=hung, silent=silent if still.overdue else ())
    if not still.overdue or not waiting:
        return Finding()
    if silent:
        return Finding(silent=silent) if len(silent) <= len(waiting) else Finding()
    all_wait = len(stands) == len(still.members) and all(is_waiting(stand) for stand in stands)
    # The last worker may have arrived just now.
    return Finding(network=all_wait and any(stand.waits for stand in stands) and lasts_s >= still.together_s)


def is_waiting(stand: ThreadActivity) -> bool:
    """Return whether a worker waits for others, in a collective or for a generation."""
    return stand.waits or stand.activity in WAITING


def _is_hung(stand: ThreadActivity, still: Standstill) -> bool:
    """Return whether a worker takes too long for its own work, does not poll its collective, or has a stopped process.

    A stopped process counts only after the others have waited for long enough, a missing poll only if the step is
    overdue.
    """
    if stand.stopped:
        return still.waits_for_stopped
    if stand.waits:
        return still.overdue and stand.is_late  # It does not poll its collective.
    return stand.is_late and stand.activity not in WAITING


def _waiting_time_s(stand: ThreadActivity) -> float:
    """Return how long a waiting worker has waited, in seconds."""
    return stand.waits_s if stand.waits else stand.for_s


def _is_far_slower(stand: ThreadActivity, others_wait_s: float, unknown_s: float) -> bool:
    """Return whether a worker takes far longer than the others for an activity without a learned limit.

    False if there is a limit, if the worker waits, or if the activity does not take all workers about as long.

    Args:
        others_wait_s: how long the others have waited for it.
        unknown_s: the least time that counts.
    """
    if stand.limit_s or stand.waits or stand.activity in WAITING or stand.activity in NOT_COMPARABLE:
        return False
    others_s = max(0.0, stand.for_s - others_wait_s)
    return stand.for_s > max(unknown_s, FAILURE * others_s + FLOOR_S)


def _stays_outside(stand: ThreadActivity) -> bool:
    """Return whether a worker does not enter a generation, although it does not wait for data."""
    return stand.activity is Activity.ENTERING and not stand.waits


def describe_position(stand: ThreadActivity) -> str:
    """Return in words where in a step a worker is."""
    of = "" if stand.micro_batch is None else f", micro-batch {stand.micro_batch}"
    return f"'{stand.activity}' of step {stand.step}{of}"


def describe_hang(stand: ThreadActivity) -> str:
    """Return in words how a worker hangs: stopped, not running, outside the group, or over its limit; with a remedy."""
    if stand.stopped:
        return f"its process is stopped, at '{stand.activity}' of step {stand.step}"
    if stand.waits:
        return f"its process does not run: it has not polled its collective for {stand.for_s:.2f} s"
    if stand.activity in WAITING:
        return f"it has been at '{stand.activity}' for {stand.for_s:.2f} s, while others have come in and wait for it"
    limit = f"limit {stand.limit_s:.2f} s" if stand.limit_s else f"more than {FAILURE:.0f} times as long as the others"
    text = f"it has been at {describe_position(stand)} for {stand.for_s:.2f} s, {limit}, while others wait for it"
    remedy = _REMEDIES.get(stand.activity)
    return f"{text}; {remedy}" if remedy else text
