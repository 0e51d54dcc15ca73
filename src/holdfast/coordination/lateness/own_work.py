"""Work that takes its time: who is late where another was, or where several are at once, is not taken out for it."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.coordination.turn import Turn
from holdfast.protocol.events import LimitRaised
from holdfast.protocol.messages.progress import Activity, Stand
from holdfast.protocol.names import node_of

#: What a worker computes there is the step's, or the script's, and another one would compute the same.
OWN_WORK = frozenset({Activity.SCRIPT, Activity.COMPUTE, Activity.PAUSED, Activity.APPLYING, Activity.SAVING})
#: Where several are late at once, it is more likely that they all do the same: they have so many times their limits.
SEVERAL = 3.0
#: What a script does between steps is its own, and what nobody has learnt yet, may take any time: each worker that was
#: ended there makes the limit so many times longer.
AGAIN_LONGER = 10.0

Place = tuple[int, Activity, int | None]


class OwnWork:
    """Where workers were late, since the last committed step."""

    def __init__(self, turn: Turn) -> None:
        self._turn = turn
        self._late_at: dict[Place, set[str]] = {}
        self._script_factor = 1.0

    def forget_up_to(self, step: int) -> None:
        """These steps are behind all."""
        if self._late_at:
            self._late_at = {place: nodes for place, nodes in self._late_at.items() if place[0] > step}

    def spare(self, hung: Sequence[Stand]) -> list[Stand]:
        """Return those of the workers that hang, as it seems, for which the work is no excuse."""
        places = [_place(stand) for stand in hung]
        at_work = [place for place in places if place is not None]
        left: list[Stand] = []
        for stand, place in zip(hung, places, strict=True):
            if place is None:
                left.append(stand)
            elif self._takes_its_time(stand, len(at_work)):
                continue
            elif at_work.count(place) > 1 or not self._is_first(place, node_of(stand.worker)):
                self._raise(place, stand)
            else:
                if stand.activity is Activity.SCRIPT:
                    self._script_factor *= AGAIN_LONGER
                left.append(stand)
        return left

    def _takes_its_time(self, stand: Stand, at_once: int) -> bool:
        factor = self._script_factor if stand.activity is Activity.SCRIPT else 1.0
        return stand.for_s <= stand.limit_s * max(factor, SEVERAL if at_once > 1 else 1.0)

    def _is_first(self, place: Place, node: str) -> bool:
        """Note that a node is late at a place; False where another was before."""
        before = self._late_at.setdefault(place, set())
        if before - {node}:
            return False
        before.add(node)
        return True

    def _raise(self, place: Place, stand: Stand) -> None:
        """Say, once for each node, that the work is to be given its time."""
        nodes, node = self._late_at.setdefault(place, set()), node_of(stand.worker)
        others = ", ".join(sorted(nodes - {node})) or "others"
        if node not in nodes:
            nodes.add(node)
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
