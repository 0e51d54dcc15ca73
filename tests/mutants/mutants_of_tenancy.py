"""Mutants of a job's side of its pool."""

from __future__ import annotations

from mutant import Mutant

TENANT = "coordination/tenancy/tenant.py"
HOLDING = "coordination/tenancy/holding.py"

TENANCY_MUTANTS = (
    Mutant(
        name="gives_back_who_is_still_a_member",
        file=TENANT,
        old="if node in away and node not in turn.nodes_planned]",
        new="if node in away]",
        why="a node is given back with the decision that does without it: before, what it has done may count",
    ),
    Mutant(
        name="takes_again_what_it_gave_back",
        file=HOLDING,
        old="        if number not in held.returned:\n",
        new="        if True:\n",
        why="the pool speaks of a grant until it hears that it was given back, and may have given the node to others",
    ),
    Mutant(
        name="lets_in_without_a_grant",
        file=HOLDING,
        old="    if grant is None or grant.number != number:\n",
        new="    if grant is None:\n",
        why="a node that is granted anew may have processes of the grant before",
    ),
    Mutant(
        name="believes_old_shares",
        file=HOLDING,
        old="(shares.term, shares.version) < (held.term, held.heard)",
        new="shares.term < held.term",
        why="what comes late says how things stood, not how they stand",
    ),
    Mutant(
        name="gives_back_who_is_about_to_come",
        file=TENANT,
        old="        gone = [node for node in absent if held.grants[node].came and not self._absences.knows(node)]\n",
        new="        gone = list(absent)\n",
        why="a node that was granted needs its time to come",
    ),
    Mutant(
        name="counts_a_standby_that_joins_next_to_a_leaver",
        file=TENANT,
        old="return update_roles(held, roles, joining)",
        new="return update_roles(held, roles, {})",
        why="the pool would count one node too many, and recall a node that has nothing to do with the move",
    ),
    Mutant(
        name="follows_a_call_twice",
        file=HOLDING,
        old="elif decided > known.role_version:",
        new="elif decided >= known.role_version:",
        why="the pool repeats its word until it has heard the job's, and the node may wait again by then",
    ),
    Mutant(
        name="forgets_who_takes_a_leavers_place",
        file="coordination/nodes/departures.py",
        old="beside = found.get(one.node, one.beside)",
        new="beside = one.beside",
        why="until the leaver is gone both would count as nodes that train",
    ),
    Mutant(
        name="calls_a_standby_once_although_it_has_not_joined",
        file=TENANT,
        old="            elif node.complete and self._standbys.fits(node):\n",
        new="            elif node.complete and (self._standbys.fits(node) or self._called.discard(name)):\n",
        why="a standby that does not fit would be reported as waiting, and called again, until its agent has ended",
    ),
    Mutant(
        name="counts_a_node_whose_place_a_standby_has_taken",
        file=TENANT,
        old='            if self._ending.over is None and held.wish == "run":\n',
        new="            if False:\n",
        why="the pool would count one node too many, and recall a node that trains",
    ),
    Mutant(
        name="counts_a_node_that_takes_its_place_back",
        file=HOLDING,
        old="if not (nodes.get(name, grant.standby) or grant.leaving)}",
        new="if not (grant.standby or grant.leaving)}",
        why="the node that has the place now is reported as training in the same write, so both would count",
    ),
    Mutant(
        name="lets_a_node_without_a_place_in_as_one_that_trains",
        file="coordination/nodes/admission.py",
        old="waits = self._tenant.is_standby(hello)",
        new="waits = self._standbys.waits(hello)",
        why="the node knows only how it was started: it would join, and the pool would count one node too many",
    ),
    Mutant(
        name="keeps_a_promotion_that_came_to_nothing",
        file="coordination/nodes/standbys.py",
        old="known is None or known.promoted or known.agent_pid",
        new="known is None or known.agent_pid",
        why="after a restart of the coordinator the standby would be no standby",
    ),
    Mutant(
        name="fills_the_place_of_a_lost_node_that_the_pool_wants_back",
        file="coordination/nodes/replacing.py",
        old="drained.update(turn.record.held.to_leave)",
        new="drained.update(())",
        why="the pool has given the place to others: it would recall another node",
    ),
    Mutant(
        name="counts_a_standby_that_leaves_again",
        file=TENANT,
        old="select_surplus(held, [*leaving_again, *idle])",
        new="select_surplus(held, idle)",
        why="a third node would count while two standbys have joined for one place",
    ),
    Mutant(
        name="sets_aside_a_node_that_is_here_before_one_that_is_not",
        file=TENANT,
        old="return node is not None and node.complete, node is not None, -held",
        new="return node is None, node is not None, -held",
        why="the node that could train would wait for one that may never come",
    ),
    Mutant(
        name="sets_all_idle_nodes_aside",
        file=HOLDING,
        old="    return counted[:surplus]\n",
        new="    return counted\n",
        why="the job would train on fewer nodes than the pool has given it",
    ),
    Mutant(
        name="reports_no_departure_of_a_node_that_had_joined",
        file="coordination/nodes/departures.py",
        old="        if node.told or node.returning:\n            self._turn.emit(NodeLeft, node=name, reason=MOVED",
        new="        if False:\n            self._turn.emit(NodeLeft, node=name, reason=MOVED",
        why="the journal would report the node as one that trains",
    ),
    Mutant(
        name="believes_that_an_absent_member_waits",
        file=TENANT,
        old="for node in differ if node in here or node in planned}",
        new="for node in differ if node in here}",
        why="after a restart of the coordinator the pool would take a member that is not back yet for a standby",
    ),
)
