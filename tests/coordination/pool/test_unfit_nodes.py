"""Tests of nodes that a job refuses: others are tried, restarted ones again, and too few usable nodes end the job."""

from __future__ import annotations

from played_pool import PlayedPool

from holdfast.coordination.pool.inputs import DrainNodes


def test_a_job_that_refuses_a_node_receives_another() -> None:
    pool = PlayedPool(nodes=3)
    pool.submit("one", most=1)
    (first,) = pool.nodes_of("one")
    pool.stands("one", unfit={first})
    (second,) = pool.nodes_of("one")
    assert second != first
    assert not pool.job_told["one"].stranded
    pool.stands("one", unfit={second})
    assert pool.nodes_of("one") == {"n1", "n2", "n3"} - {first, second}
    assert pool.pool.state.unfit_nodes("one") == {first: "no script", second: "no script"}
    assert not pool.job_told["one"].stranded
    pool.stands("one", unfit=pool.nodes_of("one"))
    assert pool.job_told["one"].stranded
    assert not pool.nodes_of("one")


def test_two_jobs_swap_nodes_if_one_needs_the_usable_node_of_the_other() -> None:
    pool = PlayedPool(nodes=3)
    pool.submit("two", least=2, most=2)
    pool.stands("two")
    pool.submit("one", most=1)
    (first,) = pool.nodes_of("one")
    pool.stands("one", unfit={first})
    assert pool.nodes_of("two") == {"n1", "n2", "n3"}, "it has another node first, and no job is below its minimum"
    assert not pool.leaving("two")
    pool.stands("two")
    (leaves,) = pool.leaving("two")
    pool.stands("two")
    assert pool.nodes_of("one") == {leaves}
    pool.stands("one", unfit={leaves})
    assert not pool.nodes_of("one")
    pool.stands("two")
    pool.stands("two")
    (last,) = pool.nodes_of("one")
    assert len({first, leaves, last}) == 3, "each node is tried once"
    pool.stands("one", unfit={last})
    assert pool.job_told["one"].stranded
    for _ in range(3):
        pool.stands("two")
    assert len(pool.nodes_of("two")) == 2


def test_a_refused_node_is_tried_again_after_a_restart_or_script_change() -> None:
    pool = PlayedPool(nodes=1)
    pool.submit("one", most=1)
    pool.stands("one", unfit={"n1"})
    assert not pool.nodes_of("one")
    pool.go("n1")
    pool.come("n1")
    assert not pool.nodes_of("one"), "the agent is the same"
    pool.go("n1")
    pool.come("n1", session="b")
    assert pool.nodes_of("one") == {"n1"}
    assert not pool.job_told["one"].stranded
    pool.stands("one")
    assert pool.nodes_of("one") == {"n1"}, "messages about the previous grant no longer count"
    pool.stands("one", unfit={"n1"})
    assert not pool.nodes_of("one")
    pool.says("n1", ended=pool.record.last_grant, changes=1)
    assert pool.nodes_of("one") == {"n1"}
    pool.stands("one", unfit={"n1"})
    pool.says("n1", ended=pool.record.last_grant, changes=1)
    assert not pool.nodes_of("one"), "the refusal is not new"


def test_a_disconnected_node_is_awaited_before_a_job_is_stranded() -> None:
    pool = PlayedPool(nodes=2, back_s=20.0)
    pool.go("n2")
    pool.submit("one", most=1)
    pool.stands("one", unfit={"n1"})
    assert not pool.job_told["one"].stranded
    pool.lives(19.0, "n2")
    assert not pool.job_told["one"].stranded
    pool.lives(3.0, "n2")
    assert pool.job_told["one"].stranded
    pool.come("n2")
    assert not pool.job_told["one"].stranded
    assert pool.nodes_of("one") == {"n2"}


def test_a_job_is_not_stranded_while_expected_or_drained_nodes_may_help() -> None:
    pool = PlayedPool(nodes=1, expected=2)
    pool.submit("one", most=1)
    pool.stands("one", unfit={"n1"})
    assert not pool.job_told["one"].stranded
    pool.come("n2")
    pool.feed(DrainNodes(("n2",)))
    pool.stands("one", without={"n2"})
    assert not pool.job_told["one"].stranded
    assert not pool.nodes_of("one")


def test_a_job_that_refuses_the_target_of_its_move_keeps_its_nodes() -> None:
    pool = PlayedPool(nodes=3)
    pool.submit("two", least=2, most=2)
    pool.stands("two")
    pool.submit("one", most=1)
    (first,) = pool.nodes_of("one")
    before = pool.nodes_of("two")
    pool.stands("one", unfit={first})
    pool.stands("two", unfit={first})
    assert pool.nodes_of("two") == before
    assert not [grant for grant in pool.record.grants.values() if grant.replaced]
    assert not pool.leaving("two")


def test_permanently_lost_nodes_are_forgotten() -> None:
    pool = PlayedPool(nodes=2, back_s=10.0, forget_s=100.0)
    for number in range(3, 6):
        pool.come(f"host-{number}", passing=True)
        pool.go(f"host-{number}")
    pool.go("n2")
    assert len(pool.record.nodes) == 5
    pool.lives(20.0)
    assert set(pool.record.nodes) == {"n1", "n2"}, "no node returns with such a name"
    pool.restart()
    pool.come("n1")
    pool.lives(90.0)
    assert set(pool.record.nodes) == {"n1", "n2"}
    pool.lives(20.0)
    assert set(pool.record.nodes) == {"n1"}
    pool.come("n2")
    assert set(pool.record.nodes) == {"n1", "n2"}, "the node is still welcome"


def test_granted_and_drained_nodes_are_not_forgotten() -> None:
    pool = PlayedPool(nodes=2, back_s=10.0, forget_s=20.0)
    pool.submit("one", most=1)
    (mine,) = pool.nodes_of("one")
    (other,) = {"n1", "n2"} - {mine}
    pool.feed(DrainNodes((other,)))
    for node in ("n1", "n2"):
        pool.go(node)
    pool.lives(60.0)
    assert set(pool.record.nodes) == {"n1", "n2"}
    pool.stands("one", without={mine})
    pool.lives(10.0)
    assert set(pool.record.nodes) == {other}


def test_a_full_pool_forgets_the_longest_disconnected_node() -> None:
    pool = PlayedPool(nodes=3, most_nodes=3)
    pool.come("n4")
    assert set(pool.record.nodes) == {"n1", "n2", "n3"}, "all nodes are connected"
    pool.go("n2")
    pool.tick()
    pool.go("n1")
    pool.come("n4")
    assert set(pool.record.nodes) == {"n1", "n3", "n4"}
