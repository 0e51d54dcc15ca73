"""Where a job's time goes, in one replication."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

#: what takes time beside a recovery's parts, with the words for people
OTHER_LOSSES = {
    "rollback": "loading a checkpoint, redoing steps",
    "restart": "restarting all workers",
    "join": "arrivals",
    "save": "saving checkpoints",
    "wait": "too few nodes",
    "fewer": "fewer nodes than the full job has",
}


@dataclass(slots=True)
class Account:
    """Seconds of one job: trained, useful (as those of the full job), and lost, by what for.

    `useful` and `fewer` share what is trained; everything else that is lost stands beside it.
    """

    trained: float = 0.0
    useful: float = 0.0
    lost: defaultdict[str, float] = field(default_factory=lambda: defaultdict[str, float](float))
    failures: int = 0
    rollbacks: int = 0

    def train(self, seconds: float, speed: float) -> None:
        """Train for a time, at a share of the full job's speed."""
        self.trained += seconds
        self.useful += speed * seconds
        self.lost["fewer"] += (1.0 - speed) * seconds
