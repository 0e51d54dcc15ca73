"""Mutants of the sample ledger: who refuses a v, what is told of it, and what is kept after it."""

from __future__ import annotations

from mutant import Mutant

WORKER = "coordination/worker/machine.py"
REPORTING = "coordination/worker/reporting.py"
REFUSALS = "coordination/generations/refusals.py"
DECIDING = "coordination/generations/deciding.py"
HEARING = "coordination/hearing.py"
PLACE = "coordination/agent/place.py"
SAMPLES = "step_samples.py"

SAMPLE_MUTANTS = (
    Mutant(
        name="nobody_refuses",
        file=WORKER,
        old="if wrong := self.samples.wrong(self.step, samples=v.samples, places=self.generations.places, **hashes):",
        new='if wrong := "":',
        why="a step that does not have each micro-batch once counts for nobody",
        quick=True,
    ),
    Mutant(
        name="samples_are_only_counted",
        file=SAMPLES,
        old="if (samples, hashes) == (global_batch, expected):",
        new="if samples == global_batch:",
        why="one micro-batch twice and another not at all are as many samples",
    ),
    Mutant(
        name="hashes_of_the_first_place_alone",
        file=SAMPLES,
        old="            if place_hashes == elsewhere:",
        new="            if True:",
        why="a gradient that is wrong at another place of a unit is as wrong",
    ),
    Mutant(
        name="the_same_hashes_at_all_places",
        file=SAMPLES,
        old="sample_hash * (2 * place + 1)",
        new="sample_hash",
        why="a micro-batch that is missing at one place and doubled at another must not add up",
    ),
    Mutant(
        name="hashes_of_any_step",
        file=SAMPLES,
        old='shake_128(f"{self.seed}/{step}".encode())',
        new='shake_128(f"{self.seed}".encode())',
        why="a gradient of the step before is another one",
    ),
    Mutant(
        name="a_refusal_is_not_reported",
        file=REPORTING,
        old="        refused=generation if phase is Phase.REFUSED and not comparison.differs else 0,\n",
        new="        refused=0,\n",
        why="what is held is kept, and with it what is wrong, for ever",
    ),
    Mutant(
        name="a_refusal_is_told_to_whoever_listens",
        file=PLACE,
        old="    VoteRefused,\n    Finished,\n    Loads,\n",
        new="    Finished,\n    Loads,\n",
        why="a coordinator that comes later must hear of it: nobody goes on otherwise",
    ),
    Mutant(
        name="a_refusal_stops_nobody",
        file=HEARING,
        old="        msg.VoteRefused: while_it_goes_on(_vote_refused),\n",
        new="        msg.VoteRefused: while_it_goes_on(ignore),\n",
        why="who has refused waits for a decision",
    ),
    Mutant(
        name="wrong_sums_are_held",
        file=DECIDING,
        old="assignment = () if refusal is not None else first_assignment(",
        new="assignment = first_assignment(",
        why="nobody knows whose gradient it is that is wrong: all of them go",
    ),
    Mutant(
        name="a_refusal_is_forgotten_at_the_next_decision",
        file=REFUSALS,
        old="    return before if before is not None and before.step > decision.applied else None\n",
        new="    return None\n",
        why="whoever has not begun anew yet still holds what was refused",
    ),
    Mutant(
        name="every_refusal_is_another_one",
        file=REFUSALS,
        old=">= before.clean_from for report in reports)",
        new="> 0 for report in reports)",
        why="one and the same may be told of again after the decision that it led to",
    ),
    Mutant(
        name="clean_from_the_generation_that_was_refused",
        file=DECIDING,
        old="clean_from=turn.record.generation + 1)",
        new="clean_from=turn.record.generation)",
        why="the attempt that was refused did not begin clean",
    ),
    Mutant(
        name="refused_for_ever",
        file=REFUSALS,
        old="    return any(_refused(report, before.step) >= before.clean_from for report in reports)\n",
        new="    return False\n",
        why="what goes wrong with nothing held goes wrong every time: the job must end and say so",
    ),
    Mutant(
        name="a_refusal_outlives_its_step",
        file=REFUSALS,
        old="before is not None and before.step > decision.applied else",
        new="before is not None else",
        why="once the step is applied gradients may be kept again",
    ),
    Mutant(
        name="restarted_for_ever",
        file=DECIDING,
        old="            if tries <= MAX_RETRIES:\n",
        new="            if True:\n",
        why="a job that is started again for one refused step after the other gets nowhere",
    ),
    Mutant(
        name="who_left_a_refused_operation_is_suspect",
        file=DECIDING,
        old="        if any(report.refused or report.ending for report in reports.values()):\n",
        new="        if False:\n",
        why="a broken collective whose cause is known is no failure of anybody's",
    ),
)
