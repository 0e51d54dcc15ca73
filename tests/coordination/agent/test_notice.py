"""Tests of an agent that is told to end: it notifies every coordinator and stays no longer than its grace period."""

from __future__ import annotations

from holdfast.coordination.agent.identity import TOLD_TO_END, EndingNotice
from holdfast.coordination.agent.instructions import SendToCoordinator
from holdfast.protocol.messages.agent import EndNotice, Leave


def test_each_new_coordinator_is_sent_the_remaining_grace_period() -> None:
    notice = EndingNotice(30.0)
    assert notice.repeat(99.0) == []
    assert not notice.is_given
    assert notice.start(100.0) == [SendToCoordinator(EndNotice(grace_s=30.0))]
    assert notice.is_given
    assert notice.repeat(112.0) == [SendToCoordinator(EndNotice(grace_s=18.0))]
    assert notice.repeat(140.0) == [SendToCoordinator(EndNotice(grace_s=0.0))]


def test_the_leave_at_the_end_of_the_grace_period_has_a_reason() -> None:
    notice = EndingNotice(30.0)
    notice.start(100.0)
    (said,) = notice.leave()
    assert said == SendToCoordinator(
        Leave(reason=TOLD_TO_END, detail="told to end, it has stayed for its grace of 30 s")
    )
