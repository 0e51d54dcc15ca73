"""Detection of a record that is older than the job, for example after it was restored from a backup.

Agents report the newest generation that was sent to them. It was in the record before, so a record without it is older.
Acting on such a record would stop or expel workers that train in a newer generation.
"""

from __future__ import annotations

from holdfast.coordination.transaction import Transaction
from holdfast.protocol.messages.agent import Hello


class RecordAge:
    """Compares the record with agents' reports, until all members of its initial plan confirm it.

    From then on the record is known to be current. An agent that reports otherwise is wrong, and must not end a healthy
    job's coordinator. A generation that this coordinator has begun confirms nothing: there may be an older one with
    that number.
    """

    def __init__(self, transaction: Transaction, lease_s: float) -> None:
        self._transaction = transaction
        self._lease_s = lease_s
        self._begun = 0.0
        record = transaction.record
        self._plan = record.plan
        #: The newest generation before this coordinator.
        self._generation = record.generation
        #: A job that begins with this coordinator has no older record.
        self._confirmed = not record.identity

    def start(self) -> None:
        """Record the start of this coordinator."""
        self._begun = self._transaction.now

    @property
    def awaits_agents(self) -> bool:
        """Whether the first generation must wait, because agents may reconnect with news of a lost one."""
        unproven = not self._confirmed and self._plan is None
        return unproven and self._transaction.now < self._begun + self._lease_s

    def confirm(self) -> None:
        """Accept the record as current once all members of its initial plan have entered."""
        if not self._confirmed and self._plan is not None and self._transaction.record.plan is self._plan:
            self._confirmed = self._transaction.members.entered(self._plan)

    def newer_than_record(self, hello: Hello) -> str:
        """Return, in words, that an agent knows a newer generation than the record from the store; "" if it does not.

        Also "" if the record is confirmed as current. An agent that knows another job identity counts only if the
        record has no generation, as after the loss of the store.
        """
        record, heard = self._transaction.record, hello.heard
        if heard.identity != record.identity:
            # A backup has the job's identity. A lost store knows no generation.
            known, newer = 0, record.generation == 0 and heard.generation > 0
        else:
            # After a loss, generation numbers are used a second time. The coordinators' terms tell them apart.
            known = record.generation if heard.term == record.term else self._generation
            newer = heard.generation > known and not self._confirmed
        if not newer:
            return ""
        return f"node {hello.node} is in generation {heard.generation}, and the store ends with generation {known}"

    def raise_term(self, hello: Hello) -> bool:
        """Open a term above the agent's, if the agent has this job's identity; return whether it was.

        Either another coordinator leads, and the write ends this one, or a coordinator of that term had an older store.
        """
        if hello.heard.identity != self._transaction.record.identity:
            return False
        self._transaction.open_term(hello.term + 1)
        return True
