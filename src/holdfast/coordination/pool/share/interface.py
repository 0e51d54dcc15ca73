"""What a policy is asked, and what it answers. It is a pure function: the same demand has the same division."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Protocol

#: those of `policies`: whoever only asks for their names need not load what they reckon with
POLICY_NAMES = ("equal", "weighted", "priority", "sized", "waf")


@dataclass(frozen=True, kw_only=True, slots=True)
class Bid:
    """A job that has nodes, or waits for some, as a policy sees it.

    order: the submission's number; the lower came first. least, most: nodes. sizes: those it can run on, ascending;
    () for all from `least` to `most`. has: nodes that are its own and stay so far. admitted: it was begun and keeps its
    `least`. limit_s: it ends this long after it was admitted at the latest. ends_by: unix seconds, of one that is
    admitted. preemptible: it runs on what all others leave over. may_wait: standbys are of use to it. standbys: so many
    it asks for. waiting: so many it has. had: nodes that it was to have when that was decided last. achieves: FLOP/s
    with 0.. nodes, () where that is not known; in_flop: else it is samples/s. change_s: how long a change of its nodes
    keeps it from training; hit_s: how long it does that a node is lost, None where that is the same. lost_share: of its
    time, what roll-backs undo, with 0.. nodes; () for nothing. may_starve:
    it keeps what it has done, so that it may be left with no node where a policy does that.
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
    had: int = 0
    achieves: tuple[float, ...] = ()
    in_flop: bool = False
    change_s: float = 0.0
    hit_s: float | None = None
    lost_share: tuple[float, ...] = ()
    may_starve: bool = False

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

    nodes: for all jobs. kept_back: of these, for preemptible jobs alone (the reserve). now: unix seconds. failure_rate:
    how often a node fails, per second. calm: nobody has come, gone, failed or asked: nobody is left with no node now,
    and nobody begun who was, where a policy does that.
    """

    nodes: int
    bids: tuple[Bid, ...]
    kept_back: int = 0
    now: float = 0.0
    failure_rate: float = 0.0
    calm: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Worth:
    """What a policy that reckons with it makes of a division of nodes, in weighted FLOP until the next failure.

    gain: what is done; cost: what the changes keep from being done; waf: weighted achieved FLOP/s afterwards.
    next_best: the best other division, {} where there is none; given_up: how much less that is worth.
    """

    gain: float
    cost: float
    waf: float
    next_best: Mapping[str, int] = field(default_factory=dict[str, int])
    given_up: float = 0.0


@dataclass(frozen=True, slots=True)
class Division:
    """How many nodes each job is to have: 0 for one that waits, and why it waits; and how many standbys beside them.

    `worth`: None where the policy reckons with none.
    """

    nodes: Mapping[str, int]
    why: Mapping[str, str] = field(default_factory=dict[str, str])
    standbys: Mapping[str, int] = field(default_factory=dict[str, int])
    worth: Worth | None = None


@dataclass(frozen=True, slots=True)
class Grown:
    """How many nodes each job is to have, and what that is worth."""

    nodes: Mapping[str, int]
    worth: Worth | None = None


class Policy(Protocol):
    """Shares out nodes. Whoever is admitted keeps its least; the rest is the policy's own."""

    @property
    def name(self) -> str:
        """What users call it."""
        ...

    @property
    def reckons(self) -> bool:
        """Whether it asks what jobs achieve."""
        ...

    @property
    def starves(self) -> bool:
        """Whether it may leave a job that was begun with no node, and says itself who is begun."""
        ...

    def order(self, bids: Sequence[Bid]) -> list[Bid]:
        """Return jobs in the order in which they are begun."""
        ...

    def begins_with(self, bid: Bid) -> int:
        """Return how many nodes a job needs to be begun, and keeps."""
        ...

    def grow(self, nodes: Mapping[str, int], bids: Sequence[Bid], free: int, failure_rate: float) -> Grown:
        """Share out what is left over once all that are begun have their least.

        Args:
            nodes: of each job that is begun, 0 for one that the policy may leave with none. bids: theirs, but of those
                that lack of their least. free: how many nodes are left over. failure_rate: of a node, per second.

        Returns:
            How many each is to have, no fewer than before, and together at most `free` more.
        """
        ...


def first_come(bids: Sequence[Bid]) -> list[Bid]:
    """Return jobs as they came."""
    return sorted(bids, key=lambda bid: bid.order)
