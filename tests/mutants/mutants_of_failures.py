"""Mutants of what is done about failures: classes, budgets, scripts that raise."""

from __future__ import annotations

from mutant import Mutant

BLAME = "coordination/failures/blame.py"
DECIDING = "coordination/generations/deciding.py"
MACHINE = "coordination/worker/machine.py"
CLOSING = "coordination/closing.py"
FAILURES = "coordination/failures/failures.py"
LADDER = "coordination/failures/ladder.py"
KEPT_RANKS = "coordination/failures/kept_ranks.py"
ADMISSION = "coordination/nodes/admission.py"
PLANNER = "coordination/generations/planner.py"
PROBING = "coordination/nodes/probing.py"
PAIR_PROBES = "coordination/nodes/pair_probes.py"
START_PROBES = "coordination/nodes/start_probes.py"
COORDINATOR = "coordination/coordinator.py"
SUSPECTS = "coordination/failures/suspects.py"
TRANSFERS = "coordination/nodes/transfers.py"

FAILURE_MUTANTS = (
    Mutant(
        name="raisers_are_let_go_at_once",
        file=DECIDING,
        old="        return None if not whole or lost_of(self._turn.record, others, reports) else others\n",
        new="        return others\n",
        why="where all scripts raise, what they have is nowhere else",
    ),
    Mutant(
        name="raisers_stay_members",
        file=DECIDING,
        old="        raisers = [] if closing else self._raisers.among(stopping.reports)\n",
        new="        raisers: list[str] = []\n",
        why="who has raised computes nothing any more",
        quick=True,
    ),
    Mutant(
        name="raiser_keeps_half_a_gradient",
        file=MACHINE,
        old="        self._kept, self._share.summed = True, []",
        new="        self._kept = True",
        why="what was added up of the micro-batch at hand may be half of it",
    ),
    Mutant(
        name="raiser_keeps_what_changes",
        file=MACHINE,
        old="        if self.applied is None or self.phase not in KEEPING:\n",
        new="        if self.applied is None:\n",
        why="a state that is being changed is nobody's",
    ),
    Mutant(
        name="blame_is_never_the_works",
        file=BLAME,
        old="    if last.step is not None and len(here) > 1:\n",
        new="    if False:\n",
        why="a sample that always raises would take one node after the other",
    ),
    Mutant(
        name="blame_is_at_once_the_works",
        file=BLAME,
        old="    if last.step is not None and len(here) > 1:\n",
        new="    if last.step is not None and len(here) > 0:\n",
        why="one node's exception starts a process again, and ends no job",
    ),
    Mutant(
        name="blame_anywhere_is_never",
        file=BLAME,
        old="    return anywhere if not machine and len(anywhere) >= max(2, min(nodes, ENOUGH)) else []\n",
        new="    return []\n",
        why="a line that only the first rank comes to raises on each that becomes it",
    ),
    Mutant(
        name="blame_a_lone_node_never",
        file=BLAME,
        old="    if nodes < 2 and len(at) > 1:\n        return here\n",
        new="    if nodes < 2 and len(at) > 1:\n        return []\n",
        why="a job of one node would begin again for ever, or lose its node",
    ),
    Mutant(
        name="a_renewed_job_ends",
        file=CLOSING,
        old="        return self.under_way and self._will is not None and self._will.renew\n",
        new="        return False\n",
        why="one exception of the only worker is no reason to end a job",
    ),
    Mutant(
        name="the_last_will_is_not_written",
        file=CLOSING,
        old="        if self._will != record.will:\n",
        new="        if False:\n",
        why="a coordinator that takes over must end the job as it was to end",
    ),
    Mutant(
        name="a_rung_never_ends",
        file=LADDER,
        old="        return tries > (MAX_RETRIES if severity is Severity.RETRY else self._max_restarts)\n",
        new="        return False\n",
        why="a node that fails again and again is taken out",
    ),
    Mutant(
        name="a_rung_counts_for_all_agents",
        file=LADDER,
        old="        key = failure.node, self._agent(failure), failure.severity\n",
        new="        key = failure.node, 0, failure.severity\n",
        why="a machine that was replaced begins anew",
    ),
    Mutant(
        name="collectives_are_tried_again_for_ever",
        file=FAILURES,
        old="        return not self._ladder.exhausted(Severity.RETRY, tries)\n",
        new="        return True\n",
        why="links that break again and again hold all members up",
    ),
    Mutant(
        name="nodes_that_are_lost_together_have_failed",
        file=LADDER,
        old="        counted.undo(since)\n",
        new="",
        why="what they share has failed: a switch that flaps would have all of them quarantined",
    ),
    Mutant(
        name="complaints_beside_a_script_that_ends_are_judged",
        file=DECIDING,
        old="report.refused or report.ending for",
        new="report.refused for",
        why="the script that has raised is why, although its traceback is still being made",
    ),
    Mutant(
        name="who_raises_last_is_not_named",
        file=CLOSING,
        old="            self._will = msgspec.structs.replace(self._will, why=why)\n",
        new="            pass\n",
        why="it was met on all nodes, and two were named",
    ),
    Mutant(
        name="who_is_given_up_is_to_blame_at_once",
        file=LADDER,
        old="        step = turn.position.step + 2\n",
        new="        step = 0\n",
        why="the others may only be slower to meet what it has met",
    ),
    Mutant(
        name="who_says_that_it_must_go_is_not_answered",
        file=LADDER,
        old="        if leave.waits:\n",
        new="        if False:\n",
        why="it waits to be heard, and says it again and again",
    ),
    Mutant(
        name="the_step_under_way_speaks_for_the_others",
        file=LADDER,
        old="        step = turn.position.step + 2\n",
        new="        step = turn.position.step + 1\n",
        why="it may have passed before the script raised",
    ),
    Mutant(
        name="who_is_given_up_is_never_to_blame",
        file=FAILURES,
        old="        self._ladder.made_good()\n",
        new="",
        why="the others go on without it: it was the node",
    ),
    Mutant(
        name="who_is_back_is_still_given_up",
        file=ADMISSION,
        old="        self._ladder.came(hello.node)\n",
        new="",
        why="it trains again, and would be quarantined for it",
    ),
    Mutant(
        name="a_deserted_job_waits_for_ever",
        file=LADDER,
        old='        self._out = node, f"is quarantined: {why}"\n',
        new="",
        why="nobody is left, and nobody can come",
    ),
    Mutant(
        name="a_job_ends_although_somebody_may_come_back",
        file=LADDER,
        old="        if not node or self._turn.members.nodes or self._gone or awaited:\n",
        new="        if not node or self._turn.members.nodes or awaited:\n",
        why="who was lost is back in a moment, and goes on from the checkpoint",
    ),
    Mutant(
        name="a_job_that_has_not_begun_ends_with_the_first_node",
        file=LADDER,
        old="        if not record.generation and len(self.all_out) < self._nodes_to_begin:\n",
        new="        if False:\n",
        why="what the others meet says more",
    ),
    Mutant(
        name="exceptions_before_the_first_step_are_forgotten",
        file=BLAME,
        old="    until = -inf if ever else last.time - WINDOW_S\n",
        new="    until = last.time - WINDOW_S\n",
        why="the slower the nodes, the later the same exception comes",
    ),
    Mutant(
        name="a_broken_machine_comes_back",
        file=FAILURES,
        old="        return found.severity is Severity.NODE and evidence.detector is not Detector.NODE_HEALTH\n",
        new="        return False\n",
        why="no other process would fare better there",
    ),
    Mutant(
        name="the_unfit_join",
        file=ADMISSION,
        old="        if hello.unfit:\n",
        new="        if False:\n",
        why="a node that finds itself unfit must not train",
    ),
    Mutant(
        name="who_came_back_by_itself_is_a_ticket",
        file=LADDER,
        old="        self._gone[node] = self._turn.now, AUTOMATIC\n",
        new="        self._gone[node] = self._turn.now, TICKET\n",
        why="repairs that nobody made cost nobody anything",
    ),
    Mutant(
        name="who_undoes_swaps_begins_anew",
        file=LADDER,
        old="(nonsense or (coming and not member))",
        new="nonsense",
        why="it keeps all other newcomers out",
    ),
    Mutant(
        name="the_quarantined_come_again",
        file=ADMISSION,
        old="        if barred is not None:\n",
        new="        if False:\n",
        why="nobody has repaired them",
    ),
    Mutant(
        name="a_quarantine_bars_all_on_the_host",
        file=LADDER,
        old='        entry = Quarantined(node=node, host="" if shared else host,',
        new="        entry = Quarantined(node=node, host=host,",
        why="others on the same host are as good as before",
    ),
    Mutant(
        name="ranks_are_kept_for_ever",
        file=KEPT_RANKS,
        old="        return any(until > now and node_of(seat) in nodes",
        new="        return any(node_of(seat) in nodes",
        why="a process that does not come must not hold up the job",
    ),
    Mutant(
        name="ranks_are_kept_for_lost_nodes",
        file=KEPT_RANKS,
        old="        return any(until > now and node_of(seat) in nodes",
        new="        return any(until > now",
        why="a node that is gone brings no process",
    ),
    Mutant(
        name="others_take_the_seats",
        file=PLANNER,
        old="    return sorted(workers, key=lambda worker: seats[_seat(worker, stand_ins)])\n",
        new="    return workers\n",
        why="who fills a place has its rank",
    ),
    Mutant(
        name="a_failed_transfer_blames_nobody",
        file=SUSPECTS,
        old="            if receiver in transfers.exhausted\n",
        new="            if False\n",
        why="a newcomer that cannot be sent the state would stop the job again and again",
    ),
    Mutant(
        name="a_bad_sender_is_sent_away_with_the_last_copy",
        file=SUSPECTS,
        old="if node in senders and transfers.can_spare(node)]",
        new="if node in senders]",
        why="what only the sender has would be lost",
    ),
    Mutant(
        name="rank_decides_between_a_member_and_a_newcomer",
        file=SUSPECTS,
        old="        having = {node_of(worker) for worker in workers if worker not in transfers.lacking}\n",
        new="        having = {node_of(worker) for worker in workers}\n",
        why="a member with the state goes because it does not reach a node that has nothing",
    ),
    Mutant(
        name="a_late_sender_is_the_laggard",
        file=SUSPECTS,
        old="    behind = [worker for worker in behind if worker in lacking] or behind\n",
        new="",
        why="a member that waits until its state is sent has done nothing wrong",
    ),
    Mutant(
        name="the_same_sender_tries_again",
        file=PLANNER,
        old="        able = _without_failures(worker, holders, history, failures) if history else holders\n",
        new="        able = holders\n",
        why="a receiver would go for what is its sender's fault",
    ),
    Mutant(
        name="one_receiver_proves_a_bad_sender",
        file=TRANSFERS,
        old="_ENOUGH_RECEIVERS = 2\n",
        new="_ENOUGH_RECEIVERS = 1\n",
        why="that may be the link between the two",
    ),
    Mutant(
        name="a_probe_of_one_side_is_enough",
        file=PAIR_PROBES,
        old="        elif probe.awaited:\n            return None\n",
        new="",
        why="the other direction may be closed",
    ),
    Mutant(
        name="one_member_refuses_a_newcomer",
        file=PROBING,
        old="TRIES = 2\n",
        new="TRIES = 1\n",
        why="the fault may be the member's",
    ),
    Mutant(
        name="the_first_nodes_are_not_probed",
        file=COORDINATOR,
        old="        self.parts.start_probes.begin(node)\n",
        new="",
        why="a job would begin with a node that others cannot reach",
    ),
    Mutant(
        name="a_job_begins_before_its_nodes_are_probed",
        file=DECIDING,
        old="        if self._start_probes.are_open or not self._have_same_data():\n",
        new="        if not self._have_same_data():\n",
        why="a node whose probes hang would be a member",
    ),
    Mutant(
        name="bad_nodes_accuse_good_ones",
        file=START_PROBES,
        old="        return sum(bool(self._reached.get(other)) for other in self._failed[one])\n",
        new="        return len(self._failed[one])\n",
        why="two bad nodes would have a good one refused",
    ),
    Mutant(
        name="no_third_node_is_asked",
        file=START_PROBES,
        old="        if self._asks_third(unclear):\n",
        new="        if False:\n",
        why="a good node that has tried two bad ones would stay unclear",
    ),
    Mutant(
        name="needed_nodes_are_refused_without_proof",
        file=START_PROBES,
        old="        if len(last) <= spare:\n",
        new="        if True:\n",
        why="if the first node is bad, all that follow would be refused",
    ),
)
