"""Distinguishes slow work from hangs: a late worker is not ended if other workers needed as long for the same work.

A work item is (step, activity, micro-batch). The first worker that is late at an item is ended, because a hang and slow
work look alike. Whether that kill counts against its node waits for a verdict (a trial):

- Another worker needs as long for the same item, or a worker of another node is late there too: the work is slow. The
  kill does not count, and the limit of this activity then covers the time that the work took.
- The step is committed and no worker needed as long: the worker hung. The kill counts (`CountHang`).

Pure: no clocks and no I/O. The coordinator may lose all of it; it then learns again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

import msgspec

from holdfast.coordination.failures.budget import WINDOW_S
from holdfast.coordination.transaction import Transaction
from holdfast.protocol.events import LimitRaised
from holdfast.protocol.messages.progress import Activity, CountHang, ThreadActivity
from holdfast.protocol.names import node_of

#: Activities in which a worker computes for the step or the script, so that another worker would compute the same.
OWN_WORK = frozenset(
    {
        Activity.SCRIPT,
        Activity.COMPUTE,
        Activity.EVALUATING,
        Activity.PAUSED,
        Activity.APPLYING,
        Activity.SAVING,
    }
)
#: If several workers are late at once, slow work is more likely than several hangs: their limits are this much longer.
SEVERAL_FACTOR = 3.0
#: Each kill on a node makes the limit of the next process there this much longer at the same item: with `hold`, that
#: process computes the same work. The script's own code between steps has no second worker, so each kill there does so
#: for the rest of the job.
REPEAT_FACTOR = 10.0
#: The limit that covers slow work, as a multiple of the longest time that it took.
SLOW_WORK_MARGIN = 1.5
#: A verdict waits this long after the step is committed: agents report the end of slow work up to a second late.
VERDICT_S = 3.0
#: most work items that are remembered
_MAX_ITEMS = 4096

WorkItem = tuple[int, Activity, int | None]


@dataclass(frozen=True, slots=True)
class _Trial:
    """A worker that was ended, with a kill that does not count yet."""

    stand: ThreadActivity
    why: str
    agent_pid: int


@dataclass(slots=True)
class _WorkState:
    """The late workers and open trials of a work item."""

    #: the workers that were late at this item
    late: set[str] = field(default_factory=set[str])
    trials: list[_Trial] = field(default_factory=list[_Trial])
    #: Whether the work is known to be slow.
    slow: bool = False
    #: When the verdict is due; not before the step is committed.
    verdict_at: float = inf


@dataclass(frozen=True, slots=True)
class _SlowTime:
    """The longest time that an activity took with an excuse, when it last did, and how long that is remembered."""

    took_s: float
    seen: float
    keep_s: float


class SlowWork:
    """Distinguishes slow work from hangs, by the late workers of the newest steps."""

    def __init__(self, transaction: Transaction) -> None:
        self._transaction = transaction
        self._states: dict[WorkItem, _WorkState] = {}
        self._script_factor = 1.0
        self._slow: dict[Activity, _SlowTime] = {}

    # ---- verdicts ----

    def tick(self, step: int) -> None:
        """Give the verdicts that are due, now that all steps up to `step` are committed.

        A work item's open kills count against their nodes 3 seconds after that; then the item is forgotten.
        """
        now = self._transaction.now
        for item, state in list(self._states.items()):
            if item[0] > step:
                continue
            if state.verdict_at == inf:
                state.verdict_at = now + VERDICT_S
            elif now >= state.verdict_at:
                del self._states[item]
                for trial in state.trials:
                    self._count_kill(trial)

    def record_kill(self, stand: ThreadActivity, why: str) -> bool:
        """Record that a worker is ended; return whether its kill counts only after a verdict.

        False, and nothing is recorded, if the worker did no work that another one does, too, or if its node is not
        connected: then the kill counts at once.
        """
        item, connection = _work_item_of(stand), self._transaction.members.connection_of(stand.worker)
        node = self._transaction.members.nodes.get(node_of(stand.worker))
        if item is None or connection is None or node is None:
            return False
        trials = self._state_of(item).trials
        if all(trial.stand.worker != stand.worker for trial in trials):
            trials.append(_Trial(stand, why, node.agent_pid))
        return True

    def on_work_ended(self, stand: ThreadActivity) -> None:
        """Handle the end of late work: if it took as long, it clears other workers that were ended at the same item.

        The time of work that is known to be slow then raises the limit of this activity.
        """
        item = _work_item_of(stand)
        state = self._states.get(item) if item is not None else None
        if state is None:
            return
        others = [trial for trial in state.trials if trial.stand.worker != stand.worker]
        if any(stand.for_s >= trial.stand.for_s for trial in others):
            state.slow = True
            state.trials.clear()
        if state.slow:
            self._remember_slow_work(stand)

    def _count_kill(self, trial: _Trial) -> None:
        """Order the agent to count a kill against its node, unless the agent was replaced meanwhile."""
        node = self._transaction.members.nodes.get(node_of(trial.stand.worker))
        if node is not None and node.agent_pid == trial.agent_pid:
            self._transaction.send(node.connection, CountHang(worker=trial.stand.worker, why=trial.why))

    # ---- who is late ----

    def exclude_slow_work(self, hung: Sequence[ThreadActivity]) -> list[ThreadActivity]:
        """Return the workers that seem to hang and are not excused by slow work, with their current limits.

        A worker at work is left out within its limit, which grows with earlier kills and slow work. It is excused if
        another worker is late at the same item; that is reported. Workers that do no work of their own, such as stopped
        ones, are always returned.
        """
        items = [_work_item_of(stand) for stand in hung]
        at_work = [item for item in items if item is not None]
        left: list[ThreadActivity] = []
        excused: list[tuple[WorkItem, ThreadActivity]] = []
        for stand, item in zip(hung, items, strict=True):
            if item is None:
                left.append(stand)
                continue
            limit_s = self._limit_s(item, stand, len(at_work))
            if stand.for_s <= limit_s:
                continue
            if at_work.count(item) > 1 or not self._is_first(item, stand.worker):
                excused.append((item, stand))
                continue
            if stand.activity is Activity.SCRIPT:
                self._script_factor *= REPEAT_FACTOR
            left.append(msgspec.structs.replace(stand, limit_s=limit_s))
        for item, stand in excused:
            self._excuse(item, stand)
        return left

    def _limit_s(self, item: WorkItem, stand: ThreadActivity, at_once: int) -> float:
        """Return the current limit of a worker's activity: longer after kills on its node at this item, and after slow
        work.

        Args:
            at_once: how many workers are late at their work now; several get longer limits.

        Returns:
            Seconds; 0 if unknown.
        """
        state, node = self._states.get(item), node_of(stand.worker)
        before = (state.late if state is not None else set[str]()) - {stand.worker}
        factor = max(
            REPEAT_FACTOR ** sum(node_of(one) == node for one in before), SEVERAL_FACTOR if at_once > 1 else 1.0
        )
        if stand.activity is Activity.SCRIPT:
            factor = max(factor, self._script_factor)
        return max(stand.limit_s * factor, SLOW_WORK_MARGIN * self._slow_work_s(stand.activity))

    def _is_first(self, item: WorkItem, worker: str) -> bool:
        """Record that a worker is late at an item; return False if a worker of another node was late there before."""
        late = self._state_of(item).late
        if any(node_of(other) != node_of(worker) for other in late):
            return False
        late.add(worker)
        return True

    def _excuse(self, item: WorkItem, stand: ThreadActivity) -> None:
        """Record that a work item is slow, drop other nodes' kills there, and emit that once for each worker."""
        state, node = self._state_of(item), node_of(stand.worker)
        state.slow = True
        state.trials = [trial for trial in state.trials if node_of(trial.stand.worker) == node]
        self._remember_slow_work(stand)
        if stand.worker in state.late:
            return
        state.late.add(stand.worker)
        others = ", ".join(sorted({node_of(worker) for worker in state.late} - {node})) or "others"
        self._transaction.emit(
            LimitRaised,
            node=node,
            step=stand.step,
            phase=str(stand.activity),
            micro_batch=stand.micro_batch,
            limit_s=stand.limit_s,
            why=f"{others} was late there, too: the work itself is slow",
        )

    def _state_of(self, item: WorkItem) -> _WorkState:
        """Return the state of a work item, a new one if it is unknown. Beyond a maximum number, the oldest items are
        forgotten.
        """
        state = self._states.setdefault(item, _WorkState())
        while len(self._states) > _MAX_ITEMS:
            del self._states[next(iter(self._states))]
        return state

    # ---- how long slow work takes ----

    def _remember_slow_work(self, stand: ThreadActivity) -> None:
        """Remember how long slow work took, which raises the limit of its activity.

        It is forgotten after the window of the nodes' budgets. Work that is slow less often (for example once an hour)
        is remembered for twice the time between the last two.
        """
        now, known = self._transaction.now, self._slow.get(stand.activity)
        keep_s = max(WINDOW_S, 2.0 * (now - known.seen)) if known is not None else WINDOW_S
        took_s = max(stand.for_s, self._slow_work_s(stand.activity))
        self._slow[stand.activity] = _SlowTime(took_s, now, max(keep_s, known.keep_s if known is not None else 0.0))

    def _slow_work_s(self, activity: Activity) -> float:
        """Return the longest recent time of slow work of this activity, or 0 without any."""
        known = self._slow.get(activity)
        return known.took_s if known is not None and self._transaction.now - known.seen < known.keep_s else 0.0


def _work_item_of(stand: ThreadActivity) -> WorkItem | None:
    """Return the work item at which a worker is late, or None if it does no work of its own."""
    if stand.stopped or stand.waits or stand.activity not in OWN_WORK:
        return None
    return stand.step, stand.activity, stand.micro_batch
