"""The pool client of a job: the job trains on nodes of which it holds grants, and returns them (docs/pool.md).

It never waits for the pool. A lost node leaves the job at once, and the grant is returned in the same write. The pool's
wishes, that the job leave nodes, save its state or end, are handled like requests of a user.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import is_

import msgspec

from holdfast.coordination.config import CoordinatorConfig
from holdfast.coordination.failures.detections import node_lost
from holdfast.coordination.failures.escalation import EscalationPolicy
from holdfast.coordination.grants import (
    apply_shares,
    describe_state,
    find_overdue,
    give_back,
    mark_awaited,
    mark_connected,
    select_surplus,
    set_roles,
    set_standing,
    update_roles,
)
from holdfast.coordination.inputs import PoolSaid, Shutdown
from holdfast.coordination.nodes.disconnected_nodes import DisconnectedNodes
from holdfast.coordination.nodes.draining import Draining
from holdfast.coordination.nodes.replacements import Replacements
from holdfast.coordination.nodes.standbys import StandbyNodes
from holdfast.coordination.pool_client.pace_reports import PaceReporter
from holdfast.coordination.progress.costs import Cost, MeasuredCosts
from holdfast.coordination.recovery.closing import Closing
from holdfast.coordination.recovery.ending import JobEnd
from holdfast.coordination.recovery.failures import Failures
from holdfast.coordination.transaction import Transaction
from holdfast.errors import EXIT_ENDED
from holdfast.protocol.failures import FailureKind
from holdfast.protocol.messages.agent import Hello
from holdfast.protocol.pool.grants import Held
from holdfast.protocol.pool.sharing import JobStanding, JobState, NodeUnfit, PoolWish

#: seconds between two tries to leave a recalled node that the job still needs
RETRY_S = 1.0
#: longest reason of a refusal, in characters
_WHY_LENGTH = 400
#: how many refused nodes a failure names
_WHY_NODES = 3
#: the reason that users see, by the pool's wish
_WHY: dict[PoolWish, str] = {
    "suspend": "the pool suspends it",
    "stop": "the pool ends it",
    "stop_now": "the pool ends it at once",
}


@dataclass(frozen=True, slots=True)
class _HeldSummary:
    """Values of the held grants that every update needs, computed once for each change of the grants."""

    of: Held
    to_leave: tuple[str, ...]
    #: the standbys
    waiting: frozenset[str]
    training: int

    @staticmethod
    def summarize(held: Held) -> _HeldSummary:
        """Return the summary of the held grants."""
        waiting = frozenset(node for node, grant in held.grants.items() if grant.standby)
        return _HeldSummary(held, held.to_leave, waiting, held.training)


class JobPoolClient:
    """The job's grants. Outside of pools it has none, and all methods do nothing."""

    def __init__(
        self,
        transaction: Transaction,
        config: CoordinatorConfig,
        departures: Draining,
        failures: Failures,
        absences: DisconnectedNodes,
        ladder: EscalationPolicy,
        closing: Closing,
        ending: JobEnd,
        standbys: StandbyNodes,
        replacing: Replacements,
        costs: MeasuredCosts,
        saves_every_s: Callable[[], float | None] = lambda: None,
    ) -> None:
        self._transaction = transaction
        self._config = config
        self._departures = departures
        self._failures = failures
        self._absences = absences
        self._ladder = ladder
        self._closing = closing
        self._ending = ending
        self._standbys = standbys
        self._replacing = replacing
        self._costs = costs
        self._pace_reporter = PaceReporter(transaction, config, costs, saves_every_s)
        #: nodes that do not fit the job, as far as this coordinator has seen; the newest last
        self._unfit: dict[str, NodeUnfit] = {}
        #: standbys that the pool has promoted, and that do not train yet
        self._promoted: set[str] = set()
        #: the last report
        self._reported: JobState | None = None
        #: the inputs from which it was made
        self._report_inputs: tuple[object, ...] = ()
        self._summary: _HeldSummary | None = None
        #: the wish that the job follows now
        self._current_wish: PoolWish = "run"
        self._asked_at = -RETRY_S

    @property
    def _held(self) -> Held | None:
        return self._transaction.record.held

    def start(self) -> None:
        """Prepare the grants for a new coordinator: nodes that have not joined get their full time again. Does nothing
        outside a pool.

        The nodes of a suspended job have left, and its state is saved: its plan is dropped, so that it starts with
        other nodes and misses none. A suspended job without checkpoints starts from scratch.
        """
        transaction = self._transaction
        submission = self._config.submission
        if not submission:
            return
        held = transaction.record.held or Held(submission=submission)
        assert held.submission == submission, f"the record is of submission {held.submission}, not {submission}"
        if held.standing == "suspended":
            transaction.change(plan=None, pending=None, decision=None, passed=())
            held = msgspec.structs.replace(held, anew=not transaction.record.saves)
        self._write_held(mark_awaited(held, self._list_absent(held), transaction.now))

    def on_shares(self, message: PoolSaid) -> None:
        """Handle the pool's message with the job's grants and its wish: update them and whether the job runs, is
        suspended or ended.

        Note promoted standbys, treat nodes without a grant as lost, and fail a stranded job. The next `update` reports
        to the pool. Ignored outside a pool.
        """
        before = self._held
        if before is None:
            return
        held = before
        if held.standing in ("going", "suspended"):
            held = apply_shares(before, message.shares, self._transaction.now)
            if held.wish == "run" and held.standing == "suspended" and self._ending.over is None:
                held = set_standing(held, "going")  # Another coordinator than this one has saved the job.
            if held.wish in ("stop", "stop_now") and held.standing == "suspended":
                held = set_standing(held, "stopped")  # It is saved and runs nowhere, so it has ended.
            elif held.standing == "suspended":
                # The pool resumed and stopped it before this coordinator heard of either.
                held = give_back(held, held.grants)
            self._write_held(held)
            if self._ending.over is None:
                self._note_promotions(before, held)
        if self._ending.over is None:
            self._drop_released_nodes(before, held)
            newest = (message.shares.term, message.shares.version) == (held.term, held.heard)
            if newest and message.shares.stranded and held.standing == "going":
                self._fail_if_stranded()
        self._reported = None
        self._asked_at = -RETRY_S

    def admit_node(self, hello: Hello) -> bool:
        """Record that a node joins by its grant; return whether the job holds that grant and runs.

        Outside a pool, only a job without a submission admits nodes. A refused node tries again.
        """
        held = self._held
        if held is None:
            return not self._config.submission
        updated = mark_connected(held, hello.node, hello.grant) if held.standing == "going" else None
        if updated is None:
            return False
        if updated is not held:
            self._departures.readmit(hello.node)  # It had to leave by another grant.
            self._write_held(updated)
        return True

    def is_standby(self, hello: Hello) -> bool:
        """Return whether an admitted node is a standby: by its grant in a pool, unless the plan has it, else by its own
        setting.
        """
        held = self._held
        if held is None:
            return self._standbys.is_standby(hello)
        return held.grants[hello.node].standby and not self._transaction.planned_on(hello.node)

    def refuse_node(self, node: str, why: str) -> None:
        """Remember that a node does not fit the job. The job's next report tells the pool.

        The refusal holds for the node's present grant. Without a grant it holds until a user allows the node.
        """
        grant = self._held.grants.get(node) if self._held is not None else None
        self._unfit.pop(node, None)
        self._unfit[node] = NodeUnfit(grant=grant.number if grant is not None else 0, why=why[:_WHY_LENGTH])

    def forget_refusal(self, node: str) -> None:
        """Forget an earlier refusal of a node that is admitted now."""
        self._unfit.pop(node, None)

    def update(self) -> None:
        """Follow the pool's wishes, return grants of nodes that have left (all, once the job has ended), promote
        standbys, update the roles of nodes, and report changes to the pool.

        Called after every input.
        """
        held = self._held
        if held is None:
            return
        if held.standing == "going":
            if self._ending.over is None:
                held = self._return_absent_nodes(
                    held
                )  # First, so that a node that has just left is not asked to leave again.
                self._write_held(held)
                self._follow_wish(held)
                self._promote_standbys()
            if self._ending.over is not None:
                held = self._return_all_nodes(held)
            held = self._update_roles(held)
            if self._ending.over is None and held.wish == "run":
                held = self._limit_training_nodes(held)
            if held.anew and self._transaction.record.plan is not None:
                held = msgspec.structs.replace(held, anew=False)  # From now on, losing the plan is a loss.
            self._write_held(held)
        self._send_report(held)

    # ---- nodes ----

    def _return_absent_nodes(self, held: Held) -> Held:
        """Return the grants without those of absent nodes that had joined and are not expected back, did not join in
        time, or must leave anyway.
        """
        absent, now = self._list_absent(held), self._transaction.now
        if not absent:
            return held
        returned = [node for node in absent if held.grants[node].came and not self._absences.is_expected(node)]
        returned += [node for node in find_overdue(held, now, self._config.grant_join_s) if node in absent]
        returned += [node for node in held.to_leave if node in absent and not held.grants[node].came]
        return give_back(held, returned)

    def _update_roles(self, held: Held) -> Held:
        """Return the grants with the roles (training or standby) that the members and the other connected nodes have
        now.

        Unchanged if they agree already and no standby joins. Standbys that the pool has just promoted keep the role of
        their grant.
        """
        here, standbys = self._transaction.members.nodes, self._transaction.members.standbys
        waiting, joining = self._summarize(held).waiting, self._joining
        if waiting == standbys.keys() and not joining:
            return held
        differ = ((waiting ^ standbys.keys()) | joining.keys()) - self._promoted
        planned = self._transaction.nodes_planned
        roles = {node: node in standbys for node in differ if node in here or node in planned}
        return update_roles(held, roles, joining)

    def _limit_training_nodes(self, held: Held) -> Held:
        """Return the grants with at most as many training nodes as the pool has given the job places.

        A node without a place becomes a standby: at once if it is connected, else when it joins. A standby that joined
        to replace a draining node, and leaves again before that, counts as a standby only once it has left.
        """
        if held.places is None or self._summarize(held).training <= held.places:
            return held
        transaction = self._transaction
        written = self._held
        before = written.waiting if written is not None else frozenset[int]()
        leaving = {one.node for one in transaction.record.leaving}
        leaving_again = [node for node, grant in held.grants.items() if node in leaving and grant.number in before]
        placed = transaction.nodes_planned | leaving | self._joining.keys() | self._promoted
        idle = sorted(held.grants.keys() - placed, key=lambda node: self._usefulness_key(held, node))
        surplus = select_surplus(held, [*leaving_again, *idle])
        for node in surplus:
            if node in transaction.members.nodes and node not in leaving:
                self._departures.set_aside(node)
        return set_roles(held, dict.fromkeys(surplus, True))

    def _usefulness_key(self, held: Held, name: str) -> tuple[bool, bool, int]:
        """Return a sort key: absent nodes first, complete nodes last, and newer grants before older ones."""
        node = self._transaction.members.nodes.get(name)
        return node is not None and node.complete, node is not None, -held.grants[name].number

    @property
    def _joining(self) -> dict[str, str]:
        """The standbys that join to replace another node, with that node."""
        return {one.beside: one.node for one in self._transaction.record.leaving if one.beside}

    def _note_promotions(self, before: Held, held: Held) -> None:
        """Remember which standbys the pool has promoted.

        Also limit the wanted number of nodes to the granted ones, so that earlier losses are not made up for.
        """
        for node, grant in held.grants.items():
            known = before.grants.get(node)
            if known is not None and known.number == grant.number and known.standby and not grant.standby:
                self._promoted.add(node)
        own = sum(1 for grant in held.grants.values() if not (grant.standby or grant.leaving))
        self._transaction.change(wanted=min(self._transaction.record.wanted, own))

    def _promote_standbys(self) -> None:
        """Start the joins of promoted standbys with all workers running; others stay noted until theirs run.

        Before the job has started, nothing has checked whether a standby fits: its workers are replaced, and it
        reconnects as a regular node. A node that is no longer a standby and does not join is forgotten here.
        """
        standbys, joining = self._transaction.members.standbys, self._joining
        for name in sorted(self._promoted):
            node = standbys.get(name)
            if node is None:
                if name not in joining:  # If it joins for a leaver, the pool wants it in addition to that one.
                    self._promoted.discard(name)  # It is lost, or trains by now. If it reconnects, it is not a standby.
            elif not self._transaction.record.generation:
                self._absences.replace_workers([name], "the pool has it join")
                self._promoted.discard(name)
            elif node.complete and self._standbys.fits(node):
                self._promoted.discard(name)
                self._replacing.promote(name)

    def _list_absent(self, held: Held) -> list[str]:
        """Return the nodes with grants that are neither connected nor in the plan."""
        transaction = self._transaction
        away = held.grants.keys() - transaction.members.nodes.keys()
        return [node for node in held.grants if node in away and node not in transaction.nodes_planned] if away else []

    def _summarize(self, held: Held) -> _HeldSummary:
        """Return the nodes that must leave, the standbys and the number of training nodes of the grants, cached for the
        same `held`.
        """
        if self._summary is None or self._summary.of is not held:
            self._summary = _HeldSummary.summarize(held)
        return self._summary

    def _drop_released_nodes(self, before: Held, held: Held) -> None:
        """Treat nodes as lost whose grant has ended, connected or expected back. Each has reported to the pool that
        none of the job's processes run there.

        A node that was granted again in the meantime has a grant of another number. If it was recalled before, that no
        longer holds.
        """

        def is_released(name: str) -> bool:
            earlier, now = before.grants.get(name), held.grants.get(name)
            return now is None or (earlier is not None and earlier.number != now.number)

        transaction = self._transaction
        released = [name for name in (*transaction.members.nodes, *self._absences.promised) if is_released(name)]
        self._failures.handle(*(node_lost(name, FailureKind.CONNECTION_LOST, transaction.now) for name in released))
        for name in released:
            if name in held.grants:
                self._departures.cancel_recall(name)

    def _fail_if_stranded(self) -> None:
        """Fail the job, with the newest refusals as the reason, because too few nodes of the pool are usable.

        Does nothing if it refuses no node, or has started and has connected nodes.
        """
        transaction = self._transaction
        refuses = self._refusals
        if not refuses or (transaction.record.generation and transaction.members.nodes):
            return
        newest = list(refuses.items())[-_WHY_NODES:]
        others = f"; and {len(refuses) - len(newest)} more" if len(refuses) > len(newest) else ""
        reasons = "; ".join(f"{node}: {refusal.why}" for node, refusal in newest)
        least = self._config.spec.nodes_to_begin
        self._ending.fail_job(f"too few usable nodes in the pool (needs {least}): {reasons}{others}")

    # ---- wishes of the pool ----

    def _follow_wish(self, held: Held) -> None:
        """Follow the pool's wish: begin to end or suspend the job, once for each wish.

        If it should run, let recalled nodes leave that do not do so already; that is repeated at most every `RETRY_S`.
        """
        if held.wish != "run" and self._current_wish != held.wish:
            self._current_wish = held.wish
            self._closing.request(Shutdown(EXIT_ENDED, _WHY[held.wish], save=held.wish != "stop_now"))
            return
        to_leave = self._summarize(held).to_leave
        if not to_leave:
            return
        # A node that only waits to leave would wait for a standby, or give its place to one: the pool wants neither.
        leaving = self._transaction.record.leaving
        on_the_way = {one.node for one in leaving if one.closes or one.owed or self._replacing.is_beside(one)}
        asked = [node for node in to_leave if node not in on_the_way]
        if held.wish == "run" and asked and self._transaction.now - self._asked_at >= RETRY_S:
            self._asked_at = self._transaction.now
            for node in asked:
                self._departures.on_recall(node)

    def _return_all_nodes(self, held: Held) -> Held:
        """Return the record of grants of a job that has ended: no grants, how it ended, and the reason unless the job
        finished or the pool asked for the end.
        """
        over = self._ending.over
        assert over is not None
        standing: JobStanding = "suspended" if held.wish == "suspend" else "stopped"
        if self._transaction.record.outcome:
            standing = "failed" if self._transaction.record.outcome == "failed" else "finished"
        # The pool knows the reason if it asked for the end.
        return set_standing(held, standing, "" if standing == "finished" or held.wish != "run" else over.why)

    # ---- reports ----

    @property
    def _move_s(self) -> float | None:
        """Seconds of training that one node costs that joins while another leaves, or None before a join was measured.

        Rounded to 0.1 s, so that it seldom changes.
        """
        if not self._costs.is_measured(Cost.SWAP):
            return None
        return round(sum(map(self._costs.of, (Cost.SWAP, Cost.DECISION, Cost.BUILD))), 1)

    @property
    def _refusals(self) -> dict[str, NodeUnfit]:
        """The nodes that the job refuses, and why."""
        return {one.node: NodeUnfit(why=one.why[:_WHY_LENGTH]) for one in self._ladder.excluded_nodes} | self._unfit

    def _write_held(self, held: Held) -> None:
        """Write the grants to the record if they have changed."""
        if held is not self._held and held != self._held:
            self._transaction.change(held=held)

    def _send_report(self, held: Held) -> None:
        """Send the job's state to the pool if it has changed."""
        record, move_s, pace, costs = (
            self._transaction.record,
            self._move_s,
            self._pace_reporter.pace,
            self._pace_reporter.costs,
        )
        # None of these objects is ever modified in place, so identity is enough.
        made_of = held, record.plan, record.pending, record.leaving, record.quarantined, record.given_up
        made_of = *made_of, pace, costs, tuple(self._unfit.items()), move_s
        if (
            self._reported is not None
            and all(map(is_, made_of[:8], self._report_inputs))
            and made_of[8:] == self._report_inputs[8:]
        ):
            return
        self._report_inputs = made_of
        state = describe_state(held, self._refusals, self._transaction.nodes_planned, move_s, pace, costs)
        if state != self._reported:
            self._reported = state
            self._transaction.send_to_pool(state)
