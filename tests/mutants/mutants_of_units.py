"""Mutants of replicas over several workers: how a unit agrees, what it keeps, who is lost with whom, state by role."""

from __future__ import annotations

from mutant import Mutant

SHARE = "coordination/worker/unit/share.py"
AGREEING = "coordination/worker/unit/agreeing.py"
ADOPTING = "coordination/worker/unit/adopting.py"
BOUNDARIES = "coordination/worker/boundaries.py"
COPY = "coordination/worker/copy.py"
ASSIGNMENT = "coordination/generations/assignment.py"
DECISIONS = "coordination/generations/decisions.py"
PLANNER = "coordination/generations/planner.py"
TURN = "coordination/turn.py"
HEARING = "coordination/hearing.py"
MEMBERSHIP = "coordination/nodes/membership.py"

UNIT_MUTANTS = (
    Mutant(
        name="what_one_place_names_is_summed",
        file=ASSIGNMENT,
        old="tuple(one for one in first if all(one in summed for summed in others))",
        new="first",
        why="what it has proposed in vain is computed by nobody",
    ),
    Mutant(
        name="a_place_keeps_what_it_has_named",
        file=SHARE,
        old="        self.summed = [micro_batch for micro_batch in self.summed if micro_batch in kept]\n",
        new="",
        why="the places of a unit must have the same sums",
    ),
    Mutant(
        name="what_is_not_kept_is_waited_for",
        file=SHARE,
        old="        if self.proposed is not None and self.proposed.number not in kept:\n",
        new="        if self.proposed is not None and not kept and self.proposed.number < 0:\n",
        why="the other place proposes something else, and it waits for ever",
    ),
    Mutant(
        name="what_is_kept_is_withdrawn",
        file=SHARE,
        old="            self.unwanted = True\n",
        new="            pass\n        self.unwanted = self.proposed is not None\n",
        why="the others count on it",
    ),
    Mutant(
        name="withdraws_at_a_stop",
        file=AGREEING,
        old="        return there and not (self._share.unwanted or self.done)\n",
        new="        return there and not (self._share.unwanted or self.done or getattr(self, 'frozen', False))\n",
        why="what all have named is promised",
    ),
    Mutant(
        name="each_place_takes_the_newer_state_that_has_come",
        file=BOUNDARIES,
        old="together=plan.expert_plan is None and _unit_receives(worker, plan, decision)",
        new="together=False",
        why="the sender may be lost before all places have it, and no unit has either state whole",
    ),
    Mutant(
        name="waits_on_for_its_unit_to_receive_after_a_stop",
        file=ADOPTING,
        old="return not (self.done or self.generations.frozen) and",
        new="return not self.done and",
        why="the other place may never have it, and nobody reports",
    ),
    Mutant(
        name="a_unit_of_which_one_place_receives_waits_for_all",
        file=BOUNDARIES,
        old="    return all(isinstance(plan.source_of(place, decision), LiveSource) for place in unit)\n",
        new="    return any(isinstance(plan.source_of(place, decision), LiveSource) for place in unit)\n",
        why="the other one has the state, and proposes nothing",
    ),
    Mutant(
        name="a_unit_that_lags_keeps_nothing",
        file=ASSIGNMENT,
        old="        lags = applied != decision.applied and all(worker in plan.sources for worker in unit)\n",
        new="        lags = False\n",
        why="where the newer state never comes the step is done again, and it is of use",
    ),
    Mutant(
        name="a_process_goes_alone",
        file=TURN,
        old="        if places == 1:\n            return ()\n",
        new="        if places:\n            return ()\n",
        why="its unit waits for it for ever",
    ),
    Mutant(
        name="a_process_that_is_gone_attaches",
        file=HEARING,
        old="        if attach.worker in node.workers or attach.worker in node.broken:\n",
        new="        if attach.worker in node.workers:\n",
        why="its unit was given up, and its agent ends it",
    ),
    Mutant(
        name="half_a_unit_is_named",
        file=MEMBERSHIP,
        old="        return [info for info in self.workers.values() if here[info.index // places] == places]\n",
        new="        return [info for info in self.workers.values() if here]\n",
        why="members are whole units",
    ),
    Mutant(
        name="one_role_is_enough",
        file=DECISIONS,
        old="        if every_role([report.worker for report in firm], places):\n",
        new="        if firm:\n",
        why="a part of the state would be with nobody",
    ),
    Mutant(
        name="one_place_goes_forward_alone",
        file=DECISIONS,
        old="        firm = [report for report in able if report.worker in whole or report.applied == step]\n",
        new="        firm = able if whole is not None else []\n",
        why="where those are lost that send the rest, its unit has neither state",
    ),
    Mutant(
        name="a_state_of_before_the_beginning",
        file=COPY,
        old="        self.keeps = receives and not (apart or anew) and self.applied is not None\n",
        new="        self.keeps = receives and not apart and self.applied is not None and anew is not None\n",
        why="step 0 of a job that begins anew is another",
    ),
    Mutant(
        name="state_of_another_role",
        file=PLANNER,
        old="zip(by_role(receivers, places), by_role(holders, places), strict=True)",
        new="zip(by_role(receivers, places), reversed(by_role(holders, places)), strict=True)",
        why="a member gets its state from those of its own role",
    ),
)
