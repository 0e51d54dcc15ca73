"""The pool above a simulated job, as the job sees it: nodes are granted, recalled, reaped and granted again.

The pool's messages arrive late, twice, or long after newer ones. A node may train only under a grant in the job's
record. A grant that the job has given back never returns to its record.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Protocol

from holdfast.coordination.inputs import PoolSaid
from holdfast.protocol.names import node_of
from holdfast.protocol.plan import GenerationPlan
from holdfast.protocol.pool.grants import Held
from holdfast.protocol.pool.sharing import JobShares, JobState
from holdfast.protocol.record import Record
from tests.simulation.faults.injection import Injector
from tests.simulation.faults.places_taken import PlacesTaken
from tests.simulation.invariants import InvariantError
from tests.simulation.machines.agent import SimAgent, is_standby
from tests.simulation.machines.coordinator import CoordinatorShell
from tests.simulation.world import World

SUBMISSION = 1
_LOOK_S = 0.4
#: a recalled or granted node trains or waits again after at most this many seconds
_PATIENCE_S = 3.0
#: a node that changes between standby and training more often than this under one grant never settles
_MOST_ROLE_CHANGES = 20


class Surroundings(Protocol):
    """The parts of the cluster that the pool uses."""

    world: World
    agents: dict[str, SimAgent]
    coordinator: CoordinatorShell | None
    ended: tuple[int, str] | None
    injector: Injector
    places: PlacesTaken

    def add_node(self, name: str) -> None: ...


class PoolAbove:
    """The grants of the job's nodes, by the pool's record."""

    def __init__(self, cluster: Surroundings) -> None:
        self._cluster = cluster
        self._world = cluster.world
        self._version = self._last = 0
        #: node -> its grant's number, and the version that introduced the grant or its role
        self._grants: dict[str, tuple[int, int]] = {}
        self._leaving: set[int] = set()
        #: the grants of standbys
        self._standbys: set[int] = set()
        self._refused: frozenset[str] = frozenset()
        self._known: set[str] = set()
        self._said: list[JobShares] = []
        #: version of the job's shares -> how many nodes train by it
        self._training: dict[int, int] = {}
        self._held: frozenset[int] = frozenset()
        self._written = Held(submission=SUBMISSION)
        #: how many nodes may train by the decisions of the pool that the job has received
        self._places = 0
        #: the nodes that joined next to a draining node, until they have left themselves
        self._joined: set[str] = set()
        #: the last generation seen, and the grants held when it was first seen
        self._generation = 0
        self._numbers: frozenset[int] = frozenset()
        self._role_changes = Counter[int]()
        self._gone: set[int] = set()
        for at in cluster.world.plan.recalls:
            self._world.timeline.after(at, self._recall)
        for at in cluster.world.plan.calls:
            self._world.timeline.after(at, self._call)
        self._world.timeline.after(_LOOK_S, self._look)

    # ---- nodes ----

    def arrives(self, name: str) -> int:
        """Replace the grant of a node when its agent starts; return the number of the new grant."""
        self._known.add(name)
        self._last += 1
        self._version += 1
        self._grants[name] = self._last, self._version
        if is_standby(name):
            self._standbys.add(self._last)
        self._say()
        return self._last

    def _recall(self) -> None:
        """Recall a node for other jobs. The job keeps at least one."""
        self._cluster.injector.extend(_PATIENCE_S)
        mine = [number for number, _ in self._grants.values() if number not in self._leaving]
        fill = [number for number in mine if number not in self._standbys]
        may = mine if len(fill) > 1 else [number for number in mine if number in self._standbys]
        if may:
            self._leaving.add(self._world.rng.choice(may))
            self._version += 1
            self._say()

    def _call(self) -> None:
        """Call a standby to join."""
        waiting = [name for name, (number, _) in self._grants.items() if number in self._standbys - self._leaving]
        if waiting:
            self._cluster.injector.extend(_PATIENCE_S)
            self._call_node(self._world.rng.choice(waiting))
            self._say()

    def _call_node(self, name: str) -> None:
        self._cluster.places.called(name)
        self._version += 1
        number, _ = self._grants[name]
        self._grants[name] = (
            number,
            self._version,
        )  # States that the job sends before it knows this version no longer count.
        self._standbys.discard(number)
        self._count_role_change(number)

    def _look(self) -> None:
        """Release the grants of agents that have ended. Sometimes repeat an old message."""
        if self._cluster.ended is None:
            for name, (number, _) in list(self._grants.items()):
                agent = self._cluster.agents.get(name)
                if agent is not None and not agent.alive and agent.exit_code is not None:
                    self._release(name, number)
            if self._said and self._world.rng.random() < 0.2:
                self._tell(self._world.rng.choice(self._said[-8:]))
            self._say()
        self._world.timeline.after(_LOOK_S, self._look)

    def _release(self, name: str, number: int) -> None:
        """End a grant: reap its processes on the node, which is granted again later."""
        del self._grants[name]
        self._leaving.discard(number)
        self._standbys.discard(number)
        self._version += 1
        self._world.timeline.after(self._world.rng.uniform(0.01, 0.5), self._reap, name, number)

    def _reap(self, name: str, number: int) -> None:
        agent = self._cluster.agents.get(name)
        if agent is not None and agent.alive and agent.grant == number:
            agent.kill(seen=True)
        if self._cluster.ended is None and name not in self._refused:
            self._world.timeline.after(self._world.rng.uniform(0.05, 2.0), self._offer, name)

    def _offer(self, name: str) -> None:
        if self._cluster.ended is None and name not in self._grants:
            self._cluster.injector.extend(_PATIENCE_S)
            self._cluster.add_node(name)

    # ---- the job ----

    def began(self) -> None:
        """Send the shares to a new coordinator."""
        self._say()

    def told(self, stands: JobState) -> None:
        """Receive the state of the job, after a short delay."""
        self._world.timeline.after(self._world.rng.uniform(0.0, 0.05), self._hear, stands)

    def _hear(self, stands: JobState) -> None:
        self._refused = frozenset(stands.refuses)
        over = stands.standing not in ("going", "suspended")
        gained = 0
        for name, (number, version) in list(self._grants.items()):
            if over or (version <= stands.heard and number not in stands.held):
                gained -= number not in self._standbys
                self._release(name, number)
            elif version <= stands.heard and (number in stands.standbys) != (number in self._standbys):
                gained += 1 if number in self._standbys else -1
                self._standbys ^= {number}
                self._version += 1
                self._count_role_change(number)
        if gained < 0 and not over and self._world.plan.calls:
            self._call_at_once(-gained)

    def _call_at_once(self, nodes: int) -> None:
        """Call standbys in the same transaction in which the job reports fewer nodes, as a pool does."""
        waiting = [name for name, (number, _) in self._grants.items() if number in self._standbys - self._leaving]
        for name in waiting[:nodes]:
            self._call_node(name)

    def _count_role_change(self, number: int) -> None:
        self._role_changes[number] += 1
        if self._role_changes[number] > _MOST_ROLE_CHANGES:
            raise InvariantError(f"the role of grant {number} has changed {_MOST_ROLE_CHANGES} times")

    def _say(self) -> None:
        grants: Mapping[str, int] = {name: number for name, (number, _) in self._grants.items()}
        shares = JobShares(
            term=1,
            version=self._version,
            submission=SUBMISSION,
            grants=grants,
            leaving=frozenset(self._leaving),
            standbys=frozenset(self._standbys),
            role_versions={name: version for name, (_, version) in self._grants.items()},
            stranded=bool(self._refused) and self._known <= self._refused,
        )
        self._said.append(shares)
        self._training[self._version] = len(set(grants.values()) - self._standbys - self._leaving)
        self._tell(shares)

    def _tell(self, shares: JobShares) -> None:
        self._world.timeline.after(self._world.rng.uniform(0.0, 0.1), self._arrive, shares)

    def _arrive(self, shares: JobShares) -> None:
        shell = self._cluster.coordinator
        if shell is not None and shell.alive:
            shell.deliver(shell.feed, PoolSaid(shares))

    # ---- what must hold ----

    def persisted(self, record: Record) -> None:
        """Check a record that was written.

        Raises:
            InvariantError: A member has no grant, or the job holds a grant again that it had given back.
        """
        held = record.held
        if held is None:
            raise InvariantError(f"a job in a pool has no grants in its record: {record}")
        self._gone |= self._held - held.numbers
        self._held = held.numbers
        if again := held.numbers & self._gone:
            raise InvariantError(f"the job holds grants {sorted(again)} again after it gave them back: {held}")
        if held.standing != "going" and held.numbers:
            raise InvariantError(f"a job that is {held.standing} holds grants: {held}")
        before, self._written = self._written, held
        self._counts_no_node_twice(before, held)
        if held.standing == "going" and not record.outcome:
            self._counts_no_idle_node_too_many(held, record)
        for plan in (record.plan, record.pending) if held.standing == "going" else ():
            if plan is not None and plan is record.plan:
                self._nobody_waits_who_trains(plan, held, record)
            nodes = {node_of(worker) for worker in plan.workers} if plan is not None else set[str]()
            if without := nodes - set(held.grants):
                raise InvariantError(f"{sorted(without)} are members without a grant: {plan}, {held}")

    def _counts_no_node_twice(self, before: Held, held: Held) -> None:
        """Check that the job counts no more nodes as training than the pool has decided.

        Otherwise the pool counts a standby that joins next to another node as one node too many, and recalls a third
        node. The place of a lost node remains, for a standby to take.
        """
        known = {grant.number: grant for grant in before.grants.values()}
        trains = [grant for grant in held.grants.values() if not grant.standby]
        granted = [grant for grant in trains if grant.number not in known]
        promoted = [grant for grant in trains if grant.number in known and known[grant.number].standby]
        called = [grant for grant in promoted if known[grant.number].role_version < grant.role_version]
        given = [grant for grant in before.grants.values() if grant.leaving and grant.number not in held.numbers]
        self._places += len(granted) + len(called) - sum(not grant.standby for grant in given)
        counted = sum(grant.came and not grant.leaving for grant in trains)
        if len(called) < len(promoted) and counted > self._places:
            raise InvariantError(f"{counted} nodes count as training, but only {self._places} may: {before}, {held}")

    def _counts_no_idle_node_too_many(self, held: Held, record: Record) -> None:
        """Check that the job counts more nodes than the pool's newest shares only if all of them have ranks.

        The pool recalls one node for each surplus node, so a node without ranks must then be a standby.
        """
        surplus = held.training - self._training.get(held.heard, held.training)
        plans = [plan.workers for plan in (record.plan, record.pending) if plan is not None]
        placed = {node_of(worker) for workers in plans for worker in workers}
        placed |= {name for one in record.leaving for name in (one.node, one.beside)}
        counted = {node for node, grant in held.grants.items() if not (grant.standby or grant.leaving)}
        if surplus > 0 and (idle := counted - placed):
            raise InvariantError(f"{sorted(idle)} count as training but have no ranks, {surplus} too many: {record}")

    def _nobody_waits_who_trains(self, plan: GenerationPlan, held: Held, record: Record) -> None:
        """Check that no member counts as a standby, unless it joins next to the node that it replaces.

        If such a member must leave itself, it counts as a standby until it has left. A member whose node was granted
        again after the plan was made is lost.
        """
        if plan.generation != self._generation:
            self._generation, self._numbers = plan.generation, held.numbers
        leaving = {one.node for one in record.leaving}
        self._joined = {one.beside for one in record.leaving} | (self._joined & leaving)
        members = {node_of(worker) for worker in plan.workers} - self._joined
        standbys = {node for node, grant in held.grants.items() if grant.standby and grant.number in self._numbers}
        if waiting := sorted(members & standbys):
            raise InvariantError(f"{waiting} are members, but the pool counts them as standbys: {plan}, {held}")
