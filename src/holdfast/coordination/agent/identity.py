"""Messages of an agent about its own node, and the check that an order comes from the newest coordinator."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.coordination.agent.instructions import AgentInstruction, SendToCoordinator
from holdfast.protocol.messages.agent import (
    EndNotice,
    HeardGeneration,
    Hello,
    Kept,
    Leave,
    NodeOrder,
    NodeSnapshots,
)
from holdfast.protocol.messages.orders import (
    Arm,
    BecomeStandby,
    CheckpointOrder,
    Disarm,
    PruneCheckpoints,
    Stop,
    Void,
    Warm,
    WorkerOrder,
)
from holdfast.protocol.messages.plans import BeginNode, PrepareNode
from holdfast.protocol.names import PROTOCOL

#: the reason in `Leave` if the machine's operator has ended the agent
TOLD_TO_END = "told"


#: value for an agent that has heard of no generation yet
NONE_HEARD = HeardGeneration()


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeIdentity:
    """The properties of a node that its agent sends in every Hello."""

    job: str
    node: str
    workers: int
    digest: str
    agent_pid: int
    rack: str = ""
    zone: str = ""
    host: str = ""
    address: str = ""
    beside_coordinator: bool = True
    probe_port: int = 0
    failure_rate: float = 1.0
    standby: bool = False
    grant: int = 0

    def make_hello(
        self,
        session: str,
        term: int,
        kept: tuple[Kept, ...],
        now: float,
        unfit: str,
        snapshots: NodeSnapshots | None = None,
        heard: HeardGeneration = NONE_HEARD,
    ) -> Hello:
        """Return the message that begins a connection.

        Args:
            kept: The messages that tell the coordinator about the workers.
            now: The time of the node's clock.
            unfit: Why the node should not train, or "".
            snapshots: The snapshot parts that the node holds.
            heard: The newest generation that a coordinator has announced to the workers.
        """
        return Hello(
            protocol=PROTOCOL,
            job=self.job,
            node=self.node,
            session=session,
            term=term,
            agent_pid=self.agent_pid,
            workers=self.workers,
            digest=self.digest,
            rack=self.rack,
            zone=self.zone,
            host=self.host,
            address=self.address,
            beside_coordinator=self.beside_coordinator,
            probe_port=self.probe_port,
            failure_rate=self.failure_rate,
            standby=self.standby,
            grant=self.grant,
            kept=kept,
            clock=now,
            unfit=unfit[:1000],
            snapshots=snapshots,
            heard=heard,
        )


class EndingNotice:
    """An agent's notice that it was told to end, which lets the others go on without its node before it is gone.

    The node may stay for a grace period. Times are by the agent's clock.
    """

    def __init__(self, grace_s: float) -> None:
        self.grace_s = grace_s
        self._until: float | None = None

    @property
    def is_given(self) -> bool:
        """Whether the agent was told to end."""
        return self._until is not None

    def start(self, now: float) -> list[AgentInstruction]:
        """Start the grace period and notify the coordinator."""
        self._until = now + self.grace_s
        return self.repeat(now)

    def repeat(self, now: float) -> list[AgentInstruction]:
        """Notify a coordinator that has just connected, with the rest of the grace period in seconds.

        Empty if the agent was not told to end.
        """
        if self._until is None:
            return []
        return [SendToCoordinator(EndNotice(grace_s=max(0.0, self._until - now)))]

    def leave(self) -> list[AgentInstruction]:
        """Return the message that the grace period is over and the node leaves."""
        return [
            SendToCoordinator(
                Leave(reason=TOLD_TO_END, detail=f"told to end, it has stayed for its grace of {self.grace_s:g} s")
            )
        ]


def is_from_newest(order: NodeOrder | WorkerOrder | CheckpointOrder, term: int) -> bool:
    """Return whether an order comes from the coordinator of this term or a later one.

    Orders without a term count as such: the connection proves their origin.
    """
    match order:
        case BeginNode(plan=change) | PrepareNode(plan=change):
            return change.rest.term >= term
        case Stop() | Arm() | Disarm() | Void() | PruneCheckpoints() | Warm() | BecomeStandby():
            return order.term >= term
        case _:
            return True  # These orders have no term. The connection's Welcome proves their origin.
