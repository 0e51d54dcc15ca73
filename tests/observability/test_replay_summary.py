"""A replay's summary: the events that count, and the time without nodes."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.observability.replay_summary import summarise_replay, without_nodes
from holdfast.protocol.events import AnyEvent
from made_events import joined, made


def step(time: float, number: int) -> AnyEvent:
    return made("step_committed", time, step=number, samples=10, loss=1.0 / number)


def node(time: float, name: str, *, joins: bool) -> AnyEvent:
    return joined(name, time) if joins else made("node_left", time, node=name, reason="failed")


def test_undone_steps_and_events_after_the_end_do_not_count() -> None:
    events = [node(0.0, "a", joins=True), step(1.0, 1), step(2.0, 2), step(3.0, 3), node(3.5, "a", joins=False)]
    events += [node(5.0, "b", joins=True), made("rolled_back", 5.0, to_step=2), step(6.0, 3)]
    events += [made("recovered", 6.0, action="rollback", down_s=2.5), step(11.5, 4)]
    summary = summarise_replay(events, 11.0, outcome="trace over")
    assert (summary.elapsed_s, summary.steps, summary.samples, summary.undone_steps) == (10.0, 3, 30, 1)
    assert summary.samples_per_s == 2.0
    assert summary.without_nodes_s == 1.5
    assert (summary.nodes_joined, summary.nodes_lost) == (2, 1)
    assert (summary.recoveries, summary.down_s) == ({"rollback": 1}, 2.5)
    assert summary.final_loss == 1 / 3


def test_a_job_that_finishes_before_the_trace_ends_the_replay() -> None:
    done = made("job_finished", 2.0)
    summary = summarise_replay([step(1.0, 1), step(2.0, 2), done], 100.0, outcome="job done")
    assert summary.elapsed_s == 1.0


def test_a_replay_without_steps_is_summarized() -> None:
    failed = made("job_failed", 2.0)
    for events in ([], [failed]):
        summary = summarise_replay(events, None, outcome="job failed")
        assert (summary.steps, summary.elapsed_s, summary.samples_per_s, summary.final_loss) == (0, 0.0, 0.0, None)


@settings(derandomize=True, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from("abc")), max_size=20))
def test_the_time_without_nodes_equals_a_count_of_every_second(changes: list[tuple[int, str]]) -> None:
    """Compared with a check at every second: changes occur at whole seconds, checks at half seconds."""
    present: set[str] = set()
    events: list[AnyEvent] = [node(0.0, "first", joins=True), node(1.0, "first", joins=False)]
    there, now = {0: {"first"}}, 1
    for after, name in changes:
        for second in range(now, now + after):
            there[second] = set(present)
        now += after
        events.append(node(float(now), name, joins=name not in present))
        present ^= {name}
    for second in range(now, now + 5):
        there[second] = set(present)
    begin, end = 1.0, float(now + 5)
    empty = sum(not nodes for second, nodes in there.items() if begin <= second < end)
    assert without_nodes(events, begin, end) == empty
