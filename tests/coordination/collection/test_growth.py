"""Tests of a generation's cost by world size: messages and bytes, counted at the coordinator's state machine."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from holdfast.coordination.config import CoordinatorConfig
from holdfast.coordination.inputs import Disconnected, Received
from holdfast.coordination.instructions import Broadcast, Instruction, Send
from holdfast.coordination.job.coordinator import Coordinator
from holdfast.protocol.job_spec import JobSpec
from holdfast.protocol.messages import any_side as msg
from holdfast.protocol.names import key_of
from holdfast.protocol.position import Position

WORKERS = 8


@dataclass
class Count:
    """Counts messages to agents, encoded messages, and the bytes of a plan for each node."""

    messages: int = 0
    encoded: int = 0
    plan_bytes: int = 0


class World:
    """Drives a job with the messages of agents and counts the output."""

    def __init__(self, nodes: int) -> None:
        spec = JobSpec(name="job", max_nodes=nodes)
        self.nodes = nodes
        self.machine = Coordinator(CoordinatorConfig(spec=spec), Position(), None)
        self.machine.start(0.0, "url", 1)
        self.count = Count()
        for node in range(nodes):
            hello = msg.Hello(
                protocol=msg.PROTOCOL,
                job="job",
                node=f"n{node}",
                session=f"{node:08x}",
                term=0,
                agent_pid=1,
                workers=WORKERS,
                digest="",
            )
            self.feed_message(node, hello)
        for node in range(nodes):
            for worker in self.workers(node):
                self.deliver(node, self.attach(worker))
        self.enter()

    def workers(self, node: int) -> list[str]:
        return [msg.worker_id(f"n{node}", place, f"{node:016x}") for place in range(WORKERS)]

    def attach(self, worker: str) -> msg.Attach:
        batches = 2 * WORKERS * self.nodes
        return msg.Attach(
            worker=worker, pid=7, host="h", state_port=1, config={}, global_batch=batches, micro_batches=batches
        )

    def feed_message(self, node: int, message: msg.AgentMessage) -> None:
        self.tally(self.machine.handle(Received(node, message), 1.0))

    def deliver(self, node: int, message: msg.WorkerMessage) -> None:
        self.feed_message(node, msg.FromWorker(message=message))

    def tally(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            if isinstance(instruction, Send | Broadcast):
                to = len(instruction.connections) if isinstance(instruction, Broadcast) else 1
                self.count.messages += to
                self.count.encoded += 1
                if isinstance(instruction.message, msg.BeginNode | msg.PrepareNode):
                    self.count.plan_bytes += len(msgspec.msgpack.encode(instruction.message))

    def enter(self, *away: int) -> None:
        for node in [node for node in range(self.nodes) if node not in away]:
            workers, generation = self.workers(node), self.machine.transaction.generation
            plan = self.machine.record.plan
            assert plan is not None
            keys = {worker: key_of(plan.workers.index(worker), "") for worker in workers}
            posts = [msg.Post(worker=w, generation=generation, keys={keys[w]: b""}) for w in workers]
            self.feed_message(node, msg.Posts(posts=tuple(posts)))
            for worker in workers:
                self.deliver(node, msg.Entered(worker=worker, generation=generation, applied=0))

    def lose(self, lost: int) -> Count:
        """Lose a node in the middle of a step; return the cost up to the end of rendezvous."""
        self.count = Count()
        self.tally(self.machine.handle(Disconnected(lost), 2.0))
        stop = self.machine.context.interruption.stop
        assert stop is not None
        for node in [node for node in range(self.nodes) if node != lost]:
            for place, worker in enumerate(self.workers(node)):
                report = msg.Report(
                    worker=worker,
                    term=stop.term,
                    generation=stop.generation,
                    applied=0,
                    step=1,
                    phase=msg.Phase.COMPUTE,
                    summed=(node * WORKERS + place,),
                )
                self.deliver(node, report)
        assert self.machine.transaction.generation == 2
        self.enter(lost)
        return self.count


def test_the_cost_of_a_node_loss_per_node_is_independent_of_world_size() -> None:
    """Messages O(N), bytes of a plan O(change) for each node, and each is encoded once."""
    small, large = World(16).lose(3), World(128).lose(3)
    # Three messages for each remaining node: Stop, Begin and the bundle of all keys.
    assert (small.messages, large.messages) == (3 * 15, 3 * 127)
    assert small.encoded == large.encoded == 3
    # Only the numbers of ranks and micro-batches get longer.
    assert small.plan_bytes < large.plan_bytes < 1.25 * small.plan_bytes
    assert large.plan_bytes < 1000
