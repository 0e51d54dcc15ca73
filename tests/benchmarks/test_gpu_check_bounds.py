"""Tests of the GPU check's bounds: no check passes without results or with results that are not numbers."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from benchmarks import dispatch_gpu
from benchmarks.gpu_check.checks import dispatch, nccl
from benchmarks.gpu_check.checks.jobs import largest_difference
from benchmarks.gpu_check.checks.snapshots import saved_figures
from benchmarks.gpu_check.options import CheckFailedError, NotPossibleError, Options
from holdfast.protocol.events import CheckpointSaved
from holdfast.runtime.moe.kernels.torch_kernels import TorchKernels


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_losses_that_are_not_finite_fail(wrong: float) -> None:
    good, bad = {1: 1.0, 2: 2.0}, {1: 1.0, 2: wrong}
    assert largest_difference(good, good) == 0.0
    for losses, wanted in ((bad, good), (good, bad), (bad, bad)):
        with pytest.raises(CheckFailedError, match="the loss of step 2"):
            largest_difference(losses, wanted)


def test_losses_of_different_steps_fail() -> None:
    for losses, wanted in (({}, {}), ({1: 1.0}, {1: 1.0, 2: 1.0})):
        with pytest.raises(CheckFailedError, match="cannot be compared"):
            largest_difference(losses, wanted)


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_kernel_results_that_are_not_finite_fail(wrong: float) -> None:
    good, bad = torch.tensor([1.0, 2.0]), torch.tensor([1.0, wrong])
    assert dispatch.difference("sum", good, good) == 0.0
    for result, wanted in ((bad, good), (good, bad), (bad, bad)):
        with pytest.raises(CheckFailedError, match=r"sum: .* not finite"):
            dispatch.difference("sum", result, wanted)


def test_kernels_are_not_checked_without_others_to_compare_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch_gpu, "available_kernels", lambda device: [TorchKernels()])
    with pytest.raises(NotPossibleError, match="Triton is not installed"):
        dispatch.run(Options(device="cpu", quick=True, folder=tmp_path), {})


def test_a_checkpoint_smaller_than_the_state_fails() -> None:
    event = CheckpointSaved(job="job", time=0.0, term=1, generation=1, step=10, save_s=1.0, saved_bytes=1000)
    assert saved_figures(event, 1000)["gb_per_s"] == 1e-6
    with pytest.raises(CheckFailedError, match="1000 of 1001 bytes"):
        saved_figures(event, 1001)


def test_the_nccl_check_is_not_run_without_nccl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    with pytest.raises(NotPossibleError, match="no NCCL"):
        nccl.run(Options(device="cuda", quick=True, folder=tmp_path), {})
