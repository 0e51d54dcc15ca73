"""Mutants of the sample ledger: refused step results, their reports, and kept gradients."""

from __future__ import annotations

from mutant import Mutant

WORKER = "coordination.worker.machine"
REPORTING = "coordination.worker.reporting"
REFUSALS = "coordination.generations.refused_results"
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
        why="no worker may count a step that lacks micro-batches or has duplicates",
        quick=True,
    ),
    Mutant(
        name="samples_are_only_counted",
        module=SAMPLES,
        qualname="StepSamples.find_error",
        old="(samples, hashes) == (global_batch, expected)",
        new="samples == global_batch",
        why="one doubled and one missing micro-batch give the right number of samples",
    ),
    Mutant(
        name="hashes_of_the_first_place_alone",
        module=SAMPLES,
        qualname="StepSamples.find_error",
        old="place_hashes == elsewhere",
        new="True",
        why="a gradient that is wrong at another local rank is equally wrong",
    ),
    Mutant(
        name="the_same_hashes_at_all_places",
        module=SAMPLES,
        qualname="place_hash",
        old="sample_hash * (2 * place + 1)",
        new="sample_hash",
        why="a micro-batch missing at one local rank and doubled at another must not cancel out",
    ),
    Mutant(
        name="hashes_of_any_step",
        module=SAMPLES,
        qualname="StepSamples._of",
        old="f'{self.seed}/{step}'",
        new="f'{self.seed}'",
        why="a gradient of the previous step is a different one",
    ),
    Mutant(
        name="a_refusal_is_not_reported",
        module=REPORTING,
        qualname="make_report",
        old="generation if phase is Phase.REFUSED and (not comparison.differs) else 0",
        new="0",
        why="kept gradients would include the wrong one forever",
    ),
    Mutant(
        name="a_refusal_is_told_to_whoever_listens",
        module=PLACE,
        old=(
            "(Prepared, Report, Complaint, VoteRefused, Finished, Loads, EvaluationDone, FlopTally, "
            "ScriptFailed, Raised)"
        ),
        new="(Prepared, Report, Complaint, Finished, Loads, EvaluationDone, FlopTally, ScriptFailed, Raised)",
        why="a later coordinator must receive it, or no worker continues",
    ),
    Mutant(
        name="a_refusal_stops_nobody",
        module=HEARING,
        qualname="MessageHandlers",
        old="_on_vote_refused",
        new="ignore",
        why="a worker that refused waits for a decision",
    ),
    Mutant(
        name="wrong_sums_are_held",
        module=DECIDING,
        qualname="GenerationDecider._begin_generation",
        old="() if refusal is not None else first_assignment(record, plan, decision, reports, whose)",
        new="first_assignment(record, plan, decision, reports, whose)",
        why="the wrong gradient cannot be identified, so all of them must be dropped",
    ),
    Mutant(
        name="a_refusal_is_forgotten_at_the_next_decision",
        module=REFUSALS,
        qualname="refusal_after",
        old="before if before is not None and before.step > decision.applied else None",
        new="None",
        why="a worker that has not restarted the step still holds the refused gradients",
    ),
    Mutant(
        name="every_refusal_is_another_one",
        module=REFUSALS,
        qualname="refused_again",
        old="_refused(report, before.step) >= before.clean_from",
        new="_refused(report, before.step) > 0",
        why="the same refusal may be reported again after the decision that it led to",
    ),
    Mutant(
        name="clean_from_the_generation_that_was_refused",
        module=DECIDING,
        qualname="GenerationDecider._record_new_refusal",
        old="transaction.record.generation + 1",
        new="transaction.record.generation",
        why="the refused attempt did not begin without kept gradients",
    ),
    Mutant(
        name="refused_for_ever",
        module=REFUSALS,
        qualname="refused_again",
        old="any((_refused(report, before.step) >= before.clean_from for report in reports))",
        new="False",
        why="an attempt that is refused without kept gradients fails every time, so the job must end with the reason",
    ),
    Mutant(
        name="a_refusal_outlives_its_step",
        module=REFUSALS,
        qualname="refusal_after",
        old="before is not None and before.step > decision.applied",
        new="before is not None",
        why="once the step is applied, gradients may be kept again",
    ),
    Mutant(
        name="restarted_for_ever",
        module=DECIDING,
        qualname="GenerationDecider._choose_next_generation",
        old="tries <= MAX_RETRIES",
        new="True",
        why="a job that restarts for one refused step after the other makes no progress",
    ),
    Mutant(
        name="who_left_a_refused_operation_is_suspect",
        module=DECIDING,
        qualname="GenerationDecider._find_culprits",
        old="any((report.refused or report.ending for report in reports.values()))",
        new="False",
        why="a broken collective with a known cause is not another failure",
    ),
)
