"""Whose fault it is that training stands still: who computes, or does not answer, while others wait.

Pure: the same evidence gives the same verdict.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from holdfast.coordination.timing.times import FAILURE, FLOOR_S, UNKNOWN_S
from holdfast.protocol.messages.progress import Activity, ThreadActivity
from holdfast.protocol.names import node_of

#: Whoever is in these waits for others, though in no collective.
WAITING = frozenset({Activity.AWAITING, Activity.ENTERING, Activity.RECEIVING, Activity.FINISHED})
#: What a user can do if work was slow and the worker did not hang.
_REMEDIES = {
    Activity.COMPUTE: (
        "if samples may take this long to load, load them ahead with `num_workers`; other slow code belongs between "
        "steps, in `with job.pause(...)`"
    ),
    Activity.SCRIPT: "if the script may take this long between steps, put that code into `with job.pause(...)`",
}
#: How long these take for one says nothing of others.
NOBODYS = frozenset({Activity.STARTING, Activity.PAUSED, Activity.WARMING})


@dataclass(frozen=True, kw_only=True, slots=True)
class Standstill:
    """What is known of a generation that stands still.

    members: its workers by rank. stands: where those stand whose agents have answered. silent: nodes that have not
    answered. idle: workers that are known to wait. outside: those that have not come into the generation yet. overdue:
    it has taken longer than any step should. waits_for_stopped: longer than a stopped process is waited for.
    together_s: what all take part in takes no longer. unknown_s: nobody is late before at what nobody knows how long
    it takes.
    """

    members: Sequence[str]
    stands: Mapping[str, ThreadActivity]
    silent: Collection[str] = ()
    idle: Collection[str] = ()
    outside: Collection[str] = ()
    overdue: bool = False
    waits_for_stopped: bool = False
    together_s: float = 0.0
    unknown_s: float = UNKNOWN_S


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What speaks against whom; `network`: nothing against anybody, and yet they all wait."""

    hung: tuple[ThreadActivity, ...] = ()
    silent: tuple[str, ...] = ()
    network: bool = False


def judge(still: Standstill) -> Finding:
    """Find who holds the others up. Nobody does where nobody waits, or where more are busy than wait for them."""
    stands = [still.stands[worker] for worker in still.members if worker in still.stands]
    lasts_s = min((_waits_s(stand) for stand in stands if is_waiting(stand)), default=0.0)
    at_work = (stand for stand in stands if stand.worker not in still.idle)
    hung = tuple(one for one in at_work if _hangs(one, still) or _lags(one, lasts_s, still.unknown_s))
    if still.overdue and any(stand.waits for stand in stands):
        # They could not wait there if somebody else's group did not stand.
        hung += tuple(stand for stand in stands if stand.worker in still.outside and _stays_away(stand))
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
    # (the last may have come just now)
    return Finding(network=all_wait and any(stand.waits for stand in stands) and lasts_s >= still.together_s)


def is_waiting(stand: ThreadActivity) -> bool:
    """Tell whether a worker waits for others, in a collective or for a generation."""
    return stand.waits or stand.activity in WAITING


def _hangs(stand: ThreadActivity, still: Standstill) -> bool:
    """Tell whether a worker is too long about something of its own, or does not run at all."""
    if stand.stopped:
        return still.waits_for_stopped
    if stand.waits:
        return still.overdue and stand.is_late  # it does not look
    return stand.is_late and stand.activity not in WAITING


def _waits_s(stand: ThreadActivity) -> float:
    return stand.waits_s if stand.waits else stand.for_s


def _lags(stand: ThreadActivity, others_wait_s: float, unknown_s: float) -> bool:
    """Tell whether a worker is far longer about something than the others, where nobody has learnt what that takes."""
    if stand.limit_s or stand.waits or stand.activity in WAITING or stand.activity in NOBODYS:
        return False
    others_s = max(0.0, stand.for_s - others_wait_s)
    return stand.for_s > max(unknown_s, FAILURE * others_s + FLOOR_S)


def _stays_away(stand: ThreadActivity) -> bool:
    """Tell whether a worker does not come into a generation, and not because something is still on its way."""
    return stand.activity is Activity.ENTERING and not stand.waits


def where(stand: ThreadActivity) -> str:
    """Say where in a step a worker is, for people."""
    of = "" if stand.micro_batch is None else f", micro-batch {stand.micro_batch}"
    return f"'{stand.activity}' of step {stand.step}{of}"


def what_hangs(stand: ThreadActivity) -> str:
    """Say what a worker that hangs is about, for people."""
    if stand.stopped:
        return f"its process is stopped, at '{stand.activity}' of step {stand.step}"
    if stand.waits:
        return f"its process does not run: for {stand.for_s:.2f} s it has not looked whether its collective has ended"
    if stand.activity in WAITING:
        return f"it has been at '{stand.activity}' for {stand.for_s:.2f} s, while others have come in and wait for it"
    limit = f"limit {stand.limit_s:.2f} s" if stand.limit_s else f"more than {FAILURE:.0f} times as long as the others"
    said = f"it has been at {where(stand)} for {stand.for_s:.2f} s, {limit}, while others wait for it"
    remedy = _REMEDIES.get(stand.activity)
    return f"{said}; {remedy}" if remedy else said
