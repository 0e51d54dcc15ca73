"""Applies a fault plan to a cluster."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Protocol

from holdfast.coordination.inputs import Drain, Evidence, Failure, MoveNodes
from holdfast.protocol.failures import Detector, FailureKind, Severity
from tests.simulation.faults.coverage import AT_WORKERS, Seen
from tests.simulation.faults.plans import Fault, FaultKind, FaultPlan
from tests.simulation.faults.troubles import SLOWER, OneWay, Partition
from tests.simulation.machines.agent import SimAgent
from tests.simulation.machines.coordinator import CoordinatorShell
from tests.simulation.machines.worker import SimWorker
from tests.simulation.world import World

#: A plan may kill all nodes. One more node joins this long after the last fault, so that the job can finish.
_RESCUE_AFTER_S = 1.0
#: a clock jumps by one of these amounts, in seconds
_JUMPS_S = (-7200.0, -2.0, 2.0, 7200.0)


class StruckCluster(Protocol):
    """The cluster that a fault plan strikes."""

    world: World
    agents: dict[str, SimAgent]
    coordinator: CoordinatorShell | None
    ended: tuple[int, str] | None

    @property
    def over(self) -> bool: ...

    def add_node(self, name: str) -> None: ...

    def interrupt(self) -> None: ...

    def ask(self, request: Drain | MoveNodes) -> None: ...

    def undrain(self) -> None: ...

    def supersede(self) -> None: ...

    def power_cut(self) -> None: ...

    def restore_backup(self, number: int, seconds: float) -> None: ...


class Injector:
    """Strikes at times, at boundaries and before writes; knows when the last fault ends."""

    def __init__(self, cluster: StruckCluster, plan: FaultPlan) -> None:
        self.down_s = plan.crash_down_s
        #: how often each fault has struck in each phase
        self.seen: Seen = Counter()
        #: no fault of the plan is active after this time
        self.quiet_from = cluster.world.timeline.now
        self._cluster = cluster
        self._world = cluster.world
        self._plan = plan
        self._at_boundary: dict[str, list[Fault]] = {}
        for fault in plan.faults:
            if fault.boundary:
                self._at_boundary.setdefault(fault.boundary, []).append(fault)
        self._next_node = plan.nodes
        self._crashes = set(plan.crashes)
        self._writes = 0
        self._struck = False
        self.extend(plan.start_spread)

    @property
    def watching(self) -> bool:
        """Whether some fault waits for a boundary."""
        return bool(self._at_boundary)

    def dies_before(self, write: int) -> bool:
        """Return whether the coordinator dies before its n-th write."""
        self._writes = write
        return write in self._crashes

    def arm(self) -> None:
        """Schedule the faults that strike at a time."""
        timeline = self._world.timeline
        for fault in self._plan.faults:
            if not fault.boundary:
                timeline.after(fault.time, self.strike, fault)
                self.extend(fault.time + fault.duration)
        if self._plan.faults:
            self.extend(_RESCUE_AFTER_S)
            timeline.at(self.quiet_from, self.rescue)

    def extend(self, seconds: float) -> None:
        """Note that a fault is active until `seconds` from now."""
        self.quiet_from = max(self.quiet_from, self._world.timeline.now + seconds)

    def at_boundary(self, worker: SimWorker, name: str) -> None:
        """Apply the first fault that waits for this boundary of this worker."""
        for fault in self._at_boundary.get(name, ()):
            if fault.step not in (0, worker.machine.step):
                continue
            if fault.target % self._plan.nodes != _number(worker.agent.name) % self._plan.nodes:
                continue
            self._at_boundary[name].remove(fault)
            self._at_boundary = {place: faults for place, faults in self._at_boundary.items() if faults}
            self._world.trace(worker.id, "at", name)
            self._strike(fault, self._cluster.agents[worker.node], worker)
            self.extend(fault.duration + _RESCUE_AFTER_S)
            self._world.timeline.after(fault.duration + _RESCUE_AFTER_S, self.rescue)
            return

    def strike(self, fault: Fault) -> None:
        """Apply a timed fault to its current target."""
        agents = [agent for agent in self._cluster.agents.values() if agent.alive]
        agent = agents[fault.target % len(agents)] if agents else None
        worker = agent.workers[fault.target // 7 % len(agent.workers)] if agent and agent.workers else None
        self._strike(fault, agent, worker)

    def _strike(self, fault: Fault, agent: SimAgent | None, worker: SimWorker | None) -> None:
        cluster = self._cluster
        if cluster.over:
            return
        if not self._struck:
            self._struck = True
            self._crashes.update(self._writes + after for after in self._plan.crashes_after_strike)
        self._world.trace(
            "FAULT", fault.kind, agent.name if agent else None, worker.id if worker else None, fault.duration
        )
        self._note(fault, worker)
        kind = fault.kind
        if kind in (FaultKind.JOIN, FaultKind.JOIN_UNREACHABLE, FaultKind.RETURN, FaultKind.UNDRAIN):
            self._bring(fault)
        elif kind in (FaultKind.DAMAGE, FaultKind.SLOW_STORE):
            self._strike_disk(fault)
        elif kind is FaultKind.CLOCK_JUMP:
            self._jump(fault, agent)
        elif kind is FaultKind.INTERRUPT:
            cluster.interrupt()
        elif kind in (FaultKind.KILL_WITNESSES, FaultKind.KILL_WORKERS):
            self._kill_many(fault)
        elif kind in (
            FaultKind.CRASH_COORDINATOR,
            FaultKind.PAUSE_COORDINATOR,
            FaultKind.SUPERSEDE,
            FaultKind.POWER_CUT,
            FaultKind.OLD_STORE,
        ):
            self._strike_coordinator(fault)
        elif agent is not None:
            self._strike_node(fault, agent)
            if worker is not None:
                self._strike_worker(fault, worker)

    def _strike_disk(self, fault: Fault) -> None:
        """Cut a checkpoint short, or slow the coordinator's writes down."""
        world = self._world
        if fault.kind is FaultKind.DAMAGE:
            world.checkpoints.damage_newest()
        else:
            world.store_slow_until = max(world.store_slow_until, world.timeline.now + fault.duration)

    def _jump(self, fault: Fault, agent: SimAgent | None) -> None:
        """Set the clocks of the coordinator's machine and of a node."""
        seconds = _JUMPS_S[fault.target % len(_JUMPS_S)]
        self._world.jump(seconds)
        if agent is not None:
            self._world.troubles(agent.name).wall_off_s -= seconds

    def _bring(self, fault: Fault) -> None:
        """Add a node: a new one, a lost one, or one that was quarantined or drained."""
        if fault.kind in (FaultKind.JOIN, FaultKind.JOIN_UNREACHABLE):
            name, world = f"n{self._next_node}", self._world
            if fault.kind is FaultKind.JOIN_UNREACHABLE:
                refused = fault.target % 2 == 0
                world.data_plane.block(world.timeline, OneWay(None, frozenset([name]), refused), None)
                self.extend(world.timing.operation_timeout_s + world.plan.longer_alone_s)
            self._cluster.add_node(name)
            self._next_node += 1
        elif fault.kind is FaultKind.RETURN:
            self._return_one(fault.target)
        else:
            self._cluster.undrain()

    def _return_one(self, target: int) -> bool:
        """Bring back a lost node; False if no node is lost."""
        agents = self._cluster.agents.items()
        gone = sorted(name for name, other in agents if not other.alive and other.exit_code is None)
        if gone:
            self._cluster.add_node(gone[target % len(gone)])
        return bool(gone)

    def bring_one(self) -> None:
        """Add one node that a job waits for: a lost one, or a new one."""
        if not self._return_one(0):
            self._bring(Fault(kind=FaultKind.JOIN))

    def _kill_many(self, fault: Fault) -> None:
        """Kill all workers at once, or all nodes with witnesses of the current generation, in any order.

        The coordinator sees some of these nodes fail at once.
        """
        if fault.kind is FaultKind.KILL_WORKERS:
            for worker in [one for agent in self._cluster.agents.values() if agent.alive for one in agent.workers]:
                self._kill_worker(worker)
            return
        world, within_s = self._world, fault.duration
        record = world.store.record
        plan = record.plan if record is not None else None
        nodes = {plan.members[rank].node for rank in plan.witnesses} if plan is not None else set[str]()
        for agent in [agent for name, agent in self._cluster.agents.items() if name in nodes]:
            kill = partial(agent.kill, seen=world.rng.random() < 0.7)
            world.timeline.after(world.rng.uniform(0.0, within_s), kill)
        self.extend(within_s)

    def note_coordinator(self, what: str) -> None:
        """Count a fault by the coordinator's current phase."""
        shell = self._cluster.coordinator
        self.seen[what, shell.phase if shell else "away"] += 1

    def _note(self, fault: Fault, worker: SimWorker | None) -> None:
        if fault.kind not in AT_WORKERS:
            self.note_coordinator(fault.kind)
        elif worker is not None:
            self.seen[fault.kind, worker.at] += 1

    def _strike_coordinator(self, fault: Fault) -> None:
        cluster, timeline = self._cluster, self._world.timeline
        shell = cluster.coordinator
        if shell is None:
            return
        if fault.kind is FaultKind.CRASH_COORDINATOR:
            self.down_s = fault.duration
            # A boundary may be reached while the coordinator's own message is handled, so it crashes after that.
            timeline.after(0.0, shell.crash)
            self.extend(fault.duration)
            return
        if fault.kind is FaultKind.POWER_CUT:
            self.down_s = fault.duration
            timeline.after(0.0, cluster.power_cut)
            self.extend(fault.duration)
            return
        if fault.kind is FaultKind.OLD_STORE:
            self.down_s = min(fault.duration / 8, 0.1)
            timeline.after(0.0, cluster.restore_backup, fault.target, fault.duration)
            self.extend(fault.duration)
            return
        shell.stop()
        timeline.after(fault.duration, shell.resume)
        self.extend(fault.duration)
        if fault.kind is FaultKind.SUPERSEDE:
            timeline.after(fault.duration * 0.5, cluster.supersede)

    def _strike_node(self, fault: Fault, agent: SimAgent) -> None:
        rng, timeline = self._world.rng, self._world.timeline
        match fault.kind:
            case FaultKind.KILL_NODE:
                agent.kill(seen=True)
            case FaultKind.SILENT_NODE:
                agent.kill(seen=False)
            case FaultKind.DRAIN:
                self._cluster.ask(Drain((agent.name,)))
            case FaultKind.NOTICE:
                agent.told_to_end(fault.duration)
                self.extend(fault.duration + _RESCUE_AFTER_S)
                timeline.after(fault.duration + _RESCUE_AFTER_S, self.rescue)
            case FaultKind.MOVE:
                self._cluster.ask(MoveNodes((agent.name,)))
            case FaultKind.SLOW_NODE:
                times, until = SLOWER[fault.target // 8 % len(SLOWER)], timeline.now + fault.duration
                self._world.troubles(agent.name).slowed(times, until)
            case FaultKind.STOP_NODE:
                agent.stop()
                timeline.after(fault.duration, agent.resume)
            case FaultKind.CUT:
                above, below = rng.choice(((0.0, 0.0), (0.0, 0.5), (0.5, 0.0), (0.01, 0.01)))
                agent.cut(lose=rng.random() < 0.5, above_s=above, below_s=below)
            case FaultKind.BAD_SENDER | FaultKind.ONE_WAY:
                self._block(fault, agent.name)
            case _:
                self._trouble(fault, agent.name)

    def _block(self, fault: Fault, node: str) -> None:
        """Make a node's connections fail, to all other nodes or to one."""
        world = self._world
        others = sorted(name for name, agent in self._cluster.agents.items() if agent.alive and name != node)
        to = frozenset([world.rng.choice(others)]) if others and fault.kind is FaultKind.ONE_WAY else None
        one_way = OneWay(frozenset([node]), to, refused=fault.target // 8 % 2 == 0)
        world.data_plane.block(world.timeline, one_way, fault.duration)

    def _trouble(self, fault: Fault, node: str) -> None:
        """Apply a fault to a node. Its processes stay alive."""
        world = self._world
        troubles, until = world.troubles(node), world.timeline.now + fault.duration
        match fault.kind:
            case FaultKind.LAG_LISTENER:
                troubles.deaf_until = max(troubles.deaf_until, until)
            case FaultKind.LAG_UP:
                troubles.up_until = max(troubles.up_until, until)
            case FaultKind.LAG_DOWN:
                troubles.down_until = max(troubles.down_until, until)
            case FaultKind.LINK_DOWN:
                troubles.up_until, troubles.down_until = max(troubles.up_until, until), max(troubles.down_until, until)
                world.data_plane.part(world.timeline, Partition(frozenset([node]), None), fault.duration)
            case FaultKind.SLOW_DISK:
                troubles.slow_until = max(troubles.slow_until, until)
            case FaultKind.FULL_DISK:
                troubles.full_until = max(troubles.full_until, until)
            case FaultKind.FULL_MEMORY:
                troubles.memory_full_until = max(troubles.memory_full_until, until)
            case FaultKind.FLIP:
                for part in world.memory(node).parts.values():
                    part.damaged = True
            case FaultKind.PARTITION | FaultKind.PARTITION_FOR_GOOD:
                others = sorted(name for name, agent in self._cluster.agents.items() if agent.alive and name != node)
                one = frozenset([world.rng.choice(others)]) if others and world.rng.random() < 0.5 else None
                heals = fault.duration if fault.kind is FaultKind.PARTITION else None
                world.data_plane.part(world.timeline, Partition(frozenset([node]), one), heals)
                if heals is None:  # no process can detect it before an operation times out
                    self.extend(world.timing.operation_timeout_s + world.plan.longer_alone_s)
            case _:
                pass

    def _strike_worker(self, fault: Fault, worker: SimWorker) -> None:
        world = self._world
        match fault.kind:
            case FaultKind.KILL_WORKER:
                self._kill_worker(worker)
            case FaultKind.STOP_WORKER:
                worker.stop()
                world.timeline.after(fault.duration, worker.resume)
            case FaultKind.RAISE_APPLY:
                worker.raise_next = True
            case FaultKind.RAISE:
                worker.raise_script = True
            case FaultKind.GLITCH:
                worker.glitch()
            case FaultKind.CORRUPT_SUM:
                worker.corrupt()
            case FaultKind.CORRUPT_STATE:
                worker.corrupted = True
            case FaultKind.DIFFER:
                worker.settings = fault.target + 1
                worker.checker.lets_differ(worker.node)
            case FaultKind.HANG:
                worker.hanging = True
                tell = self._tell_coordinator_of_hang if fault.target % 2 else self._tell_agent_of_hang
                world.timeline.after(fault.duration, worker.agent.deliver, tell, worker)
            case _:
                pass

    def _kill_worker(self, worker: SimWorker) -> None:
        worker.kill()
        self._world.after("exit", worker.agent, worker.agent.worker_ended, worker, -9, FailureKind.PROCESS_EXIT)

    @staticmethod
    def _tell_agent_of_hang(worker: SimWorker) -> None:
        """Kill a hanging worker, as its agent does after hang detection."""
        worker.hanging = False
        if worker.hung and worker.alive:
            worker.kill()
            worker.agent.worker_ended(worker, -9, FailureKind.HANG)

    def _tell_coordinator_of_hang(self, worker: SimWorker) -> None:
        """Report the hang to the coordinator, again and again until the worker is gone."""
        worker.hanging = False
        if not worker.hung or not worker.alive:
            return
        shell, node = self._cluster.coordinator, worker.node
        now, again_s = self._world.timeline.now, self._world.config.lease_s / 2
        if shell is not None:
            evidence = Evidence(detector=Detector.TIMEOUT, detail="a training thread stands still")
            kind, severity = FailureKind.HANG, Severity.NODE
            failure = Failure(kind=kind, node=node, severity=severity, since=now, evidence=evidence)
            shell.deliver(shell.feed, failure)
        self.extend(again_s)
        self._world.timeline.after(again_s, worker.agent.deliver, self._tell_coordinator_of_hang, worker)

    def rescue(self) -> None:
        """Add nodes if none is left, or too few to start."""
        cluster = self._cluster
        if cluster.ended is not None:
            return
        started = self._world.store.record is not None and self._world.store.record.generation > 0
        # the nodes that a job waits for
        alive = sum(agent.alive and not agent.standby for agent in cluster.agents.values())
        needed = max(1, self._plan.ep_size, self._plan.nodes_for_experts)
        for _ in range(alive, needed if started else self._plan.start_nodes):
            cluster.add_node(f"n{self._next_node}")
            self._next_node += 1


def _number(node: str) -> int:
    return int(node[1:])
