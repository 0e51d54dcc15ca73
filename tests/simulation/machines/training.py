"""What stands for a model's state: a chain of hashes over exactly what went into it.

state(k) = H(state(k-1), the parts of step k as they were rounded, v): a doubled or lost micro-batch, a gradient of
another state, another v or a torn transfer gives another value. Rounding depends on who reduced, as with real floats,
so that a step that was done again is never mistaken for the first attempt. Only integers and floats are hashed: the
values are the same in every process.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from random import Random
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from holdfast.coordination.worker.machine import WorkerMachine
from holdfast.protocol.commit import Commit, Wish, commit_from_sums, flag_contribution, lane_contribution, lanes_of
from holdfast.protocol.events import StepCommitted
from holdfast.protocol.fingerprint import find_unequal_roles
from holdfast.protocol.layouts.layout import Layout
from holdfast.protocol.messages.worker import FlopTally
from holdfast.protocol.plan import Passed
from holdfast.step_samples import StepSamples, place_hash
from tests.simulation.faults.plans import FaultPlan, layout_of

#: that a round counts for each of its samples
FLOP_PER_SAMPLE = 7.0


class SimGradient(NamedTuple):
    """The gradient of one micro-batch, and the micro-batch's hash."""

    value: int
    sample_hash: int


#: what a worker has summed up: what came of each micro-batch, which is one gradient where all is well
SimSums = dict[int, tuple[SimGradient, ...]]


class SimReduced(NamedTuple):
    """The result of a reduction: which parts are in it, sorted, a token for the bits of all of them, and v."""

    parts: tuple[int, ...]
    rounding: int
    v: Commit


class SimReceipt(NamedTuple):
    """A state that has come: the one of `step`. `senders`: whose parts of it are here."""

    generation: int
    step: int
    passed: tuple[Passed, ...]
    state: int
    senders: frozenset[str]


def initial_state(token: int) -> int:
    """Return a fresh worker's state, different for each."""
    return hash((11, token))


def gradient(state: int, step: int, micro_batch: int) -> int:
    """Return the gradient of one micro-batch of a step on a state."""
    return hash((13, state, step, micro_batch))


def summed(sums: SimSums) -> list[SimGradient]:
    """Return all gradients that are in a worker's sums."""
    return [gradient for gradients in sums.values() for gradient in gradients]


class SimShare(NamedTuple):
    """What a rank puts into a reduction: its gradients, and the numbers that are compared."""

    gradients: Sequence[SimGradient]
    compared: Sequence[float]


def reduce_shares(
    shares: Iterable[SimShare], plan: FaultPlan, generation: int, step: int, count: int = 1
) -> tuple[SimReduced, ...]:
    """Reduce as `reduce_parts`, and compare what the ranks have put in for that."""
    shares = list(shares)
    sums = [sum(column) for column in zip(*(share.compared for share in shares), strict=True)]
    unequal = find_unequal_roles(sums, len(shares))
    reduced = reduce_parts([share.gradients for share in shares], plan, generation, step, count)
    return tuple(one._replace(v=replace(one.v, unequal_roles=unequal)) for one in reduced) if unequal else reduced


def reduce_parts(
    shares: Iterable[Sequence[SimGradient]], plan: FaultPlan, generation: int, step: int = 0, count: int = 1
) -> tuple[SimReduced, ...]:
    """Unite the gradients of each role's ranks, and add up the lanes of v, which all have the same.

    Nothing is dropped, so what is in twice shows. `count`: of places of a unit.
    """
    shares, layout = list(shares), layout_of(count)
    domains = [shares[place::count] for place in range(count)]
    parts = [tuple(sorted(gradient.value for share in domain for gradient in share)) for domain in domains]
    roundings = [hash((17, generation, of_role)) for of_role in parts]
    places = [rank % count for rank in range(len(shares))]
    lanes = (
        lane_contribution(_lanes(share, plan, layout, roundings[place], place))
        for place, share in zip(places, shares, strict=True)
    )
    v = commit_from_sums([sum(column) for column in zip(*lanes, strict=True)])
    v = replace(v, metrics=logged(parts[0])) if plan.logs else v
    fails = 0 < plan.skips_from <= step
    v = replace(v, nonfinite=max(1, v.nonfinite) if fails else v.nonfinite, overflow=not fails and v.nonfinite > 0)
    return tuple(SimReduced(of_role, rounding, v) for of_role, rounding in zip(parts, roundings, strict=True))


def corrupted(sums: SimSums, samples: StepSamples, state: int, step: int, rng: Random) -> None:
    """Let the gradient of one micro-batch be there twice, or not at all, or be another's, or of the step before."""
    micro_batch = rng.choice(sorted(sums))
    right = sums[micro_batch]
    other = (micro_batch + 1) % samples.micro_batches
    wrong = [right + right, ()]
    if other != micro_batch:
        wrong.append((SimGradient(gradient(state, step, other), samples.hash_of(step, other)),))
    if step > 1:
        stale = samples.hash_of(step - 1, micro_batch)
        wrong.append((SimGradient(gradient(state, step - 1, micro_batch), stale),))
    sums[micro_batch] = rng.choice(wrong)


def _lanes(gradients: Sequence[SimGradient], plan: FaultPlan, layout: Layout, rounding: int, place: int) -> Commit:
    """Return one rank's part of v; now and then its gradients are not finite, all by itself.

    Of a unit the places along `shard` have the samples between them. Each place adds hashes of its own.
    """
    share = tuple(gradient.value for gradient in gradients)
    samples = plan.micro_batch // layout.shard if layout.tensor_of(place) == 0 else 0
    hashes = [gradient.sample_hash for gradient in gradients]
    elsewhere = [place_hash(one, place, layout.places, plan.micro_batches) for one in hashes] if place else []
    return Commit(
        grad_square=float(rounding % 1048573),
        loss_sum=float(sum(part % 1009 for part in share)),
        samples=len(gradients) * samples,
        nonfinite=int(hash((23, rounding, share)) % 8 == 0),
        sample_hashes=0 if place else sum(hashes),
        place_hashes=sum(elsewhere),
    )


def vote(plan: FaultPlan, machine: WorkerMachine, *, still_saving: bool) -> list[float]:
    """Return what a rank puts into the commit operation."""
    if plan.wants_the_end(machine.step, machine.generations.rank, machine.generations.world):
        machine.wishes.raise_wish(Wish.STOP, "enough")
    saving = (Wish.STILL_SAVING,) if still_saving else ()
    return flag_contribution(machine.generations.flags, (*machine.wishes.raised, *saving))


def combine(votes: Iterable[Sequence[float]]) -> list[float]:
    """Return what the commit operation gives everybody."""
    return [sum(column) for column in zip(*votes, strict=True)]


def logged(parts: Sequence[int]) -> dict[str, float]:
    """Return what the script has logged of the micro-batches of a step: one value, and one that may be no number."""
    total = sum(part % 1009 for part in parts)
    return {"doubtful": math.nan if total % 3 == 0 else math.inf, "mean": total / max(1, len(parts))}


def tally(machine: WorkerMachine, plan: FaultPlan, micro_batches: int) -> FlopTally | None:
    """Return what a worker tells of the FLOP of its first round, None where nobody counts them in this step.

    Args:
        micro_batches: that it had in the step.
    """
    generation = machine.plan
    if not plan.counts_flop or generation is None or not generation.is_counting(machine.worker) or machine.step % 2:
        return None
    samples = plan.micro_batch if micro_batches else 0
    flop = FLOP_PER_SAMPLE * samples
    return FlopTally(
        worker=machine.worker, generation=generation.generation, step=machine.step, flop=flop, samples=samples
    )


def same_bits(one: Commit, other: Commit) -> bool:
    """Tell whether these are the same in every bit; a NaN equals itself here."""
    return msgspec.msgpack.encode(one) == msgspec.msgpack.encode(other)


def wrong_v(plan: FaultPlan, reduced: SimReduced, commit: Commit) -> bool:
    """Tell whether v has not all samples of a step, or not exactly what its script logs."""
    # In a unit the first place says what is logged, and the parts here are those of another place.
    told = dict(reduced.v.metrics) if plan.places > 1 else logged(reduced.parts)
    right = replace(commit, metrics=told if plan.logs else {})
    return commit.samples != plan.micro_batches * plan.micro_batch or not same_bits(commit, right)


def told_wrongly(event: StepCommitted, commit: Commit) -> bool:
    """Tell whether what is announced of a step is not what its v says."""
    metrics = {name: value if math.isfinite(value) else None for name, value in commit.metrics.items()}
    told = (event.loss, event.skipped, event.metrics)
    return told != (commit.loss_sum / commit.samples, commit.nonfinite > 0, metrics)


def next_state(state: int, reduced: SimReduced, commit: Commit) -> int:
    """Return the state after a step; it depends on every bit that went into it."""
    return hash((19, state, reduced.rounding, lanes_of(commit)))


def expected_parts(state: int, step: int, micro_batches: int) -> tuple[int, ...]:
    """Return the parts of a step in which every micro-batch is exactly once."""
    return tuple(sorted(gradient(state, step, micro_batch) for micro_batch in range(micro_batches)))
