"""Jobs that the weights leave without nodes, and the change that would help, against every possible division."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_waf_plan import CLOSE, all_divisions, tasks_and_nodes

from holdfast.planning.waf.plan import Planner
from holdfast.planning.waf.starved_jobs import find_shortfalls
from holdfast.planning.waf.task import Task


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[Task], int, float]:
    tasks, nodes, running_s = draw(tasks_and_nodes())
    return [replace(task, floor=0, left_s=draw(st.sampled_from([0.0, 30.0]))) for task in tasks], nodes, running_s


@settings(max_examples=200)
@given(cases())
def test_a_plan_without_floors_is_the_best_of_all_divisions(case: tuple[list[Task], int, float]) -> None:
    tasks, nodes, running_s = case
    every = all_divisions(tasks, nodes, running_s)
    plan = Planner(tasks, nodes, running_s).plan()
    assert plan.value == pytest.approx(every[0].value, abs=CLOSE * max(1.0, abs(every[0].value)))
    assert any(plan.sizes == one.sizes for one in every)


@settings(max_examples=200)
@given(cases())
def test_a_shortfall_is_the_cost_of_the_jobs_least_nodes(case: tuple[list[Task], int, float]) -> None:
    tasks, nodes, running_s = case
    every = all_divisions(tasks, nodes, running_s)
    scale = max(1.0, abs(every[0].value))
    for name, short in find_shortfalls(tasks, nodes, running_s).items():
        fed = next(plan for plan in every if plan.sizes[name])
        assert short.short == pytest.approx(every[0].value - fed.value, abs=CLOSE * scale)
        assert short.short >= -CLOSE * scale
        assert name not in short.to


@settings(max_examples=200)
@given(cases())
def test_the_factor_on_the_weight_is_sufficient(case: tuple[list[Task], int, float]) -> None:
    tasks, nodes, running_s = case
    for name, short in find_shortfalls(tasks, nodes, running_s).items():
        if not 0 < short.times < 1e6:
            continue
        heavier = [
            replace(task, weight=task.weight * short.times * (1 + 1e-6)) if task.name == name else task
            for task in tasks
        ]
        best_of = all_divisions(heavier, nodes, running_s)
        fed = next(plan for plan in best_of if plan.sizes[name])
        assert fed.value == pytest.approx(best_of[0].value, abs=1e-5 * max(1.0, abs(best_of[0].value)))


def test_a_shortfall_names_the_jobs_that_get_the_nodes() -> None:
    linear = np.arange(9.0)
    tasks = [
        Task(name="a", throughput=linear, weight=1.0, least=2),
        Task(name="b", throughput=linear, weight=1.5, most=5),
        Task(name="c", throughput=linear, weight=2.0),
    ]
    found = find_shortfalls(tasks, 8, 10.0)
    assert {name: dict(short.to) for name, short in found.items()} == {"a": {"c": 2}, "b": {"c": 1}}
    assert found["a"].short == pytest.approx(2 * (2.0 - 1.0) * 10.0)
    assert found["a"].times == pytest.approx(2.0)
    assert found["b"].times == pytest.approx(2.0 / 1.5)


def test_no_weight_is_sufficient_for_a_job_without_throughput() -> None:
    tasks = [Task(name="a", throughput=np.zeros(5)), Task(name="b", throughput=np.arange(5.0))]
    assert find_shortfalls(tasks, 4, 10.0)["a"].times == 0.0


def test_a_job_that_lacks_nodes_has_no_shortfall() -> None:
    tasks = [
        Task(name="a", throughput=np.arange(9.0), least=3),
        Task(name="b", throughput=np.arange(9.0), least=2, floor=2),
    ]
    assert find_shortfalls(tasks, 4, 10.0) == {}


def test_a_job_that_loses_all_nodes_has_a_higher_cost() -> None:
    slow = Task(name="a", throughput=np.array([0.0, 10.0]), had=1, transition_s=1.0, left_s=50.0)
    fast = Task(name="b", throughput=np.array([0.0, 12.0]))
    assert Planner([slow, fast], 1, 100.0).plan().sizes == {"a": 1, "b": 0}
    assert Planner([slow, fast], 1, 1000.0).plan().sizes == {"a": 0, "b": 1}
    plan = Planner([slow, fast], 1, 1000.0).plan()
    assert plan.cost == pytest.approx(10.0 * 51.0)
