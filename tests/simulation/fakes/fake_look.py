"""Progress of fake nodes, and the messages they received and sent: counted in each process, and added up."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Arrivals:
    """How many workers have reached a point, and when the last one did (time.monotonic)."""

    count: int = 0
    last: float = 0.0

    def note(self, at: float) -> None:
        """Count one more worker."""
        self.count, self.last = self.count + 1, max(self.last, at)

    def __add__(self, other: Arrivals) -> Arrivals:
        return Arrivals(self.count + other.count, max(self.last, other.last))


@dataclass(slots=True)
class Traffic:
    """Messages that fake nodes received from their coordinator and sent to it. `heard_bytes` are bytes on the wire."""

    heard: int = 0
    heard_bytes: int = 0
    said: int = 0
    said_bytes: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.heard + other.heard,
            self.heard_bytes + other.heard_bytes,
            self.said + other.said,
            self.said_bytes + other.said_bytes,
        )

    def __sub__(self, other: Traffic) -> Traffic:
        return self + Traffic(-other.heard, -other.heard_bytes, -other.said, -other.said_bytes)


@dataclass(slots=True)
class Look:
    """Progress of fake nodes.

    `told` and `entered` count the workers that were ordered to begin a generation, and that entered it. `welcomed`
    counts agents by term.
    """

    told: dict[int, Arrivals] = field(default_factory=dict[int, Arrivals])
    entered: dict[int, Arrivals] = field(default_factory=dict[int, Arrivals])
    welcomed: dict[int, int] = field(default_factory=dict[int, int])
    traffic: Traffic = field(default_factory=Traffic)
    processor_s: float = 0.0

    def __add__(self, other: Look) -> Look:
        return Look(
            {key: self.told.get(key, Arrivals()) + other.told.get(key, Arrivals()) for key in self.told | other.told},
            {
                key: self.entered.get(key, Arrivals()) + other.entered.get(key, Arrivals())
                for key in self.entered | other.entered
            },
            {key: self.welcomed.get(key, 0) + other.welcomed.get(key, 0) for key in self.welcomed | other.welcomed},
            self.traffic + other.traffic,
            self.processor_s + other.processor_s,
        )
