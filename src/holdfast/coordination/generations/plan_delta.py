"""Encoding of a plan as a delta to another one, and back. The same two plans give the same delta on every machine."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

import msgspec

from holdfast.coordination.generations.assignment import Assignment, share_of
from holdfast.protocol.messages.plans import DIGEST_BYTES, NewMembers, NewWorker, PlanChange, Shares, Stayers
from holdfast.protocol.names import index_of, worker_id
from holdfast.protocol.plan import WHOLE_REPLICA, ExpertPlan, GenerationPlan, Member
from holdfast.protocol.state import LiveSource, StateSource

_encoder = msgspec.msgpack.Encoder(order="deterministic")


class MisfitError(ValueError):
    """A delta does not lead to the plan that it claims."""


def digest_of(plan: GenerationPlan | None) -> bytes:
    """Return a digest that identifies a plan, or b"" for none."""
    return hashlib.blake2b(_encoder.encode(plan), digest_size=DIGEST_BYTES).digest() if plan is not None else b""


# ---- from plans to a change ----


def change_of(plan: GenerationPlan, base: GenerationPlan | None) -> PlanChange:
    """Return a plan as a delta to a base, or complete if the base is None, with the digests of both."""
    before = _ranks_in(plan, base)
    holders = _holders(plan)
    rank_of = {member.worker: rank for rank, member in enumerate(plan.members)}
    held, placement = _experts(plan, base, before)
    return PlanChange(
        rest=_without(plan),
        base=base.generation if base is not None else 0,
        base_digest=digest_of(base),
        digest=digest_of(plan),
        members=tuple(_runs(plan, before)),
        holders=holders,
        sources={} if holders else {rank_of[worker]: source for worker, source in plan.sources.items()},
        placement=placement,
        held=held,
    )


def shares_of(assignment: Assignment, micro_batches: int, plan: GenerationPlan, base: GenerationPlan | None) -> Shares:
    """Return an assignment as a delta: only the replica groups with other micro-batches than they had in the base.

    Args:
        assignment: the micro-batches of each replica group in the first step.
        micro_batches: their number in a step.
    """
    usual = _usual_shares(_ranks_in(plan, base), plan, base, micro_batches)
    pairs = zip(assignment, usual, strict=True)
    other = {unit: share for unit, (share, as_before) in enumerate(pairs) if share != as_before}
    return Shares(micro_batches=micro_batches, other=other)


def _ranks_in(plan: GenerationPlan, base: GenerationPlan | None) -> list[int | None]:
    """Return each member's rank in the base, or None if it is not an identical member there."""
    if base is None:
        return [None] * len(plan.members)
    ranks = {member.worker: rank for rank, member in enumerate(base.members)}
    found = (ranks.get(member.worker) for member in plan.members)
    return [
        rank if rank is not None and base.members[rank] == member else None
        for rank, member in zip(found, plan.members, strict=True)
    ]


def _runs(plan: GenerationPlan, before: Sequence[int | None]) -> Iterator[Stayers | NewMembers]:
    """Yield runs of members that were consecutive in the base, and runs of new members on one node.

    Args:
        before: each member's rank in the base, or None for a new member.
    """
    rank, world = 0, len(before)
    while rank < world:
        start, first, member = rank, before[rank], plan.members[rank]
        rank += 1
        if first is not None:
            while rank < world and before[rank] == first + rank - start:
                rank += 1
            yield Stayers(first, rank - start)
            continue
        while rank < world and before[rank] is None and _place(plan.members[rank]) == _place(member):
            rank += 1
        yield NewMembers(member.node, member.host, tuple(map(_new, plan.members[start:rank])))


def _place(member: Member) -> tuple[str, str]:
    return member.node, member.host


def _new(member: Member) -> NewWorker:
    """Return a new member without its node and host, which its run names; the usual role is left out."""
    nonce = member.worker.rsplit("/", 1)[1]
    return NewWorker(
        index_of(member.worker), nonce, member.state_port, None if member.role == WHOLE_REPLICA else member.role
    )


def _holders(plan: GenerationPlan) -> int:
    """Return the number of members with state if each other member has one of them as its sender, in turn; else 0."""
    holders = len(plan.members) - len(plan.sources)
    return holders if holders > 0 and plan.sources == _in_turn(plan.workers, holders) else 0


def _in_turn(workers: Sequence[str], holders: int) -> dict[str, StateSource]:
    """Return the senders if the first `holders` workers have the state and the others receive it from them in turn."""
    givers = [LiveSource(members=(worker,)) for worker in workers[:holders]]
    return {worker: givers[place % holders] for place, worker in enumerate(workers[holders:])}


def _without(plan: GenerationPlan) -> GenerationPlan:
    """Return a plan without members, sources and experts' blobs, which a delta encodes separately."""
    experts = plan.expert_plan
    bare = msgspec.structs.replace(experts, placement=(), held=()) if experts is not None else None
    return msgspec.structs.replace(plan, members=(), sources={}, expert_plan=bare)


def _experts(
    plan: GenerationPlan, base: GenerationPlan | None, before: Sequence[int | None]
) -> tuple[dict[int, bytes], dict[int, bytes]]:
    """Return the held experts, then the placed ones, of ranks at which they differ from the members' experts in the
    base.

    Both are {} without experts.

    Args:
        before: each member's rank in the base, or None for a new member.
    """
    if plan.expert_plan is None:
        return {}, {}
    usual = _usual_experts(base, before)
    held, placement = plan.expert_plan.held, plan.expert_plan.placement
    return (
        {rank: blob for rank, blob in enumerate(held) if blob != usual[rank]},
        {rank: blob for rank, blob in enumerate(placement) if blob != usual[rank]},
    )


def _usual_experts(base: GenerationPlan | None, before: Sequence[int | None]) -> list[bytes]:
    """Return the experts that each member had in the base; b"" if it was not a member or the base has none."""
    placement = base.expert_plan.placement if base is not None and base.expert_plan is not None else ()
    return [placement[rank] if rank is not None and placement else b"" for rank in before]


def _usual_shares(
    before: Sequence[int | None], plan: GenerationPlan, base: GenerationPlan | None, micro_batches: int
) -> Assignment:
    """Return the share that each replica group had in the base, by its first worker's rank there; () for new groups.

    All are () without a base, or if its replica groups have another number of workers.

    Args:
        before: the rank in the base of each member of `plan`, or None for a new one.
    """
    firsts = before[:: plan.places]
    if base is None or base.places != plan.places:
        return tuple(() for _ in firsts)
    return tuple(share_of(base, micro_batches, rank) if rank is not None else () for rank in firsts)


# ---- and back ----


def rebuilt(change: PlanChange, base: GenerationPlan | None) -> GenerationPlan:
    """Return the plan that a delta leads to, checked by its digest.

    Args:
        base: the plan that it changes, or None.

    Raises:
        MisfitError: the delta names ranks that do not exist, or the result is not the plan that it claims.
    """
    before = _ranks_before(change, base)
    plan = msgspec.structs.replace(change.rest, members=_members(change, base))
    workers, holders = plan.workers, min(change.holders, len(before))
    try:
        sources = {workers[rank]: source for rank, source in change.sources.items()}
    except IndexError:
        raise MisfitError(f"generation {change.rest.generation} names a rank that it does not have") from None
    plan = msgspec.structs.replace(
        plan,
        sources=_in_turn(workers, holders) if holders else sources,
        expert_plan=_expert_plan(change, base, before),
    )
    if digest_of(plan) != change.digest:
        raise MisfitError(f"generation {plan.generation} does not match its digest")
    return plan


def rebuilt_shares(
    shares: Shares | None, change: PlanChange, plan: GenerationPlan, base: GenerationPlan | None
) -> Assignment:
    """Return each replica group's micro-batches in the first step of a rebuilt plan; () without `shares`, for the usual
    ones.
    """
    if shares is None:
        return ()
    usual = _usual_shares(_ranks_before(change, base), plan, base, shares.micro_batches)
    return tuple(shares.other.get(unit, usual[unit]) for unit in range(plan.units))


def _ranks_before(change: PlanChange, base: GenerationPlan | None) -> list[int | None]:
    """Return each member's rank in the base, or None for a new member.

    Raises:
        MisfitError: a rank does not exist, or more members stay than the base has.
    """
    world = len(base.members) if base is not None else 0
    stayers = [run for run in change.members if isinstance(run, Stayers)]
    # This check comes before any allocation: the result must not grow beyond the message and the base.
    if sum(run.count for run in stayers) > world or any(run.first + run.count > world for run in stayers):
        raise MisfitError(f"generation {change.rest.generation} keeps members that generation {change.base} lacks")
    return list(chain.from_iterable(map(_ranks_of, change.members)))


def _ranks_of(run: Stayers | NewMembers) -> Sequence[int | None]:
    return range(run.first, run.first + run.count) if isinstance(run, Stayers) else [None] * len(run.workers)


def _members(change: PlanChange, base: GenerationPlan | None) -> tuple[Member, ...]:
    """Return a delta's members in rank order: copies from the base, and new ones."""
    known = base.members if base is not None else ()
    runs = (
        known[run.first : run.first + run.count] if isinstance(run, Stayers) else _made(run) for run in change.members
    )
    return tuple(chain.from_iterable(runs))


def _made(run: NewMembers) -> Iterator[Member]:
    """Yield the members of a run of new workers on one node."""
    for new in run.workers:
        worker = worker_id(run.node, new.index, new.nonce)
        yield Member(worker=worker, host=run.host, state_port=new.state_port, role=new.role or WHOLE_REPLICA)


def _expert_plan(change: PlanChange, base: GenerationPlan | None, before: Sequence[int | None]) -> ExpertPlan | None:
    """Return a delta's expert placement with the unchanged blobs from the base, or None without experts."""
    bare = change.rest.expert_plan
    if bare is None:
        return None
    usual = _usual_experts(base, before)
    return msgspec.structs.replace(bare, placement=_blobs(change.placement, usual), held=_blobs(change.held, usual))


def _blobs(other: Mapping[int, bytes], usual: Sequence[bytes]) -> tuple[bytes, ...]:
    return tuple(other.get(rank, blob) for rank, blob in enumerate(usual)) if other else tuple(usual)
