"""Which of a node's workers the coordinator's plans name: whom an order is for that was said to the whole node."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.protocol.messages.orders import Arm, Begin, GenerationOrder, JobDone, Prepare, Void
from holdfast.protocol.plan import GenerationPlan


class KnownMembers:
    """The members of the generation in force and of the pending one, as the connection that stands has told them.

    A coordinator changes neither without telling the nodes of those that are named, and what it says comes in order. So
    this is what it had in mind when it sent an order, whoever has attached or died here meanwhile.
    """

    def __init__(self) -> None:
        self._members: set[str] = set()
        self._pending: set[str] = set()

    def told_anew(self, members: Sequence[str]) -> None:
        """A coordinator says who is a member; nothing that was said before counts."""
        self._members, self._pending = set(members), set()

    def concerned(self, order: GenerationOrder, workers: Sequence[str]) -> tuple[str, ...]:
        """Return those of the node's `workers` that an order is for."""
        match order:
            case Begin(plan=plan):
                members = self._members = _named(plan, workers)
                self._pending = set()
            case Prepare(plan=plan):
                # One that was pending and never voided is in force by now.
                self._members |= self._pending
                members = self._pending = _named(plan, workers)
            case Arm():
                members = self._pending
            case Void():
                members, self._pending = self._pending, set()
            case JobDone():
                members = set(workers)
            case _:
                members = self._members | self._pending
        return tuple(worker for worker in workers if worker in members)


def _named(plan: GenerationPlan, workers: Sequence[str]) -> set[str]:
    here = set(workers)
    return {member.worker for member in plan.members if member.worker in here}
