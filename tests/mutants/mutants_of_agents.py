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
        qualname="_kept_step",
        old="msgspec.structs.asdict(message.commit)",
        new="{**msgspec.structs.asdict(message.commit), 'metrics': {}}",
        why="a later coordinator would announce steps without their logged values",
    ),
    Mutant(
        name="agent_lets_anybody_forget",
        module=AGENT,
        qualname="AgentMachine.on_message",
        old="message.term >= self.term",
        new="True",
        why="commits of an older coordinator may not count",
    ),
    Mutant(
        name="agent_tells_of_an_end_for_ever",
        module=PLACE,
        qualname="LocalRank.keep",
        old=("if isinstance(message, Attach) and self.down_reported:\n    self.down = None"),
        new="pass",
        why="an end must be reported only until the next worker has attached",
    ),
    Mutant(
        name="agent_forgets_an_end_that_nobody_has_heard_of",
        module=PLACE,
        qualname="LocalRank.keep",
        old="isinstance(message, Attach) and self.down_reported",
        new="isinstance(message, Attach)",
        why="a worker may end, and another attach, while no coordinator is connected",
    ),
    Mutant(
        name="agent_gives_up_too_early",
        module=RESTARTS,
        qualname="Restarts.count_failure",
        old="tries > self._most",
        new="tries >= self._most",
        why="a few failures do not prove a bad machine",
    ),
    Mutant(
        name="agent_never_gives_up",
        module=RESTARTS,
        qualname="Restarts.count_failure",
        old="tries > self._most",
        new="False",
        why="a node with repeatedly failing processes is a bad machine",
    ),
    Mutant(
        name="agent_restarts_on_a_broken_machine",
        module=RESTARTS,
        qualname="Restarts.is_machine_broken",
        old="self._class_of(down).severity is Severity.NODE",
        new="False",
        why="a fresh process would meet the same broken memory",
    ),
    Mutant(
        name="who_has_used_up_its_tries_is_to_blame",
        module=AGENT,
        qualname="AgentMachine._replace",
        old="'exhausted'",
        new="'quarantined'",
        why="the work may be at fault, and other nodes may only be slower to fail on it",
    ),
    Mutant(
        name="who_must_go_starts_anew",
        module=AGENT,
        qualname="AgentMachine._on_refused",
        old="self._unfit is None",
        new="True",
        why="its message was not received, and the node would return as if healthy",
    ),
    Mutant(
        name="budget_never_refills",
        module=BUDGET,
        qualname="Budget.count_try",
        old="self._tries and self._tries[0] <= now - self.window_s",
        new="False",
        why="failures of long ago do not indicate a bad machine",
    ),
    Mutant(
        name="budget_counts_each_place",
        module=BUDGET,
        qualname="Budget.count_try",
        old="not self._tries or place in self._together or now - self._tries[-1] >= TOGETHER_S",
        new="True or now - self._tries[-1] >= TOGETHER_S",
        why="processes of a node that die together are one failure",
    ),
    Mutant(
        name="classes_last_rule_wins",
        module=CLASSES,
        qualname="FailureClasses.classify",
        old="chain(self._site, _compile_table())",
        new="chain(_compile_table(), self._site)",
        why="a site's own rules must come before the general ones",
    ),
    Mutant(
        name="agent_undoes_what_counts",
        module=PLACE,
        qualname="LocalRank.undo_after",
        old="self.top_generation < generation",
        new="True",
        why="steps applied in the entered generation count",
    ),
    Mutant(
        name="agent_keeps_what_one_applied_alone",
        module=AGENT,
        qualname="AgentMachine._replace",
        old="self._steps.undo_after(max((other.applied for other in self._places)))",
        new="pass",
        why="a step that died with its worker may be repeated with another result",
    ),
    Mutant(
        name="agent_ends_scripts_that_are_done",
        module=AGENT,
        qualname="AgentMachine.on_message",
        old="message.exit_code == EXIT_DONE and all((place.done for place in self._places))",
        new="False",
        why="a script that left its loop may have more to do",
    ),
    Mutant(
        name="agent_leaves_with_the_first",
        module=AGENT,
        qualname="AgentMachine._on_finished_worker",
        old="not all((place.ended for place in self._places))",
        new="False",
        why="a node ends only with its last worker",
    ),
    Mutant(
        name="agent_keeps_the_end_of_a_loop",
        module=PLACE,
        old="(Prepared, Report, Complaint, VoteRefused, Finished)",
        new="(Prepared, Report, Complaint, VoteRefused)",
        why="an ended loop continues after a rollback",
    ),
    Mutant(
        name="agent_takes_another_ones_word",
        module=AGENT,
        qualname="AgentMachine.on_worker_message",
        old=("if place is None or self.over is not None:\n    return []"),
        new=("place = place or self._places[0]\nif self.over is not None:\n    return []"),
        why="messages of a replaced worker must be ignored",
    ),
)
