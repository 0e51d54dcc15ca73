"""The replacement of nodes: which standby takes over which ranks, and when the others wait for one.

A warm standby takes over the ranks of a lost node at once: the same ranks, share and experts. If the job cannot
continue otherwise (too few expert slots, `wait`, no node left), a cold standby is used, too. Its start-up then overlaps
with all other work. If ranks are unfilled, a standby joins once it is warm.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from msgspec.structs import replace

from holdfast.coordination.config import CoordinatorConfig
from holdfast.coordination.generations.announcing import Newcomers
from holdfast.coordination.generations.configuration_check import workers_by_node
from holdfast.coordination.generations.planner import copies_left, lacks_slots
from holdfast.coordination.membership import Node
from holdfast.coordination.nodes.standbys import StandbyNodes
from holdfast.coordination.progress.costs import Cost, MeasuredCosts
from holdfast.coordination.progress.replacement_timing import NodesLost, Replacement, choose_replacement
from holdfast.coordination.transaction import Transaction
from holdfast.errors import BadInputError, RefusedError, UnreachableError
from holdfast.protocol.names import node_of
from holdfast.protocol.plan import GenerationPlan
from holdfast.protocol.record import Departure


class Replacements:
    """The unfilled ranks, and the standbys that take them over."""

    def __init__(
        self,
        transaction: Transaction,
        config: CoordinatorConfig,
        standbys: StandbyNodes,
        newcomers: Newcomers,
        costs: MeasuredCosts,
    ) -> None:
        self._transaction = transaction
        self._config = config
        self._standbys = standbys
        self._newcomers = newcomers
        self._costs = costs
        #: Why the unfilled ranks are filled or not; "" without unfilled ranks.
        self.why = ""
        #: For each standby: the node that it replaces in the next generation, and why it was chosen.
        self._stand_ins: dict[str, tuple[str, str]] = {}

    @property
    def workers(self) -> list[str]:
        """The workers of standbys that replace nodes in the next generation."""
        nodes = self._transaction.members.nodes
        return [worker for name in self._stand_ins if self._stands_in(name) for worker in nodes[name].workers]

    def pop_stand_ins(self) -> dict[str, tuple[str, str]]:
        """Return the replacements of the next generation, which is decided now, and clear them.

        Returns:
            Standby -> the node that it replaces and why it was chosen; without standbys that were lost meanwhile.
        """
        stand_ins, self._stand_ins = self._stand_ins, {}
        return {name: whose for name, whose in stand_ins.items() if self._stands_in(name)}

    def reassign_draining_nodes(self, successors: Mapping[str, str]) -> None:
        """Assign draining nodes to other standbys, if their joined standbys are lost or leave themselves.

        Args:
            successors: the nodes that are lost or leave, with the standby that replaces each.
        """
        leaving = self._transaction.record.leaving
        if any(one.beside in successors for one in leaving):
            changed = (replace(one, beside=successors.get(one.beside, one.beside)) for one in leaving)
            self._transaction.change(leaving=tuple(changed))

    def replace_lost_nodes(self, plan: GenerationPlan) -> None:
        """Decide whether standbys replace the lost nodes of a plan now, and keep the reason.

        If they do, promote and assign a standby for each lost node while there are any. Otherwise the job first
        continues with fewer nodes. Call this when all other members have reported.
        """
        members, self.why = self._transaction.members, ""
        choice = self._weigh(plan)
        if not members.standbys or not self._config.spec.recovery.uses_standbys or not choice.at_once:
            return
        self._stand_ins = {name: whose for name, whose in self._stand_ins.items() if self._stands_in(name)}
        for name in self._find_unreplaced_nodes(plan):
            standby = self._choose(name, self._candidates())
            if standby is None:
                return
            self.promote(standby)
            self._stand_ins[standby] = name, self._describe_nearness(name, standby)
            self.reassign_draining_nodes({name: standby})

    def _weigh(self, plan: GenerationPlan) -> Replacement:
        """Return whether standbys replace the lost nodes now (`at_once`), and why; keep the reason in `self.why`, too.

        Costs are weighed only with the policy `auto`, a warm standby, and enough slots for all experts; otherwise the
        answer is yes.
        """
        empty, recovery = self._find_unreplaced_nodes(plan), self._config.spec.recovery
        if not empty or recovery.on_node_failure != "auto":
            return Replacement(at_once=True, why="")
        members, nodes = self._transaction.members, list(workers_by_node(plan))
        if not any(map(self._standbys.ready, members.standbys)) or self._lacks_slots:
            self.why = f"no standby is warm: {len(nodes) - len(empty)} of {len(nodes)} nodes go on"
            return Replacement(at_once=True, why=self.why)
        saved_at = self._transaction.record.saving.saved_at or self._transaction.record.run_since
        copies = copies_left(self._transaction.record, [name for name in nodes if name in members.nodes])
        back_s = max(0.0, self._transaction.now - saved_at)
        experts = plan.expert_plan is not None
        loss = NodesLost(nodes=len(nodes), lost=len(empty), copies=copies, back_s=back_s, experts=experts)
        choice = choose_replacement(self._costs, loss, self._transaction.now)
        self.why = choice.why
        return choice

    def unfollowed(self, names: Collection[str]) -> list[Departure]:
        """Return the entries of these leaving nodes, without retained ones and ones next to which a standby joins."""
        leaving = self._transaction.record.leaving
        return [one for one in leaving if one.node in names and not one.owed and not self.is_beside(one)]

    def find_replacing_workers(self, leavers: Iterable[str]) -> list[str]:
        """Return the workers of warm standbys that would replace these workers' nodes now."""
        taken = self.select_standbys(self.unfollowed(set(map(node_of, leavers)))).values()
        return [worker for name, _ in taken for worker in self._transaction.members.nodes[name].workers]

    def goes_beside(self, one: Departure) -> bool:
        """Return whether a node's replacement can join next to it first, and there is time for that before its
        deadline.

        Never if nodes join only in a restart of all workers.
        """
        spec, costs = self._config.spec, self._costs
        if spec.experiments.static_experts or spec.recovery.restarts_all:
            # Then nodes join only in a restart of all workers.
            return False
        takes_s = sum(map(costs.of, (Cost.BUILD, Cost.TRANSFER, Cost.SWAP, Cost.DECISION))) + 3 * costs.step_s
        return not one.until or takes_s <= one.until - self._transaction.now

    def is_beside(self, one: Departure, plan: GenerationPlan | None = None) -> bool:
        """Return whether a node's replacement is promoted to join next to it; with a plan: whether it has joined.

        False if the replacement is lost or leaves itself.
        """
        node = self._transaction.members.nodes.get(one.beside)
        if node is None or node.aside or any(other.node == one.beside for other in self._transaction.record.leaving):
            return False
        return plan is None or all(plan.rank(worker) is not None for worker in node.workers)

    def beside_of(self, one: Departure) -> tuple[bool, bool]:
        """Return whether a node's replacement is about to join next to it, and whether it has joined."""
        joined = self.is_beside(one, self._transaction.record.plan)
        return self.is_beside(one) and not joined, joined

    def assign_joined_standby(self, one: Departure) -> None:
        """Assign a joined standby to its node's ranks in the next generation."""
        self._stand_ins[one.beside] = one.node, self._explain_choice(one, one.beside)

    def select_standbys(self, leaving: Iterable[Departure]) -> dict[str, tuple[str, str]]:
        """Return the warm standby that would replace each leaving node, with the reason of the choice.

        It is the requested one, for which the node waits while it may become warm, else the nearest. Nodes without one
        are left out, and so are nodes that the pool recalls.
        """
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
                found[one.node] = choice, self._explain_choice(one, choice)
                del free[choice]
        return found

    def _explain_choice(self, one: Departure, name: str) -> str:
        """Return why this standby replaces a leaving node: by request, or for its rack or zone; "" without a reason."""
        if one.to == name:
            return "it was asked for"
        gone = f"standby {one.to}, which was asked for, cannot replace it; " if one.to else ""
        return (gone + self._describe_nearness(one.node, name)).removesuffix("; ")

    def _may_come(self, name: str) -> bool:
        """Return whether a node may become a warm standby: it is a standby, or is moved before."""
        return self._standbys.may_come(name) or any(
            one.node == name and one.stays for one in self._transaction.record.leaving
        )

    def waits_for(self, one: Departure) -> str:
        """Return what a node to be moved waits for while no suitable standby is warm, in words: a standby, or another
        node's move, after which that node is a standby.
        """
        if one.to and self._may_come(one.to):
            return f"standby {one.to} to be warm"
        before = [other.node for other in self._transaction.record.leaving if other.stays and other.node != one.node]
        if before and not any(map(self._standbys.may_come, self._transaction.members.standbys)):
            return f"{before[0]}, which gives its own place away before it and is a standby then"
        return f"a standby to be warm ({one.to}, which was asked for, cannot be)" if one.to else "a standby to be warm"

    def explain_no_standby(self, one: Departure) -> str:
        """Return why none of the connected standbys will ever replace a node, with the remedy.

        "" if one of them may, if no standby is connected, or if others are still expected or come by a move.
        """
        here = self._transaction.members.standbys
        whys = [self._standbys.explain_never_warm(name) for name in here]
        if not whys or not all(whys) or self._standbys.awaited or self._becoming():
            return ""
        return f"{'; '.join(whys)}: {_remedy([one.node], 'another')}"

    def _becoming(self) -> list[str]:
        """Return the nodes that become standbys as soon as their replacements train."""
        leaving = self._transaction.record.leaving
        return [one.node for one in leaving if one.stays and (one.owed or self.is_beside(one))]

    def stand_in_for(self, leaving: Iterable[Departure]) -> list[str]:
        """Promote a warm standby for each of these leaving nodes, if there is one, and assign it the node's ranks.

        Returns:
            The workers of all assigned replacements, also of earlier calls.
        """
        for name, (standby, why) in self.select_standbys(leaving).items():
            self.promote(standby)
            self._stand_ins[standby] = name, why
        return self.workers

    @property
    def slow(self) -> set[str]:
        """The nodes that were slow recently: they replace others only as a last resort."""
        return {one.node for one in self._transaction.record.slow if one.until > self._transaction.now}

    def count_awaited_nodes(self, plan: GenerationPlan) -> int:
        """Return how many lost nodes the job must wait for before it continues: 0 unless its policy is to wait.

        Nodes with starting workers count as missing.
        """
        if not self._config.spec.recovery.waits_for_nodes:
            return 0
        coming = {node.name for node in self._transaction.members.regular if node.coming}
        return len(self._find_unreplaced_nodes(plan, coming, count_recalled=True))

    @property
    def needed(self) -> int:
        """The number of nodes with which the job can start or restart.

        For a start it is the configured number. For a restart it is 1, or the previous number in a job that waits for
        lost nodes.
        """
        record, spec = self._transaction.record, self._config.spec
        if not record.generation or self._transaction.begins_again:
            return spec.nodes_to_begin
        return max(record.wanted, 1) if spec.recovery.waits_for_nodes else 1

    def promote_to_restart(self) -> None:
        """Promote standbys if too few nodes are left to restart the job, or too few slots for all experts.

        Without a checkpoint and other nodes, one with an intact initial state is preferred. Nothing before the first
        generation, or if the job does not use standbys.
        """
        members, record = self._transaction.members, self._transaction.record
        if not record.generation or not self._config.spec.recovery.uses_standbys:
            return
        while members.standbys and (
            members.complete_nodes < self.needed or lacks_slots(self._transaction, self._config)
        ):
            here = [node for node in members.standbys.values() if node.complete]
            if not here:
                return
            # Without a checkpoint the job restarts from an intact initial state, which standbys lose by their warm-up.
            here.sort(
                key=lambda node: not (members.complete_nodes or record.checkpoints or self._has_initial_state(node))
            )
            self.promote(here[0].name)

    def promote_for_missing_nodes(self, plan: GenerationPlan) -> None:
        """Promote warm standbys to join while the job has fewer nodes than it wants, near the lost ones if possible.

        Nothing if no standby is warm, or if the job does not use standbys.
        """
        members = self._transaction.members
        if not members.standbys or not self._config.spec.recovery.uses_standbys:
            return
        here = {node.name for node in members.regular} | workers_by_node(plan).keys()
        # A leaving node and the standby that replaces it count as one.
        number = len(here) - len(self._transaction.record.replacements_among(here))
        missing = max(0, self._transaction.record.wanted - number)
        lost = [
            name
            for name in reversed(list(self._transaction.record.places))
            if name not in here and name not in members.nodes
        ]
        # The other missing nodes have no known rack or zone.
        lost += [""] * missing
        for name in lost[:missing]:
            found = self._choose(name, [name for name in members.standbys if self._standbys.ready(name)])
            if found is None:
                return
            self.promote(found)

    # ---- internal ----

    def _has_initial_state(self, node: Node) -> bool:
        """Return whether all workers of a node have an intact initial state."""
        return len(self._standbys.fresh(node.workers)) == len(node.workers)

    def _find_unreplaced_nodes(
        self, plan: GenerationPlan, without: Collection[str] = (), *, count_recalled: bool = False
    ) -> list[str]:
        """Return the lost nodes of a plan without a replacement, in rank order.

        Nodes that have connected since also count as replacements. Drained nodes, and nodes that the pool recalls, need
        none.

        Args:
            without: connected nodes that count as lost.
            count_recalled: whether a connected node that the pool recalls counts as a replacement until it leaves.
        """
        transaction, members = self._transaction, self._transaction.members
        beside = transaction.record.replacements_among(workers_by_node(plan).keys() | members.nodes.keys())
        drained = {one.node for one in transaction.record.drained} | beside.keys()
        # A standby that is lost before it replaced its node had no ranks yet, even if it was about to leave itself.
        drained |= {one.beside for one in transaction.record.leaving if not one.owed and one.node in members.nodes}
        held = transaction.record.held
        recalled = set(held.to_leave) if held is not None else set[str]()
        drained.update(recalled)  # The pool has given their places to others.
        places = [name for name in workers_by_node(plan) if name not in drained]
        taken = {whose for name, (whose, _) in self._stand_ins.items() if self._stands_in(name)}
        gone = [name for name in places if name not in members.nodes or name in without]
        lost = [name for name in gone if name not in taken]
        counted = members.nodes.keys() - (set[str]() if count_recalled else recalled)
        regular = [node for node in members.regular if node.name in counted]
        here = sum(node.complete or (node.name in places and node.name not in without) for node in regular)
        here -= sum({name, whose} <= counted for name, whose in beside.items())
        return lost[: max(0, len(places) - here)]

    def _stands_in(self, name: str) -> bool:
        """Return whether a chosen standby still replaces its node: not if it was lost and has only reconnected."""
        node = self._transaction.members.nodes.get(name)
        return node is not None and not node.aside and not node.coming

    def _candidates(self) -> list[str]:
        """Return the standbys that may replace a node now, in the order in which they connected: the warm ones.

        If none is warm and the job cannot continue otherwise, all with complete workers.
        """
        standbys = self._transaction.members.standbys
        warm = [name for name in standbys if self._standbys.ready(name)]
        if warm or not (self._config.spec.recovery.waits_for_nodes or self._lacks_slots):
            return warm
        return [name for name, node in standbys.items() if node.complete]

    @property
    def _lacks_slots(self) -> bool:
        """Whether the members lack slots for all experts even if the retained nodes become members again."""
        return lacks_slots(self._transaction, self._config, retained=True)

    def _choose(self, lost: str, candidates: Collection[str]) -> str | None:
        """Return the standby that replaces a node, or None without candidates.

        One of the same rack is preferred, then one of the same zone. Slow nodes are a last resort.

        Args:
            lost: the node's name, or "" if it is unknown.
        """
        if not candidates:
            return None
        slow = self.slow
        candidates = [name for name in candidates if name not in slow] or candidates
        return max(candidates, key=lambda name: self._is_near(lost, name))

    def _is_near(self, lost: str, name: str) -> tuple[bool, bool]:
        """Return whether node `name` is in the rack, and whether it is in the zone, of node `lost`.

        False for a rack or zone that is unknown.
        """
        rack, zone = self._transaction.members.place_of(lost)
        its_rack, its_zone = self._transaction.members.place_of(name)
        return bool(rack) and its_rack == rack, bool(zone) and its_zone == zone

    def _describe_nearness(self, lost: str, name: str) -> str:
        return _describe_place(*self._transaction.members.place_of(lost), *self._is_near(lost, name))

    def promote(self, name: str) -> None:
        """Make a standby a regular node, which joins or replaces a node."""
        node = self._standbys.promote(name)
        self._newcomers.on_worker_attached(node, is_new=True)

    # ---- checks ----

    def check_targets(self, names: Sequence[str], to: Sequence[str]) -> None:
        """Check that these nodes can move, and that the named standbys can replace them.

        Raises:
            BadInputError: too many targets, a node that is a standby, or a target that leaves, is in use or replaces
                another.
            UnreachableError: a target does not exist.
            RefusedError: a node is just joining to replace another one, or a target will never be warm.
        """
        nodes, standbys = self._transaction.members.nodes, self._transaction.members.standbys
        if len(to) > len(names):
            raise BadInputError(f"{len(to)} targets are named for {named(names)}: name at most one for each")
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
                raise BadInputError(f"node {name} will leave: it cannot take over ranks; name a standby")
            if name not in nodes:
                known = ", ".join(sorted(standbys)) or "none"
                raise UnreachableError(f"there is no node {name!r}: the standbys are {known}")
            taken = next((one.node for one in self._transaction.record.leaving if name in (one.to, one.beside)), None)
            if taken is not None and taken not in names:
                raise BadInputError(f"standby {name} will replace node {taken}: name another")
            if not (name in standbys or taken is not None or self._may_come(name)):
                raise BadInputError(f"node {name} is in use: it has a place of its own; name a standby")
            if name in standbys and (why := self._standbys.explain_never_warm(name)):
                raise RefusedError(f"{why}: name another, or start one (holdfast agent --standby)")

    def check_room(self, names: Sequence[str]) -> None:
        """Check that there can be a standby for each moved node: now, after earlier moves, or by starting the
        configured ones.

        Raises:
            RefusedError: there cannot be enough; the message has the remedy.
        """
        standbys = self._transaction.members.standbys
        whys = [why for name in standbys if (why := self._standbys.explain_never_warm(name))]
        # Each waiting move uses one standby and creates one. `holdfast run` starts missing standbys itself.
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
    """Return what to do if there are too few standbys for these nodes."""
    return f"start {which} (holdfast agent --standby), or let it leave (holdfast drain {' '.join(names)})"


def _describe_place(rack: str, zone: str, in_rack: bool, in_zone: bool) -> str:
    """Return that a standby is in the named rack or zone of the other node, or that none is; "" if none was named.

    Args:
        in_rack, in_zone: whether the standby is there, too.
    """
    if rack and in_rack:
        return f"it is in rack {rack}, too"
    if zone and in_zone:
        return (f"no standby that could is in rack {rack}; " if rack else "") + f"it is in zone {zone}, too"
    said = [f"{word} {name}" for word, name in (("rack", rack), ("zone", zone)) if name]
    return f"no standby that could is in {' or '.join(said)}" if said else ""


def named(names: Sequence[str]) -> str:
    """Return "node a" or "nodes a, b" for a message."""
    return f"node {names[0]}" if len(names) == 1 else f"nodes {', '.join(names)}"
