"""Mutants of replica groups over several workers: agreement, kept gradients, common losses, and state by role."""

from __future__ import annotations

from mutant import Mutant

SHARE = "coordination.worker.replica_group.share"
AGREEING = "coordination.worker.replica_group.agreeing"
ADOPTING = "coordination.worker.replica_group.adopting"
BOUNDARIES = "coordination.worker.boundaries"
COPY = "coordination.worker.copy"
ASSIGNMENT = "coordination.generations.assignment"
DECISIONS = "coordination.generations.decisions"
PLANNER = "coordination.generations.planner"
TURN = "coordination.transaction"
HEARING = "coordination.job.handlers"
MEMBERSHIP = "coordination.membership"

UNIT_MUTANTS = (
    Mutant(
        name="what_one_place_names_is_summed",
        module=ASSIGNMENT,
        qualname="summed_by",
        old="tuple((one for one in first if all((one in summed for summed in others))))",
        new="first",
        why="no worker would compute a micro-batch that was only proposed",
    ),
    Mutant(
        name="a_place_keeps_what_it_has_named",
        module=SHARE,
        qualname="Share.assign_in_group",
        old="self.summed = [micro_batch for micro_batch in self.summed if micro_batch in kept]",
        new="pass",
        why="the workers of a replica group must have the same sums",
    ),
    Mutant(
        name="what_is_not_kept_is_waited_for",
        module=SHARE,
        qualname="Share.assign_in_group",
        old="self.proposed is not None and self.proposed.number not in kept",
        new="self.proposed is not None and (not kept) and (self.proposed.number < 0)",
        why="the other worker proposes something else, and this one would wait forever",
    ),
    Mutant(
        name="what_is_kept_is_withdrawn",
        module=SHARE,
        qualname="Share.assign_in_group",
        old=("if self.proposed is not None and self.proposed.number not in kept:\n    self.unwanted = True"),
        new=(
            "if self.proposed is not None and self.proposed.number not in kept:\n"
            "    pass\n"
            "self.unwanted = self.proposed is not None"
        ),
        why="the other workers rely on it",
    ),
    Mutant(
        name="withdraws_at_a_stop",
        module=AGREEING,
        qualname="GroupAgreement.is_proposal_wanted",
        old="self._share.unwanted or self.done",
        new="self._share.unwanted or self.done or getattr(self, 'frozen', False)",
        why="an agreed proposal is binding",
    ),
    Mutant(
        name="each_place_takes_the_newer_state_that_has_come",
        module=BOUNDARIES,
        qualname="next_entering_task",
        old="plan.expert_plan is None and _whole_group_receives(worker, plan, decision)",
        new="False",
        why="the sender may be lost before all workers have the state, and no group would have either state complete",
    ),
    Mutant(
        name="waits_on_for_its_unit_to_receive_after_a_stop",
        module=ADOPTING,
        qualname="StateAdoption.is_adoption_wanted",
        old="self.done or self.generations.frozen",
        new="self.done",
        why="the other worker may never receive it, and no worker would report",
    ),
    Mutant(
        name="a_unit_of_which_one_place_receives_waits_for_all",
        module=BOUNDARIES,
        qualname="_whole_group_receives",
        old="all",
        new="any",
        why="the other worker has the state and proposes nothing",
    ),
    Mutant(
        name="a_unit_that_lags_keeps_nothing",
        module=ASSIGNMENT,
        qualname="kept_by_units",
        old="applied != decision.applied and all((worker in plan.sources for worker in unit))",
        new="False",
        why="if the newer state never arrives, the step is repeated and needs the gradients",
    ),
    Mutant(
        name="a_process_goes_alone",
        module=TURN,
        qualname="Transaction.drop_group_of",
        old="places == 1",
        new="places",
        why="its replica group would wait for it forever",
    ),
    Mutant(
        name="a_process_that_is_gone_attaches",
        module=HEARING,
        qualname="MessageHandlers._on_attach",
        old="attach.worker in node.workers or attach.worker in node.broken",
        new="attach.worker in node.workers",
        why="its replica group was removed, and its agent ends the process",
    ),
    Mutant(
        name="half_a_unit_is_named",
        module=MEMBERSHIP,
        qualname="Node.in_units",
        old="here[info.index // places] == places",
        new="here",
        why="plans must contain only complete replica groups",
    ),
    Mutant(
        name="one_role_is_enough",
        module=DECISIONS,
        qualname="_reachable",
        old="every_role([report.worker for report in firm], places)",
        new="firm",
        why="no worker would have one part of the state",
    ),
    Mutant(
        name="one_place_goes_forward_alone",
        module=DECISIONS,
        qualname="_reachable",
        old="[report for report in able if report.worker in whole or report.applied == step]",
        new="able if whole is not None else []",
        why="if the senders of the rest are lost, its replica group has neither state",
    ),
    Mutant(
        name="a_state_of_before_the_beginning",
        module=COPY,
        qualname="StateCopy.apply_decision",
        old="receives and (not (apart or is_start)) and (self.applied is not None)",
        new="receives and (not apart) and (self.applied is not None) and (is_start is not None)",
        why="step 0 of a restarted job is a different state",
    ),
    Mutant(
        name="state_of_another_role",
        module=PLANNER,
        qualname="plan_with",
        old="by_role(holders, places)",
        new="reversed(by_role(holders, places))",
        why="a member must receive its state from members of its own role",
    ),
)
