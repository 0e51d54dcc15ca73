"""How long nodes are waited for that are asked where their workers stand: learnt from how long their answers take."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.coordination.lateness.times import FAILURE

#: an agent answers in milliseconds; one on a busy machine may have to wait so long for a core
PATIENCE_S = 0.2
#: the slowest answer of the last one or two of these counts, in seconds
WINDOW_S = 30.0


@dataclass(slots=True)
class _Slowest:
    """Of one node's answers: when this window began, the slowest in it, and in the one before, in seconds."""

    began: float
    now_s: float = 0.0
    before_s: float = 0.0

    def roll(self, now: float) -> None:
        if now - self.began > WINDOW_S:
            self.before_s = self.now_s if now - self.began < 2 * WINDOW_S else 0.0
            self.began, self.now_s = now, 0.0


class Answers:
    """Of all nodes. Times are unix seconds."""

    def __init__(self) -> None:
        self._slowest: dict[str, _Slowest] = {}

    def came(self, node: str, took_s: float, now: float) -> None:
        """A node has answered; what was late counts as just late, lest a node that was stopped be waited for."""
        slowest, took_s = self._slowest.setdefault(node, _Slowest(now)), min(took_s, self.patience_s(node, now))
        slowest.roll(now)
        slowest.now_s = max(slowest.now_s, took_s)

    def patience_s(self, node: str, now: float) -> float:
        """Return how long a node's answer may take: three times the slowest one lately, on a machine that is loaded."""
        slowest = self._slowest.get(node)
        if slowest is None:
            return PATIENCE_S
        slowest.roll(now)
        return max(PATIENCE_S, FAILURE * max(slowest.now_s, slowest.before_s))

    def keep(self, nodes: frozenset[str]) -> None:
        """Nobody asks any others now."""
        self._slowest = {node: slowest for node, slowest in self._slowest.items() if node in nodes}
