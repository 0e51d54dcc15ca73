"""More mutants of a node's agent."""

from __future__ import annotations

from mutant import Mutant

AGENT = "coordination.agent.machine"
PLACE = "coordination.agent.place"
RESTARTS = "coordination.agent.restarts"
BUDGET = "coordination.failures.budget"
CLASSES = "coordination.failures.classes"

AGENT_MUTANTS = (
    Mutant(
        name="agent_forgets_what_was_logged",
        module="coordination.agent.kept_steps",
        qualname="_kept",
        old="msgspec.structs.asdict(message.commit)",
        new="{**msgspec.structs.asdict(message.commit), 'metrics': {}}",
        why="a coordinator that comes later would announce steps without it",
    ),
    Mutant(
        name="agent_lets_anybody_forget",
        module=AGENT,
        qualname="AgentMachine.hear",
        old="message.term >= self.term",
        new="True",
        why="what an older coordinator has committed may not count",
    ),
    Mutant(
        name="agent_tells_of_an_end_for_ever",
        module=PLACE,
        qualname="WorkerPlace.keep",
        old=("if isinstance(message, Attach) and self.down_told:\n    self.down = None"),
        new="pass",
        why="an end is told until the next worker has attached, not after",
    ),
    Mutant(
        name="agent_forgets_an_end_that_nobody_has_heard_of",
        module=PLACE,
        qualname="WorkerPlace.keep",
        old="isinstance(message, Attach) and self.down_told",
        new="isinstance(message, Attach)",
        why="a worker may end, and another attach, while there is no coordinator",
    ),
    Mutant(
        name="agent_gives_up_too_early",
        module=RESTARTS,
        qualname="Restarts.count",
        old="tries > self._most",
        new="tries >= self._most",
        why="bad luck is no bad machine",
    ),
    Mutant(
        name="agent_never_gives_up",
        module=RESTARTS,
        qualname="Restarts.count",
        old="tries > self._most",
        new="False",
        why="a node whose processes die again and again is a bad machine",
    ),
    Mutant(
        name="agent_restarts_on_a_broken_machine",
        module=RESTARTS,
        qualname="Restarts.broken",
        old="self._class_of(down).severity is Severity.NODE",
        new="False",
        why="a fresh process meets the same broken memory",
    ),
    Mutant(
        name="who_has_used_up_its_tries_is_to_blame",
        module=AGENT,
        qualname="AgentMachine._replace",
        old="'exhausted'",
        new="'quarantined'",
        why="what its processes die of may be the work's, and the others only slower to meet it",
    ),
    Mutant(
        name="who_must_go_starts_anew",
        module=AGENT,
        qualname="AgentMachine._refused",
        old="self._unfit is None",
        new="True",
        why="what it had to say was not heard, and it would come back as if nothing were wrong",
    ),
    Mutant(
        name="budget_never_refills",
        module=BUDGET,
        qualname="Budget.count_try",
        old="self._tries and self._tries[0] <= now - self.window_s",
        new="False",
        why="failures of long ago say nothing of a machine",
    ),
    Mutant(
        name="budget_counts_each_place",
        module=BUDGET,
        qualname="Budget.count_try",
        old="not self._tries or place in self._together or now - self._tries[-1] >= TOGETHER_S",
        new="True or now - self._tries[-1] >= TOGETHER_S",
        why="a node of many processes that die together has failed once",
    ),
    Mutant(
        name="classes_last_rule_wins",
        module=CLASSES,
        qualname="FailureClasses.classify",
        old="chain(self._site, _compile_table())",
        new="chain(_compile_table(), self._site)",
        why="what a site says of its own machines counts before what is said of all",
    ),
    Mutant(
        name="agent_undoes_what_counts",
        module=PLACE,
        qualname="WorkerPlace.undo_after",
        old="self.top_generation < generation",
        new="True",
        why="what was applied in the generation that is entered counts",
    ),
    Mutant(
        name="agent_keeps_what_one_applied_alone",
        module=AGENT,
        qualname="AgentMachine._replace",
        old="self._steps.undo_after(max((other.applied for other in self._places)))",
        new="pass",
        why="a step that died with its worker may be done again, with another v",
    ),
    Mutant(
        name="agent_ends_scripts_that_are_done",
        module=AGENT,
        qualname="AgentMachine.hear",
        old="message.exit_code == EXIT_DONE and all((place.done for place in self._places))",
        new="False",
        why="a script that is done may have more to do",
    ),
    Mutant(
        name="agent_leaves_with_the_first",
        module=AGENT,
        qualname="AgentMachine._ended_in_order",
        old="not all((place.ended for place in self._places))",
        new="False",
        why="a node ends with its last worker",
    ),
    Mutant(
        name="agent_keeps_the_end_of_a_loop",
        module=PLACE,
        old="(Prepared, Report, Complaint, VoteRefused, Finished)",
        new="(Prepared, Report, Complaint, VoteRefused)",
        why="a loop that had ended goes on after a roll-back",
    ),
    Mutant(
        name="agent_takes_another_ones_word",
        module=AGENT,
        qualname="AgentMachine.worker_said",
        old=("if place is None or self.over is not None:\n    return []"),
        new=("place = place or self._places[0]\nif self.over is not None:\n    return []"),
        why="who was replaced is not heard any more",
    ),
)
