"""Mutants of the sample ledger: refused step results, their reports, and kept gradients."""

from __future__ import annotations

from mutant import Mutant

WORKER = "coordination.worker.machine"
REPORTING = "coordination.worker.reporting"
REFUSALS = "coordination.generations.refusals"
DECIDING = "coordination.job.deciding"
HEARING = "coordination.job.handlers"
PLACE = "coordination.agent.place"
SAMPLES = "step_samples"

SAMPLE_MUTANTS = (
    Mutant(
        name="nobody_refuses",
        module=WORKER,
        qualname="WorkerMachine.finish_reduction",
        old="self.samples.find_error(self.step, samples=v.samples, places=self.generations.places, **hashes)",
        new="''",
        why="a step that does not have each micro-batch once counts for nobody",
        quick=True,
    ),
    Mutant(
        name="samples_are_only_counted",
        module=SAMPLES,
        qualname="StepSamples.find_error",
        old="(samples, hashes) == (global_batch, expected)",
        new="samples == global_batch",
        why="one micro-batch twice and another not at all are as many samples",
    ),
    Mutant(
        name="hashes_of_the_first_place_alone",
        module=SAMPLES,
        qualname="StepSamples.find_error",
        old="place_hashes == elsewhere",
        new="True",
        why="a gradient that is wrong at another place of a unit is as wrong",
    ),
    Mutant(
        name="the_same_hashes_at_all_places",
        module=SAMPLES,
        qualname="place_hash",
        old="sample_hash * (2 * place + 1)",
        new="sample_hash",
        why="a micro-batch that is missing at one place and doubled at another must not add up",
    ),
    Mutant(
        name="hashes_of_any_step",
        module=SAMPLES,
        qualname="StepSamples._of",
        old="f'{self.seed}/{step}'",
        new="f'{self.seed}'",
        why="a gradient of the step before is another one",
    ),
    Mutant(
        name="a_refusal_is_not_reported",
        module=REPORTING,
        qualname="make_report",
        old="generation if phase is Phase.REFUSED and (not comparison.differs) else 0",
        new="0",
        why="what is held is kept, and with it what is wrong, for ever",
    ),
    Mutant(
        name="a_refusal_is_told_to_whoever_listens",
        module=PLACE,
        old=(
            "(Prepared, Report, Complaint, VoteRefused, Finished, Loads, EvaluationDone, FlopTally, "
            "ScriptFailed, Raised)"
        ),
        new="(Prepared, Report, Complaint, Finished, Loads, EvaluationDone, FlopTally, ScriptFailed, Raised)",
        why="a coordinator that comes later must hear of it: nobody goes on otherwise",
    ),
    Mutant(
        name="a_refusal_stops_nobody",
        module=HEARING,
        qualname="MessageHandlers",
        old="_on_vote_refused",
        new="ignore",
        why="who has refused waits for a decision",
    ),
    Mutant(
        name="wrong_sums_are_held",
        module=DECIDING,
        qualname="GenerationDecider._begin_generation",
        old="() if refusal is not None else first_assignment(record, plan, decision, reports, whose)",
        new="first_assignment(record, plan, decision, reports, whose)",
        why="nobody knows whose gradient it is that is wrong: all of them go",
    ),
    Mutant(
        name="a_refusal_is_forgotten_at_the_next_decision",
        module=REFUSALS,
        qualname="refusal_after",
        old="before if before is not None and before.step > decision.applied else None",
        new="None",
        why="whoever has not begun anew yet still holds what was refused",
    ),
    Mutant(
        name="every_refusal_is_another_one",
        module=REFUSALS,
        qualname="refused_again",
        old="_refused(report, before.step) >= before.clean_from",
        new="_refused(report, before.step) > 0",
        why="one and the same may be told of again after the decision that it led to",
    ),
    Mutant(
        name="clean_from_the_generation_that_was_refused",
        module=DECIDING,
        qualname="GenerationDecider._record_new_refusal",
        old="transaction.record.generation + 1",
        new="transaction.record.generation",
        why="the attempt that was refused did not begin clean",
    ),
    Mutant(
        name="refused_for_ever",
        module=REFUSALS,
        qualname="refused_again",
        old="any((_refused(report, before.step) >= before.clean_from for report in reports))",
        new="False",
        why="what goes wrong with nothing held goes wrong every time: the job must end and say so",
    ),
    Mutant(
        name="a_refusal_outlives_its_step",
        module=REFUSALS,
        qualname="refusal_after",
        old="before is not None and before.step > decision.applied",
        new="before is not None",
        why="once the step is applied gradients may be kept again",
    ),
    Mutant(
        name="restarted_for_ever",
        module=DECIDING,
        qualname="GenerationDecider._choose_next_generation",
        old="tries <= MAX_RETRIES",
        new="True",
        why="a job that is started again for one refused step after the other gets nowhere",
    ),
    Mutant(
        name="who_left_a_refused_operation_is_suspect",
        module=DECIDING,
        qualname="GenerationDecider._find_culprits",
        old="any((report.refused or report.ending for report in reports.values()))",
        new="False",
        why="a broken collective whose cause is known is no failure of anybody's",
    ),
)
