"""Whose place a standby takes, and when the others wait for one.

A standby that is warm takes the place of a node that is lost at once: the same rank, share and experts. Where the job
cannot go on without (too few slots for its experts, `wait`, nobody left), a cold one does too: that it comes up then
lies beside everything else that has to be done. Where a place is empty, a standby that becomes warm joins.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from msgspec.structs import replace

from holdfast.coordination.config import CoordinatorConfig
from holdfast.coordination.generations.announcing import Newcomers
from holdfast.coordination.generations.fitting import workers_by_node
from holdfast.coordination.generations.planner import copies_left, lacks_slots
from holdfast.coordination.membership import Node
from holdfast.coordination.nodes.standbys import Standbys
from holdfast.coordination.progress.choosing import NodesLost, Replacement, choose
from holdfast.coordination.progress.costs import Cost, MeasuredCosts
from holdfast.coordination.turn import Transaction
from holdfast.errors import BadInputError, RefusedError, UnreachableError
from holdfast.protocol.names import node_of
from holdfast.protocol.plan import GenerationPlan
from holdfast.protocol.record import Departure


class Replacing:
    """The places that are empty, and who takes them."""

    def __init__(
        self,
        transaction: Transaction,
        config: CoordinatorConfig,
        standbys: Standbys,
        newcomers: Newcomers,
        costs: MeasuredCosts,
    ) -> None:
        self._transaction = transaction
        self._config = config
        self._standbys = standbys
        self._newcomers = newcomers
        self._costs = costs
        #: why the places that are empty are filled, or not; "" where no place is
        self.why = ""
        #: who takes whose place in the next generation, and why it is this one, by node
        self._stand_ins: dict[str, tuple[str, str]] = {}

    @property
    def workers(self) -> list[str]:
        """The workers that take others' places in the next generation."""
        nodes = self._transaction.members.nodes
        return [worker for name in self._stand_ins if self._stands_in(name) for worker in nodes[name].workers]

    def over(self) -> dict[str, tuple[str, str]]:
        """The next generation is decided: return who takes whose place in it, and why it is this one."""
        stand_ins, self._stand_ins = self._stand_ins, {}
        return {name: whose for name, whose in stand_ins.items() if self._stands_in(name)}

    def pass_on(self, successors: Mapping[str, str]) -> None:
        """Assign leavers to other standbys, if the ones that joined for them are lost or leave themselves.

        Args:
            successors: the nodes that are lost or leave, with the standby that takes the place of each.
        """
        leaving = self._transaction.record.leaving
        if any(one.beside in successors for one in leaving):
            changed = (replace(one, beside=successors.get(one.beside, one.beside)) for one in leaving)
            self._transaction.change(leaving=tuple(changed))

    def fill(self, plan: GenerationPlan) -> None:
        """The members of a plan that are left have spoken: let standbys take the places of the others."""
        members, self.why = self._transaction.members, ""
        choice = self._weigh(plan)
        if not members.standbys or not self._config.spec.recovery.uses_standbys or not choice.at_once:
            return
        self._stand_ins = {name: whose for name, whose in self._stand_ins.items() if self._stands_in(name)}
        for name in self._empty(plan):
            standby = self._choose(name, self._candidates())
            if standby is None:
                return
            self.promote(standby)
            self._stand_ins[standby] = name, self._whence(name, standby)
            self.pass_on({name: standby})

    def _weigh(self, plan: GenerationPlan) -> Replacement:
        """Say whether standbys take the places that are empty now, and keep why."""
        empty, recovery = self._empty(plan), self._config.spec.recovery
        if not empty or recovery.on_node_failure != "auto":
            return Replacement(at_once=True, why="")
        members, nodes = self._transaction.members, list(workers_by_node(plan))
        if not any(map(self._standbys.ready, members.standbys)) or lacks_slots(self._transaction, self._config):
            self.why = f"no standby is warm: {len(nodes) - len(empty)} of {len(nodes)} nodes go on"
            return Replacement(at_once=True, why=self.why)
        saved_at = self._transaction.record.saving.saved_at or self._transaction.record.run_since
        copies = copies_left(self._transaction.record, [name for name in nodes if name in members.nodes])
        back_s = max(0.0, self._transaction.now - saved_at)
        experts = plan.expert_plan is not None
        loss = NodesLost(nodes=len(nodes), lost=len(empty), copies=copies, back_s=back_s, experts=experts)
        choice = choose(self._costs, loss, self._transaction.now)
        self.why = choice.why
        return choice

    def unfollowed(self, names: Collection[str]) -> list[Departure]:
        """Return those of the nodes that are about to leave beside which no other has joined, to follow them."""
        leaving = self._transaction.record.leaving
        return [one for one in leaving if one.node in names and not one.owed and not self.is_beside(one)]

    def heirs(self, leavers: Iterable[str]) -> list[str]:
        """Return the workers of warm standbys that would take the places of these workers' nodes, if they left now."""
        taken = self.targets(self.unfollowed(set(map(node_of, leavers)))).values()
        return [worker for name, _ in taken for worker in self._transaction.members.nodes[name].workers]

    def goes_beside(self, one: Departure) -> bool:
        """Tell whether the standby that takes a node's place can join first, and there is time for that."""
        spec, costs = self._config.spec, self._costs
        if spec.experiments.static_experts or spec.recovery.restarts_all:
            return False  # (there nobody joins beside the others)
        takes_s = sum(map(costs.of, (Cost.BUILD, Cost.TRANSFER, Cost.SWAP, Cost.DECISION))) + 3 * costs.step_s
        return not one.until or takes_s <= one.until - self._transaction.now

    def is_beside(self, one: Departure, plan: GenerationPlan | None = None) -> bool:
        """Tell whether the standby that takes a node's place is there to join; with a plan: it has joined."""
        node = self._transaction.members.nodes.get(one.beside)
        if node is None or node.aside or any(other.node == one.beside for other in self._transaction.record.leaving):
            return False
        return plan is None or all(plan.rank(worker) is not None for worker in node.workers)

    def beside_of(self, one: Departure) -> tuple[bool, bool]:
        """Tell whether the standby that takes a node's place is about to join beside it, and whether it has joined."""
        joined = self.is_beside(one, self._transaction.record.plan)
        return self.is_beside(one) and not joined, joined

    def has_come(self, one: Departure) -> None:
        """A standby that has joined beside a node takes its place with the next generation."""
        self._stand_ins[one.beside] = one.node, self._why_it(one, one.beside)

    def targets(self, leaving: Iterable[Departure]) -> dict[str, tuple[str, str]]:
        """Return which warm standbys would take the places of nodes that leave, by node, and why it is these."""
        named = {one.to for one in self._transaction.record.leaving if one.to}
        free = dict.fromkeys(name for name in self._transaction.members.standbys if self._standbys.ready(name))
        found: dict[str, tuple[str, str]] = {}
        for one in leaving:
            choice = None
            if one.closes:
                continue
            if one.to and (one.to in free or self._may_come(one.to)):
                choice = one.to if one.to in free else None
            elif one.stays or self._config.spec.recovery.uses_standbys:
                choice = self._choose(one.node, [name for name in free if name not in named])
            if choice is not None:
                found[one.node] = choice, self._why_it(one, choice)
                del free[choice]
        return found

    def _why_it(self, one: Departure, name: str) -> str:
        """Say why this one takes the place of a node that leaves."""
        if one.to == name:
            return "it was asked for"
        gone = f"standby {one.to}, which was asked for, cannot have it; " if one.to else ""
        return (gone + self._whence(one.node, name)).removesuffix("; ")

    def _may_come(self, name: str) -> bool:
        """Tell whether a node may be a warm standby some time: it waits, or gives its own place away before."""
        return self._standbys.may_come(name) or any(
            one.node == name and one.stays for one in self._transaction.record.leaving
        )

    def waits_for(self, one: Departure) -> str:
        """Return what a node waits for that gives its place away, while nobody is warm who could take it."""
        if one.to and self._may_come(one.to):
            return f"standby {one.to} to be warm"
        before = [other.node for other in self._transaction.record.leaving if other.stays and other.node != one.node]
        if before and not any(map(self._standbys.may_come, self._transaction.members.standbys)):
            return f"{before[0]}, which gives its own place away before it and is a standby then"
        return f"a standby to be warm ({one.to}, which was asked for, cannot be)" if one.to else "a standby to be warm"

    def in_vain(self, one: Departure) -> str:
        """Return why no standby will ever take the place of a node, and what to do; "" where one may."""
        here = self._transaction.members.standbys
        whys = [self._standbys.in_vain(name) for name in here]
        if not whys or not all(whys) or self._standbys.awaited or self._becoming():
            return ""
        return f"{'; '.join(whys)}: {_remedy([one.node], 'another')}"

    def _becoming(self) -> list[str]:
        """Return the nodes that are standbys as soon as those train that have come for their places."""
        leaving = self._transaction.record.leaving
        return [one.node for one in leaving if one.stays and (one.owed or self.is_beside(one))]

    def stand_in_for(self, leaving: Iterable[Departure]) -> list[str]:
        """These nodes leave: let standbys that are warm take their places; return all workers that take any."""
        for name, (standby, why) in self.targets(leaving).items():
            self.promote(standby)
            self._stand_ins[standby] = name, why
        return self.workers

    @property
    def slow(self) -> set[str]:
        """The nodes that were slow lately: they take places where nobody else can."""
        return {one.node for one in self._transaction.record.slow if one.until > self._transaction.now}

    def waits(self, plan: GenerationPlan) -> int:
        """Return how many nodes the others wait for before they go on; one that has just come until it can train."""
        if not self._config.spec.recovery.waits_for_nodes:
            return 0
        coming = {node.name for node in self._transaction.members.regular if node.coming}
        return len(self._empty(plan, coming))

    @property
    def needed(self) -> int:
        """How many nodes a job begins with; one that waits for lost nodes begins again with as many as it had."""
        record, spec = self._transaction.record, self._config.spec
        if not record.generation or self._transaction.begins_again:
            return spec.nodes_to_begin
        return max(record.wanted, 1) if spec.recovery.waits_for_nodes else 1

    def take_over(self) -> None:
        """Nobody is left, or too few are: whoever is here goes on with the job."""
        members, record = self._transaction.members, self._transaction.record
        if not record.generation or not self._config.spec.recovery.uses_standbys:
            return
        while members.standbys and (
            members.complete_nodes < self.needed or lacks_slots(self._transaction, self._config)
        ):
            here = [node for node in members.standbys.values() if node.complete]
            if not here:
                return
            # (without a checkpoint the job begins anew, from an initial state that is whole: who was warmed has none)
            here.sort(key=lambda node: not (members.complete_nodes or record.checkpoints or self._whole(node)))
            self.promote(here[0].name)

    def grow(self, plan: GenerationPlan) -> None:
        """Where the job has fewer nodes than it had, let warm standbys join."""
        members = self._transaction.members
        if not members.standbys or not self._config.spec.recovery.uses_standbys:
            return
        here = {node.name for node in members.regular} | workers_by_node(plan).keys()
        missing = max(0, self._transaction.record.wanted - len(here))
        lost = [
            name
            for name in reversed(list(self._transaction.record.places))
            if name not in here and name not in members.nodes
        ]
        lost += [""] * missing  # (of those that have named no place)
        for name in lost[:missing]:
            found = self._choose(name, [name for name in members.standbys if self._standbys.ready(name)])
            if found is None:
                return
            self.promote(found)

    # ---- inside ----

    def _whole(self, node: Node) -> bool:
        """Tell whether the initial state of all workers of a node is whole."""
        return len(self._standbys.fresh(node.workers)) == len(node.workers)

    def _empty(self, plan: GenerationPlan, without: Collection[str] = ()) -> list[str]:
        """Return the nodes of a plan that are gone and that nobody replaces yet, in rank order.

        Nodes that have come meanwhile fill places, too; those of nodes that were drained are none.

        Args:
            without: these are here, and count as gone.
        """
        transaction, members = self._transaction, self._transaction.members
        beside = transaction.record.replacements_among(workers_by_node(plan).keys() | members.nodes.keys())
        drained = {one.node for one in transaction.record.drained} | beside.keys()
        # A standby that is lost beside the node that it came for had no place yet: it does not leave one, even if it
        # was about to leave itself.
        drained |= {one.beside for one in transaction.record.leaving if not one.owed and one.node in members.nodes}
        if transaction.record.held is not None:
            drained.update(transaction.record.held.to_leave)  # The pool has given their places to others.
        places = [name for name in workers_by_node(plan) if name not in drained]
        taken = {whose for name, (whose, _) in self._stand_ins.items() if self._stands_in(name)}
        gone = [name for name in places if name not in members.nodes or name in without]
        lost = [name for name in gone if name not in taken]
        here = sum(node.complete or (node.name in places and node.name not in without) for node in members.regular)
        here -= sum(name in members.nodes and whose in members.nodes for name, whose in beside.items())
        return lost[: max(0, len(places) - here)]

    def _stands_in(self, name: str) -> bool:
        """Tell whether a node that was given a place has it still: not where it was lost, and has only come again."""
        node = self._transaction.members.nodes.get(name)
        return node is not None and not node.aside and not node.coming

    def _candidates(self) -> list[str]:
        """Return the standbys that may take a place now, in the order in which they came."""
        standbys = self._transaction.members.standbys
        warm = [name for name in standbys if self._standbys.ready(name)]
        if warm or not (self._config.spec.recovery.waits_for_nodes or lacks_slots(self._transaction, self._config)):
            return warm
        return [name for name, node in standbys.items() if node.complete]

    def _choose(self, lost: str, candidates: Collection[str]) -> str | None:
        """Return who takes the place of a node; None: nobody can.

        One of its rack comes first, then one of its zone; of a rack, one that is in its zone, too.
        """
        if not candidates:
            return None
        slow = self.slow
        candidates = [name for name in candidates if name not in slow] or candidates
        return max(candidates, key=lambda name: self._near(lost, name))

    def _near(self, lost: str, name: str) -> tuple[bool, bool]:
        """Tell whether a node is in the rack, and in the zone, of another one."""
        rack, zone = self._transaction.members.place_of(lost)
        its_rack, its_zone = self._transaction.members.place_of(name)
        return bool(rack) and its_rack == rack, bool(zone) and its_zone == zone

    def _whence(self, lost: str, name: str) -> str:
        return _whence(*self._transaction.members.place_of(lost), *self._near(lost, name))

    def promote(self, name: str) -> None:
        """A standby is a node like any other from here on: it joins, or has a place."""
        node = self._standbys.promote(name)
        self._newcomers.attached(node, is_new=True)

    # ---- whether it can be ----

    def check_targets(self, names: Sequence[str], to: Sequence[str]) -> None:
        """See whether these nodes have places to give, and whether those take any.

        Raises:
            BadInputError, UnreachableError, RefusedError: as `Departures.ask`.
        """
        nodes, standbys = self._transaction.members.nodes, self._transaction.members.standbys
        if len(to) > len(names):
            raise BadInputError(f"{len(to)} targets are named for {named(names)}: name one for each at the most")
        waiting = next((name for name in names if name in standbys), None)
        if waiting is not None:
            raise BadInputError(f"node {waiting} is a standby: it has no place to give")
        for one in self._transaction.record.leaving:
            if one.beside in names and self.is_beside(one):
                raise RefusedError(
                    f"node {one.beside} joins to take the place of node {one.node}: ask again once it has that place"
                )
        for name in to:
            if name in names:
                raise BadInputError(f"node {name} is to leave: it cannot take a place; name a standby")
            if name not in nodes:
                known = ", ".join(sorted(standbys)) or "none"
                raise UnreachableError(f"there is no node {name!r}: the standbys are {known}")
            taken = next((one.node for one in self._transaction.record.leaving if name in (one.to, one.beside)), None)
            if taken is not None and taken not in names:
                raise BadInputError(f"standby {name} is to take the place of node {taken}: name another")
            if not (name in standbys or taken is not None or self._may_come(name)):
                raise BadInputError(f"node {name} is in use: it has a place of its own; name a standby")
            if name in standbys and (why := self._standbys.in_vain(name)):
                raise RefusedError(f"{why}: name another, or start one (holdfast agent --standby)")

    def check_room(self, names: Sequence[str]) -> None:
        """See whether there can be a standby for each place that is given: now, or once earlier moves are done.

        Raises:
            RefusedError: there never can, as it is.
        """
        standbys = self._transaction.members.standbys
        whys = [why for name in standbys if (why := self._standbys.in_vain(name))]
        # (each move that waits takes one and makes one; where they are started by `holdfast run`, it starts others)
        usable = len(standbys) - len(whys)
        room = max(usable + len(self._becoming()), self._config.spec.recovery.standbys - len(whys))
        if room >= len(names):
            return
        if whys and not room:
            raise RefusedError(f"{named(names)} cannot move: {'; '.join(whys)}: {_remedy(names, 'another')}")
        found = f"there {'is 1 standby' if room == 1 else f'are {room} standbys'} for {len(names)}"
        raise RefusedError(
            f"{named(names)} cannot move: {found if room else 'there is no standby'}; {_remedy(names, 'one')}"
        )


def _remedy(names: Sequence[str], which: str) -> str:
    """Say what to do where there are too few standbys for these nodes' places."""
    return f"start {which} (holdfast agent --standby), or let it leave (holdfast drain {' '.join(names)})"


def _whence(rack: str, zone: str, in_rack: bool, in_zone: bool) -> str:
    """Say whether who takes a place is in the rack and zone that the other has named; "" where it has named none."""
    if rack and in_rack:
        return f"it is in rack {rack}, too"
    if zone and in_zone:
        return (f"no standby that could is in rack {rack}; " if rack else "") + f"it is in zone {zone}, too"
    said = [f"{word} {name}" for word, name in (("rack", rack), ("zone", zone)) if name]
    return f"no standby that could is in {' or '.join(said)}" if said else ""


def named(names: Sequence[str]) -> str:
    """Return how these nodes are called, one or several."""
    return f"node {names[0]}" if len(names) == 1 else f"nodes {', '.join(names)}"
