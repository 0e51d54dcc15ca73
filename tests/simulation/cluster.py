"""A simulated cluster of failing machines under one virtual clock; it runs a fault plan."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from holdfast.coordination.failures.suspects import TRANSFER_TRIES
from holdfast.coordination.inputs import Drain, MoveNodes, Shutdown, Undrain
from holdfast.errors import EXIT_DONE, EXIT_INTERRUPTED
from holdfast.protocol.messages.agent import CoordinatorMessage
from holdfast.protocol.pool.sharing import JobState
from holdfast.protocol.record import Record
from tests.simulation.durable import SimJournal
from tests.simulation.faults.ends import barred
from tests.simulation.faults.injection import Injector
from tests.simulation.faults.one_way import ONE_WAY
from tests.simulation.faults.places_taken import PlacesTaken
from tests.simulation.faults.plans import THREAD_BOUNDARIES, FaultKind, FaultPlan
from tests.simulation.faults.pool_above import PoolAbove
from tests.simulation.faults.troubles import OneWay
from tests.simulation.invariants import Checker
from tests.simulation.machines.agent import FIRST_STANDBY, SimAgent
from tests.simulation.machines.coordinator import CoordinatorShell
from tests.simulation.machines.worker import SimWorker
from tests.simulation.network import SimConnection
from tests.simulation.world import START, Parts, World


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The end of a run; `events` is the number of simulation events."""

    exit_code: int
    why: str
    time: float
    events: int


class SimCluster:
    """One run, which is deterministic: the same plan and parts give the same run."""

    def __init__(self, plan: FaultPlan, parts: Parts | None = None, *, keep_trace: bool = False) -> None:
        self.plan = plan
        self.world = World(plan, parts or Parts(), keep_trace=keep_trace)
        self.checker = Checker(self.world)
        self.places = PlacesTaken(waits=plan.on_loss == "wait" and not plan.restart)
        self.agents: dict[str, SimAgent] = {}
        self.coordinator: CoordinatorShell | None = None
        self._coordinators: list[CoordinatorShell] = []
        self.ended: tuple[int, str] | None = None
        #: The number of coordinators that detected an outdated store and stopped.
        self.outdated_seen = 0
        self._newest_journal: SimJournal | None = None
        self.injector = Injector(self, plan)
        self.pool = PoolAbove(self) if plan.pooled else None
        self._homeless: list[SimAgent] = []
        for link in plan.blocked:
            sender, receiver = (frozenset([f"n{end}"]) if end >= 0 else None for end in link)
            one_way = OneWay(sender, receiver, refused=sum(link) % 2 == 0)
            self.world.data_plane.block(self.world.timeline, one_way, None)
        self._writes = 0
        #: The event limit, which only an endless loop exceeds; 1,000 nodes need about 50,000 events.
        self.most_events = 500_000

    # ---- running ----

    def run(self) -> Outcome:
        """Run the plan to its end.

        Raises:
            InvariantError: An invariant is violated.
        """
        self.start_coordinator()
        for index in range(self.plan.nodes):
            self.world.timeline.after(self.world.rng.uniform(0.0, self.plan.start_spread), self.add_node, f"n{index}")
        for index in range(FIRST_STANDBY, FIRST_STANDBY + self.plan.standbys):
            self.world.timeline.after(self.world.rng.uniform(0.0, 0.5), self.add_node, f"n{index}")
        self.injector.arm()
        steps, patience_s, helped, helped_at = 0, self.patience_s, 0, 0.0
        while not self.over:
            self.world.timeline.step()
            steps += 1
            now = self.world.timeline.now
            if steps > self.most_events:
                self.checker.stuck()
            if now > max(self.injector.quiet_from, self.checker.progress_at, helped_at) + patience_s:
                if helped == self._most_help or not self._waits_for_a_person:
                    self.checker.stuck()
                helped, helped_at = helped + 1, now
                self._help()
        self.checker.finished()
        assert self.ended is not None
        return Outcome(exit_code=self.ended[0], why=self.ended[1], time=self.world.timeline.now - START, events=steps)

    @property
    def patience_s(self) -> float:
        """The time that a job may make no progress after the last fault, in seconds.

        It is two leases, the build timeout of a group, and a step of one node with all micro-batches. A permanently
        partitioned node is identified only after a group with two other nodes, which takes a second build timeout. A
        hanging transfer is tried twice, the second time from another sender. Members with a finished loop may abort
        each attempt once.
        """
        timing = self.world.timing
        alone_s = self.plan.micro_batches * timing.spans["micro_batch"][1] + self.plan.longer_alone_s
        kinds = Counter(fault.kind for fault in self.plan.faults)
        groups = 1 + (FaultKind.PARTITION_FOR_GOOD in kinds)
        tries_s = (
            2
            * TRANSFER_TRIES
            * timing.operation_timeout_s
            * (len(self.plan.blocked) + sum(kinds[kind] for kind in ONE_WAY))
        )
        return 2 * self.world.config.lease_s + groups * timing.build_timeout_s + tries_s + alone_s

    @property
    def _most_help(self) -> int:
        """The maximum number of nodes added or undrained: one per node and one per fault that may kill a node.

        The limit is higher if nodes cannot connect to some nodes.
        """
        again = sum(fault.kind in (FaultKind.KILL_NODE, FaultKind.SILENT_NODE) for fault in self.plan.faults)
        unreachable = sum(fault.kind is FaultKind.JOIN_UNREACHABLE for fault in self.plan.faults)
        return self.plan.nodes + again + 2 * len(self.plan.blocked) + unreachable

    @property
    def _waits_for_a_person(self) -> bool:
        """Whether the job waits for a person to add or undrain a node.

        A job that has not begun waits for all its nodes, including an excluded node. A job without nodes waits for
        any node. A job that keeps its size waits for each lost node. A job that needs all remaining nodes waits if
        one of them is permanently partitioned.
        """
        record = self.world.store.record
        if record is None:
            return False
        deserted = record.generation > 0 and not any(agent.alive for agent in self.agents.values())
        return self._lacks or deserted or (record.generation == 0 and bool(barred(record) or record.given_up))

    @property
    def _lacks(self) -> bool:
        """Whether the job needs an additional node."""
        lacks = self._lacks_nodes or self._lacks_room or self._lacks_reach or self._lacks_refused
        return lacks or self._lacks_first or self._has_only_standbys

    @property
    def _lacks_first(self) -> bool:
        """Whether a job that has not begun lacks a node that was terminated or drained, and will not connect again."""
        shell, record = self.coordinator, self.world.store.record
        if shell is None or not shell.alive or record is None or record.generation > 0:
            return False
        agents = list(self.agents.values())
        here = sum(agent.alive and not agent.standby for agent in agents)
        ended = any(not agent.alive and (agent.ended_by_machine or agent.exit_code == EXIT_DONE) for agent in agents)
        return ended and here < shell.machine.config.spec.nodes_to_begin

    @property
    def _has_only_standbys(self) -> bool:
        """Whether only standbys are left in a job that does not replace lost nodes by standbys."""
        shell = self.coordinator
        if self.plan.on_loss != "shrink" or shell is None or not shell.alive:
            return False
        members = shell.machine.members
        return shell.machine.need_reporter.need is not None and bool(members.standbys) and not members.regular

    @property
    def _lacks_nodes(self) -> bool:
        """Whether a job that keeps its size reports that it waits for nodes."""
        shell = self.coordinator
        return self.places.waits and shell is not None and shell.alive and shell.machine.need_reporter.need is not None

    @property
    def _lacks_room(self) -> bool:
        """Whether excluded or drained nodes and a lost node leave too few nodes for the experts."""
        shell, record = self.coordinator, self.world.store.record
        if shell is None or not shell.alive or record is None or shell.machine.need_reporter.need is None:
            return False
        away = barred(record) | {one.node for one in (*record.leaving, *record.given_up)}
        here = [agent.name for agent in self.agents.values() if agent.alive and agent.name not in away]
        return bool(away) and len(here) < self._nodes_for_experts

    @property
    def _nodes_for_experts(self) -> int:
        """How many nodes all experts need, in free or in fixed places."""
        return max(self.plan.nodes_for_experts, -(-self.plan.ep_size // self.plan.workers_per_node))

    @property
    def _lacks_refused(self) -> bool:
        """Whether the job waits for a node to replace or to identify an unreachable node."""
        shell, record = self.coordinator, self.world.store.record
        if shell is None or not shell.alive or record is None or record.plan is not None:
            return False
        return bool(shell.machine.context.start_probes.unclear or (record.generation == 0 and self.checker.refused))

    @property
    def _lacks_reach(self) -> bool:
        """Whether the job needs an unreachable node for its experts, or reports that it waits for nodes."""
        kinds = {fault.kind for fault in self.plan.faults}
        here = [agent.name for agent in self.agents.values() if agent.alive]
        if FaultKind.PARTITION_FOR_GOOD in kinds and len(here) <= self._nodes_for_experts:
            return True
        reached = sum(self.world.data_plane.blocked("", name) is None for name in here)
        if FaultKind.JOIN_UNREACHABLE in kinds and here and reached < self._nodes_for_experts:
            return True
        shell = self.coordinator
        waits = shell is not None and shell.alive and shell.machine.need_reporter.need is not None
        return waits and bool(kinds & ONE_WAY)

    def _help(self) -> None:
        """Add or undrain a node that the job waits for."""
        if self._lacks:
            self.injector.bring_one()
        elif any(agent.alive for agent in self.agents.values()):
            self.undrain()
        else:
            self.injector.rescue()

    @property
    def over(self) -> bool:
        """Whether the job has ended and no agent is left; after an interrupt the launcher ends the agents."""
        return self.ended is not None and (
            self.world.interrupted or not any(agent.alive for agent in self.agents.values())
        )

    # ---- nodes ----

    def add_node(self, name: str) -> None:
        """Start a node's agent, unless an agent with that name is alive."""
        known = self.agents.get(name)
        if known is not None and known.alive:
            return
        self.world.trace(name, "starts")
        agent = self.agents[name] = SimAgent(self, name)
        agent.boot()

    def boundary(self, worker: SimWorker, name: str) -> bool:
        """Apply the plan's faults to a worker at this boundary; return True if it died or hangs."""
        worker.at = name
        injector = self.injector
        if injector.watching:
            injector.at_boundary(worker, name)
        in_thread = name in THREAD_BOUNDARIES
        worker.hung = worker.hung or (worker.hanging and in_thread)
        return not worker.alive or (worker.hung and in_thread)

    # ---- coordinators ----

    def start_coordinator(self) -> None:
        """Start a coordinator from the store and the journal, and let waiting agents connect."""
        if self.coordinator is not None and self.coordinator.alive and not self.coordinator.stopped:
            return
        shell = self.coordinator = CoordinatorShell(self, self.world.pid())
        self._coordinators.append(shell)
        self.world.trace("coordinator", shell.pid, "starts", self.world.store.version)
        shell.boot()
        if self.pool is not None:
            self.pool.began()
        homeless, self._homeless = self._homeless, []
        for agent in homeless:
            self.world.after("reconnect", agent, agent.connect)

    def interrupt(self) -> None:
        """Request that the job saves and ends; repeat until it has ended, as the launcher does."""
        self.world.interrupted = True
        shell = self.coordinator
        if shell is not None:
            shell.deliver(shell.feed, Shutdown(EXIT_INTERRUPTED, "Ctrl-C", save=True))
        if not self.over:
            self.world.timeline.after(0.5, self.interrupt)

    def ask(self, request: Drain | MoveNodes) -> None:
        """Send a request about nodes to the coordinator; ignore a refusal."""
        if self.coordinator is not None:
            self.coordinator.deliver(self.coordinator.ask, request)

    def undrain(self) -> None:
        """Undrain a quarantined or drained node, and start its agent again."""
        if self.coordinator is not None:
            self.coordinator.deliver(self._let_back, self.coordinator)

    def _let_back(self, shell: CoordinatorShell) -> None:
        out = (*shell.machine.context.escalation.excluded_nodes, *shell.machine.record.drained)
        if out:
            shell.feed(Undrain(out[0].node))
            self.world.after("reconnect", shell, self._bring_back, out[0].node)

    def _bring_back(self, name: str) -> None:
        """Start a node's agent again after the previous agent has ended."""
        if self.agents[name].alive and not self.over:
            self.world.timeline.after(0.1, self._bring_back, name)
        else:
            self.add_node(name)

    def supersede(self) -> None:
        """Start another coordinator while the old one is paused."""
        old = self.coordinator
        self.start_coordinator()
        if old is None or self.coordinator is old:
            return
        for agent in self.agents.values():
            self.world.after("reconnect", agent, agent.reconnect_to_new)

    def coordinator_gone(self, shell: CoordinatorShell) -> None:
        """Start a new coordinator after the downtime in the plan."""
        if shell is self.coordinator:
            self.coordinator = None
            self.world.timeline.after(self.injector.down_s, self.start_coordinator)
            self.injector.extend(self.injector.down_s)

    def power_cut(self) -> None:
        """Cut the power of the coordinators' machine; unsynced store and journal data are lost."""
        self.world.trace("power cut")
        for shell in self._coordinators:
            shell.crash()
        self.world.store.power_cut()
        self.world.journal.power_cut(self.world.rng)
        self.checker.journal_cut()
        self.places.cut(self.world.journal.events)

    def restore_backup(self, number: int, seconds: float) -> None:
        """Restore the store and the journal from a backup for some seconds, then put the newest data back.

        Coordinators that start on the backup must stop. Nothing happens if no running agent knows a newer generation
        than the backup.
        """
        world, store = self.world, self.world.store
        if store.outdated or not store.backups or self.over:
            return
        backup = store.backups[number % len(store.backups)]
        newer = [agent for agent in self.agents.values() if agent.machine.heard.generation > backup.generation]
        if not any(agent.alive and not agent.stopped for agent in newer):
            return
        world.trace("backup", backup)
        store.restore_backup(number)
        self._newest_journal, world.journal = world.journal, SimJournal()
        world.journal.events = self._newest_journal.events[: backup.newest_event]
        for shell in self._coordinators:
            shell.crash()
        world.timeline.after(seconds, self._put_back)

    def on_outdated_message(self, shell: CoordinatorShell, name: str, message: CoordinatorMessage) -> None:
        """Check a message from a coordinator with an outdated store to an agent."""
        self.checker.on_outdated_message(self.agents[name].machine.heard, message, shell.machine.record)

    def _put_back(self) -> None:
        assert self._newest_journal is not None
        self.world.trace("backup", "is replaced by the newest")
        for shell in self._coordinators:
            shell.crash()
        self.world.store.put_back()
        self.world.journal, self._newest_journal = self._newest_journal, None

    def connect(self, agent: SimAgent) -> SimConnection | None:
        """Connect an agent, or return None without a coordinator; the agent connects when one starts."""
        shell = self.coordinator
        if shell is None or not shell.alive:
            self._homeless.append(agent)
            return None
        number = self.world.pid()
        connection = shell.connections[number] = SimConnection(self.world, number, agent, shell)
        return connection

    def write_due(self, shell: CoordinatorShell, what: str) -> bool:
        """Count a coordinator's write; return True if the coordinator dies before it."""
        self._writes += 1
        if self.injector.dies_before(self._writes):
            self.injector.note_coordinator(f"crash before {what}")
            self.injector.down_s = self.plan.crash_down_s
            if self.plan.power_cuts:
                self.power_cut()
            else:
                shell.crash()
            return True
        return not shell.alive

    @property
    def writes(self) -> int:
        """The number of writes of all coordinators."""
        return self._writes

    def on_job_state(self, shell: CoordinatorShell, stands: JobState) -> None:
        """Pass a coordinator's report about the job to its pool."""
        if self.pool is not None:
            self.pool.told(stands)

    def persisted(self, record: Record) -> None:
        """Pass a coordinator's new record to the pool."""
        if self.pool is not None:
            self.pool.persisted(record)

    def grant_of(self, name: str) -> int:
        """Return the grant with which a node's agent starts, or 0 without a pool."""
        return self.pool.arrives(name) if self.pool is not None else 0

    def job_ended(self, exit_code: int, why: str) -> None:
        """Record the end of the job that a coordinator reports."""
        self.ended = (exit_code, why)
        self.checker.job_ended(exit_code, why)


def run_plan(plan: FaultPlan, parts: Parts | None = None) -> Outcome:
    """Run one plan.

    Raises:
        InvariantError: An invariant is violated; the message has the plan.
    """
    return SimCluster(plan, parts).run()
