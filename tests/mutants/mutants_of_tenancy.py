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
        old="if node in here}, joining)",
        new="if node in here}, {})",
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
)
