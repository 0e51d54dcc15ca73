"""The components of one coordinator, constructed and connected in one place: `JobContext`."""

from __future__ import annotations

from enum import StrEnum

from holdfast.coordination.collection.rendezvous import KeyBundles
from holdfast.coordination.config import CoordinatorConfig
from holdfast.coordination.failures.classes import FailureClasses
from holdfast.coordination.failures.escalation import EscalationPolicy
from holdfast.coordination.generations.announcing import Newcomers
from holdfast.coordination.generations.interruption import Interruption
from holdfast.coordination.generations.plan_distribution import PlanDistribution
from holdfast.coordination.generations.rebalancing import Rebalancing
from holdfast.coordination.generations.swap import PendingGeneration
from holdfast.coordination.hang_detection.probe import HangProbe
from holdfast.coordination.hang_detection.straggler_response import StragglerPolicy
from holdfast.coordination.layouts.changing import LayoutChanges
from holdfast.coordination.layouts.failing import FailingLayouts
from holdfast.coordination.membership import Membership
from holdfast.coordination.nodes.disconnected_nodes import DisconnectedNodes
from holdfast.coordination.nodes.draining import Draining
from holdfast.coordination.nodes.expert_handoff import ExpertHandoff
from holdfast.coordination.nodes.pair_probes import PairProbes
from holdfast.coordination.nodes.record_age import RecordAge
from holdfast.coordination.nodes.replacements import Replacements
from holdfast.coordination.nodes.standbys import StandbyNodes
from holdfast.coordination.nodes.start_probes import StartProbes
from holdfast.coordination.pool_client.client import JobPoolClient
from holdfast.coordination.pool_client.flop_count import FlopBook
from holdfast.coordination.progress.announced import Progress
from holdfast.coordination.progress.checkpoints import CheckpointBook
from holdfast.coordination.progress.evaluations import EvaluationBook
from holdfast.coordination.progress.ledger import StepLedger
from holdfast.coordination.progress.loads import LoadBook
from holdfast.coordination.recovery.closing import Closing
from holdfast.coordination.recovery.ending import JobEnd
from holdfast.coordination.recovery.failures import Failures
from holdfast.coordination.recovery.rank_hold import RankHold
from holdfast.coordination.recovery.script_errors import ScriptErrors
from holdfast.coordination.snapshots.book import SnapshotBook
from holdfast.coordination.transaction import Transaction
from holdfast.protocol.plan import ExpertPlan, GenerationPlan


class JobPhase(StrEnum):
    """The phase of a job. A job that is over has an outcome in its record, which users see instead."""

    #: No generation is in force.
    WAITING = "waiting"
    #: A generation is in force; another one may be pending.
    RUNNING = "running"
    #: The generation is interrupted, and reports of its members are awaited.
    RECOVERING = "recovering"
    #: The job has ended, permanently or until it is resumed.
    OVER = "stopped"


class JobContext:
    """All components of a coordinator; each one gets the components that it needs in its constructor."""

    def __init__(self, transaction: Transaction, config: CoordinatorConfig) -> None:
        self.transaction = transaction
        self.config = config
        self.record_age = RecordAge(transaction, config.lease_s)
        self.pair_probes = PairProbes(transaction, config.probe_timeout_s)
        self.start_probes = StartProbes(transaction, self.pair_probes)
        self.progress = Progress(transaction)
        costs = self.progress.costs
        self.loads = LoadBook(transaction)
        self.newcomers = Newcomers(transaction, config.spec.max_nodes)
        self.plan_distribution = PlanDistribution(transaction)
        self.rendezvous = KeyBundles(transaction)
        self.pending_generation = PendingGeneration(
            transaction, config, self.loads, self.plan_distribution, self.newcomers
        )
        self.rebalancing = Rebalancing(transaction, config, self.loads, transaction.position.step)
        self.checkpoints = CheckpointBook(transaction, config, costs)
        self.snapshots = SnapshotBook(transaction, config)
        self.evaluations = EvaluationBook(transaction)
        self.flop = FlopBook(transaction, config)
        self.job_end = JobEnd(transaction)
        self.standbys = StandbyNodes(transaction, config, costs)
        self.disconnected = DisconnectedNodes(transaction)
        self.interruption = Interruption(transaction, self.progress)
        self.replacements = Replacements(transaction, config, self.standbys, self.newcomers, costs)
        stopping, absences = self.interruption, self.disconnected
        self.draining = Draining(
            transaction, config, self.ledger, stopping, absences, self.standbys, self.replacements, costs
        )
        self.layouts = LayoutChanges(
            transaction, config, self.progress, stopping, absences, self.snapshots, self.draining
        )
        self.failing = FailingLayouts(transaction, config, self.progress, stopping, self.layouts)
        self.straggling = StragglerPolicy(transaction, config, self.draining, self.replacements)
        self.expert_handoff = ExpertHandoff(transaction, config, self.loads, self.draining)
        self.closing = Closing(transaction, config, stopping, self.job_end, self.failing.revert_change)
        #: Why a node was refused last; "" if none was refused.
        self.last_refusal = ""
        self.classes = FailureClasses(config.rules)
        self.escalation = EscalationPolicy(transaction, config)
        self.rank_hold = RankHold(transaction, config)
        told = self.standbys.on_failure, self.draining.on_failure
        self.failures = Failures(
            transaction, self.progress, stopping, self.pending_generation, absences, self.classes, self.escalation, told
        )
        self.pool_client = JobPoolClient(
            transaction,
            config,
            self.draining,
            self.failures,
            self.disconnected,
            self.escalation,
            self.closing,
            self.job_end,
            self.standbys,
            self.replacements,
            costs,
            lambda: self.checkpoints.period_s,
        )
        self.hang_detection = HangProbe(transaction, config, self.failures, self.interruption, self.disconnected)
        self.script_errors = ScriptErrors(
            transaction, config, self.ledger, self.interruption, self.failures, self.closing, self.classes, self.failing
        )

    @property
    def members(self) -> Membership:
        """The connected nodes and their workers."""
        return self.transaction.members

    @property
    def ledger(self) -> StepLedger:
        """The steps that each worker has applied."""
        return self.progress.ledger

    def forget_past_failures(self) -> None:
        """Forget the cause of the last failure, and finish a layout change once its first step is committed."""
        self.failures.forget_cause()
        self.layouts.finish_if_committed()

    def start_planned_changes(self, plan: GenerationPlan) -> None:
        """Interrupt a settled generation at a step boundary if nodes leave or the layout changes."""
        self.draining.start_at_boundary(plan)
        self.layouts.start_if_due(plan)

    def update_saved_state(self, plan: GenerationPlan) -> None:
        """Bring checkpoints, snapshots and stashed states up to date with the committed steps.

        Orders seals, copies and due saves, and emits events. Also activates the new layout once all nodes have stashed
        the state, or cancels its change after the time limit.
        """
        self.checkpoints.note_left_out(self.progress.take_left_out())
        self.checkpoints.update(self.ledger.committed)
        self.snapshots.update(self.ledger.committed)
        self.layouts.check_stash(plan)

    def find_better_placement(self, plan: GenerationPlan) -> ExpertPlan | None:
        """Return a new expert placement for the plan in force, or None to keep the current one.

        First choice is a copy of experts that only draining nodes hold, then the result of a search for a faster
        placement. May start such a search.
        """
        found = self.rebalancing.poll(plan, self.ledger.committed, self.progress.costs)
        return self.expert_handoff.plan_handoff(plan) or found

    @property
    def phase(self) -> JobPhase:
        """The phase of the job: over, or recovering while a generation is interrupted, or running with a plan, else
        waiting.
        """
        if self.job_end.over is not None:
            return JobPhase.OVER
        if self.interruption.stop is not None:
            return JobPhase.RECOVERING
        return JobPhase.RUNNING if self.transaction.record.plan else JobPhase.WAITING
