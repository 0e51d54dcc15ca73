"""The steps that a node's workers have applied and that may not be in the journal yet, each kept once per node.

A coordinator may be down for days, so all but the newest steps are stored as encoded pages, 50 bytes per step.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from holdfast.protocol.commit import step_weight
from holdfast.protocol.layouts.layout import are_of_same_role
from holdfast.protocol.messages.agent import PAGE_STEPS, AppliedSteps, CompactCommit, KeptStep
from holdfast.protocol.messages.worker import Applied
from holdfast.protocol.plan import PassedStep

#: enough for more than a million steps; beyond that, the results of the oldest ones are dropped
MAX_KEPT_BYTES = 64 << 20
_decoder = msgspec.msgpack.Decoder(tuple[KeptStep, ...])
_encoder = msgspec.msgpack.Encoder()


@dataclass(frozen=True, slots=True)
class _Page:
    last: int
    data: bytes


class KeptSteps:
    """The result of each step after the committed ones, with its generation, time and state hash."""

    def __init__(self, max_bytes: int = MAX_KEPT_BYTES) -> None:
        #: the results of steps up to this one were dropped, though they were applied; 0 if none
        self.given_up = 0
        self._max_bytes = max_bytes
        self._bytes = 0
        self._pages: deque[_Page] = deque()
        self._newest: dict[int, KeptStep] = {}
        #: reports that contradict a kept step; the coordinator judges them
        self._odd: deque[Applied] = deque(maxlen=16)

    @property
    def last(self) -> int:
        """The newest kept step, or 0 before the first."""
        return max(self._newest, default=self._pages[-1].last if self._pages else 0)

    def hash_of(self, step: int) -> str:
        """Return the hash of the state after a step, or "" if it is unknown or already in a page."""
        known = self._newest.get(step)
        return known.state_hash if known is not None else ""

    def add_received(self, passed: PassedStep) -> None:
        """Keep a step that came with a state received from another node.

        It replaces a kept report of an older generation. Steps that are already in a compressed page are ignored.
        """
        past = self._pages and passed.step <= self._pages[-1].last
        known = self._newest.get(passed.step)
        if not past and (known is None or known.generation < passed.generation):
            self._keep(
                KeptStep(
                    step=passed.step,
                    generation=passed.generation,
                    world=passed.world,
                    time=0.0,
                    commit=CompactCommit(**msgspec.structs.asdict(passed.commit)),
                )
            )

    def add(self, message: Applied, now: float) -> None:
        """Keep a step that a worker reports as applied; `now` is kept as the time.

        If a report of the step is already kept, and the new one has another result or state hash, the new one is kept
        as a contradiction; hashes of different roles are not compared. Else the one of the newer generation counts.
        Steps that are already in a compressed page are ignored.
        """
        known = self._newest.get(message.step)
        if known is None:
            if self._pages and message.step <= self._pages[-1].last:
                # No worker lags so far behind another that its step is already in a page.
                return
            self._keep(_kept_step(message, now))
            return
        new = _kept_step(message, now)
        same_hash = known.state_hash == new.state_hash or not known.state_hash
        same_hash = same_hash or not are_of_same_role(known.state_hash, new.state_hash)
        if not same_hash or _encoder.encode(known.commit) != _encoder.encode(new.commit):
            self._odd.append(message)
        elif known.generation <= new.generation:
            self._newest[message.step] = new
        else:
            self._newest[message.step] = msgspec.structs.replace(known, time=now)

    def forget_up_to(self, step: int) -> None:
        """Drop the steps up to this one, and contradictions of them: they are in the journal.

        A page is dropped only if all its steps are.
        """
        while self._pages and self._pages[0].last <= step:
            self._bytes -= len(self._pages.popleft().data)
        self._newest = {known: kept for known, kept in self._newest.items() if known > step}
        self._odd = deque((message for message in self._odd if message.step > step), maxlen=self._odd.maxlen)
        if self.given_up <= step:
            self.given_up = 0

    def undo_after(self, step: int, generation: float = math.inf) -> None:
        """Drop the steps after `step` that were applied in a generation before this one, and contradictions of them.

        By default, drop all steps after `step`.
        """
        while self._pages and self._pages[-1].last > step:
            page = self._pages.pop()
            self._bytes -= len(page.data)
            self._newest = {kept.step: kept for kept in _decoder.decode(page.data)} | self._newest
        counts = [kept for kept in self._newest.values() if kept.step <= step or kept.generation >= generation]
        self._newest = {kept.step: kept for kept in counts}
        odd = (message for message in self._odd if message.step <= step or message.generation >= generation)
        self._odd = deque(odd, maxlen=self._odd.maxlen)
        self.given_up = min(self.given_up, step)

    def pages_after(self, step: int, tops: dict[str, int]) -> list[AppliedSteps]:
        """Return pages with all kept steps after this one, oldest first.

        Args:
            tops: The newest step that each worker has applied.
        """
        kept = [old for page in self._pages if page.last > step for old in _decoder.decode(page.data)]
        kept = [known for known in kept if known.step > step]
        kept += [self._newest[known] for known in sorted(self._newest) if known > step]
        return [AppliedSteps(workers=tops, steps=steps) for steps in _split_into_pages(kept)]

    def pages(self, tops: dict[str, int], committed: int) -> Iterator[AppliedSteps]:
        """Yield pages with all kept steps, oldest first, as of this call; before them, pages without results for steps
        whose results were dropped to save memory (`given_up`).

        Pages are decoded only when they are requested.

        Args:
            tops: The newest step that each worker has applied.
            committed: The steps up to this one are in the journal.
        """
        given_up, pages = self.given_up, tuple(self._pages)
        newest = [self._newest[step] for step in sorted(self._newest)]
        for first in range(committed + 1, given_up + 1, PAGE_STEPS):
            yield AppliedSteps(workers=tops, given_up=min(first + PAGE_STEPS - 1, given_up))
        for page in pages:
            yield AppliedSteps(workers=tops, steps=_decoder.decode(page.data))
        for steps in _split_into_pages(newest):
            yield AppliedSteps(workers=tops, steps=steps)

    @property
    def contradictions(self) -> tuple[Applied, ...]:
        """The reports that contradict a kept step."""
        return tuple(self._odd)

    def _keep(self, step: KeptStep) -> None:
        """Store the result of a step, in place of an earlier one of the same step, and encode the oldest results into a
        page if there are many.
        """
        self._newest[step.step] = step
        if len(self._newest) >= 2 * PAGE_STEPS:
            self._seal()

    def _seal(self) -> None:
        """Encode the oldest steps in detail into a page.

        If the pages exceed the memory limit, drop the oldest pages and record the last of their steps in `given_up`.
        """
        oldest = next(_split_into_pages([self._newest[step] for step in sorted(self._newest)]))
        self._newest = {step: kept for step, kept in self._newest.items() if step > oldest[-1].step}
        data = _encoder.encode(oldest)
        self._pages.append(_Page(oldest[-1].step, data))
        self._bytes += len(data)
        while self._bytes > self._max_bytes:
            dropped = self._pages.popleft()
            self._bytes -= len(dropped.data)
            self.given_up = dropped.last


def _split_into_pages(steps: Sequence[KeptStep]) -> Iterator[tuple[KeptStep, ...]]:
    """Split steps into pages of PAGE_STEPS, or fewer for steps with large logs."""
    portion: list[KeptStep] = []
    room = PAGE_STEPS
    for kept in steps:
        each = step_weight(kept.commit)
        if portion and each > room:
            yield tuple(portion)
            portion, room = [], PAGE_STEPS
        portion.append(kept)
        room -= each
    if portion:
        yield tuple(portion)


def _kept_step(message: Applied, now: float) -> KeptStep:
    return KeptStep(
        step=message.step,
        generation=message.generation,
        world=message.world,
        time=now,
        commit=CompactCommit(**msgspec.structs.asdict(message.commit)),
        state_hash=message.state_hash,
    )
