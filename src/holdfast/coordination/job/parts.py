"""The components of one coordinator, constructed and connected in one place: `JobContext`."""

from __future__ import annotations

from enum import StrEnum

from holdfast.coordination.config import CoordinatorConfig
from holdfast.coordination.failures.classes import FailureClasses
from holdfast.coordination.failures.ladder import EscalationPolicy
from holdfast.coordination.generations.announcing import Newcomers
from holdfast.coordination.generations.plans import Telling
from holdfast.coordination.generations.rebalancing import Rebalancing
from holdfast.coordination.generations.stopping import Stopping
from holdfast.coordination.generations.swap import Joining
from holdfast.coordination.lateness.inquiry import HangProbe
from holdfast.coordination.lateness.straggling import StragglerPolicy
from holdfast.coordination.layouts.changing import LayoutChanges
from holdfast.coordination.layouts.failing import FailingLayouts
from holdfast.coordination.membership import Membership
from holdfast.coordination.nodes.absences import Absences
from holdfast.coordination.nodes.departures import Departures
from holdfast.coordination.nodes.handing_on import HandingOn
from holdfast.coordination.nodes.pair_probes import PairProbes
from holdfast.coordination.nodes.record_age import RecordAge
from holdfast.coordination.nodes.replacing import Replacing
from holdfast.coordination.nodes.standbys import Standbys
from holdfast.coordination.nodes.start_probes import StartProbes
from holdfast.coordination.progress.announced import Progress
from holdfast.coordination.progress.checkpoints import CheckpointBook
from holdfast.coordination.progress.evaluations import EvaluationBook
from holdfast.coordination.progress.ledger import StepLedger
from holdfast.coordination.progress.loads import LoadBook
from holdfast.coordination.recovery.closing import Closing
from holdfast.coordination.recovery.ending import Ending
from holdfast.coordination.recovery.failures import Failures
from holdfast.coordination.recovery.kept_ranks import KeptRanks
from holdfast.coordination.recovery.raisers import Raisers
from holdfast.coordination.snapshots.book import SnapshotBook
from holdfast.coordination.telling.rendezvous import KeyBundles
from holdfast.coordination.tenancy.flop import FlopBook
from holdfast.coordination.tenancy.tenant import JobPoolClient
from holdfast.coordination.turn import Transaction
from holdfast.protocol.plan import ExpertPlan, GenerationPlan


class JobState(StrEnum):
    """The phase of a job. A job that is over has an outcome in its record, which users see instead."""

    #: No generation is in force.
    WAITING = "waiting"
    #: A generation is in force; another one may be pending.
    RUNNING = "running"
    #: The generation is interrupted, and reports of its members are awaited.
    RECOVERING = "recovering"
    #: The job has ended, permanently or until it is resumed.
    OVER = "stopped"


class JobParts:
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
        self.telling = Telling(transaction)
        self.rendezvous = KeyBundles(transaction)
        self.joining = Joining(transaction, config, self.loads, self.telling, self.newcomers)
        self.rebalancing = Rebalancing(transaction, config, self.loads, transaction.position.step)
        self.checkpoints = CheckpointBook(transaction, config, costs)
        self.snapshots = SnapshotBook(transaction, config)
        self.evaluations = EvaluationBook(transaction)
        self.flop = FlopBook(transaction, config)
        self.ending = Ending(transaction)
        self.standbys = Standbys(transaction, config, costs)
        self.absences = Absences(transaction)
        self.stopping = Stopping(transaction, self.progress)
        self.replacing = Replacing(transaction, config, self.standbys, self.newcomers, costs)
        stopping, absences = self.stopping, self.absences
        self.departures = Departures(
            transaction, config, self.ledger, stopping, absences, self.standbys, self.replacing, costs
        )
        self.layouts = LayoutChanges(
            transaction, config, self.progress, stopping, absences, self.snapshots, self.departures
        )
        self.failing = FailingLayouts(transaction, config, self.progress, stopping, self.layouts)
        self.straggling = StragglerPolicy(transaction, config, self.departures, self.replacing)
        self.handing_on = HandingOn(transaction, config, self.loads, self.departures)
        self.closing = Closing(transaction, config, stopping, self.ending, self.failing.revert_change)
        #: Why a node was refused last; "" if none was refused.
        self.misfit = ""
        self.classes = FailureClasses(config.rules)
        self.ladder = EscalationPolicy(transaction, config)
        self.kept_ranks = KeptRanks(transaction, config)
        told = self.standbys.failed, self.departures.failed
        self.failures = Failures(
            transaction, self.progress, stopping, self.joining, absences, self.classes, self.ladder, told
        )
        self.tenant = JobPoolClient(
            transaction,
            config,
            self.departures,
            self.failures,
            self.absences,
            self.ladder,
            self.closing,
            self.ending,
            self.standbys,
            self.replacing,
            costs,
            lambda: self.checkpoints.period_s,
        )
        self.inquiry = HangProbe(transaction, config, self.failures, self.stopping, self.absences)
        self.raisers = Raisers(
            transaction, config, self.ledger, self.stopping, self.failures, self.closing, self.classes, self.failing
        )

    @property
    def members(self) -> Membership:
        """The connected nodes and their workers."""
        return self.transaction.members

    @property
    def ledger(self) -> StepLedger:
        """The steps that each worker has applied."""
        return self.progress.ledger

    def made_good(self) -> None:
        """Forget failures before the steps that are committed now."""
        self.failures.made_good()
        self.layouts.finish_if_committed()

    def change(self, plan: GenerationPlan) -> None:
        """Interrupt a settled generation at a step boundary if nodes leave or the layout changes."""
        self.departures.begin(plan)
        self.layouts.start_if_due(plan)

    def look_at_what_is_saved(self, plan: GenerationPlan) -> None:
        """Update which checkpoints and snapshots can be used."""
        self.checkpoints.note_left_out(self.progress.take_left_out())
        self.checkpoints.accept(self.ledger.committed)
        self.snapshots.look(self.ledger.committed)
        self.layouts.check_stash(plan)

    def other_placement(self, plan: GenerationPlan) -> ExpertPlan | None:
        """Return a better expert placement for the plan in force, or None to keep the current one."""
        found = self.rebalancing.look(plan, self.ledger.committed, self.progress.costs)
        return self.handing_on.look(plan) or found

    @property
    def state(self) -> JobState:
        """The phase of the job."""
        if self.ending.over is not None:
            return JobState.OVER
        if self.stopping.stop is not None:
            return JobState.RECOVERING
        return JobState.RUNNING if self.transaction.record.plan else JobState.WAITING
