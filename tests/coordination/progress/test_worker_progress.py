"""Tests that incremental counts always equal a walk over all members."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast.coordination.progress.worker_progress import WorkerProgress

WORKERS = [f"n{index}" for index in range(6)]
STEPS = st.integers(0, 6)


@given(
    changes=st.lists(
        st.one_of(
            st.tuples(st.just("record_step"), st.lists(st.sampled_from(WORKERS)), STEPS),
            st.tuples(st.just("forget"), st.sampled_from(WORKERS)),
            st.tuples(st.just("follow"), st.sets(st.sampled_from(WORKERS))),
            st.tuples(st.just("go_back"), STEPS),
            st.tuples(st.just("reset"), STEPS),
            st.tuples(st.just("ask_next")),
        ),
        max_size=40,
    )
)
def test_the_counts_equal_a_count_over_all_workers(changes: list[tuple[object, ...]]) -> None:
    standings, step = WorkerProgress(1), 1
    members: set[str] = set()
    known: dict[str, int] = {}
    for what, *arguments in changes:
        getattr(standings, str(what))(*arguments)
        match what, arguments:
            case "record_step", [list(workers), int(at)]:
                known |= {worker: max(at, known.get(worker, 0)) for worker in workers}
            case "forget", [str(worker)]:
                known.pop(worker, None)
            case "follow", [set(workers)]:
                members = workers
            case "go_back", [int(to)]:
                known = {worker: at for worker, at in known.items() if at <= to}
            case "reset", [int(step)]:
                known.clear()
            case _:
                step += 1
        assert standings.all_beyond == (bool(members) and all(known.get(worker, -1) > step for worker in members))
        assert standings.all_there == all(known.get(worker) == step for worker in members)
        assert standings.slowest(WORKERS) == min(known.get(worker, 0) for worker in WORKERS)
        assert [standings.of(worker) for worker in WORKERS] == [known.get(worker) for worker in WORKERS]
