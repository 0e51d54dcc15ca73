"""Who is let in: what an agent's first message must fit; and who has to come again."""

from __future__ import annotations

from holdfast.coordination.membership import Membership, Node
from holdfast.coordination.turn import Turn
from holdfast.errors import EXIT_BAD_INPUT, EXIT_FAILED
from holdfast.protocol.agent import EndNode, Hello, Refused
from holdfast.protocol.events import FailureDetected, NodeLeft
from holdfast.protocol.names import PROTOCOL
from holdfast.protocol.record import Record
from holdfast.protocol.worker import Applied, Attach, Begun, Entered, Prepared, Report


def refusal(record: Record, members: Membership, hello: Hello) -> Refused | None:
    """Return why an agent is refused, None where it is welcome."""
    why = _misfit(record, hello)
    if why is not None:
        return Refused(why=why, exit_code=EXIT_BAD_INPUT)
    if record.outcome == "failed":
        return Refused(why=f"the job is {record.outcome}", exit_code=EXIT_FAILED)
    known = members.nodes.get(hello.node)
    if known is not None and known.session != hello.session:
        why = f"a node named {hello.node} is connected: choose another --node"
        return Refused(why=why, exit_code=EXIT_BAD_INPUT)
    if _was_expelled(record, hello):
        why = f"node {hello.node} was expelled in its absence: its workers must start afresh"
        return Refused(why=why, exit_code=EXIT_FAILED, retry=True)
    return None


def takes_part(turn: Turn, node: Node, attach: Attach) -> bool:
    """Take the job's configuration from its first worker; False where another's differs: its node is told to end."""
    if not turn.record.config_digest:
        turn.change(
            config_digest=attach.digest,
            global_batch=attach.global_batch,
            micro_batches=attach.micro_batches,
            experts=attach.experts,
        )
    elif attach.digest != turn.record.config_digest:
        why = f"model, optimizer or batch of {attach.worker} differ from the job's: use the same code and config"
        turn.send(node.connection, EndNode(exit_code=EXIT_BAD_INPUT, why=why, alone=True))
        return False
    return True


def _misfit(record: Record, hello: Hello) -> str | None:
    if hello.protocol != PROTOCOL:
        return f"protocol {hello.protocol} of node {hello.node} is not {PROTOCOL}: install the same holdfast everywhere"
    if hello.job != record.job:
        return f"job {hello.job!r} is not run here, but {record.job!r}: give the right --coordinator"
    if record.script_digest and hello.digest != record.script_digest:
        return f"script or arguments of node {hello.node} differ from those of the job: start it with the same ones"
    return None


def _was_expelled(record: Record, hello: Hello) -> bool:
    """True where the node holds workers that were in an epoch and are in none any more."""
    current = {worker for plan in (record.plan, record.pending) if plan for worker in plan.workers}
    evidence = Begun | Prepared | Entered | Applied | Report
    return any(isinstance(kept, evidence) and kept.worker not in current for kept in hello.kept)


def expel(turn: Turn, node: Node, kind: str, failed_at: float, detail: str = "") -> None:
    """From here on nothing of a node counts."""
    turn.members.remove(node.name)
    after_s = max(0.0, turn.now - failed_at)
    turn.emit(FailureDetected, node=node.name, kind=kind, after_s=after_s, detail=detail)
    turn.emit(NodeLeft, node=node.name, reason="failed")


def send_away_all(turn: Turn, why: str) -> None:
    """Have all nodes replace their workers and come again."""
    for node in list(turn.members.nodes.values()):
        turn.send(node.connection, Refused(why=why, exit_code=EXIT_FAILED, retry=True))
        turn.close(node.connection)
        turn.members.remove(node.name)
        turn.emit(NodeLeft, node=node.name, reason="failed")
