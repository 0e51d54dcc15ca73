"""Forecasts for nodes that will leave: the moved state, its receiver, the delay, and the reason."""

from __future__ import annotations

import math
from collections.abc import Sequence

from holdfast.coordination.experts.blobs import experts_by_layer
from holdfast.coordination.generations.configuration_check import workers_by_node
from holdfast.coordination.job.context import JobContext
from holdfast.coordination.progress.costs import Cost
from holdfast.protocol.messages.forecast import MoveForecast
from holdfast.protocol.names import node_of
from holdfast.protocol.plan import GenerationPlan
from holdfast.protocol.record import Departure

#: The reasons of the pauses.
_FOR = {
    Cost.SWAP: "for it to join, its state is transferred during training",
    Cost.DECISION: "to decide",
    Cost.BUILD: "for the group",
    Cost.TRANSFER: "for the state",
}


def forecast_moves(
    context: JobContext, names: Sequence[str], to: Sequence[str] = (), *, stays: bool = False
) -> list[MoveForecast]:
    """Return a forecast for each node that a request to drain or move these nodes would affect, without changing
    anything.

    Nodes that drain already are left out. Each one gets the standby given in `to`, or else the free standby that is
    warm first.

    Args:
        names: the nodes to drain.
        to: the standbys that take over their ranks, in the same order; may be shorter.
        stays: whether the nodes stay as standbys. Otherwise only ready standbys take over.

    Raises:
        BadInputError, UnreachableError, RefusedError: the request itself would be refused.
    """
    new = context.draining.check(names, to, stays=stays)
    targets = dict(zip(names, to, strict=False))
    promised = {one.to for one in context.transaction.record.leaving} | set(to)
    free = sorted(
        (
            name
            for name in context.members.standbys
            if name not in promised and not context.standbys.explain_never_warm(name)
        ),
        key=lambda name: context.standbys.warm_in_s(name),
    )
    # These nodes are standbys after their own moves.
    later = [one.node for one in context.transaction.record.leaving if one.stays]
    found: list[MoveForecast] = []
    for name in new:
        target = targets.get(name, "")
        if not target and not context.members.nodes[name].standby:
            taking = [one for one in free if stays or context.standbys.ready(one)] or (later if stays else [])
            target = taking[0] if taking and (stays or context.config.spec.recovery.uses_standbys) else ""
            free = [one for one in free if one != target]
            later = [one for one in later if one != target]
        found.append(_forecast_move(context, name, target))
    return found


def _forecast_move(context: JobContext, name: str, to: str) -> MoveForecast:
    """Return the forecast for one node: ranks, moved bytes, seconds until it leaves, seconds without training, and
    reasons.

    Unmeasured costs are guesses, and marked so; unknown bytes or waits are None. A node without a rank costs nothing.

    Args:
        to: the standby that takes its ranks, or "".
    """
    costs, plan = context.progress.costs, context.transaction.record.plan
    known = next(
        (one for one in context.transaction.record.leaving if one.node == name), Departure(node=name, since=0.0)
    )
    beside = bool(to) and context.replacements.goes_beside(known)
    here = context.transaction.planned_on(name)
    ranks = [] if plan is None else [rank for worker in here if (rank := plan.rank(worker)) is not None]
    if plan is None or not ranks:
        why = "it has no rank: nothing moves, and no step waits"
        return MoveForecast(
            node=name, to="", ranks=(), expert_replicas=0, moved_bytes=0, wait_s=0.0, down_s=0.0, why=why
        )
    replicas = _count_replicas(context, plan, ranks)
    moved = int(costs.of(Cost.STATE)) * len(ranks) if costs.is_measured(Cost.STATE) else None
    warm_s, left = context.standbys.warm_in_s(to) if to else 0.0, len(workers_by_node(plan)) - 1
    pauses = [Cost.DECISION, Cost.BUILD]
    if to:
        pauses = [Cost.SWAP, *pauses] if beside else [*pauses, Cost.TRANSFER]
        first = f"{to} is warm in about {warm_s:.1f} s" if warm_s else f"{to} is warm"
        if math.isinf(warm_s):
            first = f"{to} gives its own place away before, and is a standby then"
    else:
        longer = (left + 1) / max(left, 1)
        first = f"no standby takes its place: {left} of {left + 1} nodes go on, a step takes {longer:.2f} times as long"
    guessed = {True: "", False: " (a guess)"}
    details = ", ".join(f"{costs.of(one):.3f} s {_FOR[one]}{guessed[costs.is_measured(one)]}" for one in pauses)
    # First its group is built. Its state arrives in the step after that.
    joins_s = costs.of(Cost.BUILD) + costs.step_s + max(costs.step_s, costs.of(Cost.TRANSFER)) if beside else 0.0
    return MoveForecast(
        node=name,
        to=to,
        ranks=tuple(ranks),
        expert_replicas=replicas,
        moved_bytes=moved if to or replicas else 0,
        wait_s=None if math.isinf(warm_s) else warm_s + joins_s + costs.step_s,
        down_s=sum(map(costs.of, pauses)) + costs.step_s,
        why=f"{first}; {details}, and {costs.step_s:.3f} s for the step itself",
    )


def _count_replicas(context: JobContext, plan: GenerationPlan, ranks: Sequence[int]) -> int:
    """Return the number of expert replicas at these ranks, over all layers; 0 without experts."""
    shape, experts = context.transaction.record.expert_shape, plan.expert_plan
    if shape is None or experts is None:
        return 0
    held = (experts_by_layer(experts.placement[rank], shape) for rank in ranks)
    return sum(len(layer) for layers in held for layer in layers)


def describe_wait(context: JobContext, one: Departure) -> str:
    """Return what a draining node still waits for before it can leave, as the end of a sentence that begins with "waits
    for".

    This is, in order: the others, if it is only retained; a standby for its ranks; the job's start; other draining
    nodes; reports, a pending generation, or the end of a step.
    """
    transaction, leaving = context.transaction, context.transaction.record.leaving
    if one.owed:
        return f"the others, to go on without it from step {one.step}"
    joins, joined = context.replacements.beside_of(one)
    if not (joins or joined) and (one.stays or context.draining.in_time(one)):
        waiting = [other for other in leaving if not (other.owed or any(context.replacements.beside_of(other)))]
        found = context.replacements.select_standbys(waiting)
        if one.node not in found:
            return context.replacements.waits_for(one)
    if transaction.record.plan is None:
        return "the job to begin"
    if transaction.record.plan.last:
        return "nothing: the job ends"
    if before := [other.node for other in leaving if other.owed]:
        return f"{', '.join(before)}, which leaves before it"
    if context.interruption.stop is not None:
        return "the others to report where they stand"
    if joins:
        return f"standby {one.beside} to join next to it"
    if transaction.record.pending is not None:
        return f"generation {transaction.record.pending.generation} to begin, which is being prepared"
    before = dict.fromkeys(map(node_of, context.draining.find_next_leavers(transaction.record.plan)))
    return f"{', '.join(before)}, which leaves before it" if before and one.node not in before else "the end of a step"
