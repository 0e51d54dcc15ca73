"""Finds the cause if collectives or state transfers failed although every member answers.

Being late is not guilt: the suspect is the member that has not issued the operation for which others waited until their
time-out. Otherwise it is the member that cannot be reached. A new connection may repair a broken one, so the same
members try again. After a time-out, or without a step between two tries, they are never put together again.

A member that lacks the state is removed before a member that has it. If a transfer fails, that is the receiver. If two
members cannot reach each other, it is the one without the state. A sender is a suspect only if several receivers failed
with it and then got the state from another.

Pure: the same evidence gives the same verdict.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from types import MappingProxyType

from holdfast.protocol.messages.worker import Complaint, Report
from holdfast.protocol.names import node_of
from holdfast.protocol.plan import GenerationPlan, Phase

#: Phases by their progress in a step. Workers that have finished their loop, or not entered, take part in nothing.
_ORDER = (
    Phase.IDLE,
    Phase.ENTERING,
    Phase.ADOPTING,
    Phase.FORWARD,
    Phase.FINISHED,
    Phase.COMPUTE,
    Phase.REDUCING,
    Phase.REFUSED,
    Phase.READY,
    Phase.VOTED,
    Phase.ABANDONED,
    Phase.PASSED,
    Phase.APPLYING,
)

#: A node that could not be sent the state this often goes; the second time another node sends it, if there is one.
TRANSFER_TRIES = 2
#: most pairs of nodes without a connection that are remembered
_KEPT = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class StateTransfers:
    """The state transfers of the generation that failed, by worker ids."""

    #: the receivers that did not get the state
    lacking: AbstractSet[str] = frozenset()
    #: the transfers that failed: receiver -> its senders
    failed: Mapping[str, AbstractSet[str]] = field(default_factory=lambda: MappingProxyType({}))
    #: the receivers of failed transfers for which another try makes no sense
    exhausted: AbstractSet[str] = frozenset()
    #: the nodes that are suspects as senders (`TransferHistory.is_suspect`)
    suspects: Collection[str] = ()
    #: whether the other nodes have all state that a node has
    can_spare: Callable[[str], bool] = lambda _node: True


#: Every member had the state.
NO_TRANSFERS = StateTransfers()


def find_lacking_members(plan: GenerationPlan, reports: Mapping[str, Report], applied: int) -> frozenset[str]:
    """Return the receivers of a generation that did not report step `applied` or a later one: the state did not reach
    them.

    Receivers without a report also count.
    """
    receivers = [worker for worker in plan.sources if plan.senders(worker)]
    reached = {worker: reports[worker].applied if worker in reports else None for worker in receivers}
    return frozenset(worker for worker, step in reached.items() if step is None or step < applied)


def find_failed_transfers(plan: GenerationPlan, complaints: Iterable[Complaint]) -> dict[str, AbstractSet[str]]:
    """Return the failed transfers of state: each receiver, with the senders from which its transfer failed.

    If a receiver names the failed sender, its other transfers failed as a consequence and do not count; otherwise the
    complaints of senders count.
    """
    by_receivers: dict[str, set[str]] = {}
    by_senders: dict[str, set[str]] = {}
    for complaint in complaints:
        own = plan.senders(complaint.worker)
        for peer in complaint.transfer_peers:
            if peer in own:
                by_receivers.setdefault(complaint.worker, set()).add(peer)
            elif not own and plan.senders(peer):
                by_senders.setdefault(peer, set()).add(complaint.worker)
    return {**by_senders, **by_receivers}


class Suspects:
    """Finds suspects, and remembers which members have tried before."""

    def __init__(self) -> None:
        self._tried: tuple[frozenset[str], int] | None = None
        #: the pairs of nodes that could not reach each other since the last committed step
        self._unreachable_pairs = set[frozenset[str]]()
        self._committed = 0

    def find_suspects(
        self,
        workers: Sequence[str],
        reports: Mapping[str, Report],
        complaints: Mapping[str, Complaint],
        committed: int,
        owing: Sequence[str] = (),
        transfers: StateTransfers = NO_TRANSFERS,
    ) -> dict[str, str]:
        """Return the nodes that cannot stay, with the reason; {} if the same members may try again, or if they are all
        on one node.

        After failed transfers these are bad senders, or receivers without further tries. Otherwise, after a time-out or
        a second try without a new step, they are in this order: laggards, members without a known address, unreachable
        ones, or the fallback. At least one node always stays.

        Args:
            workers: the members by rank, all of which have reported
            reports: their reports
            complaints: the complaints about failed collectives; without any, there are no suspects
            committed: the newest step applied by all
            owing: members with addresses that the others wait for
            transfers: the transfers of state between the members
        """
        late = any(complaint.timed_out or complaint.unreachable for complaint in complaints.values())
        again = self._tried == (frozenset(workers), committed)
        self._tried = (frozenset(workers), committed)
        if committed > self._committed or len(self._unreachable_pairs) > _KEPT:
            self._unreachable_pairs.clear()
        self._committed = committed
        if len({node_of(worker) for worker in workers}) < 2 or not complaints:
            return {}
        if transfers.failed:
            return _find_transfer_suspects(workers, transfers)
        if not (late or again):
            return {}
        return (
            _find_laggards(workers, reports, complaints, transfers.lacking)
            or unless_all(workers, dict.fromkeys(map(node_of, owing), "its address has not come, for which all waited"))
            or self._find_unreachable(workers, complaints, transfers)
            or _suspect_fallback(workers, complaints, transfers)
        )

    def _find_unreachable(
        self, workers: Sequence[str], complaints: Mapping[str, Complaint], transfers: StateTransfers
    ) -> dict[str, str]:
        """Return few nodes (chosen greedily) without which all others reach each other, with the reason; {} if none
        would stay.

        Pairs of nodes that both have the state come first. If one of two nodes lacks the state, that one goes, unless
        several such nodes reach other nodes with the state, but not this one. Of two equals, the one with more failed
        connections so far goes, so that its new partner is not blamed each time. If that is equal too, the later one
        goes.
        """
        nodes = list(dict.fromkeys(map(node_of, workers)))
        cut: set[frozenset[str]] = {
            frozenset((node_of(complaint.worker), node_of(peer)))
            for complaint in complaints.values()
            for peer in complaint.unreachable
        }
        cut = {pair for pair in cut if len(pair) == 2 and pair <= set(nodes)}
        self._unreachable_pairs |= cut
        ever = Counter(node for pair in self._unreachable_pairs for node in pair)
        having = {node_of(worker) for worker in workers if worker not in transfers.lacking}
        having -= _find_cut_off_holders(having, cut, transfers.can_spare)
        named: dict[str, str] = {}

        def leave_out(node: str) -> None:
            """Add a node to the named ones, with the peers that it cannot reach, and remove its pairs."""
            nonlocal cut
            peers = sorted(peer for pair in cut if node in pair for peer in pair - {node})
            named[node] = f"no connection between it and {', '.join(peers)}"
            cut = {pair for pair in cut if node not in pair}

        while among := [pair for pair in cut if pair <= having] or list(cut):
            now = Counter(node for pair in among for node in pair if node not in having or pair <= having)
            leave_out(max(now, key=lambda node: (now[node], ever[node], nodes.index(node))))
        return unless_all(workers, named)


def find_last_report(node: str, reports: Iterable[Report]) -> Report:
    """Return the report of the worker of a node that is furthest behind."""
    return min((report for report in reports if node_of(report.worker) == node), key=_progress_key)


def _progress_key(report: Report) -> tuple[int, int]:
    """Return a sort key for the progress of a worker."""
    return report.step, _ORDER.index(report.phase)


def _find_cut_off_holders(
    having: AbstractSet[str], cut: AbstractSet[frozenset[str]], can_spare: Callable[[str], bool]
) -> set[str]:
    """Return the nodes with the state that several nodes without it cannot reach, although these reach other holders.

    Only nodes that the others can spare: they may go like nodes without the state.

    Args:
        having: the nodes with the state.
        cut: the pairs of nodes that cannot reach each other.
        can_spare: whether the others have all state of a node.
    """
    found: dict[str, list[str]] = {}
    for pair in cut:
        for node in pair & having:
            found.setdefault(node, []).extend(
                peer for peer in pair - having if any(frozenset((other, peer)) not in cut for other in having - {node})
            )
    return {node for node, peers in found.items() if len(peers) > 1 and can_spare(node)}


def _find_transfer_suspects(workers: Sequence[str], transfers: StateTransfers) -> dict[str, str]:
    """Return the nodes that cannot stay after failed transfers, with the reason; {} if none would stay.

    These are suspect senders that the others can spare, else receivers for which another try makes no sense.
    """
    senders = {node_of(sender) for senders in transfers.failed.values() for sender in senders}
    if bad := [node for node in transfers.suspects if node in senders and transfers.can_spare(node)]:
        why = "several nodes could not receive the state from it, and received it from others"
        return unless_all(workers, dict.fromkeys(bad, why))
    return unless_all(
        workers,
        {
            node_of(receiver): f"it could not be sent the state by {', '.join(sorted(map(node_of, senders)))}"
            for receiver, senders in transfers.failed.items()
            if receiver in transfers.exhausted
        },
    )


def _find_laggards(
    workers: Sequence[str],
    reports: Mapping[str, Report],
    complaints: Mapping[str, Complaint],
    lacking: AbstractSet[str],
) -> dict[str, str]:
    """Return the nodes with workers that have not issued the operation for which others waited until a time-out.

    {} without a time-out. A member with the state may be late because it still sends it: members that lack it go first.

    Args:
        lacking: the members that lack the state.
    """
    places = {worker: _progress_key(report) for worker, report in reports.items()}
    timed_out = [places[worker] for worker, complaint in complaints.items() if complaint.timed_out and worker in places]
    if not timed_out:
        return {}
    behind = [worker for worker in workers if places[worker] < min(timed_out)]
    behind = [worker for worker in behind if worker in lacking] or behind
    why = "its training thread stands still: it is at '{}' of step {} while the others waited for it in vain"
    named = {node_of(w): why.format(reports[w].phase, reports[w].step) for w in behind}
    return unless_all(workers, named)


def select_fallback(workers: Sequence[str], complaints: Mapping[str, Complaint], transfers: StateTransfers) -> str:
    """Return the node that is blamed without other evidence.

    It has a member that lacks the state, if possible: the receiver of a failed transfer, else the first of them that
    complained, else the last by rank.
    """
    first, lacking = next(iter(complaints)), transfers.lacking
    complained = [worker for worker in complaints if worker in lacking]
    by_rank = [worker for worker in reversed(workers) if worker in lacking]
    return node_of(next(iter((*transfers.failed, *complained, *by_rank, first))))


def _suspect_fallback(
    workers: Sequence[str], complaints: Mapping[str, Complaint], transfers: StateTransfers
) -> dict[str, str]:
    """Return the node of `select_fallback`, with the first complaint as the reason; {} if no other node would stay.

    For members that have failed before, if there is no other evidence: another set of members must be tried.
    """
    first = next(iter(complaints.values()))
    blamed = select_fallback(workers, complaints, transfers)
    return unless_all(workers, {blamed: f"the same members have failed before: {first.detail}"})


def unless_all(workers: Sequence[str], named: dict[str, str]) -> dict[str, str]:
    """Return the named nodes, or {} if no other node would stay."""
    return named if any(node_of(worker) not in named for worker in workers) else {}
