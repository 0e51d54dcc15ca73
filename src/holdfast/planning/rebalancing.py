"""Whether a new placement is worth its migration: the predicted gain over the next interval against the cost.

Axes: L layers, E experts, N nodes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from holdfast.errors import BadInputError
from holdfast.planning.arrays import FloatArray, IntArray
from holdfast.planning.balance.work import busiest_tokens
from holdfast.planning.moving.migration import Migration
from holdfast.planning.placement.strategy import fewest_hosts
from holdfast.planning.survival.objective import default_weights
from holdfast.planning.survival.recovery_probability import fatal_share

#: The smallest difference between the fatal shares of two placements that is worth a switch.
_WORTH_A_SWITCH = 2e-3


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadAverage:
    """Tokens per step, layer and expert: an average with exponentially larger weights for recent steps."""

    #: `(L, E)` weighted sum of tokens.
    tokens: FloatArray
    #: Weighted number of steps in the sum.
    steps: float

    @classmethod
    def empty(cls, layers: int, experts: int) -> LoadAverage:
        """Return an average of no steps."""
        return cls(tokens=np.zeros((layers, experts)), steps=0.0)

    def add(self, tokens: IntArray | FloatArray, *, steps: int, half_life: float) -> LoadAverage:
        """Return the average with `tokens` `(L, E)` of `steps` more steps; steps `half_life` ago count half.

        Raises:
            BadInputError: The tokens have another shape, there is less than one step, or the half-life is not positive.
        """
        if tokens.shape != self.tokens.shape:
            raise BadInputError(f"loads have shape {tokens.shape}: this job's are {self.tokens.shape}")
        if steps < 1 or not half_life > 0:
            raise BadInputError(f"loads of {steps} steps with half-life {half_life:g}: both must be above 0")
        decay = 0.5 ** (steps / half_life)
        return LoadAverage(tokens=self.tokens * decay + tokens, steps=self.steps * decay + steps)

    def per_step(self) -> FloatArray:
        """Return tokens per step `(L, E)`; zeros before anything was added."""
        return self.tokens / self.steps if self.steps else self.tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class CostModel:
    """What steps and migrations cost on this cluster, as measured by the runtime."""

    #: Seconds a node (or rank) computes for one token of one expert, forward and backward.
    token_s: float
    #: Bytes of one expert of one layer: parameters with optimizer state.
    expert_bytes: int
    #: Bytes per second that a node sends, and that it receives at the same time.
    bandwidth: float
    #: Seconds that the job pauses to switch, whatever moves.
    pause_s: float
    #: Seconds of the transfers that cost no time, since they overlap with a step.
    hidden_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RebalanceDecision:
    """Whether to adopt the new placement, and why."""

    adopt: bool
    #: Seconds saved over the interval.
    gain_s: float
    #: Seconds that the migration costs.
    cost_s: float
    reason: str


def migration_seconds(migration: Migration, model: CostModel) -> float:
    """Return how long the migration stops training, or 0 if no expert moves.

    This is the busiest node's transfer time, sending or receiving, beyond the hidden part, plus the pause.
    """
    if not migration.expert_moves:
        return 0.0
    nodes = migration.counts.shape[2]
    sent = np.bincount(migration.transfers.source, minlength=nodes)
    received = np.bincount(migration.transfers.destination, minlength=nodes)
    busiest = int(np.maximum(sent, received).max())
    return model.pause_s + max(0.0, busiest * model.expert_bytes / model.bandwidth - model.hidden_s)


def decide_rebalance(
    loads: FloatArray,
    current: IntArray,
    migration: Migration,
    *,
    threshold: int,
    steps: int,
    model: CostModel,
    mended: bool = False,
    racks: IntArray | None = None,
    rates: FloatArray | None = None,
) -> RebalanceDecision:
    """Decide whether to adopt a new placement for the next `steps` steps: usually, if it saves more time than it costs.

    The first exception that applies decides. A new placement that needs an expert without a live copy is rejected. If
    the rarest expert has fewer nodes than the `threshold`, one that gives it more is adopted at any price. So is one
    that survives clearly more than a mended placement.

    Args:
        loads: `(L, E)` expected tokens per step.
        current: `(L, E, N)` replicas now.
        migration: Leads to the new placement.
        threshold: The distinct nodes that each expert should have.
        steps: The steps of the next interval.
        model: What steps and migrations cost.
        mended: The current placement was repaired, and its survival was not considered.
        racks: `(N,)`; if given without `rates`, survival counts losses of whole racks.
        rates: `(N,)` failure rates; if given, survival counts losses of nodes at these rates.
    """
    saved = model.token_s * (busiest_tokens(current, loads) - busiest_tokens(migration.counts, loads)).sum()
    gain, cost = float(saved) * steps, migration_seconds(migration, model)
    if (migration.counts != current).any():
        cost = max(cost, model.pause_s)  # More copies on the same node need a switch, although nothing is transferred.
    if migration.lost:
        layer, expert = migration.lost[0]
        return _make_decision(False, gain, cost, f"expert {expert} of layer {layer} has no live copy to move")
    now, then = fewest_hosts(current), fewest_hosts(migration.counts)
    if now < threshold and then > now:
        return _make_decision(
            True, gain, cost, f"the rarest expert has {now} nodes instead of {threshold}; it gets {then}"
        )
    if mended and gain <= cost:
        now, then = (_fatal_losses(counts, racks, rates) for counts in (current, migration.counts))
        if then.most < now.least - _WORTH_A_SWITCH:
            why = f"{now.least:.2%} of losses would be fatal to the mended placement, {then.most:.2%} to this one"
            return _make_decision(True, gain, cost, why)
    figures = f"{gain:.3g} s saved over {steps} steps, {cost:.3g} s to move {migration.expert_moves} experts"
    return _make_decision(gain > cost, gain, cost, figures)


@dataclass(frozen=True, slots=True)
class _Bounds:
    """Two bounds of a share."""

    least: float
    most: float


def _fatal_losses(counts: IntArray, racks: IntArray | None, rates: FloatArray | None) -> _Bounds:
    """Return bounds of the share of losses that a placement `(L, E, N)` does not survive, with the default weights.

    A loss takes nodes, or whole racks if `racks` are given without `rates`.
    """
    hosts = counts > 0
    if racks is not None and rates is None:
        hosts = np.stack([hosts[:, :, racks == rack].any(axis=2) for rack in range(int(racks.max()) + 1)], axis=2)
    share, weights = fatal_share(hosts, rates), default_weights(hosts.shape[2])
    return _Bounds(float(share.least @ weights), float(share.most @ weights))


def _make_decision(adopt: bool, gain: float, cost: float, reason: str) -> RebalanceDecision:
    return RebalanceDecision(adopt=adopt, gain_s=gain, cost_s=cost, reason=reason)
