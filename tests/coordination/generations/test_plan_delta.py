"""Tests of plan deltas: they rebuild the exact plan from few bytes, or are rejected."""

from __future__ import annotations

from random import Random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.coordination.generations.assignment import keep_summed, round_robin
from holdfast.coordination.generations.plan_delta import MisfitError, change_of, rebuilt, rebuilt_shares, shares_of
from holdfast.protocol.messages.agent import CoordinatorMessage
from holdfast.protocol.messages.plans import BeginNode, NewMembers, PlanChange, Stayers
from holdfast.protocol.plan import WHOLE_REPLICA, Decision, DecisionKind, ExpertPlan, GenerationPlan, Member, Role
from holdfast.protocol.state import CheckpointSource, LiveSource, StateSource

REDO = Decision(kind=DecisionKind.REDO, applied=3)


def member(node: int, place: int, *, life: int = 0, role: Role = WHOLE_REPLICA) -> Member:
    worker = f"n{node}/{place}/{life:04x}{node:04x}"
    return Member(worker=worker, host=f"10.0.0.{node}", state_port=1000 + place, role=role)


def plan_of(
    generation: int,
    members: list[Member],
    experts: ExpertPlan | None = None,
    sources: dict[str, StateSource] | None = None,
) -> GenerationPlan:
    return GenerationPlan(
        term=2,
        generation=generation,
        members=tuple(members),
        expert_plan=experts,
        sources=sources or {},
        secret=b"s" * 32,
    )


def world(nodes: int, workers: int = 8) -> list[Member]:
    return [member(node, place) for node in range(nodes) for place in range(workers)]


def experts_of(placement: list[bytes], held: list[bytes]) -> ExpertPlan:
    return ExpertPlan(layers=2, experts=4, placement=tuple(placement), held=tuple(held), moves=1, asked=1, given=1)


def size_of(message: BeginNode) -> int:
    return len(msgspec.msgpack.encode(message))


def over_the_wire(change: PlanChange) -> PlanChange:
    data = msgspec.msgpack.encode(BeginNode(plan=change, decision=REDO, shares=None))
    message = msgspec.msgpack.Decoder(CoordinatorMessage).decode(data)
    assert isinstance(message, BeginNode)
    return message.plan


blobs = st.sampled_from([b"", b"ab", b"cd"])


@st.composite
def plans(draw: st.DrawFn) -> tuple[GenerationPlan | None, GenerationPlan]:
    """Return two related plans, or None and one plan."""
    pool = [member(node, place, life=life) for node in range(4) for place in range(2) for life in range(2)]
    pool += [member(0, 0, role=Role(stage=1)), member(5, 1, role=Role(place=1))]

    def one(generation: int) -> GenerationPlan:
        found = draw(st.lists(st.sampled_from(pool), min_size=1, unique_by=lambda member: member.worker))
        names = [member.worker for member in found]
        holders = draw(st.integers(1, len(names)))
        in_turn = {name: LiveSource(members=(names[place % holders],)) for place, name in enumerate(names[holders:])}
        sources: dict[str, StateSource] = draw(
            st.sampled_from(
                [{}, in_turn, dict.fromkeys(names[1:], LiveSource(members=(names[0], names[-1]))),
                 {names[-1]: CheckpointSource(name="step-3")}]
            )
        )  # fmt: skip
        experts = None
        if draw(st.booleans()):
            many = st.lists(blobs, min_size=len(names), max_size=len(names))
            experts = experts_of(draw(many), draw(many))
        return plan_of(generation, found, experts, sources)

    return draw(st.sampled_from([None, one(4)])), one(5)


@given(plans())
@settings(max_examples=300, deadline=None)
def test_a_delta_rebuilds_the_plan(pair: tuple[GenerationPlan | None, GenerationPlan]) -> None:
    base, plan = pair
    assert rebuilt(over_the_wire(change_of(plan, base)), base) == plan


@given(st.integers(1, 12), st.integers(1, 12), st.integers(0, 30), st.integers(0, 1 << 30))
@settings(max_examples=200, deadline=None)
def test_micro_batch_shares_are_rebuilt_from_a_delta(before: int, after: int, micro_batches: int, seed: int) -> None:
    random = Random(seed)
    base, members = plan_of(4, world(before, 1)), world(after, 1)
    random.shuffle(members)
    plan = plan_of(5, members)
    dealt = list(range(micro_batches))
    random.shuffle(dealt)
    cuts = sorted(random.randrange(micro_batches + 1) for _ in range(after - 1))
    assignment = tuple(tuple(dealt[a:b]) for a, b in zip([0, *cuts], [*cuts, micro_batches], strict=True))
    for known in (base, None):
        shares = shares_of(assignment, micro_batches, plan, known)
        assert rebuilt_shares(shares, change_of(plan, known), plan, known) == assignment
    assert rebuilt_shares(None, change_of(plan, base), plan, base) == ()


def test_the_delta_of_a_loss_does_not_grow_with_the_world_size() -> None:
    """The delta sent to each node after a loss does not grow with the world size, unlike the complete plan."""
    changes, wholes = [], []
    for nodes in (16, 128, 1024):
        members, size = world(nodes), 8 * nodes
        slots = [bytes([rank % 250, 1]) * 40 for rank in range(size)]
        base = plan_of(7, members, experts_of(slots, slots))
        left = members[:40] + members[48:]
        kept = slots[:40] + slots[48:]
        kept[3] = b"new" * 20
        plan = plan_of(8, left, experts_of(kept, slots[:40] + slots[48:]))
        micro_batches = 2 * size
        summed = [round_robin(micro_batches, size, rank)[:1] for rank in [*range(40), *range(48, size)]]
        usual = [round_robin(micro_batches, size, rank) for rank in [*range(40), *range(48, size)]]
        assignment = keep_summed(micro_batches, summed, usual)
        for known, sizes in ((base, changes), (None, wholes)):
            shares = shares_of(assignment, micro_batches, plan, known)
            change = change_of(plan, known)
            assert rebuilt_shares(shares, change, plan, known) == assignment
            sizes.append(size_of(BeginNode(plan=change, decision=REDO, shares=shares)))
    assert max(changes) < 1000
    assert changes[2] - changes[0] < 100, "only the numbers of ranks and micro-batches get longer"
    assert wholes[2] > 50 * wholes[0]


def test_the_delta_of_a_join_grows_only_with_the_joining_nodes() -> None:
    members = world(128)
    base = plan_of(7, members)
    sizes = []
    for joining in (1, 2, 64):
        plan = plan_of(8, members + [member(1000 + node, place) for node in range(joining) for place in range(8)])
        givers = {m.worker: LiveSource(members=(members[place].worker,)) for place, m in enumerate(plan.members[1024:])}
        change = change_of(msgspec.structs.replace(plan, sources=givers), base)
        assert change.holders == 1024
        assert change.members[0] == Stayers(0, 1024)
        assert [len(run.workers) for run in change.members[1:] if isinstance(run, NewMembers)] == [8] * joining
        sizes.append(len(msgspec.msgpack.encode(change)))
    assert sizes[1] - sizes[0] < 300
    assert sizes[2] - sizes[0] < 63 * 300


def test_a_delta_contains_every_field_of_the_plan() -> None:
    """This test fails if a new field of a plan is missing in the delta."""
    base = plan_of(4, world(2, 1))
    plan = msgspec.structs.replace(plan_of(5, world(3, 1)), last=True, term=9)
    rest, told_apart = change_of(plan, base).rest, {"members", "sources", "expert_plan"}
    for name in set(GenerationPlan.__struct_fields__) - told_apart:
        assert getattr(rest, name) == getattr(plan, name)


@pytest.mark.parametrize(
    "changes",
    [
        {"members": (Stayers(0, 3),)},
        {"members": (Stayers(1, 2),)},
        {"members": (Stayers(0, 2), Stayers(0, 2))},
        {"members": (Stayers(0, 1),)},
        {"members": ()},
        {"holders": 1},
        {"sources": {7: LiveSource(members=("n0/0/00000000",))}},
        {"placement": {0: b"x"}},
        {"digest": bytes(16)},
    ],
    ids=str,
)
def test_deltas_that_do_not_fit_are_rejected(changes: dict[str, object]) -> None:
    base = plan_of(4, world(2, 1), experts_of([b"ab"] * 2, [b"ab"] * 2))
    plan = msgspec.structs.replace(base, generation=5)
    wrong = msgspec.structs.replace(change_of(plan, base), **changes)
    with pytest.raises(MisfitError):
        rebuilt(over_the_wire(wrong), base)


def test_a_small_delta_cannot_allocate_much_memory() -> None:
    """The members are copied at most once, however often the message refers to them."""
    base = plan_of(4, world(128))
    bomb = msgspec.structs.replace(change_of(base, base), members=(Stayers(0, 1024),) * 50_000)
    with pytest.raises(MisfitError):
        rebuilt(over_the_wire(bomb), base)


def test_the_kept_field_is_omitted_without_multi_worker_replica_groups() -> None:
    begin = BeginNode(plan=change_of(plan_of(4, world(2)), None), decision=REDO, shares=None)
    assert list(msgspec.msgpack.decode(msgspec.msgpack.encode(begin))) == ["type", "plan", "decision", "shares"]
