"""Whether a standby takes a lost node's place at once, or the others go on without it and the standby joins them then.

At once: all stand still while the state travels, as far as the step that is done again does not take as long. Later:
the state travels while the others train, with fewer nodes, and another change of generation lets the standby in. The
larger the state and the more nodes there are, the more is to be said for later. Until the standby is there, a part of
the state may have a single copy: then the next loss costs what has to be done again.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.coordination.progress.costs import Cost, MeasuredCosts

#: the way that is usual is left for none that saves less
LEAST_GAIN_S = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class NodesLost:
    """What was lost: `lost` of `nodes`.

    `copies`: on how many of the nodes that are left each part of the state lives at least. `back_s`: what would have to
    be done again if those were lost, too. `experts`: nobody computes before all of them are there.
    """

    nodes: int
    lost: int
    copies: int
    back_s: float
    experts: bool = False


@dataclass(frozen=True, slots=True)
class Replacement:
    """Whether a standby takes the place at once, and why."""

    at_once: bool
    why: str


def choose(costs: MeasuredCosts, loss: NodesLost, now: float) -> Replacement:
    """Choose what costs less training, the chance of the next loss included; guesses alone are no reason to wait."""
    transfer_s, swap_s = costs.of(Cost.TRANSFER), costs.of(Cost.SWAP)
    beside_s = transfer_s + costs.of(Cost.BUILD)
    still_s = max(0.0, transfer_s - (0.0 if loss.experts else costs.step_s))
    fewer_s = swap_s + beside_s * loss.lost / max(loss.nodes, 1)
    rate = 1.0 / max(costs.between_losses_s(now), 1.0) if loss.copies < 2 else 0.0
    at_once_s = still_s + rate * transfer_s * loss.back_s
    later_s = fewer_s + rate * (beside_s + swap_s) * loss.back_s
    known = costs.is_measured(Cost.TRANSFER) and costs.is_measured(Cost.SWAP)
    at_once = not known or at_once_s <= later_s + LEAST_GAIN_S
    said = (
        f"a standby that takes the place at once costs {at_once_s:.2f} s of training, one that joins later, while "
        f"{loss.nodes - loss.lost} of {loss.nodes} nodes go on, {later_s:.2f} s{'' if known else ' (guesses)'}"
    )
    if rate:
        said += f"; another loss meanwhile, once in {1 / rate:.0f} s, would cost {loss.back_s:.0f} s"
    return Replacement(at_once, said)
