"""What a policy is asked, and what it answers. It is a pure function: the same demand has the same division."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Protocol


@dataclass(frozen=True, kw_only=True, slots=True)
class Bid:
    """A job that has nodes, or waits for some, as a policy sees it.

    order: the submission's number; the lower came first. least, most: nodes. sizes: those it can run on, ascending;
    () for all from `least` to `most`. has: nodes that are its own and stay so far. admitted: it was begun and keeps its
    `least`. limit_s: it ends this long after it was admitted at the latest. ends_by: unix seconds, of one that is
    admitted. preemptible: it runs on what all others leave over. may_wait: standbys are of use to it. standbys: so many
    it asks for. waiting: so many it has.
    """

    name: str
    order: int
    least: int
    most: int
    sizes: tuple[int, ...] = ()
    weight: float = 1.0
    priority: int = 0
    has: int = 0
    admitted: bool = False
    limit_s: float = inf
    ends_by: float = inf
    preemptible: bool = False
    may_wait: bool = False
    standbys: int = 0
    waiting: int = 0

    def above(self, nodes: int) -> int | None:
        """Return the next larger number of nodes that it can run on; None where there is none."""
        if self.sizes:
            return next((size for size in self.sizes if size > nodes and self.least <= size <= self.most), None)
        return max(nodes + 1, self.least) if nodes < self.most else None

    @property
    def smallest(self) -> int:
        """The least number of nodes that it can run on."""
        return next((size for size in self.sizes if size >= self.least), self.least)

    @property
    def largest(self) -> int:
        """The greatest number of nodes that it can run on."""
        return next((size for size in reversed(self.sizes) if size <= self.most), self.most)


@dataclass(frozen=True, kw_only=True, slots=True)
class Demand:
    """The nodes that there are to be shared out, and who wants some.

    nodes: for all jobs. kept_back: of these, for preemptible jobs alone (the reserve). now: unix seconds.
    """

    nodes: int
    bids: tuple[Bid, ...]
    kept_back: int = 0
    now: float = 0.0


@dataclass(frozen=True, slots=True)
class Division:
    """How many nodes each job is to have: 0 for one that waits, and why it waits; and how many standbys beside them."""

    nodes: Mapping[str, int]
    why: Mapping[str, str] = field(default_factory=dict[str, str])
    standbys: Mapping[str, int] = field(default_factory=dict[str, int])


class Policy(Protocol):
    """Shares out nodes. Whoever is admitted keeps its least; the rest is the policy's own."""

    @property
    def name(self) -> str:
        """What users call it."""
        ...

    def order(self, bids: Sequence[Bid]) -> list[Bid]:
        """Return jobs in the order in which they are begun."""
        ...

    def begins_with(self, bid: Bid) -> int:
        """Return how many nodes a job needs to be begun, and keeps."""
        ...

    def grow(self, nodes: Mapping[str, int], bids: Sequence[Bid], free: int) -> dict[str, int]:
        """Share out what is left over once all that are begun have their least.

        Args:
            nodes: of each job that is begun. bids: theirs. free: how many nodes are left over.

        Returns:
            How many each is to have, no fewer than before, and together at most `free` more.
        """
        ...


def first_come(bids: Sequence[Bid]) -> list[Bid]:
    """Return jobs as they came."""
    return sorted(bids, key=lambda bid: bid.order)
