"""Tests of roles and of the domains derived from them."""

from __future__ import annotations

import msgspec
from machinery import w

from holdfast.coordination.roles import assign_roles
from holdfast.protocol.plan import WHOLE_REPLICA, GenerationPlan, Member, Role


def plan(*roles: Role) -> GenerationPlan:
    members = (
        Member(worker=w(f"n{rank}"), host="10.0.0.1", state_port=1, role=role) for rank, role in enumerate(roles)
    )
    return GenerationPlan(term=1, generation=1, members=tuple(members))


def test_all_workers_have_one_role_and_keep_their_order() -> None:
    workers = [w("n2"), w("n0"), w("n1")]
    roles = assign_roles(workers)
    assert list(roles) == workers
    assert set(roles.values()) == {Role(stage=0, place=0)}


def test_with_one_role_the_domain_is_the_world() -> None:
    assert plan(WHOLE_REPLICA, WHOLE_REPLICA, WHOLE_REPLICA).domain_of(w("n1")) == (0, 1, 2)


def test_a_domain_has_the_members_of_one_role() -> None:
    two = plan(Role(), Role(place=1), Role(), Role(place=1), Role(stage=1))
    assert [two.domain_of(worker) for worker in two.workers] == [(0, 2), (1, 3), (0, 2), (1, 3), (4,)]


def test_a_role_shared_by_all_members_is_not_encoded() -> None:
    one = plan(*assign_roles([w("n0"), w("n1")]).values())
    encoded = msgspec.msgpack.encode(one)
    assert b"role" not in encoded
    again = msgspec.msgpack.decode(encoded, type=GenerationPlan)
    assert again == one
    assert msgspec.msgpack.encode(again) == encoded
