"""Tests of the machine check: it describes each driver fault, and a faulty tool does not prevent a result."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu_check.checks import machine
from benchmarks.gpu_check.options import CheckFailedError, Figures, NotPossibleError, Options

GB = 10**9


class FakeGpu:
    """The functions of torch.cuda that the check uses, as on a machine with one GPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch
        self.set(
            is_available=lambda: True,
            is_initialized=lambda: False,
            get_device_name=lambda: "NVIDIA H100 80GB HBM3",
            device_count=lambda: 1,
            mem_get_info=lambda: (79 * GB, 80 * GB),
        )
        monkeypatch.setattr(machine, "_sum_on_device", lambda: 1000.0)
        monkeypatch.setattr(machine, "_read_as_agent", lambda: [{"problem": ""}])

    def set(self, **functions: Callable[[], Any]) -> None:
        for name, function in functions.items():
            self._patch.setattr(torch.cuda, name, function)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    return FakeGpu(monkeypatch)


def run(folder: Path, figures: Figures) -> Figures:
    machine.run(Options(device="cuda", quick=True, folder=folder), figures)
    return figures


def raising(error: Exception) -> Callable[[], Any]:
    def function() -> Any:
        raise error

    return function


def test_the_facts_of_a_gpu_are_reported(gpu: FakeGpu, tmp_path: Path) -> None:
    figures = run(tmp_path, {})
    assert figures["gpu"] == "NVIDIA H100 80GB HBM3"
    assert (figures["memory_gb"], figures["memory_free_gb"], figures["shared_with_others"]) == (80.0, 79.0, False)


def test_memory_used_by_another_process_is_reported(gpu: FakeGpu, tmp_path: Path) -> None:
    gpu.set(mem_get_info=lambda: (GB, 80 * GB))
    assert run(tmp_path, {})["shared_with_others"] is True


def test_a_gpu_without_free_memory_is_reported_by_name(gpu: FakeGpu, tmp_path: Path) -> None:
    gpu.set(mem_get_info=raising(RuntimeError("CUDA error: out of memory")))
    figures: Figures = {}
    with pytest.raises(RuntimeError, match="out of memory"):
        run(tmp_path, figures)
    assert figures["gpu"] == "NVIDIA H100 80GB HBM3"


@pytest.mark.parametrize("message", ["The NVIDIA driver on your system is too old (found version 11040).\nUpdate", ""])
@pytest.mark.parametrize("kind", [RuntimeError, AssertionError])
def test_a_driver_that_torch_cannot_use_is_reported(
    message: str, kind: type[Exception], gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu.set(is_available=lambda: False, init=raising(kind(message)))
    with pytest.raises(NotPossibleError, match="torch cannot use a GPU here") as error:
        run(tmp_path, {})
    assert message.partition("\n")[0] in str(error.value)


@pytest.mark.parametrize("error", [AttributeError("version"), RuntimeError("no NCCL"), ImportError("libnccl.so.2")])
def test_a_torch_build_without_nccl_is_reported(
    error: Exception, gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda.nccl, "version", raising(error))
    assert run(tmp_path, {})["nccl"] == "none"


@pytest.mark.parametrize(
    ("script", "wanted"),
    [
        ("#!/bin/sh\necho 'NVIDIA H100, 570.1, 81559 MiB'", "NVIDIA H100, 570.1, 81559 MiB"),
        ("#!/bin/sh\necho 'NVIDIA-SMI has failed' >&2; exit 9", "NVIDIA-SMI has failed"),
        ("#!/bin/sh\nsleep 60", "no answer within 1 s"),
        ("#!/bin/sh\nhead -c 30000000 /dev/urandom", None),
        ("#!/does/not/exist", "cannot be run: "),
        ("rubbish", None),
    ],
)
def test_a_faulty_nvidia_smi_does_not_stop_the_check(
    script: str, wanted: str | None, gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = tmp_path / "nvidia-smi"
    command.write_text(script)
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(machine, "NVIDIA_SMI_S", 1.0)
    began = time.monotonic()
    figures = run(tmp_path, {})
    assert time.monotonic() - began < 30.0
    assert len(figures["nvidia_smi"]) <= 1000
    if wanted is not None:
        assert figures["nvidia_smi"].startswith(wanted)


def test_a_missing_nvidia_smi_is_reported(gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert run(tmp_path, {})["nvidia_smi"] == "missing"


def test_a_wrong_sum_on_the_gpu_fails_the_check(gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_sum_on_device", lambda: 999.0)
    with pytest.raises(CheckFailedError, match="999"):
        run(tmp_path, {})


def test_imports_that_initialize_cuda_fail_the_check_after_the_facts(gpu: FakeGpu, tmp_path: Path) -> None:
    gpu.set(is_initialized=lambda: True)
    figures: Figures = {}
    with pytest.raises(CheckFailedError, match="initializes CUDA"):
        run(tmp_path, figures)
    assert figures["gpu"] == "NVIDIA H100 80GB HBM3"


@pytest.mark.parametrize("facts", [[], [{"problem": "GPU is lost"}]])
def test_the_check_fails_if_the_agent_reads_no_gpu_facts(
    facts: list[dict[str, Any]], gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "_version", lambda package: "1")
    monkeypatch.setattr(machine, "_read_as_agent", lambda: facts)
    with pytest.raises(CheckFailedError, match="nvidia-ml-py"):
        run(tmp_path, {})


def test_the_check_passes_without_the_package_that_reads_gpu_facts(
    gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "_version", lambda package: machine.MISSING)
    monkeypatch.setattr(machine, "_read_as_agent", list)
    assert run(tmp_path, {})["agent_reads"] == []
