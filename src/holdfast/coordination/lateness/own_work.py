"""Work that takes its time: who is late where another was, or where several are at once, is not taken out for it."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.coordination.failures.budget import WINDOW_S
from holdfast.coordination.turn import Turn
from holdfast.protocol.events import LimitRaised
from holdfast.protocol.messages.progress import Activity, Stand
from holdfast.protocol.names import node_of

#: What a worker computes there is the step's, or the script's, and another one would compute the same.
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
#: Where several are late at once, it is more likely that they all do the same: they have so many times their limits.
SEVERAL = 3.0
#: What a script does between steps is its own, and what nobody has learnt yet, may take any time; and a node that keeps
#: its share computes the same again in another process: each worker that was ended there makes the limit so many times
#: longer.
AGAIN_LONGER = 10.0
#: What the work takes its time for once, it may take it for again, elsewhere (long sequences, say): within the window
#: of nodes' budgets that activity has so many times what it took then, but no more than the factor above.
ROOM = 1.5

Place = tuple[int, Activity, int | None]


class OwnWork:
    """Where workers were late, since the last committed step."""

    def __init__(self, turn: Turn) -> None:
        self._turn = turn
        #: the workers that were, by place
        self._late_at: dict[Place, set[str]] = {}
        self._script_factor = 1.0
        #: by activity: by how much the work has exceeded its limit, and when that was seen last
        self._exceeded: dict[Activity, tuple[float, float]] = {}

    def forget_up_to(self, step: int) -> None:
        """These steps are behind all."""
        if self._late_at:
            self._late_at = {place: nodes for place, nodes in self._late_at.items() if place[0] > step}

    def spare(self, hung: Sequence[Stand]) -> list[Stand]:
        """Return those of the workers that hang, as it seems, for which the work is no excuse."""
        places = [_place(stand) for stand in hung]
        at_work = [place for place in places if place is not None]
        left, works = list[Stand](), list[tuple[Place, Stand]]()
        for stand, place in zip(hung, places, strict=True):
            if place is None:
                left.append(stand)
            elif self._takes_its_time(place, stand, len(at_work)):
                continue
            elif at_work.count(place) > 1 or not self._is_first(place, stand.worker):
                works.append((place, stand))
            else:
                if stand.activity is Activity.SCRIPT:
                    self._script_factor *= AGAIN_LONGER
                left.append(stand)
        for place, stand in works:
            self._raise(place, stand)
        return left

    def _takes_its_time(self, place: Place, stand: Stand, at_once: int) -> bool:
        before, node = self._late_at.get(place, set[str]()) - {stand.worker}, node_of(stand.worker)
        factor = max(ROOM * self._lately(stand.activity), AGAIN_LONGER ** sum(node_of(one) == node for one in before))
        if stand.activity is Activity.SCRIPT:
            factor = max(factor, self._script_factor)
        return stand.for_s <= stand.limit_s * max(factor, SEVERAL if at_once > 1 else 1.0)

    def _lately(self, activity: Activity) -> float:
        """Return by how much the work has exceeded the limit of an activity within the window, 0 for not at all."""
        exceeded, seen = self._exceeded.get(activity, (0.0, 0.0))
        return exceeded if self._turn.now - seen < WINDOW_S else 0.0

    def _is_first(self, place: Place, worker: str) -> bool:
        """Note that a worker is late at a place; False where one of another node was before."""
        before = self._late_at.setdefault(place, set())
        if any(node_of(other) != node_of(worker) for other in before):
            return False
        before.add(worker)
        return True

    def _raise(self, place: Place, stand: Stand) -> None:
        """Give the work its time, and say so once for each worker."""
        by = min(stand.for_s / stand.limit_s, AGAIN_LONGER / ROOM) if stand.limit_s else 0.0
        self._exceeded[stand.activity] = max(by, self._lately(stand.activity)), self._turn.now
        late, node = self._late_at.setdefault(place, set()), node_of(stand.worker)
        others = ", ".join(sorted({node_of(worker) for worker in late} - {node})) or "others"
        if stand.worker not in late:
            late.add(stand.worker)
            why = f"{others} was late there, too: it is the work that takes its time"
            step, phase, micro_batch = stand.step, str(stand.activity), stand.micro_batch
            self._turn.emit(
                LimitRaised,
                node=node,
                step=step,
                phase=phase,
                micro_batch=micro_batch,
                limit_s=stand.limit_s,
                why=why,
            )


def _place(stand: Stand) -> Place | None:
    """Return where in a step a worker is late at own work; None where it is something else that holds it up."""
    if stand.stopped or stand.waits or stand.activity not in OWN_WORK:
        return None
    return stand.step, stand.activity, stand.micro_batch
