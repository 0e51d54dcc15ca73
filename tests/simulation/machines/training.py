"""The simulated model state: a chain of hashes over every input of each step.

state(k) = H(state(k-1), the rounded parts of step k, its step result). The value changes if a micro-batch is doubled
or lost, a gradient comes from another state, a step result differs, or a transfer is torn. Rounding depends on the
ranks that reduced, as with real floats, so a repeated step differs from the first attempt. Only integers and floats
are hashed, so every process computes the same values.
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
from holdfast.protocol.plan import PassedStep
from holdfast.step_samples import StepSamples, place_hash
from tests.simulation.faults.plans import FaultPlan, layout_of

#: The FLOP that a round counts for each sample.
FLOP_PER_SAMPLE = 7.0


class SimGradient(NamedTuple):
    """The gradient of one micro-batch, and the micro-batch's hash."""

    value: int
    sample_hash: int


#: A worker's sums: the gradients of each micro-batch; a correct sum has exactly one.
SimSums = dict[int, tuple[SimGradient, ...]]


class SimReduced(NamedTuple):
    """The result of a reduction: the sorted parts, a token for their bits, and the step result `v`."""

    parts: tuple[int, ...]
    rounding: int
    v: Commit


class SimReceipt(NamedTuple):
    """A received state of `step`; `senders` are the workers that have sent their parts."""

    generation: int
    step: int
    passed: tuple[PassedStep, ...]
    state: int
    senders: frozenset[str]


def initial_state(token: int) -> int:
    """Return a fresh worker's state, different for each."""
    return hash((11, token))


def gradient(state: int, step: int, micro_batch: int) -> int:
    """Return the gradient of one micro-batch of a step on a state."""
    return hash((13, state, step, micro_batch))


def summed(sums: SimSums) -> list[SimGradient]:
    """Return all gradients in a worker's sums."""
    return [gradient for gradients in sums.values() for gradient in gradients]


class SimShare(NamedTuple):
    """A rank's input to a reduction: its gradients, and the numbers that are compared."""

    gradients: Sequence[SimGradient]
    compared: Sequence[float]


def reduce_shares(
    shares: Iterable[SimShare], plan: FaultPlan, generation: int, step: int, count: int = 1
) -> tuple[SimReduced, ...]:
    """Reduce as `reduce_parts` does, and compare the ranks' numbers."""
    shares = list(shares)
    sums = [sum(column) for column in zip(*(share.compared for share in shares), strict=True)]
    unequal = find_unequal_roles(sums, len(shares))
    reduced = reduce_parts([share.gradients for share in shares], plan, generation, step, count)
    return tuple(one._replace(v=replace(one.v, unequal_roles=unequal)) for one in reduced) if unequal else reduced


def reduce_parts(
    shares: Iterable[Sequence[SimGradient]], plan: FaultPlan, generation: int, step: int = 0, count: int = 1
) -> tuple[SimReduced, ...]:
    """Merge the gradients of each role's ranks, and add up the fields of the common step result.

    Duplicates are kept, so that a doubled gradient shows. `count` is the number of workers of a replica group.
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
    """Double, drop or replace the gradient of one micro-batch; the replacement has another micro-batch or step."""
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
    """Return one rank's part of the step result; sometimes its gradients are not finite.

    The workers along `shard` of a replica group divide the samples. Each worker adds its own hashes.
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
    """Return a rank's input to the commit operation."""
    if plan.wants_the_end(machine.step, machine.generations.rank, machine.generations.world):
        machine.wishes.raise_wish(Wish.STOP, "enough")
    saving = (Wish.STILL_SAVING,) if still_saving else ()
    return flag_contribution(machine.generations.flags, (*machine.wishes.raised, *saving))


def combine(votes: Iterable[Sequence[float]]) -> list[float]:
    """Return the result of the commit operation, which is equal on all ranks."""
    return [sum(column) for column in zip(*votes, strict=True)]


def logged(parts: Sequence[int]) -> dict[str, float]:
    """Return the metrics that the script logs for a step: one finite value and one that is NaN or infinite."""
    total = sum(part % 1009 for part in parts)
    return {"doubtful": math.nan if total % 3 == 0 else math.inf, "mean": total / max(1, len(parts))}


def tally(machine: WorkerMachine, plan: FaultPlan, micro_batches: int) -> FlopTally | None:
    """Return a worker's FLOP count for its first round, or None if it does not count in this step.

    Args:
        micro_batches: The number of micro-batches that the worker had in the step.
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
    """Return whether two results are equal bit for bit; a NaN equals itself here."""
    return msgspec.msgpack.encode(one) == msgspec.msgpack.encode(other)


def wrong_v(plan: FaultPlan, reduced: SimReduced, commit: Commit) -> bool:
    """Return whether a step result lacks samples of the step, or differs from the metrics that its script logs."""
    # In a replica group the first worker logs the metrics; the parts here may belong to another worker.
    metrics = dict(reduced.v.metrics) if plan.places > 1 else logged(reduced.parts)
    right = replace(commit, metrics=metrics if plan.logs else {})
    return commit.samples != plan.micro_batches * plan.micro_batch or not same_bits(commit, right)


def is_announced_wrongly(event: StepCommitted, commit: Commit) -> bool:
    """Return whether the announced event of a step differs from its step result."""
    metrics = {name: value if math.isfinite(value) else None for name, value in commit.metrics.items()}
    announced = (event.loss, event.skipped, event.metrics)
    return announced != (commit.loss_sum / commit.samples, commit.nonfinite > 0, metrics)


def next_state(state: int, reduced: SimReduced, commit: Commit) -> int:
    """Return the state after a step; it depends on every bit of the step's inputs."""
    return hash((19, state, reduced.rounding, lanes_of(commit)))


def expected_parts(state: int, step: int, micro_batches: int) -> tuple[int, ...]:
    """Return the parts of a step that contains every micro-batch exactly once."""
    return tuple(sorted(gradient(state, step, micro_batch) for micro_batch in range(micro_batches)))
