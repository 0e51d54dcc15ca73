"""The units of a node: who has come to be in which, and what their places say to each other until they are met."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

from holdfast.coordination.agent.instructions import AgentInstruction, KillHung, Pass
from holdfast.coordination.agent.replica_groups.refusals import CALLED_TWICE, difference, misfit, other_lists
from holdfast.protocol.layouts.group_messages import (
    JoinUnit,
    UnitAwaits,
    UnitFormed,
    UnitPost,
    UnitPosted,
    UnitRefused,
    UnitWord,
)
from holdfast.protocol.layouts.layout import WHOLE, Layout
from holdfast.protocol.layouts.layout_list import Layouts, layout_for
from holdfast.protocol.messages.agent import Welcome
from holdfast.protocol.names import MAX_POSTED_BYTES, index_of, is_key_of, posted_bytes

#: a place that has not come so long after the first of its unit hangs somewhere before `holdfast.init()`
COME_S = 600.0


@dataclass(frozen=True, slots=True)
class _Asked:
    """A worker that has come."""

    worker: str
    layout: Layout
    layouts: Layouts = ()


@dataclass(slots=True)
class _Unit:
    """One that is formed, and how much each of its workers has posted, in bytes."""

    name: str
    workers: tuple[str, ...]
    posted: dict[str, int] = field(default_factory=dict[str, int])


class Units:
    """Forms units of the workers that ask for it, and knows who goes with whom.

    Args:
        workers: how many the node has.
        nonce: gives a unit a name that no other ever has.
    """

    def __init__(self, workers: int, nonce: Callable[[], str]) -> None:
        self.come_s = COME_S
        self._workers, self._nonce = workers, nonce
        #: by index on the node: what these ask for, and in which unit they are
        self._asked: dict[int, _Asked] = {}
        self._formed: dict[int, _Unit] = {}
        #: of several layouts, the one in force; None: no coordinator says which that is
        self._choose: Callable[[Layouts], Layout] | None = None
        #: who waits for a coordinator that says so
        self._early: dict[int, JoinUnit] = {}
        #: since when a unit is waited for that is not whole, by its first index; None: from the next look on
        self._since: dict[int, float | None] = {}

    def take(self, word: UnitWord, now: float) -> list[AgentInstruction]:
        """Take what the worker that fills a place says."""
        if isinstance(word, UnitPost):
            return self._post(word)
        if not word.layouts:
            return self._joined(_Asked(word.worker, word.layout), now)
        if why := next((why for one in word.layouts if (why := misfit(one.layout, self._workers))), ""):
            return [Pass((word.worker,), UnitRefused(why=why))]
        if self._choose is None:
            self._early[index_of(word.worker)] = word
            return []
        return self._joined(_Asked(word.worker, self._choose(word.layouts), word.layouts), now)

    def informed(self, welcome: Welcome, now: float) -> list[AgentInstruction]:
        """A coordinator says which layout is in force, or with how many nodes the job begins.

        Who waits in a unit of another one, which was in force when it came, is to be in one of this. Who has met others
        in such a unit already is replaced once it attaches.
        """
        choose = self._choose = lambda layouts: welcome.layout or layout_for(layouts, welcome.nodes)
        early, self._early = self._early, {}
        waiting = [one for index, one in sorted(self._asked.items()) if self._waits(index) and one.layouts]
        for one in (one for one in waiting if choose(one.layouts) != one.layout):
            del self._asked[index_of(one.worker)]
            early[index_of(one.worker)] = JoinUnit(worker=one.worker, layouts=one.layouts)
        self._wait_anew()
        return [said for word in early.values() for said in self.take(word, now)]

    def uninformed(self) -> None:
        """Nobody coordinates, or another one will: who comes waits until it is known what is in force."""
        self._choose = None

    def attached(self, worker: str) -> list[AgentInstruction]:
        """A worker trains; one that has not come before does so without a layout, which then nobody else may have."""
        index = index_of(worker)
        if index in self._asked:
            return []
        self._asked[index] = asked = _Asked(worker, WHOLE)
        return self._refuse(difference(index, WHOLE, self._layouts(asked)) or self._other_lists(asked))

    def mates(self, worker: str) -> tuple[int, ...]:
        """Return who goes with a worker, by index: the others of its unit."""
        unit = self._formed.get(index := index_of(worker))
        if unit is None or worker not in unit.workers:
            return ()
        return tuple(index_of(other) for other in unit.workers if index_of(other) != index)

    def left(self, index: int) -> None:
        """Another process fills a place: the unit that the one before was in is none any more."""
        self._asked.pop(index, None)
        self._early.pop(index, None)
        unit = self._formed.get(index)
        for worker in unit.workers if unit is not None else ():
            self._formed.pop(index_of(worker), None)
        self._wait_anew()

    def late(self, now: float, workers: Sequence[str]) -> list[AgentInstruction]:
        """Time has passed: end those of the node's workers that do not come to where others wait for them."""
        out: list[AgentInstruction] = []
        for first, since in list(self._since.items()):
            if since is not None and now - since <= self.come_s:
                continue
            self._since[first] = now
            if since is None:
                continue
            places = next((one.layout.places for one in self._waiting(first)), 0)
            for index in range(first, first + places):
                if index not in self._asked and workers[index]:
                    out.append(KillHung(workers[index], f"{self._who(index, places)} did not come to {self._wait()}"))
        return out

    # ---- inside ----

    def _joined(self, word: _Asked, now: float) -> list[AgentInstruction]:
        index = index_of(word.worker)
        if index in self._asked:
            return [Pass((word.worker,), UnitRefused(why=CALLED_TWICE))]
        if why := misfit(word.layout, self._workers):
            return [Pass((word.worker,), UnitRefused(why=why))]
        self._asked[index] = word
        if why := difference(index, word.layout, self._layouts(word)) or self._other_lists(word):
            return self._refuse(why) or [Pass((word.worker,), UnitRefused(why=why))]
        if word.layouts and word.layout.places == 1:
            return [Pass((word.worker,), UnitFormed(unit=self._nonce(), workers=(word.worker,), layout=word.layout))]
        first = index - index % word.layout.places
        self._since.setdefault(first, now)
        here = tuple(one.worker for one in self._waiting(first))
        there = {index_of(worker) for worker in here}
        missing = tuple(each for each in range(first, first + word.layout.places) if each not in there)
        if missing:
            return [Pass(here, UnitAwaits(missing=missing))]
        unit = _Unit(self._nonce(), here)
        self._formed |= dict(zip(count(first), [unit] * len(here), strict=False))
        del self._since[first]
        layout = word.layout if word.layouts else WHOLE
        return [Pass(here, UnitFormed(unit=unit.name, workers=here, layout=layout))]

    def _post(self, post: UnitPost) -> list[AgentInstruction]:
        unit = self._formed.get(index_of(post.worker))
        if unit is None or unit.name != post.unit or post.worker not in unit.workers:
            return []
        place = unit.workers.index(post.worker)
        posted = unit.posted[post.worker] = unit.posted.get(post.worker, 0) + posted_bytes(post.keys)
        if posted > MAX_POSTED_BYTES or not all(is_key_of(place, key) for key in post.keys):
            return [KillHung(post.worker, f"it has posted what it may not to its unit, {posted} bytes so far")]
        others = tuple(worker for worker in unit.workers if worker != post.worker)
        return [Pass(others, UnitPosted(unit=unit.name, keys=post.keys))]

    def _refuse(self, why: str) -> list[AgentInstruction]:
        """Refuse all that wait: of those that do not want the same nobody knows who is right."""
        waiting = tuple(self._asked[index].worker for index in sorted(self._asked) if self._waits(index))
        if not why or not waiting:
            return []
        for worker in waiting:
            del self._asked[index_of(worker)]
        self._since.clear()
        return [Pass(waiting, UnitRefused(why=why))]

    def _wait_anew(self) -> None:
        """Who is waited for has all its time: a process that has just begun, or is to be in another unit."""
        self._since = dict.fromkeys(first for first in self._since if any(self._waiting(first)))

    def _waits(self, index: int) -> bool:
        return index not in self._formed and self._asked[index].layout != WHOLE

    def _waiting(self, first: int) -> Iterator[_Asked]:
        """Yield who has come of the unit that begins there."""
        asked = (self._asked[index] for index in sorted(self._asked) if self._waits(index))
        return (one for one in asked if index_of(one.worker) // one.layout.places * one.layout.places == first)

    def _layouts(self, besides: _Asked) -> dict[int, Layout]:
        """Return what the others of the node have asked for; of those with the same list it is not their choice."""
        listed = besides.layouts
        return {
            i: one.layout
            for i, one in self._asked.items()
            if one is not besides and not (listed and one.layouts == listed)
        }

    def _other_lists(self, asked: _Asked) -> str:
        """Say whose list of layouts on the node is another than this worker's; "" where all have the same."""
        other = next((one for _, one in sorted(self._asked.items()) if one.layouts != asked.layouts), None)
        return (
            other_lists(index_of(asked.worker), asked.layouts, index_of(other.worker), other.layouts) if other else ""
        )

    def _who(self, index: int, places: int) -> str:
        return f"place {index % places} of a unit (worker {index} of the node)"

    def _wait(self) -> str:
        return f"holdfast.init() within {self.come_s:g} s of another place"
