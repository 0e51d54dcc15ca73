"""How a job may fail for what its plan does to it, and what must hold then."""

from __future__ import annotations

from collections.abc import Collection

from holdfast.simulation.faults.plans import FaultKind, FaultPlan, Raises


def refused_twice(plan: FaultPlan, why: str) -> bool:
    """Tell whether a job ends because a step was refused, and once more with nothing kept: never by one corruption."""
    corrupt = sum(fault.kind is FaultKind.CORRUPT_SUM for fault in plan.faults)
    return corrupt > 1 and "had kept nothing" in why


def works_fault(plan: FaultPlan, why: str) -> bool:
    """Tell whether a job ends because its script always raises, wherever it runs."""
    return plan.raises is not Raises.NOTHING and f"step {plan.raises_at[0]}" in why and "Oops" in why


def unsaved(plan: FaultPlan, committed: int, saved: Collection[int]) -> bool:
    """Tell whether what such a job has led to is not saved, although nothing else has gone wrong."""
    calm = not plan.faults and not plan.crashes and plan.raises is not Raises.APPLY
    return calm and plan.checkpoint_every > 0 and committed > 0 and committed not in saved
