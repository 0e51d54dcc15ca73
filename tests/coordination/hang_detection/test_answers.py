"""Tests of answer timeouts learned from a node's earlier answers."""

from __future__ import annotations

import pytest

from holdfast.coordination.hang_detection.pace import PATIENCE_S, WINDOW_S, AnswerTimes


def test_the_answer_timeout_has_a_minimum() -> None:
    answers = AnswerTimes()
    assert answers.patience_s("a", 100.0) == PATIENCE_S
    answers.on_answer("a", 0.004, 100.0)
    assert answers.patience_s("a", 100.0) == PATIENCE_S


def test_the_answer_timeout_is_three_times_a_nodes_slowest_answer() -> None:
    answers = AnswerTimes()
    for took_s in (0.05, 0.15, 0.02):
        answers.on_answer("a", took_s, 100.0)
    assert answers.patience_s("a", 100.0) == pytest.approx(0.45)
    assert answers.patience_s("b", 100.0) == PATIENCE_S


def test_the_answer_timeout_is_bounded_after_a_stopped_node() -> None:
    answers = AnswerTimes()
    answers.on_answer("a", 3600.0, 100.0)
    assert answers.patience_s("a", 100.0) == pytest.approx(3 * PATIENCE_S)


def test_slow_answers_are_forgotten_after_a_while() -> None:
    answers = AnswerTimes()
    answers.on_answer("a", 0.15, 100.0)
    assert answers.patience_s("a", 100.0 + 1.5 * WINDOW_S) == pytest.approx(0.45)
    assert answers.patience_s("a", 100.0 + 3.0 * WINDOW_S) == PATIENCE_S
    answers.on_answer("a", 0.15, 200.0)
    assert answers.patience_s("a", 200.0 + 5 * WINDOW_S) == PATIENCE_S


def test_answer_times_of_removed_nodes_are_forgotten() -> None:
    answers = AnswerTimes()
    answers.on_answer("a", 0.15, 100.0)
    answers.keep_nodes(frozenset({"b"}))
    assert answers.patience_s("a", 100.0) == PATIENCE_S
