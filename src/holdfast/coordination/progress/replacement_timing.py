"""Chooses whether a standby replaces a lost node at once, or joins later while the others go on without it.

At once: all members wait for the state transfer, unless the repeated step takes as long. Later: the state is
transferred while fewer nodes train, and another change of generation admits the standby. The larger the state and the
more nodes there are, the better is later. Until the standby has joined, part of the state may have a single copy; then
the next loss causes a rollback.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.coordination.progress.costs import Cost, MeasuredCosts

#: the standby joins later only if that saves at least this many seconds of training
LEAST_GAIN_S = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class NodesLost:
    """The extent of a loss of nodes."""

    #: the number of nodes before the loss
    nodes: int
    #: the number of lost nodes
    lost: int
    #: the least number of remaining nodes that hold each part of the state
    copies: int
    #: the seconds of work that must be repeated if those nodes fail, too
    back_s: float
    #: whether the model has experts; then no step is computed before all of them are placed
    experts: bool = False


@dataclass(frozen=True, slots=True)
class Replacement:
    """Whether a standby takes over a rank at once, and why."""

    at_once: bool
    why: str


def choose_replacement(costs: MeasuredCosts, loss: NodesLost, now: float) -> Replacement:
    """Choose whether a standby replaces lost nodes at once, or joins later while the job goes on with fewer nodes, and
    say why.

    The costs of both ways include the risk of another loss. It joins later only if that saves at least `LEAST_GAIN_S`
    seconds of training, and if both costs were measured before.
    """
    transfer_s, swap_s = costs.of(Cost.TRANSFER), costs.of(Cost.SWAP)
    beside_s = transfer_s + costs.of(Cost.BUILD)
    still_s = max(0.0, transfer_s - (0.0 if loss.experts else costs.step_s))
    fewer_s = swap_s + beside_s * loss.lost / max(loss.nodes, 1)
    rate = 1.0 / max(costs.between_losses_s(now), 1.0) if loss.copies < 2 else 0.0
    at_once_s = still_s + rate * transfer_s * loss.back_s
    later_s = fewer_s + rate * (beside_s + swap_s) * loss.back_s
    known = costs.is_measured(Cost.TRANSFER) and costs.is_measured(Cost.SWAP)
    at_once = not known or at_once_s <= later_s + LEAST_GAIN_S
    why = (
        f"a standby that takes over at once costs {at_once_s:.2f} s of training; one that joins later, while "
        f"{loss.nodes - loss.lost} of {loss.nodes} nodes go on, {later_s:.2f} s{'' if known else ' (estimates)'}"
    )
    if rate:
        why += f"; another loss meanwhile, once in {1 / rate:.0f} s, would cost {loss.back_s:.0f} s"
    return Replacement(at_once, why)
