"""Report the GPU, the driver and the versions of this machine, and whether the device can be used."""

from __future__ import annotations

import importlib
import importlib.metadata
import platform
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import msgspec
import torch

from benchmarks.gpu_check.options import Figures, NotPossibleError, Options, require
from holdfast.control.agent.gpus import GpuReader, load_nvml

_PACKAGES = (
    "torch",
    "triton",
    "numpy",
    "msgspec",
    "starlette",
    "uvicorn",
    "httpx",
    "websockets",
    "typer",
    "xxhash",
    "nvidia-ml-py",
)
_QUERY = "name,driver_version,memory.total,memory.used,temperature.gpu,ecc.errors.uncorrected.volatile.total"
#: Time limit of nvidia-smi in seconds; a faulty driver may make it hang.
NVIDIA_SMI_S = 20.0
_NVIDIA_SMI_CHARACTERS = 1000
#: Less free memory than this share means that another process uses the GPU.
_FREE_SHARE = 0.9
#: Reported as the version of a package that is not installed.
MISSING = "missing"


def run(options: Options, figures: Figures) -> None:
    """Record the facts of the machine, then check that the GPU can be used."""
    figures["gpu"] = "cpu" if options.device == "cpu" else "unknown"
    figures["python"] = platform.python_version()
    figures["versions"] = {name: _version(name) for name in _PACKAGES}
    figures["cuda"] = torch.version.cuda or "none"
    began = time.monotonic()
    for module in ("holdfast.cli", "holdfast.runtime.session.job"):
        importlib.import_module(module)
    figures["import_s"] = time.monotonic() - began
    figures["agent_reads"] = _read_as_agent()
    initialized = torch.cuda.is_initialized()
    if options.device == "cuda":
        figures["nvidia_smi"] = _ask_nvidia_smi(options.folder)
        _require_gpu()
        figures["gpu"] = torch.cuda.get_device_name()
        figures["gpus"] = torch.cuda.device_count()
        figures["nccl"] = _nccl_version()
    # Workers are forked from a process that has imported all this, and CUDA does not survive a fork.
    require(not initialized, "importing holdfast or reading the GPUs' state initializes CUDA")
    if options.device == "cuda":
        _check_gpu(figures)


def _require_gpu() -> None:
    """Raise `NotPossibleError` with torch's own reason unless torch can use a GPU."""
    if torch.cuda.is_available():
        return
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        raise NotPossibleError(f"torch cannot use a GPU here: {str(error).partition(chr(10))[0]}") from None
    raise NotPossibleError("torch cannot use a GPU here: it finds none")


def _check_gpu(figures: Figures) -> None:
    """Check that the GPU can be used, and that an agent can read its state."""
    free, total = torch.cuda.mem_get_info()
    figures["memory_gb"], figures["memory_free_gb"] = total / 1e9, free / 1e9
    figures["shared_with_others"] = free < _FREE_SHARE * total
    result = _sum_on_device()
    require(result == 1000.0, f"the sum of 1000 ones on the GPU is {result}")
    if figures["versions"]["nvidia-ml-py"] != MISSING:
        facts: list[dict[str, Any]] = figures["agent_reads"]
        readable = any(not gpu["problem"] for gpu in facts)
        require(readable, f"nvidia-ml-py is installed, but an agent can read no GPU: {facts}")


def _ask_nvidia_smi(folder: Path) -> str:
    """Return the output of nvidia-smi, or why it has none."""
    if not shutil.which("nvidia-smi"):
        return MISSING
    output = folder / "nvidia-smi.txt"
    try:
        # Into a file: a pipe stays open as long as a child process that nvidia-smi has left behind.
        with output.open("wb") as file:
            command = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader"]
            subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, timeout=NVIDIA_SMI_S, check=False)
    except subprocess.TimeoutExpired:
        return f"no answer within {NVIDIA_SMI_S:.0f} s"
    except OSError as error:
        return f"cannot be run: {error}"
    with output.open("rb") as file:
        return file.read(_NVIDIA_SMI_CHARACTERS).decode(errors="replace").strip()


def _sum_on_device() -> float:
    return float(torch.ones(1000, device="cuda").sum())


def _read_as_agent() -> list[dict[str, Any]]:
    """Return the facts that an agent reports of the GPUs; [] without the driver or nvidia-ml-py."""
    nvml = load_nvml()
    return [] if nvml is None else [msgspec.structs.asdict(gpu) for gpu in GpuReader(nvml).read()]


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return MISSING


def _nccl_version() -> str:
    untyped: Any = torch.cuda
    try:
        return ".".join(map(str, untyped.nccl.version()))
    except (AttributeError, ImportError, RuntimeError):
        return "none"
