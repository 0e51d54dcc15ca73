"""Account of a job's time in one replication."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

#: losses other than the parts of a recovery, with the words that users see
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
    """Seconds of one job: trained, useful, and lost, by cause."""

    #: seconds in which the job trained, at any speed
    trained: float = 0.0
    #: the same, as seconds of the full job: `trained` less `lost["fewer"]`
    useful: float = 0.0
    #: by cause; all but "fewer" are not part of `trained`
    lost: defaultdict[str, float] = field(default_factory=lambda: defaultdict[str, float](float))
    #: failures that struck the job while it could run
    failures: int = 0
    #: how often it went back to a checkpoint
    rollbacks: int = 0

    def train(self, seconds: float, speed: float) -> None:
        """Count `seconds` of training as trained, useful, and lost to "fewer" nodes.

        `speed` is the useful share: the speed relative to the full job's.
        """
        self.trained += seconds
        self.useful += speed * seconds
        self.lost["fewer"] += (1.0 - speed) * seconds
