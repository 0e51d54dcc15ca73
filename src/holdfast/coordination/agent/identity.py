"""What an agent says of its node."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.protocol.messages.agent import Hello, Kept, NodeSnapshots
from holdfast.protocol.names import PROTOCOL


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeIdentity:
    """What an agent says of its node in every Hello."""

    job: str
    node: str
    workers: int
    digest: str
    agent_pid: int
    rack: str = ""
    host: str = ""
    failure_rate: float = 1.0
    standby: bool = False

    def hello(
        self,
        session: str,
        term: int,
        kept: tuple[Kept, ...],
        now: float,
        wall: float,
        unfit: str,
        snapshots: NodeSnapshots | None = None,
    ) -> Hello:
        """Return what begins a connection.

        Args:
            kept: what the coordinator must know of the workers. now, wall: what the node's clocks show. unfit: why it
                should not train, "" where it may. snapshots: of which parts it holds.
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
            host=self.host,
            failure_rate=self.failure_rate,
            standby=self.standby,
            kept=kept,
            clock=now,
            wall=wall,
            unfit=unfit[:1000],
            snapshots=snapshots,
        )
