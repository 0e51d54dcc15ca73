"""What a recovery (or a join, or a rebalance) costs, from the failure to the first step committed after it."""

from __future__ import annotations

from dataclasses import dataclass, field

#: why a generation is broken, unless somebody says otherwise
FAILURE = "failure"
#: somebody leaves in good order
DRAIN = "drain"
#: somebody gives its place to a standby
MOVE = "move"
#: another layout is to be in force
LAYOUT = "layout"
#: all that there is is saved, and the job ends
SAVE = "save"


@dataclass(frozen=True, slots=True)
class TakenPlace:
    """Whose place somebody has taken; `reason`: failure, drain, move; `why` it is this one who has."""

    whose: str
    reason: str
    why: str


@dataclass(slots=True)
class RecoveryCost:
    """Times of one recovery (or join) under way; seconds on the coordinator's clock.

    It ends with the first committed step after `after_step`. `swap`: a join at a step boundary, without a failure.
    `restart`: all workers are started again; what they have lost is done again before it ends. `asked`: nothing has
    failed.
    """

    failed: float
    detected: float
    action: str
    source: str = "none"
    after_step: int = 0
    swap: bool = False
    restart: bool = False
    asked: bool = False
    #: 0 for a join: it was decided before its costs begin
    decided: float = 0.0
    regrouped: float = 0.0
    moved_bytes: int = 0
    transfer_s: float = 0.0
    experts_moved: int = 0
    micro_batches_kept: int | None = None
    micro_batches_redone: int | None = None
    #: of a join: the nodes of the plan
    nodes: frozenset[str] = frozenset()
    #: who has taken a place, and whose
    taken: dict[str, TakenPlace] = field(default_factory=dict[str, "TakenPlace"])
    #: why this was done, of what could have been
    why: str = ""
    #: that one member has received
    most_bytes: int = 0

    def swapped_at(self, step: int, time: float) -> None:
        """A step is committed; a join costs from the one on whose boundary it took effect."""
        if self.swap and step == self.after_step:
            self.failed = self.detected = time

    def moved(self, received_bytes: int, transfer_s: float) -> None:
        """One member has received its state."""
        self.moved_bytes += received_bytes
        self.most_bytes = max(self.most_bytes, received_bytes)
        self.transfer_s = max(self.transfer_s, transfer_s)

    def costs(self, committed: float) -> dict[str, float | int | str | None]:
        """Return the fields of the `recovered` event for a first commit at this time."""
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
