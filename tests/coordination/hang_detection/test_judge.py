"""Tests of hang verdicts: a worker is hung if it computes or does not answer while others wait."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from holdfast.coordination.hang_detection.judge import Finding, Standstill, describe_hang, judge_standstill
from holdfast.protocol.messages.progress import Activity, ThreadActivity

NODES = ("a", "b", "c", "d")
WORKERS = tuple(f"{node}/0/0" for node in NODES)


def stand(node: str, activity: Activity = Activity.COMPUTE, for_s: float = 1.0, limit_s: float = 0.5) -> ThreadActivity:
    """Return the activity of a late worker of a node."""
    return ThreadActivity(worker=f"{node}/0/0", generation=1, step=5, activity=activity, for_s=for_s, limit_s=limit_s)


def waiting(node: str, looked_s: float = 0.01) -> ThreadActivity:
    return msgspec.structs.replace(stand(node, Activity.REDUCING, looked_s, 0.3), waits=True)


def case(*stands: ThreadActivity, silent: tuple[str, ...] = (), overdue: bool = True) -> Standstill:
    return Standstill(members=WORKERS, stands={stand.worker: stand for stand in stands}, silent=silent, overdue=overdue)


def test_a_late_worker_is_hung_before_the_step_is_overdue() -> None:
    late = stand("a")
    assert judge_standstill(case(late, *map(waiting, "bcd"), overdue=False)) == Finding(hung=(late,))


def test_a_worker_within_its_limit_is_not_hung() -> None:
    assert judge_standstill(case(stand("a", for_s=0.4), *map(waiting, "bcd"))) == Finding()


def test_a_worker_without_a_known_limit_is_not_hung() -> None:
    assert judge_standstill(case(stand("a", limit_s=0.0), *map(waiting, "bcd"))) == Finding()


def test_the_network_is_at_fault_only_after_the_last_worker_waited() -> None:
    early = [msgspec.structs.replace(waiting(node), waits_s=1.0) for node in "abc"]
    for waits_s, network in ((0.4, False), (0.5, True)):
        last = msgspec.structs.replace(waiting("d"), waits_s=waits_s)
        assert judge_standstill(replace(case(*early, last), together_s=0.5)) == Finding(network=network)


def test_without_a_limit_a_worker_far_slower_than_the_others_is_hung() -> None:
    def first(took_s: float, lasts_s: float, activity: Activity = Activity.COMPUTE) -> Finding:
        """Return the finding if all other workers took `took_s` and then waited until `lasts_s`."""
        late = stand("a", activity, for_s=lasts_s, limit_s=0.0)
        others = (msgspec.structs.replace(waiting(node), waits_s=lasts_s - took_s) for node in "bcd")
        return judge_standstill(case(late, *others, overdue=False))

    assert [stand.worker for stand in first(1.0, 30.5).hung] == ["a/0/0"]
    assert first(1.0, 29.5) == Finding()
    assert first(20.0, 59.0) == Finding()
    assert first(20.0, 61.0).hung
    assert first(1.0, 90.0, Activity.PAUSED) == Finding()
    assert first(1.0, 29.5, Activity.ENDING) == Finding(), "a traceback and the exit take time"
    assert first(1.0, 30.5, Activity.ENDING).hung


def test_without_a_limit_the_slowest_other_worker_is_the_reference() -> None:
    late = stand("a", for_s=60.0, limit_s=0.0)
    early, other = (msgspec.structs.replace(waiting(node), waits_s=59.0) for node in "bc")
    newest = msgspec.structs.replace(waiting("d"), waits_s=20.0)
    assert judge_standstill(case(late, early, other, newest)) == Finding()
    assert judge_standstill(case(late, early, other)).hung == (late,)


def test_no_worker_is_hung_if_no_worker_waits() -> None:
    assert judge_standstill(case(*map(stand, "abcd"))) == Finding()


def test_no_worker_is_hung_if_more_are_busy_than_wait() -> None:
    assert judge_standstill(case(*map(stand, "abc"), waiting("d"))) == Finding()
    both = (stand("a"), stand("b"))
    assert judge_standstill(case(*both, waiting("c"), waiting("d"))).hung == both


def test_one_of_two_workers_is_hung_if_the_other_waits() -> None:
    late = stand("a")
    two = replace(case(late, waiting("b")), members=WORKERS[:2])
    assert judge_standstill(two) == Finding(hung=(late,))


def test_an_overdue_step_in_which_all_wait_blames_the_network() -> None:
    assert judge_standstill(case(*map(waiting, "abcd"))) == Finding(network=True)
    assert judge_standstill(case(*map(waiting, "abcd"), overdue=False)) == Finding()


def test_the_network_is_not_blamed_if_a_worker_has_not_answered() -> None:
    assert judge_standstill(case(*map(waiting, "abc"))) == Finding()


def test_a_waiting_worker_that_does_not_poll_is_hung() -> None:
    asleep = waiting("a", looked_s=0.6)
    assert judge_standstill(case(asleep, *map(waiting, "bcd"))) == Finding(hung=(asleep,))
    assert judge_standstill(case(asleep, *map(waiting, "bcd"), overdue=False)) == Finding()


def test_a_stopped_process_is_hung_once_it_was_waited_for() -> None:
    stopped = msgspec.structs.replace(stand("a", for_s=0.1), stopped=True)
    long_enough = replace(case(stopped, *map(waiting, "bcd"), overdue=False), waits_for_stopped=True)
    assert judge_standstill(long_enough) == Finding(hung=(stopped,))
    assert judge_standstill(case(stopped, *map(waiting, "bcd"), overdue=False)) == Finding()


def test_a_node_that_does_not_answer_is_named_once_the_step_is_overdue() -> None:
    assert judge_standstill(case(*map(waiting, "abc"), silent=("d",))) == Finding(silent=("d",))
    assert judge_standstill(case(*map(waiting, "abc"), silent=("d",), overdue=False)) == Finding()


def test_no_silent_node_is_named_if_more_nodes_are_silent_than_wait() -> None:
    assert judge_standstill(case(waiting("a"), silent=("b", "c", "d"))) == Finding()


def test_no_silent_node_is_named_if_no_worker_waits() -> None:
    assert judge_standstill(case(*(stand(node, for_s=0.1) for node in "abc"), silent=("d",))) == Finding()


def test_members_that_have_reported_count_as_waiting() -> None:
    late = stand("a", Activity.APPLYING)
    told = replace(case(late), idle=WORKERS[1:])
    assert judge_standstill(told) == Finding(hung=(late,))
    assert judge_standstill(replace(told, idle=WORKERS)) == Finding()


def test_a_worker_that_does_not_enter_while_others_have_is_hung() -> None:
    away = stand("a", Activity.ENTERING, limit_s=0.0)
    assert judge_standstill(case(away, *map(waiting, "bcd"))).hung == ()
    assert judge_standstill(replace(case(away, *map(waiting, "bcd")), outside=WORKERS[:1])) == Finding(hung=(away,))
    all_away = case(*(stand(node, Activity.ENTERING) for node in NODES))
    assert judge_standstill(replace(all_away, outside=WORKERS)) == Finding()


def test_a_worker_that_is_receiving_its_state_is_not_hung() -> None:
    receives = stand("a", Activity.RECEIVING)
    assert judge_standstill(replace(case(receives, *map(waiting, "bcd")), outside=WORKERS[:1])).hung == ()


def test_the_description_of_a_hang_names_activity_and_remedy() -> None:
    late = msgspec.structs.replace(stand("a"), micro_batch=3)
    assert describe_hang(late) == (
        "it has been at 'compute' of step 5, micro-batch 3 for 1.00 s, limit 0.50 s, while others wait for it; "
        "if samples may take this long to load, load them ahead with `num_workers`; other slow code belongs between "
        "steps, in `with job.pause(...)`"
    )
    assert "`with job.pause(...)`" in describe_hang(stand("a", Activity.SCRIPT))
    assert "job.pause" not in describe_hang(stand("a", Activity.APPLYING))
    assert "is stopped" in describe_hang(msgspec.structs.replace(late, stopped=True))
    assert "has not polled" in describe_hang(waiting("a"))
    assert "have come in" in describe_hang(stand("a", Activity.ENTERING))
