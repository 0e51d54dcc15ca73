"""Mutants of what rests on witnesses: few tell of a step as it passes, the others where something breaks."""

from __future__ import annotations

from mutant import Mutant

AGENT = "coordination/agent/machine.py"
NODE_STEPS = "coordination/agent/node_steps.py"
PLACE = "coordination/agent/place.py"
LEDGER = "coordination/progress/ledger.py"
PROGRESS = "coordination/progress/announced.py"
HEARING = "coordination/hearing.py"
ADOPTING = "coordination/worker/unit/adopting.py"
WORKER = "coordination/worker/machine.py"
COPY = "coordination/worker/copy.py"
WITNESSES = "coordination/generations/witnesses.py"

WITNESS_MUTANTS = (
    Mutant(
        name="reports_tell_the_newest_step_only",
        file=AGENT,
        old="                out = self._tell_of_steps(now)\n",
        new="                pass\n",
        why="the witnesses may be dead: a report comes with every v that is not in the journal",
    ),
    Mutant(
        name="a_left_loop_takes_its_steps_along",
        file=AGENT,
        old="            return [*self._tell_of_steps(now), *self._tell(place.down, now)]\n",
        new="            return self._tell(place.down, now)\n",
        why="who has left its loop gives no report any more",
    ),
    Mutant(
        name="a_step_s_own_v_announces_it",
        file=LEDGER,
        old="            self._proven = max(self._proven, step - 1)\n",
        new="            self._proven = max(self._proven, step)\n",
        why="that a step passed somewhere does not prove that anybody else has applied it",
        quick=True,
    ),
    Mutant(
        name="a_proof_outlives_its_generation",
        file=LEDGER,
        old="        self._generation, self._proven = generation, 0\n",
        new="        self._generation = generation\n",
        why="who joins has not applied what the members before it had",
    ),
    Mutant(
        name="any_generation_proves",
        file=LEDGER,
        old="        if generation == self._generation:\n            self._proven",
        new="        if True:\n            self._proven",
        why="a step that passed in an older generation proves nothing of who has come since",
    ),
    Mutant(
        name="proves_before_all_have_entered",
        file=PROGRESS,
        old=" if self._turn.members.entered(self._turn.record.plan) else 0\n",
        new="\n",
        why="FORWARD is told by whoever had the gradients, while others still wait for the state",
    ),
    Mutant(
        name="a_swap_announces_nothing",
        file=HEARING,
        old="        if parts.progress.release():  # (who joins",
        new="        if False:  # (who joins",
        why="what is proven of the members of before is announced before others are members",
    ),
    Mutant(
        name="heartbeats_of_an_abandoned_lineage",
        file=HEARING,
        old="        if not record.lineage <= heartbeat.generation <= record.generation:\n",
        new="        if not heartbeat.generation <= record.generation:\n",
        why="where somebody stood before a roll-back does not count",
    ),
    Mutant(
        name="where_one_stands_all_stand",
        file=HEARING,
        old="        if len(applied) == 1 and applied[0]:\n",
        new="        if applied and applied[0]:\n",
        why="one number stands for all only where it is the only one",
    ),
    Mutant(
        name="heartbeats_do_not_say_where_one_stands",
        file=NODE_STEPS,
        old="        if not any(place.applied > place.told for place in places):\n",
        new="        if True:\n",
        why="the last step of a job waits for nobody's next",
    ),
    Mutant(
        name="a_decision_takes_nobody_back",
        file=LEDGER,
        old="        self._standings.go_back(step)\n",
        new="",
        why="who is taken back does not stand any longer where it stood",
    ),
    Mutant(
        name="a_joiner_knows_no_step",
        file=ADOPTING,
        old="        self._copy.sent = tuple(passed)\n",
        new="        self._copy.sent = ()\n",
        why="who was sent a state may be the last one alive",
    ),
    Mutant(
        name="a_state_goes_with_the_newest_step_only",
        file=WORKER,
        old="        return tuple(self._copy.history)\n",
        new="        return tuple(self._copy.history)[-1:]\n",
        why="the steps before may not be in the journal either",
    ),
    Mutant(
        name="what_was_loaded_has_a_history",
        file=COPY,
        old="        self.reduced, self.keeps = None, False\n        self.history.clear()\n",
        new="        self.reduced, self.keeps = None, False\n",
        why="what a roll-back has undone never led anywhere",
    ),
    Mutant(
        name="a_gap_counts_as_told",
        file=NODE_STEPS,
        old="        if message.step <= max(self._told, self.committed) + 1:\n",
        new="        if True:\n",
        why="a witness may have been none before",
    ),
    Mutant(
        name="what_was_undone_counts_as_told",
        file=NODE_STEPS,
        old="        self._told = min(self._told, step)\n",
        new="        pass\n",
        why="a step that is done again has another v",
    ),
    Mutant(
        name="the_step_that_was_sent_is_of_now",
        file=HEARING,
        old="                time = min(self._turn.now, kept.time + node.ahead_s) if kept.time else 0.0\n",
        new="                time = min(self._turn.now, kept.time + node.ahead_s)\n",
        why="when a step was applied elsewhere is not known here",
    ),
    Mutant(
        name="each_worker_tells_its_hash",
        file=NODE_STEPS,
        old="        if message.state_hash and message.state_hash == known:\n",
        new="        if False:\n",
        why="one hash of a node is enough, where its workers agree",
    ),
    Mutant(
        name="a_node_keeps_its_quarrels",
        file=NODE_STEPS,
        old="        if not (message.witness or message.state_hash):\n",
        new="        if not message.witness:\n",
        why="replicas that differ are never tolerated",
    ),
    Mutant(
        name="all_witnesses_in_one_rack",
        file=WITNESSES,
        old="    nodes = list(dict.fromkeys((*firsts.values(), *ranks)))\n",
        new="    nodes = list(ranks)\n",
        why="the nodes of one rack fail together",
    ),
)
