"""Whose fault it is that collectives failed although everybody answers.

Being late is no guilt by itself: the suspect is who has not issued what others waited for until its time was up. Else
it is who cannot be reached. A broken connection may be mended by connecting anew, so the same members try once more;
but after a time-out, or without a step between two tries, they are never put together again.

Pure: the same evidence gives the same verdict.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from holdfast.protocol.messages.worker import Complaint, Report
from holdfast.protocol.names import node_of
from holdfast.protocol.plan import Phase

#: How far a step has got; who has finished its loop, or has not come into the generation, takes part in nothing.
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

#: of the pairs of nodes that could not reach each other, so many are kept
_KEPT = 4096


class Suspects:
    """Remembers who has tried in vain."""

    def __init__(self) -> None:
        self._tried: tuple[frozenset[str], int] | None = None
        #: the pairs of nodes that could not reach each other since a step was committed, and the newest step
        self._cut = set[frozenset[str]]()
        self._committed = 0

    def name(
        self,
        workers: Sequence[str],
        reports: Mapping[str, Report],
        complaints: Mapping[str, Complaint],
        committed: int,
        owing: Sequence[str] = (),
    ) -> dict[str, str]:
        """Return the nodes that cannot stay, with the reason; none where the same members may try again.

        Args:
            workers: the members by rank, all of whom have reported.
            complaints: the complaints of those whose collectives failed.
            committed: the newest step applied by all.
            owing: members whose addresses the others wait for.
        """
        late = any(complaint.timed_out or complaint.unreachable for complaint in complaints.values())
        again = self._tried == (frozenset(workers), committed)
        self._tried = (frozenset(workers), committed)
        if committed > self._committed or len(self._cut) > _KEPT:
            self._cut.clear()
        self._committed = committed
        if len({node_of(worker) for worker in workers}) < 2 or not complaints or not (late or again):
            return {}
        return (
            _laggards(workers, reports, complaints)
            or some_stay(workers, dict.fromkeys(map(node_of, owing), "its address has not come, for which all waited"))
            or self._unreachable(workers, complaints)
            or _last_resort(workers, complaints)
        )

    def _unreachable(self, workers: Sequence[str], complaints: Mapping[str, Complaint]) -> dict[str, str]:
        """Name the fewest nodes (greedily) without which all others reach each other.

        Of two equals it is who could not reach more others before: else whoever is put together with one that is cut
        off might be taken for that one each time. Then it is the later one.
        """
        nodes = list(dict.fromkeys(map(node_of, workers)))
        cut: set[frozenset[str]] = {
            frozenset((node_of(complaint.worker), node_of(peer)))
            for complaint in complaints.values()
            for peer in complaint.unreachable
        }
        cut = {pair for pair in cut if len(pair) == 2 and pair <= set(nodes)}
        self._cut |= cut
        ever = Counter(node for pair in self._cut for node in pair)
        named: dict[str, str] = {}
        while cut:
            now = Counter(node for pair in cut for node in pair)
            worst = max(nodes, key=lambda node: (now[node], ever[node], nodes.index(node)))
            peers = sorted(node for pair in cut if worst in pair for node in pair - {worst})
            named[worst] = f"no connection between it and {', '.join(peers)}"
            cut = {pair for pair in cut if worst not in pair}
        return some_stay(workers, named)


def last_on(node: str, reports: Iterable[Report]) -> Report:
    """Return the report of that worker of a node that is furthest behind."""
    return min((report for report in reports if node_of(report.worker) == node), key=_place)


def _place(report: Report) -> tuple[int, int]:
    return report.step, _ORDER.index(report.phase)


def _laggards(
    workers: Sequence[str], reports: Mapping[str, Report], complaints: Mapping[str, Complaint]
) -> dict[str, str]:
    """Name the nodes whose workers have not issued what the complainers waited for."""
    places = {worker: _place(report) for worker, report in reports.items()}
    timed_out = [places[worker] for worker, complaint in complaints.items() if complaint.timed_out and worker in places]
    if not timed_out:
        return {}
    behind = [worker for worker in workers if places[worker] < min(timed_out)]
    why = "its training thread stands still: it is at '{}' of step {} while the others waited for it in vain"
    named = {node_of(w): why.format(reports[w].phase, reports[w].step) for w in behind}
    return some_stay(workers, named)


def _last_resort(workers: Sequence[str], complaints: Mapping[str, Complaint]) -> dict[str, str]:
    """Name who complained first: without other evidence another set of members must do."""
    first = next(iter(complaints.values()))
    return some_stay(workers, {node_of(first.worker): f"the same members have failed before: {first.detail}"})


def some_stay(workers: Sequence[str], named: dict[str, str]) -> dict[str, str]:
    """Return the named nodes unless that is all of them, or none."""
    return named if any(node_of(worker) not in named for worker in workers) else {}
