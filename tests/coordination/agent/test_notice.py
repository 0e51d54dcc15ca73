"""Tests of an agent that is told to end: it notifies every coordinator and stays no longer than its grace period."""

from __future__ import annotations

from holdfast.coordination.agent.identity import TOLD, Notice
from holdfast.coordination.agent.instructions import Say
from holdfast.protocol.messages.agent import EndNotice, Leave


def test_every_coordinator_that_comes_is_told_what_is_left_of_the_grace() -> None:
    notice = Notice(30.0)
    assert notice.again(99.0) == []
    assert not notice.given
    assert notice.give(100.0) == [Say(EndNotice(grace_s=30.0))]
    assert notice.given
    assert notice.again(112.0) == [Say(EndNotice(grace_s=18.0))]
    assert notice.again(140.0) == [Say(EndNotice(grace_s=0.0))]


def test_at_its_end_it_says_why_it_goes() -> None:
    notice = Notice(30.0)
    notice.give(100.0)
    (said,) = notice.over()
    assert said == Say(Leave(reason=TOLD, detail="told to end, it has stayed for its grace of 30 s"))
