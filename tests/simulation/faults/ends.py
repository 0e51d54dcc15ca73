"""The ways in which a fault plan may end a job, and checks of how it ends."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from holdfast.coordination.failures.mismatch import RECEIVED
from holdfast.protocol.commit import Commit, Wish
from holdfast.protocol.events import AnyEvent, FailureDetected, GenerationStarted, JobFinished, NodeLeft
from holdfast.protocol.record import Record
from tests.simulation.faults.plans import FaultKind, FaultPlan, Raises

#: after these faults alone, a state that was stashed for a layout under which scripts raise is not lost
HARMLESS = (FaultKind.JOIN, FaultKind.RETURN)


def refused_twice(plan: FaultPlan, why: str) -> bool:
    """Return whether a job ends because a step was refused again in an attempt that had kept no gradients.

    One corruption cannot cause this.
    """
    corrupt = sum(fault.kind is FaultKind.CORRUPT_SUM for fault in plan.faults)
    return corrupt > 1 and "had kept nothing" in why


def diverged(plan: FaultPlan, why: str) -> bool:
    """Return whether a job ends because one worker's state differs from the others'."""
    return any(fault.kind is FaultKind.CORRUPT_STATE for fault in plan.faults) and "replicas diverged" in why


def differs(plan: FaultPlan, why: str) -> bool:
    """Return whether a job ends because workers have different settings: twice, or without a majority."""
    faults = sum(fault.kind is FaultKind.DIFFER for fault in plan.faults)
    unclear = "no majority" in why or RECEIVED in why
    return faults > 0 and "workers differ at step" in why and (faults > 1 or unclear)


def unjust(plan: FaultPlan, events: Iterable[AnyEvent]) -> Sequence[AnyEvent]:
    """Return the failures that a job reports for slow work, if they hit a node or more than one process.

    The first slow worker looks as if it hung. After that the limit covers the slow work on every node.
    """
    if not plan.slow_work or plan.faults or plan.crashes:
        return ()
    reported = [event for event in events if isinstance(event, FailureDetected | NodeLeft)]
    failed = [event for event in reported if isinstance(event, FailureDetected)]
    left = [event for event in reported if isinstance(event, NodeLeft) and event.reason != "finished"]
    return reported if left or len(failed) > 1 else ()


def works_fault(plan: FaultPlan, why: str) -> bool:
    """Return whether a job ends because its script raises on every node."""
    if plan.raises is Raises.UNDER:
        return any(fault.kind not in HARMLESS for fault in plan.faults) and "Oops" in why
    where = "" if plan.raises is Raises.BEFORE else f"step {plan.raises_at[0]}"
    return plan.raises is not Raises.NOTHING and where in why and "Oops" in why


def skipped(plan: FaultPlan, why: str) -> bool:
    """Return whether a job ends because too many steps in a row were skipped."""
    return plan.fails_by_skips and f"the last good step is {plan.skips_from - 1}" in why


def may_fail(plan: FaultPlan, why: str) -> bool:
    """Return whether the plan explains the end of a job although a worker with its state is alive."""
    reasons = (skipped, refused_twice, works_fault, last_quarantined, diverged, differs)
    return any(is_reason(plan, why) for is_reason in reasons)


def unsaved(plan: FaultPlan, why: str, committed: int, saved: Collection[int]) -> bool:
    """Return whether a job that its script ended has not saved its progress, although no other fault struck."""
    if skipped(plan, why) and not plan.faults and not plan.crashes and plan.checkpoint_every > 0:
        # A simulated loop does not wait for a checkpoint when it ends. Quick steps can pass until the job stops.
        good = plan.skips_from - 1
        return bool(good) and committed < plan.steps and max(saved, default=0) != good
    calm = works_fault(plan, why) and not plan.faults and not plan.crashes and plan.raises is not Raises.APPLY
    return calm and plan.checkpoint_every > 0 and committed > 0 and committed not in saved


def last_quarantined(plan: FaultPlan, why: str) -> bool:
    """Return whether a job ends because its last node has failed too often."""
    return plan.max_restarts < FaultPlan(seed=0).max_restarts and ("is quarantined" in why or "is given up" in why)


def wrong_end(plan: FaultPlan, event: JobFinished, commits: Mapping[int, Commit]) -> str:
    """Return an error if a job that no user interrupted ends wrongly, else "".

    Args:
        commits: The step result of each step. A wish raised in a step that a survivor finished alone is in the next
            result.
    """
    if plan.raises not in (Raises.NOTHING, Raises.UNDER):
        return f"although every script raises at {plan.raises_at}"
    if plan.fails_by_skips and event.steps >= plan.last_step:
        return f"although all steps from {plan.skips_from} on were skipped"
    asked = [step for step, v in commits.items() if Wish.STOP in v.wishes]
    steps = min(asked, default=plan.steps)
    if (event.steps, event.samples) != (steps, steps * plan.micro_batches * plan.micro_batch):
        return f"after {event.steps} steps of {steps}"
    return ""


def barred(record: Record | None) -> set[str]:
    """Return the nodes that may not join: quarantined and drained ones."""
    return {one.node for one in (*record.quarantined, *record.drained)} if record is not None else set()


def wronged(plan: FaultPlan, record: Record | None, event: AnyEvent) -> str:
    """Return an error if an event shows that a node is treated wrongly, else ""."""
    few = plan.max_restarts < FaultPlan(seed=0).max_restarts
    # Other faults can silence a node, which the coordinator may then blame.
    alone = plan.raises is Raises.BEFORE and not plan.faults and not plan.crashes
    blameless = alone or (plan.raises is not Raises.NOTHING and not few)
    if blameless and isinstance(event, NodeLeft) and event.reason == "quarantined":
        return f"a node is quarantined although the script is at fault: {event}"
    # Members may have swapped to a new generation before one of its nodes was barred. Such a generation, which has no
    # decision, is announced, and then loses the node.
    if isinstance(event, GenerationStarted) and event.decision and barred(record) & set(event.members):
        return f"a quarantined or drained node is a member: {event}"
    return ""
