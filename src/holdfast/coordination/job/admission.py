"""Checks of an agent's first message, and the catch-up of a node that comes back."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from ipaddress import ip_address

from holdfast.coordination.failures.detections import worker_missing
from holdfast.coordination.grants import mark_awaited
from holdfast.coordination.job.context import JobContext
from holdfast.coordination.membership import Node
from holdfast.coordination.transaction import Transaction
from holdfast.errors import EXIT_BAD_INPUT, EXIT_DONE, EXIT_FAILED, EXIT_REFUSED
from holdfast.protocol.events import NodeLeft, NodeRefused
from holdfast.protocol.messages.agent import Hello, Refused, Welcome, WorkerDown
from holdfast.protocol.messages.worker import Begun, Entered, Prepared, Report
from holdfast.protocol.names import PROTOCOL
from holdfast.protocol.record import Record

#: At most this many refusals are remembered.
_KEPT_REFUSALS = 4096


@dataclass(slots=True)
class _Namesake:
    """A node asks for a name while another node's lease on it runs; the times of its first and last try."""

    first: float
    last: float


class Admission:
    """Admits or refuses agents, and sends missed orders to returning nodes."""

    def __init__(self, context: JobContext) -> None:
        self._transaction = context.transaction
        self._config = context.config
        self._ledger = context.ledger
        self._interruption = context.interruption
        self._failures = context.failures
        self._disconnected = context.disconnected
        self._draining = context.draining
        self._standbys = context.standbys
        self._escalation = context.escalation
        self._pool_client = context.pool_client
        self._record_age = context.record_age
        self._snapshots, self._checkpoints = context.snapshots, context.checkpoints
        self._namesakes: dict[str, _Namesake] = {}
        #: The refused nodes that were reported, with their addresses, oldest first.
        self._refused: dict[tuple[str, str], None] = {}

    def admit(self, connection: int, hello: Hello) -> Node | None:
        """Admit an agent: add its node, send Welcome and return the node. Or refuse it and return None.

        A refused agent gets the reason before its connection is closed; if its protocol, job, script or address is
        wrong, the pool is told, too. The connection is closed without a reason if the agent knows a newer coordinator,
        or if the pool has not assigned its node yet. If it knows a newer record than the store has, this coordinator
        ends.
        """
        transaction, config = self._transaction, self._config
        if newer := self._record_age.newer_than_record(hello):
            # The write detects whether another coordinator leads. Then this one was paused, and ends as superseded.
            transaction.change()
            transaction.stop_outdated(newer)
            return None
        if hello.term > transaction.record.term and not self._record_age.raise_term(hello):
            # The agent may find the newer coordinator.
            transaction.close(connection)
            return None
        if not self._pool_client.admit_node(hello):
            # The agent reconnects until the pool has assigned its node.
            transaction.close(connection)
            return None
        why_not = self._find_refusal(hello)
        if why_not is not None:
            if why_not.exit_code == EXIT_BAD_INPUT:
                self._pool_client.refuse_node(hello.node, why_not.why)
            transaction.send(connection, why_not)
            transaction.close(connection)
            return None
        self._namesakes.pop(hello.node, None)
        self._escalation.on_node_admitted(hello.node)
        self._pool_client.forget_refusal(hello.node)
        waits = self._pool_client.is_standby(hello)
        if not transaction.record.script_digest and not waits:
            transaction.change(script_digest=hello.digest)
        node = transaction.members.add(hello, connection, transaction.now, standby=waits)
        if waits:
            self._standbys.on_admitted(node)
        elif self._draining.is_retained(hello.node):
            transaction.members.owe(hello.node)
        self._disconnected.on_node_connected()
        node.returning = self._disconnected.is_known(hello.node)
        self._snapshots.on_parts_held(node, hello.snapshots)
        welcome = Welcome(
            term=transaction.record.term,
            lease_s=config.lease_s,
            heartbeat_s=config.beat_s(max(config.spec.nodes_to_begin, len(transaction.members.nodes))),
            committed=self._transaction.recorded.step,
            members=tuple(transaction.planned_on(hello.node)),
            rules=config.rules,
            max_restarts=config.spec.recovery.max_restarts,
            snapshot_key=self._snapshots.key,
            layout=transaction.record.layout if transaction.record.layouts else None,
            nodes=config.spec.nodes_to_begin,
            time=transaction.now,
            identity=transaction.record.identity,
        )
        transaction.send(connection, welcome)
        return node

    def catch_up(self, node: Node, generation: int, ended: Set[str]) -> None:
        """Send a node that has connected the orders that it missed, and handle the effects of its absence.

        Planned workers that it no longer has are failures. It gets the stop order of an interrupted generation. If one
        of its workers has not entered the generation in force, that generation is interrupted, because its rendezvous
        is lost.

        Args:
            generation: the generation that was in force when the node connected.
            ended: the workers that are known to have ended.
        """
        transaction, plan = self._transaction, self._transaction.record.plan
        self._checkpoints.repeat_order(node.name)
        here = node.workers.keys() | ended | node.broken
        missing = [worker for worker in transaction.planned_on(node.name) if worker not in here]
        if missing:
            self._failures.handle(*(worker_missing(node.name, worker, transaction.now) for worker in missing))
        if self._interruption.stop is not None:
            transaction.send(node.connection, self._interruption.stop)
            return
        for worker in list(node.workers):
            if plan is None or plan.generation != generation or plan.rank(worker) is None:
                # It missed nothing, or has just got its orders.
                continue
            if node.workers[worker].entered < generation:
                # The rendezvous of the previous coordinator is lost. Only a new generation helps.
                self._interruption.start(transaction.now)

    def _find_refusal(self, hello: Hello) -> Refused | None:
        """Return why an agent is refused, with its exit code and whether it must retry, or None if it is admitted.

        Reasons: another protocol, job or script; an unreachable address, which is reported; a drained, quarantined or
        unfit node (an unfit one is excluded); a job that is over; a name that is taken; or workers that the job has
        replaced.
        """
        record = self._transaction.record
        why = _find_misfit(record, hello)
        if why is not None:
            return Refused(why=why, exit_code=EXIT_BAD_INPUT)
        why = self.check_address(hello)
        if why is not None:
            self._report_refusal(hello.node, hello.address, why)
            return Refused(why=why, exit_code=EXIT_BAD_INPUT)
        if self._draining.is_drained(hello.node):
            why = f"node {hello.node} is drained; `holdfast undrain {hello.node}` lets it come back"
            return Refused(why=why, exit_code=EXIT_DONE)
        barred = self._escalation.find_quarantine(hello.node, hello.host)
        if barred is not None:
            what = (
                f"node {hello.node}" if barred.node == hello.node else f"{hello.host}, the host of node {barred.node},"
            )
            why = f"{what} is quarantined: {barred.why}; `holdfast undrain {barred.node}` lets it come back"
            return Refused(why=why, exit_code=EXIT_REFUSED)
        if hello.unfit:
            self._exclude(hello)
            return Refused(why=f"node {hello.node} is not fit: {hello.unfit}", exit_code=EXIT_REFUSED)
        known = self._transaction.members.nodes.get(hello.node)
        if record.outcome == "failed" or (record.outcome and known is not None):
            exit_code = EXIT_FAILED if record.outcome == "failed" else EXIT_DONE
            return Refused(why=f"the job is {record.outcome}", exit_code=exit_code)
        if known is not None:
            return self._refuse_namesake(known)
        if _was_expelled(self._transaction.planned, hello):
            why = f"node {hello.node} was expelled in its absence: its workers must start afresh"
            return Refused(why=why, exit_code=EXIT_FAILED, retry=True)
        return None

    def check_address(self, hello: Hello) -> str | None:
        """Return why a node and another one cannot reach each other at their advertised addresses, or None if all can.

        A loopback address works only if the coordinator and all nodes are on one host. A member that reconnects is not
        checked again, because the others have already reached it.
        """
        if self._transaction.planned_on(hello.node):
            return None
        others = [node for node in self._transaction.members.nodes.values() if node.name != hello.node]
        if is_local_address(hello.address):
            problem = f"node {hello.node} advertises {hello.address}, which only its own host can reach, and "
            advice = "start its agent with --advertise ADDRESS, an address of its host that the others can reach"
            if not hello.beside_coordinator:
                return f"{problem}the coordinator is on another host: {advice}"
            if elsewhere := next((node for node in others if not node.beside_coordinator), None):
                return f"{problem}node {elsewhere.name} is on another host: {advice}"
        elif not hello.beside_coordinator and (bad := next((o for o in others if is_local_address(o.address)), None)):
            return (
                f"node {hello.node} cannot reach node {bad.name}, which advertises {bad.address}: "
                f"start the agent of {bad.name} again with --advertise ADDRESS, an address that others can reach"
            )
        return None

    def refuse_newcomer(self, connection: int, hello: Hello, why: str) -> None:
        """Refuse a newcomer that is not admitted yet and that members cannot reach, or that cannot reach them.

        Reports it once for each node and address, tells the pool, and closes the connection.
        """
        self._refuse(connection, hello.node, hello.address, why)

    def refuse_node(self, node: Node, why: str) -> None:
        """Refuse and remove an admitted node, before the first generation, that others cannot reach, or that cannot
        reach them.

        Reports it, tells the pool, and closes the connection. If the node's joining was reported, its leaving is, too.
        """
        self._refuse(node.connection, node.name, node.address, why)
        self._draining.forget(node)
        if node.told:
            self._transaction.emit(NodeLeft, node=node.name, reason="failed", detail=why)

    def _refuse(self, connection: int, node: str, address: str, why: str) -> None:
        """Report a refusal, tell the pool, send the agent the reason, and close its connection."""
        self._report_refusal(node, address, why)
        self._pool_client.refuse_node(node, why)
        self._transaction.send(connection, Refused(why=why, exit_code=EXIT_REFUSED))
        self._transaction.close(connection)

    def _report_refusal(self, node: str, address: str, why: str) -> None:
        """Emit that a node is refused for its address, once for each of the newest 4096 nodes and addresses."""
        key = node, address
        if key in self._refused:
            return
        self._refused[key] = None
        if len(self._refused) > _KEPT_REFUSALS:
            del self._refused[next(iter(self._refused))]
        self._transaction.emit(NodeRefused, node=node, why=why, address=address)

    def _exclude(self, hello: Hello) -> None:
        """Exclude a node that reports itself unfit, and emit that it left.

        A node with a grant is refused to the pool, which replaces it, and may grant it again once it reconnects. Any
        other node is quarantined.
        """
        if hello.grant:
            self._pool_client.refuse_node(hello.node, hello.unfit)
        else:
            self._escalation.quarantine(hello.node, hello.host, hello.unfit)
        reason = "failed" if hello.grant else "quarantined"
        self._transaction.emit(NodeLeft, node=hello.node, reason=reason, detail=hello.unfit)

    def on_pause_over(self) -> None:
        """Forget name conflicts after this process was paused: silence in that time proves nothing."""
        self._namesakes.clear()

    def _refuse_namesake(self, known: Node) -> Refused:
        """Return the refusal of a node with a name that is taken: final if the other node stayed alive for two leases
        since the first try.

        Until then it is told to retry, because it may be the same node, which reconnected before the end of its old
        connection was noticed.
        """
        now, lease_s = self._transaction.now, self._config.lease_s
        self._namesakes = {
            name: one for name, one in self._namesakes.items() if name in self._transaction.members.nodes
        }
        asked = self._namesakes.setdefault(known.name, _Namesake(now, now))
        if now - asked.last > lease_s:
            asked.first = now
        asked.last = now
        if known.seen - asked.first > 2 * lease_s:
            why = f"a node named {known.name} is connected: choose another --node-name"
            return Refused(why=why, exit_code=EXIT_BAD_INPUT)
        why = f"the lease of a node named {known.name} still runs"
        return Refused(why=why, exit_code=EXIT_FAILED, retry=True)


def is_local_address(address: str) -> bool:
    """Return whether an address is reachable only on its own host: a loopback or unspecified address."""
    if address == "localhost":
        return True
    try:
        parsed = ip_address(address)
    except ValueError:
        return False  # A host name.
    return parsed.is_loopback or parsed.is_unspecified


def _find_misfit(record: Record, hello: Hello) -> str | None:
    """Return how an agent's protocol, job or script differs from the record's, with advice, or None if it fits."""
    if hello.protocol != PROTOCOL:
        return f"protocol {hello.protocol} of node {hello.node} is not {PROTOCOL}: install the same holdfast everywhere"
    if hello.job != record.job:
        return f"job {hello.job!r} is not run here, but {record.job!r}: give the right --address"
    if record.script_digest and hello.digest != record.script_digest:
        return f"script or arguments of node {hello.node} differ from those of the job: start it with the same ones"
    return None


def _was_expelled(planned: Set[str], hello: Hello) -> bool:
    """Return whether the node has workers that were in a generation and are in no plan now.

    A worker that has left its loop does not count.
    """
    # A worker that has applied a step was ordered to begin before, or has prepared.
    begun = {kept.worker for kept in hello.kept if isinstance(kept, Begun | Prepared | Entered | Report)}
    left = {kept.worker for kept in hello.kept if isinstance(kept, WorkerDown) and kept.has_left_loop}
    return not begun - left <= planned


def send_away_all(transaction: Transaction, why: str) -> None:
    """Make all regular nodes replace their workers and reconnect, unless their first workers are still starting.

    Their connections are closed, they are removed as failed, and the pool's grants of them count as not connected.
    """
    stay = {node.name for node in transaction.members.regular if node.coming and not transaction.planned_on(node.name)}
    if transaction.record.held is not None:
        transaction.change(
            held=mark_awaited(transaction.record.held, transaction.record.held.grants.keys() - stay, transaction.now)
        )
    for node in [node for node in transaction.members.regular if node.name not in stay]:
        transaction.send(node.connection, Refused(why=why, exit_code=EXIT_FAILED, retry=True))
        transaction.close(node.connection)
        transaction.members.remove(node.name)
        transaction.emit(NodeLeft, node=node.name, reason="failed")
