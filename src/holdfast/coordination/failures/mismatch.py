"""Finds workers with differing settings or state: the minority is replaced, or the script is at fault.

Pure: the same reports give the same verdict.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from holdfast.protocol.fingerprint import VERSION, Fingerprint
from holdfast.protocol.messages.worker import Report
from holdfast.protocol.names import node_of

SCRIPT = "script"
TRANSFER = "transfer"
#: by likely cause, how many replacements are tried within the window of budgets before the job ends
REPLACEMENTS = {SCRIPT: 1, TRANSFER: 3}
#: text about workers that have received their state since all were equal
RECEIVED = "after the state was received there"
#: how many nodes and settings a message names
_NAMED = 4
_PLURALS = {"settings": "settings", "state": "states"}

_CAUSES = {
    (SCRIPT, "settings"): (
        "the likely cause is the script: it sets options of the optimizer, or requires_grad, from something that "
        "differs between workers, such as a random number, the time, the rank, or a counter that is neither in "
        "state_dict() nor in extra"
    ),
    (SCRIPT, "state"): (
        "the likely cause is the script: it changes the state on one worker alone, or keeps something that training "
        "depends on outside the model, the optimizer's state_dict() and extra"
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Mismatch:
    """Workers of one role whose settings or state should be equal and are not."""

    step: int
    #: settings, or state
    what: str
    #: the nodes with workers of a minority; empty if no majority exists
    minority: tuple[str, ...]
    detail: str
    #: SCRIPT, TRANSFER, or "" if the fingerprints cannot be compared
    likely_cause: str

    @property
    def why(self) -> str:
        """What differs, and the likely cause."""
        cause = _CAUSES.get((self.likely_cause, self.what), "")
        return f"{self.detail}{': ' if cause else ''}{cause}"


def find_mismatch(workers: Sequence[str], reports: Mapping[str, Report], places: int) -> Mismatch | None:
    """Compare the fingerprints of settings and state that workers of one role reported for the same step.

    Return one mismatch for all roles, with the nodes of the minority, or None. There is no minority if one role has no
    majority.

    Args:
        workers: the members of the generation that was stopped, by rank
        reports: their reports; a report without a fingerprint is skipped
        places: How many workers share one replica. Ranks that differ by a multiple of it have the same role.
    """
    found: list[Mismatch] = []
    for place in range(places):
        of_role = [reports[worker] for worker in workers[place::places] if worker in reports]
        for step in sorted({report.step for report in of_role}):
            at_step = [report for report in of_role if report.step == step and report.compared is not None]
            if (mismatch := _compare_role(step, at_step)) is not None:
                found.append(mismatch)
    return _merge_roles(found)


def _merge_roles(found: Sequence[Mismatch]) -> Mismatch | None:
    """Return one mismatch for all roles, or None without any. It has no minority if one of the roles has no
    majority.

    The cause is the script only if it is in all roles.
    """
    if not found:
        return None
    first = next((one for one in found if not one.minority), found[0])
    minority = dict.fromkeys(node for one in found for node in one.minority) if first.minority else {}
    cause = next((one.likely_cause for one in found if one.likely_cause != SCRIPT), SCRIPT)
    return Mismatch(step=first.step, what=first.what, minority=tuple(minority), detail=first.detail, likely_cause=cause)


def _compare_role(step: int, reports: Sequence[Report]) -> Mismatch | None:
    """Return how workers of one role differ at a step, or None if their fingerprints are equal.

    The minority are the nodes of all workers outside the majority, which `_find_majority` finds; it is empty without a
    majority. The cause is a transfer if a worker outside the majority (any worker, if there is none) has received its
    state, else the script. Fingerprints of different versions have no minority and no cause.
    """
    groups: dict[tuple[int, int, int], list[Report]] = {}
    for report in reports:
        if report.compared is not None:
            one = report.compared
            groups.setdefault((one.version, one.settings, one.state), []).append(report)
    if len(groups) < 2:
        return None
    ordered = sorted(groups.values(), key=len, reverse=True)
    versions = sorted({version for version, _, _ in groups})
    if versions != [VERSION]:
        return Mismatch(step=step, what="settings", minority=(), detail=_describe_versions(ordered), likely_cause="")
    what = "settings" if len({settings for _, settings, _ in groups}) > 1 else "state"
    right = _find_majority(ordered)
    wrong = [report for group in ordered if group is not right for report in group]
    received = any(map(_has_received, wrong))
    detail = _describe_minority(what, right, wrong) if right is not None else _describe_no_majority(what, ordered)
    return Mismatch(
        step=step,
        what=what,
        minority=tuple(dict.fromkeys(node_of(report.worker) for report in wrong)) if right is not None else (),
        detail=detail,
        likely_cause=TRANSFER if received else SCRIPT,
    )


def _find_majority(groups: Iterable[Sequence[Report]]) -> Sequence[Report] | None:
    """Return the group of more than half of the workers.

    If no group is that large, it is the group of the workers that have not received their state since all were equal,
    if these agree; else None.
    """
    groups = list(groups)
    workers = sum(map(len, groups))
    for group in groups:
        if 2 * len(group) > workers:
            return group
    undisturbed = [group for group in groups if not all(map(_has_received, group))]
    return undisturbed[0] if len(undisturbed) == 1 else None


def _has_received(report: Report) -> bool:
    """Whether a worker has received its state since all were equal."""
    return report.compared is not None and report.compared.received


def _describe_minority(what: str, right: Sequence[Report], wrong: Sequence[Report]) -> str:
    """Return in words which nodes differ from the majority, with some differing settings and advice after a transfer.

    Args:
        what: "settings" or "state".
    """
    nodes = _format_nodes(dict.fromkeys(node_of(report.worker) for report in wrong))
    others = len({node_of(report.worker) for report in right})
    rest = f"those of the {others} other nodes" if others > 1 else f"those of {node_of(right[0].worker)}"
    text = f"the {_PLURALS[what]} of {nodes} differ from {rest}"
    here, there = _find_differing_settings(_settings_of(wrong[0]), _settings_of(right[0]))
    received = (
        f", {RECEIVED}: test memory, accelerators and network of these nodes, or check what the script changes when a "
        "worker joins"
    )
    return f"{text}{f' ({here}, not {there})' if here else ''}{received if any(map(_has_received, wrong)) else ''}"


def _describe_no_majority(what: str, groups: Sequence[Sequence[Report]]) -> str:
    """Return in words which nodes differ if no majority agrees, with differing settings of the two largest groups.

    Args:
        what: "settings" or "state".
    """
    first, second = (_settings_of(group[0]) for group in groups[:2])
    here, others = _find_differing_settings(first, second)
    nodes = [node_of(group[0].worker) for group in groups[:2]]
    values = f" ({here} on {nodes[0]}, {others} on {nodes[1]})" if here else ""
    names = _format_nodes(dict.fromkeys(node_of(report.worker) for group in groups for report in group))
    return f"the {_PLURALS[what]} of {names} differ, and no majority of them agrees{values}"


def _describe_versions(groups: Sequence[Sequence[Report]]) -> str:
    """Return in words that fingerprints of different versions cannot be compared."""
    by_version = Counter[int]()
    for report in (one for group in groups for one in group):
        if report.compared is not None:
            by_version[report.compared.version] += 1
    counts = ", ".join(f"version {version} on {count} workers" for version, count in sorted(by_version.items()))
    return (
        f"fingerprints of workers are of different versions ({counts}), so they cannot be compared: install the same "
        "version of holdfast on all nodes"
    )


def _settings_of(report: Report) -> tuple[str, ...]:
    """Return the settings in a report's fingerprint, in words."""
    fingerprint: Fingerprint | None = report.compared
    return fingerprint.shown if fingerprint is not None else ()


def _find_differing_settings(one: Sequence[str], other: Sequence[str]) -> tuple[str, str]:
    """Return up to 4 settings that only the one has, and up to 4 that only the other has, joined by commas.

    Both are "" unless each has some.
    """
    here = [setting for setting in one if setting not in other][:_NAMED]
    there = [setting for setting in other if setting not in one][:_NAMED]
    return (", ".join(here), ", ".join(there)) if here and there else ("", "")


def _format_nodes(nodes: Iterable[str]) -> str:
    """Return up to 4 node names as text, sorted, and the number of further ones."""
    names = sorted(nodes)
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{', '.join(names[:_NAMED])}{more}"
