"""Memory of obsolete state, and no other memory, is reused for the next received state."""

from __future__ import annotations

import torch

from holdfast.runtime.state.memory import ReusableMemory
from holdfast.runtime.state.state import TrainingState

CPU = torch.device("cpu")


def test_reusable_memory_is_given_out_once_for_matching_tensors() -> None:
    first, second = torch.zeros(3, 2), torch.zeros(3, 2)
    used = ReusableMemory([first, second])
    assert used.pop_tensor((2, 3), torch.float32, CPU) is None
    assert used.pop_tensor((3, 2), torch.float64, CPU) is None
    found = {one.data_ptr() for _ in range(2) if (one := used.pop_tensor((3, 2), torch.float32, CPU)) is not None}
    assert found == {first.data_ptr(), second.data_ptr()}
    assert used.pop_tensor((3, 2), torch.float32, CPU) is None


def test_shared_memory_is_not_reused() -> None:
    weight, whole, twice = torch.zeros(4), torch.zeros(8), torch.zeros(4)
    used = ReusableMemory([weight.detach(), whole[:4], twice, twice.view(4)], without=[weight])
    assert used.pop_tensor((4,), torch.float32, CPU) is None


def made(steps: int) -> tuple[torch.nn.Linear, torch.optim.Optimizer]:
    torch.manual_seed(steps)
    model = torch.nn.Linear(5, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        model(torch.ones(2, 5)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def moments(optimizer: torch.optim.Optimizer) -> set[int]:
    return {kept[name].data_ptr() for kept in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")}


def test_a_received_state_reuses_the_old_memory_unless_kept_separate() -> None:
    sender, (model, optimizer) = TrainingState(*made(3)), made(1)
    receiver, before = TrainingState(model, optimizer), moments(optimizer)
    view = sender.capture()
    aside = receiver.prepare(view.manifest, separate=True)
    assert not before & {tensor.data_ptr() for tensor in aside}
    into = receiver.prepare(view.manifest)
    assert before <= {tensor.data_ptr() for tensor in into}
    for target, source in zip(into, view.tensors, strict=True):
        target.copy_(source)
    receiver.adopt(view.manifest, into)
    again = receiver.capture()
    assert again.manifest == view.manifest
    assert all(map(torch.equal, again.tensors, view.tensors))
    assert moments(optimizer) == before


def test_memory_released_by_an_optimizer_is_reused_once() -> None:
    sender, (model, optimizer) = TrainingState(*made(3)), made(1)
    receiver, before = TrainingState(model, optimizer), moments(optimizer)
    receiver.recycle_memory(tensor for kept in optimizer.state.values() for tensor in kept.values())
    optimizer.state.clear()
    view = sender.capture()
    first = receiver.prepare(view.manifest)  # Keep the reference, or the allocator may reuse its memory.
    assert before <= {tensor.data_ptr() for tensor in first}
    assert not before & {tensor.data_ptr() for tensor in receiver.prepare(view.manifest)}
