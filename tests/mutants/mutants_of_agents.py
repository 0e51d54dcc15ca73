"""More mutants of a node's agent."""

from __future__ import annotations

from mutant import Mutant

AGENT = "coordination/agent/machine.py"
PLACE = "coordination/agent/place.py"
RESTARTS = "coordination/agent/restarts.py"
BUDGET = "coordination/failures/budget.py"
CLASSES = "coordination/failures/classes.py"

AGENT_MUTANTS = (
    Mutant(
        name="agent_forgets_what_was_logged",
        file="coordination/agent/kept_steps.py",
        old="        commit=Lanes(**msgspec.structs.asdict(message.commit)),\n        state_hash",
        new='        commit=Lanes(**{**msgspec.structs.asdict(message.commit), "metrics": {}}),\n        state_hash',
        why="a coordinator that comes later would announce steps without it",
    ),
    Mutant(
        name="agent_lets_anybody_forget",
        file=AGENT,
        old="                if message.term >= self.term:\n                    self._steps.forget",
        new="                if True:\n                    self._steps.forget",
        why="what an older coordinator has committed may not count",
    ),
    Mutant(
        name="agent_tells_of_an_end_for_ever",
        file=PLACE,
        old="        if isinstance(message, Attach) and self.down_told:\n            self.down = None\n",
        new="",
        why="an end is told until the next worker has attached, not after",
    ),
    Mutant(
        name="agent_forgets_an_end_that_nobody_has_heard_of",
        file=PLACE,
        old="        if isinstance(message, Attach) and self.down_told:\n",
        new="        if isinstance(message, Attach):\n",
        why="a worker may end, and another attach, while there is no coordinator",
    ),
    Mutant(
        name="agent_gives_up_too_early",
        file=RESTARTS,
        old="        if tries > self._most:\n",
        new="        if tries >= self._most:\n",
        why="bad luck is no bad machine",
    ),
    Mutant(
        name="agent_never_gives_up",
        file=RESTARTS,
        old="        if tries > self._most:\n",
        new="        if False:\n",
        why="a node whose processes die again and again is a bad machine",
    ),
    Mutant(
        name="agent_restarts_on_a_broken_machine",
        file=RESTARTS,
        old="        return self._class_of(down).severity is Severity.NODE\n",
        new="        return False\n",
        why="a fresh process meets the same broken memory",
    ),
    Mutant(
        name="who_has_used_up_its_tries_is_to_blame",
        file=AGENT,
        old=' else "exhausted"',
        new=' else "quarantined"',
        why="what its processes die of may be the work's, and the others only slower to meet it",
    ),
    Mutant(
        name="who_must_go_starts_anew",
        file=AGENT,
        old="        if self._unfit is None:\n            fresh = [",
        new="        if True:\n            fresh = [",
        why="what it had to say was not heard, and it would come back as if nothing were wrong",
    ),
    Mutant(
        name="budget_never_refills",
        file=BUDGET,
        old="        while self._tries and self._tries[0] <= now - self.window_s:\n",
        new="        while False:\n",
        why="failures of long ago say nothing of a machine",
    ),
    Mutant(
        name="budget_counts_each_place",
        file=BUDGET,
        old="        if not self._tries or place in self._together or",
        new="        if True or",
        why="a node of many processes that die together has failed once",
    ),
    Mutant(
        name="classes_last_rule_wins",
        file=CLASSES,
        old="chain(self._site, _our_own())",
        new="chain(_our_own(), self._site)",
        why="what a site says of its own machines counts before what is said of all",
    ),
    Mutant(
        name="agent_undoes_what_counts",
        file=PLACE,
        old="        if self.top_generation < generation:\n",
        new="        if True:\n",
        why="what was applied in the generation that is entered counts",
    ),
    Mutant(
        name="agent_keeps_what_one_applied_alone",
        file=AGENT,
        old="        self._steps.undo_after(max(other.applied for other in self._places))\n",
        new="        pass\n",
        why="a step that died with its worker may be done again, with another v",
    ),
    Mutant(
        name="agent_ends_scripts_that_are_done",
        file=AGENT,
        old="                if message.exit_code == EXIT_DONE and all(place.done for place in self._places):\n",
        new="                if False:\n",
        why="a script that is done may have more to do",
    ),
    Mutant(
        name="agent_leaves_with_the_first",
        file=AGENT,
        old="        if not all(place.ended for place in self._places):\n",
        new="        if False:\n",
        why="a node ends with its last worker",
    ),
    Mutant(
        name="agent_keeps_the_end_of_a_loop",
        file=PLACE,
        old="_GENERATION_BOUND = (Prepared, Report, Complaint, VoteRefused, Finished)\n",
        new="_GENERATION_BOUND = (Prepared, Report, Complaint, VoteRefused)\n",
        why="a loop that had ended goes on after a roll-back",
    ),
    Mutant(
        name="agent_takes_another_ones_word",
        file=AGENT,
        old="        if place is None or self.over is not None:\n            return []\n        if isins",
        new="        place = place or self._places[0]\n        if self.over is not None:\n            return []\n"
        "        if isins",
        why="who was replaced is not heard any more",
    ),
)
