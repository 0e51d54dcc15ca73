"""A simulated job of a pool: its coordinator trains, loses and releases nodes, and records its grants."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from holdfast.coordination.grants import (
    describe_state,
    find_overdue,
    give_back,
    mark_connected,
    set_roles,
    set_standing,
)
from holdfast.protocol.pool.grants import Held
from holdfast.protocol.pool.sharing import JobPace, JobShares, JobStanding, NodeUnfit
from tests.simulation.pool.pool_around import PoolAround
from tests.simulation.pool.pool_world import Crash, JobDisk, Line, NodeComes, PoolWorld

LEASE_S = 3.0
JOIN_S = 15.0


class SimJobCoordinator:
    """One life of a job's coordinator."""

    def __init__(self, cluster: PoolAround, name: str, submission: int, disk: JobDisk) -> None:
        self.name = name
        self.submission = submission
        self.up = True
        self.disk = disk
        self._cluster = cluster
        self._world: PoolWorld = cluster.world
        self._pool: Line | None = None
        #: The connected nodes and their lines.
        self.members: dict[str, Line] = {}
        #: The time of each node's last message, or of the start of the wait for it.
        self._seen = dict.fromkeys(disk.held.grants, self._world.now)
        self._doing = ""
        self._unfit: dict[str, NodeUnfit] = {}
        self._world.later(0.01, 0.5, self._link)
        self._world.later(0.5, 1.0, self._tick)
        self._world.later(0.5, 4.0, self._end_moves)

    def die(self) -> None:
        """Kill the coordinator; its nodes continue until another process ends them."""
        self.up = False
        for line in (self._pool, *self.members.values()):
            if line is not None:
                line.cut()

    @property
    def training(self) -> list[str]:
        """The connected nodes that train, including standbys that join next to a draining node."""
        grants, joining = self.disk.held.grants, self.disk.joining
        return [node for node in self.members if not grants[node].standby or node in joining]

    def move(self) -> None:
        """Move a node's role: a standby joins next to it and takes over later; the node becomes a standby."""
        grants, joining = self.disk.held.grants, self.disk.joining
        waiting = [node for node in self.members if grants[node].standby and node not in joining]
        leavers = [node for node in self.training if node not in (*joining, *joining.values())]
        if self.up and waiting and leavers and self.disk.standing == "going":
            joining[self._world.rng.choice(waiting)] = self._world.rng.choice(leavers)
            self._update_roles({})
            self._world.later(0.2, 4.0, self._end_moves)

    def _end_moves(self) -> None:
        """End each move with both nodes connected: the standby trains, and the replaced node becomes a standby."""
        if not self.up:
            return
        ended = {name: leaver for name, leaver in self.disk.joining.items() if {name, leaver} <= self.members.keys()}
        self._update_roles(dict.fromkeys(ended.values(), True))
        if self.up and self.disk.joining:
            self._world.later(0.5, 1.0, self._end_moves)

    def _update_roles(self, changed: Mapping[str, bool]) -> None:
        """Write the roles of the connected nodes with these changes, and forget completed moves."""
        grants, joining = self.disk.held.grants, self.disk.joining
        called = {node for node in joining if node in grants and not grants[node].standby}
        roles = {node: grants[node].standby and node not in joining for node in self.members if node not in called}
        roles |= changed
        if self._write(self._cluster.parts.update_roles(self.disk.held, roles, joining)):
            self._drop_ended_moves()
            self._report()

    def _drop_ended_moves(self) -> None:
        """Forget moves without a standby, and moves of nodes that are gone, waiting or recalled by the pool."""
        grants = self.disk.held.grants
        counted = {node for node, grant in grants.items() if not (grant.standby or grant.leaving)}
        pairs = self.disk.joining.items()
        self.disk.joining = {name: leaver for name, leaver in pairs if name in grants and leaver in counted}

    # ---- the pool ----

    def _link(self) -> None:
        if not self.up or self._pool is not None:
            return
        server = self._cluster.server
        if server is None or not self._world.reaches(self.name, "pool"):
            self._world.later(0.2, 1.0, self._link)
            return
        self._pool = Line(self._world, (self.name, "pool"), (self, server))
        server.linked(self, self._pool)
        self._report()

    def _report(self) -> None:
        if self._pool is not None:
            report = describe_state(self.disk.held, dict(self._unfit), members=self.training, pace=self._pace)
            self._pool.send(self, report)

    @property
    def _pace(self) -> JobPace | None:
        """The pace measured in this life: jobs of one kind scale well, others badly, others become slower."""
        nodes, kind = len(self.training), self.disk.held.submission % 3
        if not nodes:
            return None
        step_s = (1.0, 4.0, 0.5)[kind] / nodes + (0.01, 0.5, 0.2 * nodes)[kind]
        return JobPace(step_s={nodes: step_s}, micro_batches=8, samples=8, workers=1, flop_per_sample=float(kind))

    def _on_shares(self, shares: JobShares) -> None:
        disk = self.disk
        held = self._cluster.parts.apply_shares(disk.held, shares, self._world.now)
        if disk.standing in ("finished", "stopped", "failed"):
            self._report()
            return
        if held.wish == "run":
            held = set_standing(held, "going")
        if not self._write(held):
            return
        for node in [node for node in self.members if node not in held.grants]:
            self._drop(node)
        if self.disk.joining:
            self._update_roles({})  # If the pool recalls the replaced node, its standby counts as an additional node.
        self._report()
        if shares.stranded and self._unfit and not self.members and disk.standing == "going":
            self._all_go("failed", "too few nodes would do")
        self._look_at_wish()

    def _look_at_wish(self) -> None:
        wish = self.disk.held.wish
        if self.disk.standing == "suspended" and wish in ("stop", "stop_now"):
            self._all_go("stopped")
        elif self.disk.standing == "suspended" and self.disk.held.grants:
            # The pool resumed and suspended the job again before the job received either order.
            self._all_go("suspended")
        if self.disk.standing == "going" and wish != "run" and self._doing != wish:
            self._doing = wish
            self._world.later(0.1, 3.0, self._do_wish, wish)
        if self.disk.held.to_leave:
            self._world.later(0.1, 2.0, self._leave)

    def _do_wish(self, wish: str) -> None:
        """End the job as requested; its step is complete and its state is saved."""
        self._doing = ""
        if not self.up or self.disk.held.wish != wish or self.disk.standing != "going":
            return
        self._all_go("suspended" if wish == "suspend" else "stopped")

    def _all_go(self, standing: JobStanding, why: str = "") -> None:
        self._give_back(list(self.disk.held.grants), standing, why)
        self._drop_ended_moves()

    def _leave(self) -> None:
        if self.up and self.disk.standing == "going" and self.disk.held.to_leave:
            self._give_back(self.disk.held.to_leave)

    def _lose(self, nodes: Collection[str]) -> None:
        """Replace lost training nodes by standbys in the same write."""
        grants, joining = self.disk.held.grants, self.disk.joining
        places = sum(not grants[node].standby for node in nodes)
        waiting = [node for node in self.members if grants[node].standby and node not in nodes]
        waiting.sort(key=lambda node: joining.get(node, "") not in nodes)
        free = [node for node in waiting if node not in joining or joining[node] in nodes]
        self._give_back(nodes, taking=free[:places])

    def _give_back(
        self,
        nodes: Collection[str],
        standing: JobStanding = "going",
        why: str = "",
        taking: Collection[str] = (),
    ) -> None:
        """Release nodes: write the record first, then inform the nodes and the pool."""
        numbers = {node: self.disk.held.grants[node].number for node in nodes}
        held = set_roles(give_back(self.disk.held, nodes), dict.fromkeys(taking, False))
        if not self._write(set_standing(held, standing, why)):
            return
        for node, number in numbers.items():
            if node in self.members:
                self.members[node].send(self, number)
                del self.members[node]
            self._seen.pop(node, None)
        self._drop_ended_moves()
        self._report()

    def _write(self, held: Held) -> bool:
        disk = self.disk
        if held == disk.held:
            return True
        try:
            self._world.writing(self.name)
        except Crash:
            self.die()
            self._cluster.job_died(self)
            return False
        before, disk.held = disk.held, held
        for node in held.grants:
            self._seen.setdefault(node, self._world.now)
        self._cluster.checker.held(self, before, held)
        return True

    # ---- nodes ----

    def on_message(self, line: Line, message: Any) -> None:
        """Handle a message from the pool or from a node."""
        if line is self._pool:
            self._on_shares(message)
        elif isinstance(message, NodeComes):
            node = message.node
            held = mark_connected(self.disk.held, node, message.grant)
            if held is None or self.disk.standing != "going":
                line.cut()  # The node retries until it belongs to another job.
            elif node in self._cluster.unfit(self.name):
                self._unfit[node] = NodeUnfit(grant=message.grant, why="no script")
                line.send(self, message.grant)
                self._give_back([node])
            elif self._write(held):
                self.members[node] = line
                self._seen[node] = self._world.now
                self._report()
        else:
            for node, known in self.members.items():
                if known is line:
                    self._seen[node] = self._world.now

    def lost(self, line: Line) -> None:
        """Handle the loss of a line; the lease of a lost node keeps running."""
        if line is self._pool:
            self._pool = None
            self._world.later(0.05, 1.0, self._link)
        self.members = {node: known for node, known in self.members.items() if known is not line}

    def _drop(self, node: str) -> None:
        self.members.pop(node).cut()

    def _tick(self) -> None:
        if not self.up:
            return
        self._world.later(0.9, 1.0, self._tick)
        now, disk = self._world.now, self.disk
        if disk.standing != "going":
            self._report()
            return
        late = [node for node, grant in disk.held.grants.items() if grant.came and now - self._seen[node] > LEASE_S]
        late += find_overdue(disk.held, now, JOIN_S)
        if late:
            self._lose(late)  # The job continues without them at once.
        if not self.up:
            return
        self._train()

    def _train(self) -> None:
        disk, limit_s = self.disk, self.disk.spec.time_limit
        if self.training:
            disk.begun_at = disk.begun_at or self._world.now
            disk.done_s += len(self.training)
        if disk.done_s >= self._cluster.work_s(self.name):
            self._all_go("finished", "completed")
        elif limit_s and disk.begun_at and self._world.now > disk.begun_at + limit_s:
            self._all_go("stopped", "time_limit")
