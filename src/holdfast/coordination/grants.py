"""A job's record of the nodes that its pool has granted. Each change is written before it takes effect.

A grant that the job has given back is never accepted again, even if an outdated message of the pool repeats it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from msgspec.structs import replace

from holdfast.protocol.pool.grants import Held, HeldGrant
from holdfast.protocol.pool.sharing import JobCosts, JobPace, JobShares, JobStanding, JobState, NodeUnfit


def apply_shares(held: Held, shares: JobShares, now: float) -> Held:
    """Return the grants after the pool's newest message, with roles, recalls, number of training nodes and wanted
    standing.

    Older shares, or shares of another submission, change nothing. Grants that the job gave back stay out, even if they
    are repeated. A node that is no longer granted is lost: its agent has reported that the job runs nothing there.

    Args:
        now: when new grants begin to wait for their nodes.
    """
    if shares.submission != held.submission or (shares.term, shares.version) < (held.term, held.heard):
        return held
    granted = set(shares.grants.values())
    grants: dict[str, HeldGrant] = {}
    for node, number in shares.grants.items():
        if number not in held.returned:
            known, decided = held.grants.get(node), shares.role_versions.get(node, 0)
            if known is None or known.number != number:
                known = HeldGrant(number=number, since=now, standby=number in shares.standbys, role_version=decided)
            elif decided > known.role_version:
                known = replace(known, standby=number in shares.standbys, role_version=decided)
            grants[node] = replace(known, leaving=number in shares.leaving)
    return replace(
        held,
        term=shares.term,
        heard=shares.version,
        grants=grants,
        returned=held.returned & granted,
        wish=shares.wish,
        places=sum(number not in shares.standbys | shares.leaving for number in shares.grants.values()),
        failure_rate=shares.failure_rate or held.failure_rate,
    )


def mark_connected(held: Held, node: str, number: int) -> Held | None:
    """Return the grants after a granted node has connected, or None if the job does not hold that grant.

    Args:
        number: the grant that the node's agent names.
    """
    grant = held.grants.get(node)
    if grant is None or grant.number != number:
        return None
    return held if grant.came else replace(held, grants={**held.grants, node: replace(grant, came=True)})


def give_back(held: Held, nodes: Collection[str]) -> Held:
    """Return the grants without these nodes, permanently: their grants are never accepted again. Unknown nodes are
    ignored.
    """
    gone = {held.grants[node].number for node in nodes if node in held.grants}
    if not gone:
        return held
    grants = {node: grant for node, grant in held.grants.items() if grant.number not in gone}
    return replace(held, grants=grants, returned=held.returned | gone)


def mark_awaited(held: Held, nodes: Collection[str], now: float) -> Held:
    """Return the grants with these nodes marked as not connected, so that their time to connect begins at `now`."""
    awaited = {node: replace(held.grants[node], came=False, since=now) for node in nodes}
    return replace(held, grants={**held.grants, **awaited})


def find_overdue(held: Held, now: float, join_s: float) -> list[str]:
    """Return the granted nodes that have not connected within `join_s` seconds of their grant."""
    return [node for node, grant in held.grants.items() if not grant.came and now - grant.since > join_s]


def set_standing(held: Held, standing: JobStanding, why: str = "") -> Held:
    """Return the grants with a new standing and its reason. Unless it is "going", the job gives all its nodes back."""
    return replace(held if standing == "going" else give_back(held, held.grants), standing=standing, why=why)


def restarts_from_zero(held: Held | None) -> bool:
    """Return whether a suspended job starts again from step 0, because it saves nothing."""
    return held is not None and held.anew


def update_roles(held: Held, nodes: Mapping[str, bool], joining: Mapping[str, str]) -> Held:
    """Return the grants with the current roles of the job's nodes: standby, or not.

    A standby that joins next to a draining node counts as a standby while that node counts as training. The roles of
    both change in one write. Otherwise the pool would count one node too many and recall a third one.

    Args:
        nodes: the members and connected nodes with possibly changed roles; True if the node is a standby.
        joining: standbys that join to take over another node's ranks, with that node.
    """
    counted = {name for name, grant in held.grants.items() if not (nodes.get(name, grant.standby) or grant.leaving)}
    waiting = {name for name, leaver in joining.items() if leaver in counted}
    roles = {node: waits or node in waiting for node, waits in nodes.items() if node in held.grants}
    return set_roles(held, roles)


def select_surplus(held: Held, candidates: Iterable[str]) -> list[str]:
    """Return the first of these nodes that count as training, as many as train beyond the number that the pool granted;
    none if there is no surplus.

    A standby takes over ranks without asking the pool. They belonged to a lost node, a draining node, or else a node
    that has no ranks at the moment. The last one must then wait, or the pool would recall a training node.

    Args:
        candidates: granted nodes without ranks, in the order of preference.
    """
    surplus = held.training - held.places if held.places is not None else 0
    if surplus <= 0:
        return []
    grants = held.grants
    counted = [node for node in candidates if not (grants[node].standby or grants[node].leaving)]
    return counted[:surplus]


def set_roles(held: Held, roles: Mapping[str, bool]) -> Held:
    """Return the grants with these granted nodes as standbys (True), or as nodes that train (False)."""
    changed = {node: waits for node, waits in roles.items() if held.grants[node].standby != waits}
    if not changed:
        return held
    updated = {node: replace(held.grants[node], standby=waits) for node, waits in changed.items()}
    return replace(held, grants={**held.grants, **updated})


def describe_state(
    held: Held,
    refuses: Mapping[str, NodeUnfit] | None = None,
    members: Collection[str] = (),
    move_s: float | None = None,
    pace: JobPace | None = None,
    costs: JobCosts | None = None,
) -> JobState:
    """Return the job's state for the pool: its grants by role, standing, refused nodes, speed and costs.

    Args:
        refuses: the refused nodes, with the reasons.
        members: the nodes in the job's plan.
        move_s: the measured cost of a move in seconds, or None.
        pace: the measured training speed, or None.
        costs: the measured costs, or None.
    """
    return JobState(
        submission=held.submission,
        heard=held.heard,
        held=held.numbers,
        standbys=held.waiting,
        trains=frozenset(grant.number for node, grant in held.grants.items() if node in members),
        standing=held.standing,
        why=held.why,
        refuses=dict(refuses or {}),
        move_s=move_s,
        pace=pace,
        costs=costs or JobCosts(),
    )
