"""Buffers that the forward pass changes: combined, they equal those of one process with all micro-batches in turn."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, spectral_norm
from torch.utils.checkpoint import checkpoint

from holdfast.errors import BadInputError
from holdfast.runtime.gradients.running_statistics import RunningStatistics

M = 4
#: (samples, channels, height, width); every micro-batch has another mean.
BATCHES = [3.0 * m + torch.randn(6, 5, 4, 3, generator=torch.Generator().manual_seed(m)) for m in range(2 * M)]
Forward = Callable[[nn.Module, torch.Tensor], torch.Tensor]


def instance_norm(channels: int, momentum: float | None = 0.1) -> nn.Module:
    return nn.InstanceNorm2d(channels, affine=True, track_running_stats=True, momentum=momentum)


def plain(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x)


def stepped(models: Sequence[nn.Module], forward: Forward, step: int, statistics: Sequence[RunningStatistics]) -> None:
    """Run a step with its micro-batches dealt out to several ranks' models in turn."""
    notes: list[bytes] = []
    for number in range(M):
        rank = number % len(models)
        statistics[rank].on_micro_batch_start(step, number)
        loss = forward(models[rank], BATCHES[step * M + number]).square().mean()
        statistics[rank].on_forward_done()
        loss.backward()
        notes.append(statistics[rank].make_note())
    for one in statistics:
        one.merge(notes, [b""] * len(models))
        one.apply()


def buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def combined(model: nn.Module, ranks: int, forward: Forward = plain) -> dict[str, torch.Tensor]:
    """Return the buffers after two steps of this many ranks; they are bit-identical on all ranks."""
    models = [copy.deepcopy(model) for _ in range(ranks)]
    statistics = [RunningStatistics(one) for one in models]
    for step in range(2):
        stepped(models, forward, step, statistics)
    for other in models[1:]:
        assert_same(buffers(other), buffers(models[0]))
    return buffers(models[0])


def in_turn(model: nn.Module, forward: Forward = plain) -> dict[str, torch.Tensor]:
    """Return the buffers of plain PyTorch after the same micro-batches."""
    model = copy.deepcopy(model)
    for batch in BATCHES:
        forward(model, batch)
    return buffers(model)


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], **near: Any) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, **(near or {"rtol": 0, "atol": 0}))


def twice(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x) + model(x * 2)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("forward", [plain, twice])
@pytest.mark.parametrize(
    "model",
    [
        nn.BatchNorm2d(5),
        nn.BatchNorm2d(5, momentum=0.3, dtype=torch.float64),
        nn.BatchNorm2d(5, momentum=None),
        nn.BatchNorm2d(5, momentum=0.0),
        instance_norm(5),
        instance_norm(5, momentum=None),
        nn.Sequential(
            nn.Conv2d(5, 7, 1),
            nn.BatchNorm2d(7),
            nn.ReLU(),
            instance_norm(7),
        ),
        nn.Sequential(nn.Flatten(2), nn.BatchNorm1d(5)),
        nn.Sequential(nn.Unflatten(1, (5, 1)), nn.BatchNorm3d(5)),
    ],
    ids=str,
)
def test_running_statistics_match_a_single_process(model: nn.Module, forward: Forward, ranks: int) -> None:
    if torch.float64 in {buffer.dtype for buffer in model.buffers()}:
        forward = lambda model, x, of=forward: of(model, x.double())  # noqa: E731
    found = combined(model, ranks, forward)
    assert_same(found, in_turn(model, forward), rtol=2e-6, atol=2e-6)
    assert_same(found, combined(model, 1, forward))


def test_statistics_follow_the_micro_batch_order_not_the_rank_order() -> None:
    """The last micro-batches count most, on whichever rank."""
    one = nn.BatchNorm2d(5, momentum=0.9)
    mean = combined(one, 3)["running_mean"]
    assert torch.allclose(mean, BATCHES[-1].mean((0, 2, 3)), atol=0.5)


def test_a_recomputed_forward_pass_counts_once() -> None:
    model = nn.Sequential(nn.Conv2d(5, 5, 1), nn.BatchNorm2d(5), instance_norm(5))

    def saved(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        found = checkpoint(model, x, use_reentrant=False)
        assert isinstance(found, torch.Tensor)
        return found

    assert_same(combined(model, 2, saved), combined(model, 2))
    assert_same(combined(model, 2, saved), in_turn(model), rtol=2e-6, atol=2e-6)


def test_layers_in_eval_mode_or_not_called_keep_their_statistics() -> None:
    model = nn.ModuleDict({"used": nn.BatchNorm2d(5), "frozen": nn.BatchNorm2d(5).eval(), "idle": nn.BatchNorm2d(5)})

    def forward(model: Any, x: torch.Tensor) -> torch.Tensor:
        return model["used"](x) + model["frozen"](x)

    assert_same(combined(model, 2, forward), in_turn(model, forward), rtol=2e-6, atol=2e-6)


def test_statistics_in_the_state_change_only_in_apply() -> None:
    """State that is sent or saved while a micro-batch is computed must be consistent."""
    model = nn.BatchNorm2d(5)
    statistics = RunningStatistics(model)
    first = {name: tensor.clone() for name, tensor in statistics.state.items()}
    assert first.keys() == {"running_mean", "running_var", "num_batches_tracked"}
    statistics.on_micro_batch_start(1, 0)
    model(BATCHES[0])
    assert not torch.equal(buffers(model)["running_mean"], first["running_mean"])
    statistics.on_forward_done()
    notes = [statistics.make_note()]
    statistics.merge(notes, [b""])
    assert_same(statistics.state, first)
    assert_same(buffers(model), first)
    statistics.apply()
    assert statistics.state["num_batches_tracked"] == 1
    assert_same(buffers(model), statistics.state)
    assert model.running_mean is statistics.state["running_mean"]


def test_an_abandoned_micro_batch_does_not_change_statistics() -> None:
    model = nn.BatchNorm2d(5)
    statistics = RunningStatistics(model)
    first = buffers(model)
    statistics.on_micro_batch_start(1, 0)
    model(BATCHES[0])
    statistics.on_attempt_start()
    assert_same(buffers(model), first)
    assert statistics.make_note() == b""
    statistics.merge([b""], [b""])
    statistics.apply()
    assert_same(buffers(model), first)


@pytest.mark.parametrize("make", [spectral_norm, parametrizations.spectral_norm])
def test_spectral_norm_makes_one_power_iteration_per_step(make: Callable[..., nn.Module]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), make(nn.Linear(60, 4)))
    expected = copy.deepcopy(model)
    for _ in range(2):
        expected(BATCHES[0])
    found = combined(model, 3)
    for name, tensor in buffers(expected).items():
        torch.testing.assert_close(found[name], tensor)
        assert not torch.equal(tensor, buffers(model)[name])


def test_a_model_without_running_statistics_has_empty_notes() -> None:
    statistics = RunningStatistics(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, track_running_stats=False)))
    statistics.on_micro_batch_start(1, 0)
    statistics.on_forward_done()
    assert statistics.make_note() == b""
    assert statistics.state == {}


class OwnNorm(nn.BatchNorm2d):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input[:3])


def test_layers_with_custom_statistics_are_refused_by_name() -> None:
    with pytest.raises(BadInputError, match=r"module '' is a OwnNorm with a forward pass of its own: .* BatchNorm of"):
        RunningStatistics(OwnNorm(5))
    RunningStatistics(OwnNorm(5).eval())
    RunningStatistics(OwnNorm(5, track_running_stats=False))
