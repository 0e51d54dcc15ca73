"""Passes the keys of a group under construction to all its members, so that nobody has to ask for them."""

from __future__ import annotations

from holdfast.coordination.turn import Turn
from holdfast.protocol.messages.orders import Posted
from holdfast.protocol.messages.worker import Post


def pass_on(turn: Turn, message: Post) -> None:
    """Send a member's key to the other members of its generation; keys of other generations are stale."""
    plans = (turn.record.plan, turn.record.pending)
    plan = next((plan for plan in plans if plan and plan.generation == message.generation), None)
    if plan is None or plan.rank(message.worker) is None:
        return
    posted = Posted(generation=message.generation, key=message.key, value=message.value)
    for worker in plan.workers:
        if worker != message.worker:
            turn.order(worker, posted)
