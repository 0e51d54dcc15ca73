"""How a job may fail for what its plan does to it, and what must hold then."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from holdfast.coordination.failures.mismatch import RECEIVED
from holdfast.protocol.commit import Commit, Wish
from holdfast.protocol.events import AnyEvent, FailureDetected, GenerationStarted, JobFinished, NodeLeft
from holdfast.protocol.record import Record
from tests.simulation.faults.plans import FaultKind, FaultPlan, Raises

#: after only these faults, state stashed for a layout under which scripts raise is not lost
HARMLESS = (FaultKind.JOIN, FaultKind.RETURN)


def refused_twice(plan: FaultPlan, why: str) -> bool:
    """Return whether a job ends because two steps were refused and nothing was kept.

    One corruption cannot cause this.
    """
    corrupt = sum(fault.kind is FaultKind.CORRUPT_SUM for fault in plan.faults)
    return corrupt > 1 and "had kept nothing" in why


def diverged(plan: FaultPlan, why: str) -> bool:
    """Return whether a job ends because one worker's state differs from the others'."""
    return any(fault.kind is FaultKind.CORRUPT_STATE for fault in plan.faults) and "replicas diverged" in why


def differs(plan: FaultPlan, why: str) -> bool:
    """Whether a job ends because workers have other settings than others: twice, or without a majority."""
    faults = sum(fault.kind is FaultKind.DIFFER for fault in plan.faults)
    unclear = "no majority" in why or RECEIVED in why
    return faults > 0 and "workers differ at step" in why and (faults > 1 or unclear)


def unjust(plan: FaultPlan, events: Iterable[AnyEvent]) -> Sequence[AnyEvent]:
    """Return the events that take out more than one process for slow work, or any node.

    The first worker that is slow looks as if it hung. From then on the limit covers the work, wherever it is done.
    """
    if not plan.slow_work or plan.faults or plan.crashes:
        return ()
    told = [event for event in events if isinstance(event, FailureDetected | NodeLeft)]
    failed = [event for event in told if isinstance(event, FailureDetected)]
    left = [event for event in told if isinstance(event, NodeLeft) and event.reason != "finished"]
    return told if left or len(failed) > 1 else ()


def works_fault(plan: FaultPlan, why: str) -> bool:
    """Return whether a job ends because its script always raises, on every node."""
    if plan.raises is Raises.UNDER:
        return any(fault.kind not in HARMLESS for fault in plan.faults) and "Oops" in why
    where = "" if plan.raises is Raises.BEFORE else f"step {plan.raises_at[0]}"
    return plan.raises is not Raises.NOTHING and where in why and "Oops" in why


def skipped(plan: FaultPlan, why: str) -> bool:
    """Return whether a job ends because too many steps in a row were skipped."""
    return plan.fails_by_skips and f"the last good step is {plan.skips_from - 1}" in why


def may_fail(plan: FaultPlan, why: str) -> bool:
    """Return whether the plan may end a job although a worker with its state is alive."""
    reasons = (skipped, refused_twice, works_fault, last_quarantined, diverged, differs)
    return any(is_reason(plan, why) for is_reason in reasons)


def unsaved(plan: FaultPlan, why: str, committed: int, saved: Collection[int]) -> bool:
    """Return whether the job's progress with such a script is unsaved although nothing else went wrong."""
    if skipped(plan, why) and not plan.faults and not plan.crashes and plan.checkpoint_every > 0:
        # A simulated loop that is over does not wait for a checkpoint. Quick steps can pass until the job is stopped.
        good = plan.skips_from - 1
        return bool(good) and committed < plan.steps and max(saved, default=0) != good
    calm = works_fault(plan, why) and not plan.faults and not plan.crashes and plan.raises is not Raises.APPLY
    return calm and plan.checkpoint_every > 0 and committed > 0 and committed not in saved


def last_quarantined(plan: FaultPlan, why: str) -> bool:
    """Return whether a job ends because its last node has failed too often."""
    return plan.max_restarts < FaultPlan(seed=0).max_restarts and ("is quarantined" in why or "is given up" in why)


def wrong_end(plan: FaultPlan, event: JobFinished, commits: Mapping[int, Commit]) -> str:
    """Return what is wrong with the end of a job that no user interrupted, "" for nothing.

    Args:
        commits: The step result of each step. An error raised in a step that a survivor finished alone is in the next
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
    """Return the nodes that may not come."""
    return {one.node for one in (*record.quarantined, *record.drained)} if record is not None else set()


def wronged(plan: FaultPlan, record: Record | None, event: AnyEvent) -> str:
    """Return what an event says that must not become of a node, "" for nothing."""
    few = plan.max_restarts < FaultPlan(seed=0).max_restarts
    # the coordinator may miss silent nodes
    alone = plan.raises is Raises.BEFORE and not plan.faults and not plan.crashes
    blameless = alone or (plan.raises is not Raises.NOTHING and not few)
    if blameless and isinstance(event, NodeLeft) and event.reason == "quarantined":
        return f"a node is quarantined for what the work does wrong: {event}"
    # A group may have formed before one of its nodes was barred. The coordinator announces that group, and the node is
    # lost there.
    if isinstance(event, GenerationStarted) and event.decision and barred(record) & set(event.members):
        return f"a node that may not come is a member: {event}"
    return ""
