"""Computes a pool's plans for possible next events in a separate process, so that the server stays responsive."""

from __future__ import annotations

import logging
from collections.abc import Callable

from holdfast.control.separate_process import BackgroundSolver, answer_in_this_process
from holdfast.coordination.pool.inputs import NextPlansSolved
from holdfast.coordination.pool.share.interface import Division
from holdfast.coordination.pool.share.next_plans import WITHIN_S, NextPlansQuestion


def make_foreseer(answer: Callable[[NextPlansSolved], None]) -> BackgroundSolver[NextPlansQuestion, list[Division]]:
    """Return a runner that answers one question at a time.

    Args:
        answer: called with the result of a question, unless another one was asked meanwhile.
    """
    return BackgroundSolver(
        __name__,
        list[Division],
        lambda question, found: answer(NextPlansSolved(question.number, found or ())),
        what="the look-up table of plans",
        within_s=lambda _: WITHIN_S,
        log=logging.getLogger("holdfast.pool"),
    )


def main() -> None:
    """Plan for the pool's possible next failures in a process of its own: read the question from stdin, write the
    answer.
    """
    answer_in_this_process(NextPlansQuestion, NextPlansQuestion.solve)
