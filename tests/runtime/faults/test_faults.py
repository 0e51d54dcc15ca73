from __future__ import annotations

import multiprocessing
import os
import signal
import time

import pytest
import torch

from holdfast.protocol.messages.orders import FAULT_PHASES, Inject
from holdfast.runtime.faults import orders
from holdfast.runtime.faults.orders import EXIT_CODE, Faults, InjectedError
from holdfast.runtime.session.injected_faults import flip_bit

_context = multiprocessing.get_context("fork")


def none() -> int | None:
    return None


def test_a_fault_strikes_once_at_its_step_and_phase() -> None:
    faults = Faults(none)
    faults.on_inject(Inject(fault="raise", step=5, phase="ready"))
    for step in range(1, 5):
        for phase in FAULT_PHASES:
            faults.strike_at(phase, step)
    faults.strike_at("compute", 5)
    assert faults.is_due("ready", 5)
    assert not faults.is_due("voted", 5)
    with pytest.raises(InjectedError):
        faults.strike_at("ready", 5)
    faults.strike_at("ready", 5)


def test_a_fault_of_a_past_step_strikes_at_the_next_occurrence_of_its_phase() -> None:
    faults = Faults(none)
    faults.on_inject(Inject(fault="raise", step=5, phase="forward"))
    with pytest.raises(InjectedError):
        faults.strike_at("forward", 9)


def test_a_hold_runs_only_in_the_training_thread() -> None:
    faults, held = Faults(none), []
    faults.register_actions(hold=lambda: held.append(True), drop=lambda: None, corrupt=lambda: None)
    faults.on_inject(Inject(fault="hold", step=2, phase="passed"))
    faults.strike_at("passed", 1)
    faults.strike_in_side_thread("passed", 2)
    assert held == []
    faults.strike_at("passed", 2)
    faults.strike_at("passed", 2)
    assert held == [True]


def test_a_hold_for_a_past_step_is_ignored() -> None:
    faults, held = Faults(none), []
    faults.register_actions(hold=lambda: held.append(True), drop=lambda: None, corrupt=lambda: None)
    faults.on_inject(Inject(fault="hold", step=2, phase="passed"))
    faults.strike_at("passed", 3)
    assert held == []


def test_an_immediate_exception_is_raised_in_the_training_thread() -> None:
    faults = Faults(none)
    faults.on_inject(Inject(fault="raise"))
    faults.strike_in_side_thread("transfer", 3)
    with pytest.raises(InjectedError):
        faults.strike_at("", 3)


def test_an_exception_in_a_transfer_is_raised_in_the_training_thread() -> None:
    faults = Faults(none)
    faults.on_inject(Inject(fault="raise", step=2, phase="transfer"))
    faults.strike_at("compute", 3)
    faults.strike_in_side_thread("transfer", 3)
    with pytest.raises(InjectedError):
        faults.strike_at("compute", 3)


def _strike(inject: Inject, agent: int | None) -> None:
    faults = Faults(lambda: agent)
    faults.on_inject(inject)
    faults.strike_at("voted", 1)


@pytest.mark.parametrize(("how", "code"), [("kill", -signal.SIGKILL), ("exit", EXIT_CODE)])
@pytest.mark.parametrize("phase", ["", "voted"])
def test_a_process_fault_ends_the_worker_but_not_its_agent(how: str, code: int, phase: str) -> None:
    inject = Inject(fault=how, whole_node=False, step=1 if phase else None, phase=phase)
    process = _context.Process(target=_strike, args=(inject, os.getpid()))
    process.start()
    process.join()
    assert process.exitcode == code


def test_killing_a_node_kills_its_agent_too() -> None:
    agent = _context.Process(target=signal.pause)
    agent.start()
    process = _context.Process(target=_strike, args=(Inject(fault="kill"), agent.pid))
    process.start()
    process.join()
    agent.join()
    assert (process.exitcode, agent.exitcode) == (-signal.SIGKILL, -signal.SIGKILL)


def test_a_frozen_process_is_stopped_until_sigcont() -> None:
    process = _context.Process(target=_strike, args=(Inject(fault="freeze", whole_node=False), None))
    process.start()
    assert process.pid is not None
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    os.kill(process.pid, signal.SIGCONT)
    process.join()
    assert process.exitcode == 0


@pytest.mark.parametrize("phase", ["", "compute"])
def test_a_hang_strikes_within_a_micro_batch(monkeypatch: pytest.MonkeyPatch, phase: str) -> None:
    faults, hung = Faults(none), []
    monkeypatch.setattr(orders, "hang_forever", lambda: hung.append(True))
    faults.on_inject(Inject(fault="hang", phase=phase))
    faults.strike_at("compute", 1)
    faults.strike_at("ready", 1)
    assert hung == []
    faults.strike_in_compute(2)
    faults.strike_in_compute(2)
    assert hung == [True]


def test_a_hang_with_another_phase_strikes_in_that_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    faults, hung = Faults(none), []
    monkeypatch.setattr(orders, "hang_forever", lambda: hung.append(True))
    faults.on_inject(Inject(fault="hang", phase="ready", step=2))
    faults.strike_in_compute(2)
    faults.strike_in_side_thread("ready", 2)
    assert hung == []
    faults.strike_at("ready", 2)
    assert hung == [True]


def test_connections_are_dropped_once() -> None:
    faults, broken = Faults(none), []
    faults.register_actions(hold=lambda: None, drop=lambda: broken.append(True), corrupt=lambda: None)
    faults.on_inject(Inject(fault="drop", phase="voted"))
    faults.strike_at("ready", 1)
    faults.strike_at("voted", 1)
    faults.strike_at("voted", 2)
    assert broken == [True]


def test_a_memory_fault_raises_a_memory_error() -> None:
    faults = Faults(none)
    faults.on_inject(Inject(fault="memory"))
    with pytest.raises(MemoryError):
        faults.strike_at("compute", 1)


def test_a_slow_fault_lengthens_computation_by_its_factor_until_reset() -> None:
    faults = Faults(none)
    faults.slow_down(time.monotonic() - 10.0)  # The slowdown is not due yet.
    faults.on_inject(Inject(fault="slow", times=4.0))
    faults.strike_at("compute", 1)
    for _ in range(2):
        began = time.monotonic()
        faults.slow_down(began - 0.01)
        assert time.monotonic() - began >= 0.03
    faults.on_inject(Inject(fault="slow", times=1.0))
    faults.strike_at("compute", 2)
    began = time.monotonic()
    faults.slow_down(began - 10.0)
    assert time.monotonic() - began < 10.0


def test_a_slow_link_fault_sets_the_slowdown_factor_of_the_link() -> None:
    faults = Faults(none)
    assert faults.slow_link == 1.0
    faults.on_inject(Inject(fault="slow-link", times=4.0))
    assert faults.slow_link == 1.0
    faults.strike_at("compute", 1)
    assert faults.slow_link == 4.0


def test_state_is_corrupted_once_in_the_training_thread() -> None:
    faults, flipped = Faults(none), []
    faults.register_actions(hold=lambda: None, drop=lambda: None, corrupt=lambda: flipped.append(True))
    faults.on_inject(Inject(fault="corrupt-state"))
    faults.strike_in_side_thread("transfer", 1)
    assert flipped == []
    faults.strike_at("", 1)
    faults.strike_at("", 2)
    assert flipped == [True]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_flip_bit_noticeably_changes_exactly_one_element(dtype: torch.dtype) -> None:
    tensor = torch.linspace(0.5, 2.0, 12).to(dtype).reshape(3, 4).T.requires_grad_()
    before = tensor.detach().clone()
    flip_bit(tensor)
    assert int((tensor != before).sum()) == 1
    assert 1e-3 < abs(tensor[0, 0] - before[0, 0]).item() < 1.0
