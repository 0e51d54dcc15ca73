"""A job's side of its grants: which of them it holds, by its own record. What changes is written before it counts.

What it has given back it never takes again, however often it is told of it by somebody who has not heard yet.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from msgspec.structs import replace

from holdfast.protocol.pool.held import Held, HeldGrant
from holdfast.protocol.pool.sharing import JobCosts, JobPace, JobShares, JobStanding, JobState, NodeUnfit


def hear(held: Held, shares: JobShares, now: float) -> Held:
    """Return the grants after the pool's newest word. Older shares, or shares of another job, change nothing.

    A node that is no longer granted is lost: the node itself has said that nothing of the job runs there.
    """
    if shares.submission != held.submission or (shares.term, shares.version) < (held.term, held.heard):
        return held
    told = set(shares.grants.values())
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
        returned=held.returned & told,
        wish=shares.wish,
        places=sum(number not in shares.standbys | shares.leaving for number in shares.grants.values()),
        failure_rate=shares.failure_rate or held.failure_rate,
    )


def joined(held: Held, node: str, number: int) -> Held | None:
    """A node comes by a grant: return what is held then, None where that grant is not held, and it is refused."""
    grant = held.grants.get(node)
    if grant is None or grant.number != number:
        return None
    return held if grant.came else replace(held, grants={**held.grants, node: replace(grant, came=True)})


def give_back(held: Held, nodes: Collection[str]) -> Held:
    """The job does without these nodes from here on, for good."""
    gone = {held.grants[node].number for node in nodes if node in held.grants}
    if not gone:
        return held
    grants = {node: grant for node, grant in held.grants.items() if grant.number not in gone}
    return replace(held, grants=grants, returned=held.returned | gone)


def awaited(held: Held, nodes: Collection[str], now: float) -> Held:
    """These nodes have to come (again), as they did when they were granted."""
    anew = {node: replace(held.grants[node], came=False, since=now) for node in nodes}
    return replace(held, grants={**held.grants, **anew})


def overdue(held: Held, now: float, join_s: float) -> list[str]:
    """Return the nodes that should have come by now, and have not: they are of no use to this job."""
    return [node for node, grant in held.grants.items() if not grant.came and now - grant.since > join_s]


def stand(held: Held, standing: JobStanding, why: str = "") -> Held:
    """The job stands so from here on; unless it goes on, it does without all its nodes."""
    return replace(held if standing == "going" else give_back(held, held.grants), standing=standing, why=why)


def begins_anew(held: Held | None) -> bool:
    """Tell whether a job begins from its start: whoever had it suspended knew that it keeps nothing."""
    return held is not None and held.anew


def update_roles(held: Held, nodes: Mapping[str, bool], joining: Mapping[str, str]) -> Held:
    """Return the grants with the roles that the job's nodes have now: standby, or not.

    A standby that joins next to a leaver counts as a standby while the leaver counts as a node that trains. The roles
    of both change in one write. Otherwise the pool would count one node too many and recall a third one.

    Args:
        nodes: the members and connected nodes whose roles may have changed; True if the node is a standby.
        joining: standbys that join to take another node's place, with that node.
    """
    counted = {name for name, grant in held.grants.items() if not (nodes.get(name, grant.standby) or grant.leaving)}
    waiting = {name for name, leaver in joining.items() if leaver in counted}
    roles = {node: waits or node in waiting for node, waits in nodes.items() if node in held.grants}
    return set_roles(held, roles)


def select_surplus(held: Held, candidates: Iterable[str]) -> list[str]:
    """Return the first of these nodes, as many as the job counts as training beyond the places that the pool gave it.

    A standby takes a place without asking the pool. Its place is that of a lost node, of a leaver, or else of a node
    that has no place at the moment. The last one must then wait, or the pool would recall a node that trains.
    """
    surplus = held.training - held.places if held.places is not None else 0
    if surplus <= 0:
        return []
    grants = held.grants
    counted = [node for node in candidates if not (grants[node].standby or grants[node].leaving)]
    return counted[:surplus]


def set_roles(held: Held, roles: Mapping[str, bool]) -> Held:
    """Return the grants with these nodes as standbys (True), or as nodes that train (False)."""
    changed = {node: waits for node, waits in roles.items() if held.grants[node].standby != waits}
    if not changed:
        return held
    anew = {node: replace(held.grants[node], standby=waits) for node, waits in changed.items()}
    return replace(held, grants={**held.grants, **anew})


def report(
    held: Held,
    refuses: Mapping[str, NodeUnfit] | None = None,
    members: Collection[str] = (),
    move_s: float | None = None,
    pace: JobPace | None = None,
    costs: JobCosts | None = None,
) -> JobState:
    """Return what the pool is told.

    Args:
        members: of its plan. move_s: what a move costs, None where that is not known yet. pace, costs: likewise.
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
