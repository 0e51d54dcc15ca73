"""The nodes and workers that the coordinator waits for, with reasons, for status displays."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.coordination.hang_detection.judge import describe_position, is_waiting
from holdfast.coordination.job.context import JobContext
from holdfast.protocol.plan import GenerationPlan
from holdfast.protocol.position import Awaited

#: At most this many waiting workers are listed.
_NAMED = 8


def list_awaited(context: JobContext, now: float) -> Iterator[Awaited]:
    """Yield the nodes and workers that the job waits for, with their missing actions; `now` in Unix seconds.

    First the disconnected nodes that may come back; nothing else once the job is over. While a generation is
    interrupted, then the members that have not reported; otherwise the late members of the generation. In both cases,
    then the members of a pending plan that have not built its group.
    """
    transaction = context.transaction
    plan, pending, stop = transaction.record.plan, transaction.record.pending, context.interruption.stop
    promised = context.disconnected.promised
    for name in promised:
        yield Awaited(who=f"node {name}", what="to come back with what its workers hold")
    if context.job_end.over is not None:
        return
    if stop is not None:
        what = f"its report of where it stands in generation {stop.generation}"
        for worker in context.interruption.awaited(promised):
            yield Awaited(
                who=transaction.place_of(worker), what=what, since_s=max(0.0, now - context.interruption.since)
            )
    elif plan is not None:
        yield from _list_late_members(context, plan, now)
    if pending is not None:
        for worker in pending.workers:
            info = context.members.worker(worker)
            if info is None or info.prepared < pending.generation:
                what = f"to build the group of generation {pending.generation}, which the others train without"
                yield Awaited(who=transaction.place_of(worker), what=what)


def _list_late_members(context: JobContext, plan: GenerationPlan, now: float) -> Iterator[Awaited]:
    """Yield the members that have not entered a generation. If all have, yield the members that lag by 2 or more steps.

    The latter are followed by members that compute while others wait, as of the newest probe.
    """
    transaction, ledger = context.transaction, context.ledger
    infos = {worker: context.members.worker(worker) for worker in plan.workers}
    outside = [worker for worker, info in infos.items() if info is None or info.entered < plan.generation]
    for worker in outside:
        yield Awaited(who=transaction.place_of(worker), what=f"to stand in the group of generation {plan.generation}")
    if outside:
        return
    applied = {worker: ledger.applied_by(worker) or 0 for worker in plan.workers}
    furthest = max(applied.values(), default=0)
    for worker, step in applied.items():
        # A lag of one step is normal: reports of the others are still on their way.
        if step < furthest - 1:
            yield Awaited(who=transaction.place_of(worker), what=f"to apply step {step + 1}")
    yield from _list_busy_workers(context, now)


def _list_busy_workers(context: JobContext, now: float) -> Iterator[Awaited]:
    """Yield the workers that compute while others wait for them, as of the newest probe, with position and stack.

    Nothing without a probe, or if no worker waits.
    """
    transaction, asked = context.transaction, context.hang_detection.newest
    if asked is None:
        return
    stands = asked.stands.values()
    waiting = tuple(transaction.place_of(stand.worker) for stand in stands if is_waiting(stand))
    for stand in stands if waiting else ():
        if not is_waiting(stand):
            yield Awaited(
                who=transaction.place_of(stand.worker),
                what=f"to be done with its part of step {stand.step}",
                since_s=stand.for_s + max(0.0, now - asked.at),
                at=describe_position(stand),
                for_whom=waiting[:_NAMED],
                stack=context.hang_detection.stack_lines(stand.worker),
            )
