"""The interface of policies: a policy is a pure function from demand to division."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Protocol

#: Names of the `policies`, for code that must not import them with numpy.
POLICY_NAMES = ("equal", "weighted", "priority", "sized", "waf")


@dataclass(frozen=True, kw_only=True, slots=True)
class Bid:
    """A running or waiting job, as a policy sees it."""

    name: str
    #: number of the submission; lower numbers came first
    order: int
    #: smallest number of nodes
    least: int
    #: largest number of nodes
    most: int
    #: numbers of nodes on which it can run, ascending; () for all from `least` to `most`
    sizes: tuple[int, ...] = ()
    weight: float = 1.0
    priority: int = 0
    #: nodes that it has and keeps so far
    has: int = 0
    #: whether it has started, and keeps its `least`
    admitted: bool = False
    #: it ends at most this long after its admission
    limit_s: float = inf
    #: when an admitted job ends at the latest, unix seconds
    ends_by: float = inf
    #: runs on nodes that all other jobs leave
    preemptible: bool = False
    #: whether standbys help it
    may_wait: bool = False
    #: how many standbys it asks for
    standbys: int = 0
    #: how many standbys it has
    waiting: int = 0
    #: its share in the last decision
    had: int = 0
    #: FLOP/s with 0, 1, ... nodes; () if unknown
    achieves: tuple[float, ...] = ()
    #: whether `achieves` is in FLOP/s; else it is in samples/s
    in_flop: bool = False
    #: seconds of training that a change of its nodes costs
    change_s: float = 0.0
    #: seconds of training that a lost node costs; None if the same as `change_s`
    hit_s: float | None = None
    #: share of its time that roll-backs cost, with 0, 1, ... nodes; () for none
    lost_share: tuple[float, ...] = ()
    #: whether a policy that starves may leave it without nodes: it saves its state
    may_starve: bool = False

    def next_size(self, nodes: int) -> int | None:
        """Return the next larger number of nodes, within the job's limits, on which it can run, or None if there is
        none.
        """
        if self.sizes:
            return next((size for size in self.sizes if size > nodes and self.least <= size <= self.most), None)
        return max(nodes + 1, self.least) if nodes < self.most else None

    @property
    def smallest(self) -> int:
        """The smallest number of nodes on which the job can run."""
        return next((size for size in self.sizes if size >= self.least), self.least)

    @property
    def largest(self) -> int:
        """The largest number of nodes on which the job can run."""
        return next((size for size in reversed(self.sizes) if size <= self.most), self.most)


@dataclass(frozen=True, kw_only=True, slots=True)
class Demand:
    """The nodes to divide, and the jobs that want some."""

    #: number of nodes for all jobs
    nodes: int
    bids: tuple[Bid, ...]
    #: the reserve: nodes of these that only preemptible jobs get
    kept_back: int = 0
    #: unix seconds
    now: float = 0.0
    #: failures of a node per second
    failure_rate: float = 0.0
    #: No node or job came, left, failed or changed. A policy that starves then stops and starts no job.
    calm: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Worth:
    """The worth of a division by a policy that computes it, in weighted FLOP until the next failure."""

    #: work done
    gain: float
    #: work that the changes prevent
    cost: float
    #: weighted achieved FLOP/s afterwards
    waf: float
    #: the second best division, or {}
    next_best: Mapping[str, int] = field(default_factory=dict[str, int])
    #: how much less that one is worth
    given_up: float = 0.0


@dataclass(frozen=True, slots=True)
class Division:
    """The result: nodes and standbys of each job, and reasons."""

    #: nodes of each job; 0 for one that waits
    nodes: Mapping[str, int]
    #: reasons of the jobs that wait
    why: Mapping[str, str] = field(default_factory=dict[str, str])
    #: standbys of each job
    standbys: Mapping[str, int] = field(default_factory=dict[str, int])
    #: None if the policy does not compute it
    worth: Worth | None = None


@dataclass(frozen=True, slots=True)
class Shares:
    """How many nodes each job should have, and the worth of that."""

    nodes: Mapping[str, int]
    worth: Worth | None = None


class Policy(Protocol):
    """Divides nodes among jobs. Admitted jobs keep their minimum; the policy decides about the rest."""

    @property
    def name(self) -> str:
        """Its name for users."""
        ...

    @property
    def uses_throughput(self) -> bool:
        """Whether it needs the throughput of jobs."""
        ...

    @property
    def allows_starvation(self) -> bool:
        """Whether it may leave a running job without nodes; such a policy also decides which jobs start."""
        ...

    def order(self, bids: Sequence[Bid]) -> list[Bid]:
        """Return jobs in the order in which they start."""
        ...

    def nodes_to_start(self, bid: Bid) -> int:
        """Return how many nodes a job needs to start, and keeps."""
        ...

    def distribute(self, nodes: Mapping[str, int], bids: Sequence[Bid], free: int, failure_rate: float) -> Shares:
        """Divide the nodes that are left once every started job has its minimum.

        Args:
            nodes: Nodes of each started job; 0 for one that the policy may leave without nodes.
            bids: these jobs, without those below their minimum
            free: how many nodes are left
            failure_rate: failures of a node per second

        Returns:
            The nodes of each job: no fewer than before, and at most `free` more in total.
        """
        ...


def first_come(bids: Sequence[Bid]) -> list[Bid]:
    """Return jobs in order of submission."""
    return sorted(bids, key=lambda bid: bid.order)
