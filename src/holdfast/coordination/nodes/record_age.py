"""Whether the record that a coordinator began with is older than the job, for example restored from a backup.

Agents report the newest generation that was announced to them. Whatever they heard was in the record first, so a record
that does not have it is older. Acting on such a record would stop or expel workers that train in a newer generation.
"""

from __future__ import annotations

from holdfast.coordination.turn import Transaction
from holdfast.protocol.messages.agent import Hello


class RecordAge:
    """Compares the record with what agents report, until all members of the plan that it began with confirm it.

    From then on the record is known to be current. An agent that claims otherwise is wrong, and must not end a healthy
    job's coordinator. A generation that this coordinator has begun itself confirms nothing: it may be a second one of
    that number.
    """

    def __init__(self, transaction: Transaction, lease_s: float) -> None:
        self._transaction = transaction
        self._lease_s = lease_s
        self._begun = 0.0
        record = transaction.record
        self._plan = record.plan
        #: the newest generation before this coordinator
        self._generation = record.generation
        #: a job that begins with this coordinator has no older record
        self._confirmed = not record.identity

    def begin(self) -> None:
        """Note that this coordinator begins now."""
        self._begun = self._transaction.now

    @property
    def awaits_agents(self) -> bool:
        """Whether no first generation may begin yet: agents may come back and know of one that the record has lost."""
        unproven = not self._confirmed and self._plan is None
        return unproven and self._transaction.now < self._begun + self._lease_s

    def confirm(self) -> None:
        """Note that the record is current if all members of the plan that it began with stand in its generation."""
        if not self._confirmed and self._plan is not None and self._transaction.record.plan is self._plan:
            self._confirmed = self._transaction.members.entered(self._plan)

    def newer_than_record(self, hello: Hello) -> str:
        """Return what an agent knows of this job that the record does not, in words, or "" if the record has it all."""
        record, heard = self._transaction.record, hello.heard
        if heard.identity != record.identity:
            # A backup has the job's identity. A store that was lost knows nothing of any generation.
            known, newer = 0, record.generation == 0 and heard.generation > 0
        else:
            # After a loss, generations are numbered a second time: the coordinators' terms tell them apart.
            known = record.generation if heard.term == record.term else self._generation
            newer = heard.generation > known and not self._confirmed
        if not newer:
            return ""
        return f"node {hello.node} is in generation {heard.generation}, and the store ends with generation {known}"

    def raise_term(self, hello: Hello) -> bool:
        """Go on with a higher term if an agent of this job has heard of one; return whether it was raised.

        Another coordinator leads, and this one ends at the write, or a coordinator of that term had an older store.
        """
        if hello.heard.identity != self._transaction.record.identity:
            return False
        self._transaction.open_term(hello.term + 1)
        return True
