"""The GPU benchmark's code runs on a CPU, so that it still works when a GPU is available."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from places import BENCHMARKS

SCRIPT = BENCHMARKS / "dispatch_gpu.py"


@pytest.fixture
def benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("dispatch_gpu", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_benchmark_reports_a_missing_gpu(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["dispatch_gpu.py"])
    with pytest.raises(SystemExit) as ended:
        benchmark.main()
    assert ended.value.code == 2
    assert "no usable GPU" in capsys.readouterr().out


def test_the_benchmark_completes_on_a_cpu(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sizes = ["--tokens", "64", "--dim", "16", "--hidden", "16", "--experts", "4", "--repeats", "2"]
    monkeypatch.setattr(sys, "argv", ["dispatch_gpu.py", "--device", "cpu", *sizes, "--results", str(tmp_path)])
    benchmark.main()
    (written,) = tmp_path.glob("*.json")
    results = json.loads(written.read_text())
    assert {"device copy", "reorder", "combine, backward"} <= {each["name"] for each in results["kernels"]}
    assert {"ours, torch", "plain loop"} <= {each["name"] for each in results["layer"]}
