"""Forms the replica groups of a node, and relays messages between their workers until they have connected."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

from holdfast.coordination.agent.instructions import AgentInstruction, KillHung, SendToWorkers
from holdfast.coordination.agent.replica_groups.refusals import (
    CALLED_TWICE,
    describe_difference,
    describe_misfit,
    describe_other_lists,
)
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

#: a local rank that joins later than this after the first of its group is taken to hang before `holdfast.init()`
JOIN_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class _JoinRequest:
    """A worker's request to join a replica group."""

    worker: str
    layout: Layout
    layouts: Layouts = ()


@dataclass(slots=True)
class _Group:
    """A formed replica group, and how many bytes each of its workers has posted."""

    name: str
    workers: tuple[str, ...]
    posted: dict[str, int] = field(default_factory=dict[str, int])


class ReplicaGroups:
    """Forms replica groups of the workers that request it, and knows which workers belong together.

    Args:
        workers: The number of workers of the node.
        nonce: Returns a unique name for a group.
    """

    def __init__(self, workers: int, nonce: Callable[[], str]) -> None:
        self.join_timeout_s = JOIN_TIMEOUT_S
        self._workers = workers
        self._nonce = nonce
        #: by index on the node: the requests of the workers, and their groups
        self._requests: dict[int, _JoinRequest] = {}
        self._formed: dict[int, _Group] = {}
        #: chooses the current one of several layouts; None until a coordinator has told which is current
        self._choose: Callable[[Layouts], Layout] | None = None
        #: the requests that wait for that
        self._early: dict[int, JoinUnit] = {}
        #: since when an incomplete group waits, by its first index; None starts the wait at the next tick
        self._since: dict[int, float | None] = {}

    def on_group_message(self, word: UnitWord, now: float) -> list[AgentInstruction]:
        """Handle a worker's request to join a replica group, or keys that it posts to its group.

        A request with several layouts waits until a coordinator has told which is current; it is refused if one of them
        does not divide the node's workers.
        """
        if isinstance(word, UnitPost):
            return self._on_post(word)
        if not word.layouts:
            return self._on_join(_JoinRequest(word.worker, word.layout), now)
        if why := next((why for one in word.layouts if (why := describe_misfit(one.layout, self._workers))), ""):
            return [SendToWorkers((word.worker,), UnitRefused(why=why))]
        if self._choose is None:
            self._early[index_of(word.worker)] = word
            return []
        return self._on_join(_JoinRequest(word.worker, self._choose(word.layouts), word.layouts), now)

    def on_welcome(self, welcome: Welcome, now: float) -> list[AgentInstruction]:
        """Learn from a coordinator which layout is current, or with how many nodes the job starts.

        Requests that waited for it are handled, and all waits start again. Workers that wait in a group of an outdated
        layout move to a group of the current one. Workers that have already connected in such a group stay in it; they
        are replaced once they attach.
        """
        choose = self._choose = lambda layouts: welcome.layout or layout_for(layouts, welcome.nodes)
        early, self._early = self._early, {}
        waiting = [one for index, one in sorted(self._requests.items()) if self._is_waiting(index) and one.layouts]
        for one in (one for one in waiting if choose(one.layouts) != one.layout):
            del self._requests[index_of(one.worker)]
            early[index_of(one.worker)] = JoinUnit(worker=one.worker, layouts=one.layouts)
        self._restart_waits()
        return [instruction for word in early.values() for instruction in self.on_group_message(word, now)]

    def on_disconnected(self) -> None:
        """Forget the current layout when the connection ends: new requests wait for the next coordinator."""
        self._choose = None

    def on_attach(self, worker: str) -> list[AgentInstruction]:
        """Record that a worker attaches. Empty if it has joined or attached before.

        If it has not joined, it uses no layout; workers that wait for a group are then refused, because all must use
        the same.
        """
        index = index_of(worker)
        if index in self._requests:
            return []
        self._requests[index] = asked = _JoinRequest(worker, WHOLE)
        return self._refuse_waiting(
            describe_difference(index, WHOLE, self._other_layouts(asked)) or self._other_lists(asked)
        )

    def group_mates(self, worker: str) -> tuple[int, ...]:
        """Return the indices on the node of the other workers in a worker's replica group. Empty if it is in none."""
        unit = self._formed.get(index := index_of(worker))
        if unit is None or worker not in unit.workers:
            return ()
        return tuple(index_of(other) for other in unit.workers if index_of(other) != index)

    def dissolve_group(self, index: int) -> None:
        """Forget the request of an index and the group to which it belongs, because another process fills it.

        The waits of other groups start again.
        """
        self._requests.pop(index, None)
        self._early.pop(index, None)
        unit = self._formed.get(index)
        for worker in unit.workers if unit is not None else ():
            self._formed.pop(index_of(worker), None)
        self._restart_waits()

    def end_late_workers(self, now: float, workers: Sequence[str]) -> list[AgentInstruction]:
        """Return instructions to kill workers that have not joined their replica group within `join_timeout_s` after
        the first of it.

        Then the wait starts again.

        Args:
            workers: The present workers by index; "" if there is none.
        """
        out: list[AgentInstruction] = []
        for first, since in list(self._since.items()):
            if since is not None and now - since <= self.join_timeout_s:
                continue
            self._since[first] = now
            if since is None:
                continue
            places = next((one.layout.places for one in self._waiting_requests(first)), 0)
            for index in range(first, first + places):
                if index not in self._requests and workers[index]:
                    out.append(
                        KillHung(
                            workers[index],
                            f"{self._describe_rank(index, places)} did not come to {self._describe_wait()}",
                        )
                    )
        return out

    # ---- inside ----

    def _on_join(self, word: _JoinRequest, now: float) -> list[AgentInstruction]:
        """Add a worker to its replica group.

        Answer all that wait for it which local ranks are missing, or that the group is formed. Refuse a second request,
        a layout that does not divide the node's workers, and one that differs from the others' (then all waiting
        workers are refused).
        """
        index = index_of(word.worker)
        if index in self._requests:
            return [SendToWorkers((word.worker,), UnitRefused(why=CALLED_TWICE))]
        if why := describe_misfit(word.layout, self._workers):
            return [SendToWorkers((word.worker,), UnitRefused(why=why))]
        self._requests[index] = word
        if why := describe_difference(index, word.layout, self._other_layouts(word)) or self._other_lists(word):
            return self._refuse_waiting(why) or [SendToWorkers((word.worker,), UnitRefused(why=why))]
        if word.layouts and word.layout.places == 1:
            return [
                SendToWorkers(
                    (word.worker,), UnitFormed(unit=self._nonce(), workers=(word.worker,), layout=word.layout)
                )
            ]
        first = index - index % word.layout.places
        self._since.setdefault(first, now)
        here = tuple(one.worker for one in self._waiting_requests(first))
        joined = {index_of(worker) for worker in here}
        missing = tuple(each for each in range(first, first + word.layout.places) if each not in joined)
        if missing:
            return [SendToWorkers(here, UnitAwaits(missing=missing))]
        unit = _Group(self._nonce(), here)
        self._formed |= dict(zip(count(first), [unit] * len(here), strict=False))
        del self._since[first]
        layout = word.layout if word.layouts else WHOLE
        return [SendToWorkers(here, UnitFormed(unit=unit.name, workers=here, layout=layout))]

    def _on_post(self, post: UnitPost) -> list[AgentInstruction]:
        """Pass the keys that a worker posts on to the others of its group.

        Kill a worker that posts invalid or too many keys. Ignore posts to a group that is not its own.
        """
        unit = self._formed.get(index_of(post.worker))
        if unit is None or unit.name != post.unit or post.worker not in unit.workers:
            return []
        place = unit.workers.index(post.worker)
        posted = unit.posted[post.worker] = unit.posted.get(post.worker, 0) + posted_bytes(post.keys)
        if posted > MAX_POSTED_BYTES or not all(is_key_of(place, key) for key in post.keys):
            return [
                KillHung(
                    post.worker, f"it has posted invalid or too many keys to its replica group: {posted} bytes so far"
                )
            ]
        others = tuple(worker for worker in unit.workers if worker != post.worker)
        return [SendToWorkers(others, UnitPosted(unit=unit.name, keys=post.keys))]

    def _refuse_waiting(self, why: str) -> list[AgentInstruction]:
        """Refuse all waiting workers and forget their requests: if they disagree, nothing shows which one is right.

        Empty if `why` is empty or none waits.
        """
        waiting = tuple(self._requests[index].worker for index in sorted(self._requests) if self._is_waiting(index))
        if not why or not waiting:
            return []
        for worker in waiting:
            del self._requests[index_of(worker)]
        self._since.clear()
        return [SendToWorkers(waiting, UnitRefused(why=why))]

    def _restart_waits(self) -> None:
        """Restart the waiting times, because a process was started or moved to another group."""
        self._since = dict.fromkeys(first for first in self._since if any(self._waiting_requests(first)))

    def _is_waiting(self, index: int) -> bool:
        return index not in self._formed and self._requests[index].layout != WHOLE

    def _waiting_requests(self, first: int) -> Iterator[_JoinRequest]:
        """Yield the waiting requests for the group that begins at this index."""
        asked = (self._requests[index] for index in sorted(self._requests) if self._is_waiting(index))
        return (one for one in asked if index_of(one.worker) // one.layout.places * one.layout.places == first)

    def _other_layouts(self, besides: _JoinRequest) -> dict[int, Layout]:
        """Return the layouts of the other workers, except those with the same list: the coordinator chose theirs."""
        listed = besides.layouts
        return {
            i: one.layout
            for i, one in self._requests.items()
            if one is not besides and not (listed and one.layouts == listed)
        }

    def _other_lists(self, asked: _JoinRequest) -> str:
        """Return which worker of the node lists other layouts than this one, or "" if all are equal."""
        other = next((one for _, one in sorted(self._requests.items()) if one.layouts != asked.layouts), None)
        return (
            describe_other_lists(index_of(asked.worker), asked.layouts, index_of(other.worker), other.layouts)
            if other
            else ""
        )

    def _describe_rank(self, index: int, places: int) -> str:
        return f"rank {index % places} of a replica group (worker {index} of the node)"

    def _describe_wait(self) -> str:
        return f"holdfast.init() within {self.join_timeout_s:g} s of another rank"
