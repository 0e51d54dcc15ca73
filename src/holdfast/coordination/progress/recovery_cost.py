"""The cost of a recovery, a join or a rebalance, from the failure to the first step committed after it."""

from __future__ import annotations

from dataclasses import dataclass, field

#: the default reason for a broken generation
FAILURE = "failure"
#: a node drains
DRAIN = "drain"
#: a node is replaced by a standby while it still works
MOVE = "move"
#: the layout changes
LAYOUT = "layout"
#: the job saves its state and ends
SAVE = "save"


@dataclass(frozen=True, slots=True)
class TakenPlace:
    """A rank that one node has taken over from another."""

    #: the node that had it before
    from_node: str
    #: failure, drain or move
    reason: str
    #: why this node was chosen
    why: str


@dataclass(slots=True)
class RecoveryCost:
    """The times of one recovery, join or rebalance in progress, in seconds on the coordinator's clock.

    It ends with the first committed step after `after_step`.
    """

    failed: float
    detected: float
    action: str
    source: str = "none"
    after_step: int = 0
    #: whether it is a join or a rebalance at a step boundary, without a failure
    swap: bool = False
    #: whether all workers are restarted; it then lasts until the lost steps are repeated
    restart: bool = False
    #: whether it was requested and nothing has failed
    asked: bool = False
    #: 0 for a join, which is decided before its costs begin
    decided: float = 0.0
    regrouped: float = 0.0
    moved_bytes: int = 0
    transfer_s: float = 0.0
    experts_moved: int = 0
    micro_batches_kept: int | None = None
    micro_batches_redone: int | None = None
    #: the nodes of the plan, for a join
    nodes: frozenset[str] = frozenset()
    #: the ranks that were taken over, by the nodes that took them
    taken: dict[str, TakenPlace] = field(default_factory=dict[str, "TakenPlace"])
    #: why this action was chosen
    why: str = ""
    #: the most bytes that one member has received
    most_bytes: int = 0

    def restart_clock(self, step: int, time: float) -> None:
        """Start the cost of a join at the commit of the step at which it took effect."""
        if self.swap and step == self.after_step:
            self.failed = self.detected = time

    def add_transfer(self, received_bytes: int, transfer_s: float) -> None:
        """Add the bytes of the state that a member has received, and count the longest transfer."""
        self.moved_bytes += received_bytes
        self.most_bytes = max(self.most_bytes, received_bytes)
        self.transfer_s = max(self.transfer_s, transfer_s)

    def costs(self, committed: float) -> dict[str, float | int | str | None]:
        """Return the fields of the event `recovered`, if the first step was committed at this time."""
        decided = max(self.decided, self.detected)
        return {
            "action": self.action,
            "state_source": self.source,
            "moved_bytes": self.moved_bytes,
            "experts_moved": self.experts_moved,
            "detect_s": max(0.0, self.detected - self.failed),
            "decide_s": max(0.0, decided - self.detected),
            "regroup_s": max(0.0, self.regrouped - decided),
            "transfer_s": self.transfer_s,
            "redo_s": max(0.0, committed - self.regrouped),
            "down_s": max(0.0, committed - self.failed),
            "micro_batches_kept": self.micro_batches_kept,
            "micro_batches_redone": self.micro_batches_redone,
            "why": self.why,
        }
