"""The plan that gets the most out of all jobs, against every possible division."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import BadInputError
from holdfast.planning.waf.plan import BestDivisions, Planner, WafPlan, best_plan, price_division
from holdfast.planning.waf.task import Task, check_throughput, find_drops

CLOSE = 1e-9


def all_divisions(tasks: Sequence[Task], nodes: int, running_s: float) -> list[WafPlan]:
    """Return every allowed division, the best first."""
    fits = [[size for size in range(nodes + 1) if _allowed(task, size)] for task in tasks]
    found = [price_division(tasks, sizes, nodes, running_s) for sizes in product(*fits) if sum(sizes) <= nodes]
    return sorted(found, key=lambda plan: -plan.value)


def _allowed(task: Task, size: int) -> bool:
    if size == 0:
        return task.floor == 0
    most = size if task.most is None else task.most
    return max(task.floor, task.least) <= size <= most and (not task.sizes or size in task.sizes)


@st.composite
def tasks_and_nodes(draw: st.DrawFn) -> tuple[list[Task], int, float]:
    nodes = draw(st.integers(1, 8))
    tasks: list[Task] = []
    left = nodes
    for number in range(draw(st.integers(1, 4))):
        table = draw(st.lists(st.floats(0, 100), min_size=1, max_size=nodes))
        least = draw(st.integers(1, 3))
        sizes = draw(st.sampled_from([(), (1, 2, 4, 8), (2, 3)]))
        task = Task(
            name=f"t{number}",
            throughput=np.array([0.0, *table]),
            weight=draw(st.floats(0.5, 2.0)),
            least=least,
            most=draw(st.sampled_from([None, least, least + 2])),
            sizes=sizes,
            had=draw(st.integers(0, nodes)),
            hit=draw(st.booleans()),
            transition_s=draw(st.floats(0, 50)),
            hit_s=draw(st.sampled_from([None, 0.0, 70.0])),
        )
        floored = replace(task, floor=task.least)
        if draw(st.booleans()) and floored.kept <= left and _allowed(floored, floored.kept):
            task, left = floored, left - floored.kept
        tasks.append(task)
    return tasks, nodes, draw(st.floats(1, 100))


def check(plan: WafPlan, tasks: Sequence[Task], nodes: int, running_s: float) -> None:
    """Compare a plan and its next best with all divisions."""
    every = all_divisions(tasks, nodes, running_s)
    again = price_division(tasks, [plan.sizes[task.name] for task in tasks], nodes, running_s)
    assert any(plan.sizes == one.sizes for one in every)
    scale = max(1.0, abs(every[0].value))
    assert again.value == pytest.approx(plan.value, abs=CLOSE * scale)
    assert plan.value == pytest.approx(every[0].value, abs=CLOSE * scale)
    if len(every) == 1:
        assert not plan.next_best
        return
    assert plan.next_best
    assert plan.next_best != plan.sizes
    assert any(plan.next_best == one.sizes for one in every)
    assert plan.value - plan.given_up == pytest.approx(every[1].value, abs=CLOSE * scale)


@settings(max_examples=300)
@given(tasks_and_nodes())
def test_a_plan_is_the_best_of_all_divisions(case: tuple[list[Task], int, float]) -> None:
    tasks, nodes, running_s = case
    check(Planner(tasks, nodes, running_s).plan(), tasks, nodes, running_s)


@settings(max_examples=300)
@given(tasks_and_nodes())
def test_a_single_plan_is_the_best_of_all_divisions(case: tuple[list[Task], int, float]) -> None:
    tasks, nodes, running_s = case
    plan = best_plan(tasks, nodes, running_s)
    check(plan, tasks, nodes, running_s)
    assert best_plan(tasks, nodes, running_s, next_best=False).sizes == plan.sizes
    any_number = BestDivisions(tasks, nodes, running_s)
    for fewer in range(nodes):
        there = any_number.value[fewer] > -np.inf
        assert there == (sum(task.kept for task in tasks) <= fewer)
        assert not there or sum(any_number.sizes(fewer)) <= fewer


@settings(max_examples=150)
@given(tasks_and_nodes())
def test_the_plan_after_each_failure_is_the_best_of_all_divisions(case: tuple[list[Task], int, float]) -> None:
    tasks, nodes, running_s = case
    planner = Planner(tasks, nodes, running_s)
    for at, task in enumerate(tasks):
        hit = [*tasks[:at], replace(task, hit=True), *tasks[at + 1 :]]
        check(planner.plan_after_failure(task.name), hit, nodes, running_s)


@settings(max_examples=150)
@given(tasks_and_nodes())
def test_the_plan_after_each_end_or_start_is_the_best_of_all_divisions(case: tuple[list[Task], int, float]) -> None:
    tasks, nodes, running_s = case
    planner = Planner(tasks, nodes, running_s)
    for task in tasks:
        others = [other for other in tasks if other is not task]
        check(planner.plan_after_end(task.name), others, nodes, running_s)
        check(Planner(others, nodes, running_s).plan_with_job(task), tasks, nodes, running_s)


@pytest.mark.processor_time
def test_plans_for_1024_nodes_and_32_jobs_take_less_than_five_seconds() -> None:
    rng = np.random.default_rng(7)
    held = np.arange(1025.0)
    tasks = [
        Task(
            name=f"t{number}",
            throughput=rng.uniform(1, 9) * held ** rng.uniform(0.6, 1.0),
            weight=rng.uniform(0.5, 2.0),
            least=2,
            floor=2,
            had=32,
            transition_s=5.0,
        )
        for number in range(32)
    ]
    began = time.process_time()
    planner = Planner(tasks, 1024, 3600.0)
    futures = [
        planner.plan(),
        *(planner.plan_after_failure(task.name) for task in tasks),
        *(planner.plan_after_end(t.name) for t in tasks),
    ]
    assert time.process_time() - began < 5.0
    assert len({tuple(plan.sizes.values()) for plan in futures}) > 1


def test_without_floors_the_job_with_the_greatest_weight_takes_all_nodes() -> None:
    alike = np.arange(9.0)
    tasks = [Task(name=name, throughput=alike, weight=weight) for name, weight in (("a", 1.0), ("b", 2.0))]
    assert Planner(tasks, 8, 100.0).plan().sizes == {"a": 0, "b": 8}
    kept = [replace(task, floor=2, least=2) for task in tasks]
    assert Planner(kept, 8, 100.0).plan().sizes == {"a": 2, "b": 6}


def test_a_job_keeps_its_nodes_if_a_change_costs_more_than_it_gains() -> None:
    curve = np.array([0.0, 10.0, 18.0, 24.0, 28.0])
    tasks = [
        Task(name="a", throughput=curve, had=3, transition_s=50.0),
        Task(name="b", throughput=curve, had=1, transition_s=50.0),
    ]
    assert Planner(tasks, 4, 100.0).plan().sizes == {"a": 3, "b": 1}
    assert Planner(tasks, 4, 10_000.0).plan().sizes == {"a": 2, "b": 2}


def test_all_plans_after_a_failure_have_the_measured_cost() -> None:
    curve = np.array([0.0, 10.0, 18.0, 24.0, 28.0])
    tasks = [Task(name=name, throughput=curve, had=2, transition_s=1.0, hit_s=30.0) for name in ("a", "b")]
    hit = [replace(tasks[0], hit=True), tasks[1]]
    for plan in (
        Planner(tasks, 3, 100.0).plan_after_failure("a"),
        Planner(hit, 3, 100.0).plan(),
        best_plan(hit, 3, 100.0),
    ):
        assert (plan.sizes, plan.cost) == ({"a": 1, "b": 2}, 18.0 * 30.0)
    assert Planner(tasks, 6, 100.0).plan().cost == 2 * 18.0


def test_a_job_that_risks_a_rollback_gets_more_nodes() -> None:
    curve = np.array([0.0, 10.0, 18.0, 24.0, 28.0])
    risky = Task(name="risky", throughput=curve, lost_share=np.array([0.0, 0.5, 0.3, 0.0, 0.0]), had=2)
    safe = Task(name="safe", throughput=curve, had=2)
    assert Planner([safe, risky], 4, 100.0).plan().sizes == {"safe": 1, "risky": 3}


@pytest.mark.parametrize(
    ("throughput", "said"),
    [([], "shape"), ([0.0], "shape"), ([0.0, -1.0], "with 1 nodes is -1"), ([0.0, 1.0, float("nan")], "2 nodes")],
)
def test_an_invalid_throughput_is_refused(throughput: list[float], said: str) -> None:
    with pytest.raises(BadInputError, match=said):
        check_throughput("gpt", np.array(throughput))
    with pytest.raises(BadInputError, match=said):
        Task(name="gpt", throughput=np.array(throughput))


def test_nodes_that_make_a_job_slower_stay_idle() -> None:
    humped = np.array([0.0, 10.0, 8.0, 20.0])
    assert find_drops(humped) == [2]
    assert Planner([Task(name="a", throughput=humped)], 2, 10.0).plan().sizes == {"a": 1}


def test_invalid_tasks_are_refused() -> None:
    one = Task(name="a", throughput=np.array([0.0, 1.0]), floor=3, least=3)
    with pytest.raises(BadInputError, match="weight of a is 0"):
        replace(one, weight=0.0)
    with pytest.raises(BadInputError, match="two jobs have the name 'a'"):
        Planner([one, one], 8, 1.0)
    with pytest.raises(BadInputError, match="2 nodes are too few: together the jobs need at least 3"):
        Planner([one], 2, 1.0)
