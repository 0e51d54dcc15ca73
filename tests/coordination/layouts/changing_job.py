"""A driver for a job with a changing layout, as its coordinator's state machine sees it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
from machinery import Job, applied, attach, hello

from holdfast.protocol.layouts.layout import WHOLE, Layout
from holdfast.protocol.layouts.layout_list import ListedLayout
from holdfast.protocol.messages import any_side as msg
from holdfast.protocol.plan import ExpertShape
from holdfast.protocol.state import Holding, SnapshotPart

TWO = Layout(shard=2)
LISTED = (ListedLayout(layout=TWO, nodes=1), ListedLayout(layout=WHOLE, nodes=3))
SETTLE_S = 2.1


def w(node: str, index: int, nonce: str = "a") -> str:
    return msg.worker_id(node, index, nonce)


@dataclass
class Changing(Job):
    """Drives nodes of two workers: with three nodes each worker has a replica, with fewer each node has one."""

    nodes: int = 3
    listed: tuple[ListedLayout, ...] = LISTED
    experts: ExpertShape | None = None
    saves: bool = False

    def up(self, node: str, layout: Layout, nonce: str = "a", parts: tuple[SnapshotPart, ...] = ()) -> None:
        held = msg.NodeSnapshots(host="h", port=1, parts=parts)
        known = msgspec.structs.replace(hello(node, session=f"{hash((node, nonce)) % 16**8:08x}"), workers=2)
        self.connect(msgspec.structs.replace(known, snapshots=held))
        for index in range(2):
            one = attach(w(node, index, nonce), experts=self.experts)
            self.deliver(msgspec.structs.replace(one, layout=layout, layouts=self.listed, saves=self.saves))

    def begin(self) -> Changing:
        self.boot()
        for index in range(self.nodes):
            self.up(f"n{index}", WHOLE)
        self.enter(0)
        return self

    def enter(self, at: int) -> None:
        for worker in self.plan.workers:
            self.deliver(msg.Entered(worker=worker, generation=self.plan.generation, applied=at))

    def done(self, step: int, after: float = 0.0) -> None:
        self.now += after
        for worker in self.plan.workers:
            self.deliver(applied(worker, self.plan.generation, step, world=len(self.plan.members)))

    def all_report(self, at: int) -> None:
        stop = self.machine.context.interruption.stop
        assert stop is not None
        for worker in list(self.plan.workers):
            if self.machine.members.worker(worker) is not None:
                known: dict[str, Any] = {"term": stop.term, "generation": stop.generation, "phase": msg.Phase.COMPUTE}
                if (experts := self.plan.expert_plan) is not None:
                    known["state"] = Holding(experts=experts.placement[self.plan.rank(worker) or 0])
                self.deliver(msg.Report(worker=worker, applied=at, step=at + 1, **known))

    def shrink(self) -> Changing:
        """Lose a node: the others continue unchanged for two steps, then stop for another layout."""
        self.done(1)
        self.lose("n2")
        self.all_report(1)
        assert not self.plan.puts_away, "at first they continue at once"
        self.enter(1)
        self.done(2)
        assert self.machine.context.interruption.stop is None, "the third node may soon return"
        self.done(3, SETTLE_S)
        self.all_report(3)
        assert self.plan.puts_away
        return self

    def changed(self) -> dict[str, tuple[SnapshotPart, ...]]:
        """Put another layout in force; until its workers attach, only the nodes' memory has the state."""
        self.enter(3)
        parts = {node: self.put(node) for node in dict.fromkeys(map(msg.node_of, self.plan.workers))}
        assert (self.machine.record.layout, self.machine.record.plan) == (TWO, None)
        return parts

    def put(self, node: str, at: int = 3, *, experts: bool = True) -> tuple[SnapshotPart, ...]:
        mine = [rank for rank, one in enumerate(self.plan.members) if one.node == node]
        parts = [self.plan.stash_part(rank, at) for rank in mine]
        parts += [self.plan.expert_stash_part(rank, at) for rank in mine if experts]
        held = tuple(part for part in parts if part is not None)
        self.deliver_from(node, msg.NodeSnapshots(host="h", port=1, parts=held))
        return held

    @property
    def plan(self) -> msg.GenerationPlan:
        plan = self.machine.record.plan
        assert plan is not None
        return plan
