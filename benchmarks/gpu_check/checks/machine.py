"""Which GPU, driver and versions are here, and whether the device can be used."""

from __future__ import annotations

import importlib
import importlib.metadata
import platform
import shutil
import subprocess
import time
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
#: Less free memory than this share means that another process uses the GPU.
_FREE_SHARE = 0.9


def run(options: Options, figures: Figures) -> None:
    """Fill in the facts of the machine."""
    figures["gpu"] = "cpu" if options.device == "cpu" else "unknown"
    figures["usable"] = False
    figures["python"] = platform.python_version()
    figures["versions"] = {name: _version(name) for name in _PACKAGES}
    figures["cuda"] = torch.version.cuda or "none"
    began = time.monotonic()
    for module in ("holdfast.cli", "holdfast.runtime.session.job"):
        importlib.import_module(module)
    figures["import_s"] = time.monotonic() - began
    # Workers are forked from a process that has imported all this, and CUDA does not survive a fork.
    require(not torch.cuda.is_initialized(), "importing holdfast initializes CUDA")
    figures["agent_reads"] = _facts_of_agent()
    require(not torch.cuda.is_initialized(), "reading the GPUs' facts initializes CUDA")
    if options.device == "cpu":
        figures["usable"] = True
        return
    if shutil.which("nvidia-smi"):
        command = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
        figures["nvidia_smi"] = (done.stdout + done.stderr).strip()
    if not torch.cuda.is_available():
        try:
            torch.cuda.init()
        except (RuntimeError, AssertionError) as error:
            raise NotPossibleError(f"torch cannot use a GPU here: {str(error).splitlines()[0]}") from None
        raise NotPossibleError("torch finds no GPU")
    figures["gpu"] = torch.cuda.get_device_name()
    figures["gpus"] = torch.cuda.device_count()
    figures["nccl"] = _nccl_version()
    free, total = torch.cuda.mem_get_info()
    figures["memory_gb"], figures["memory_free_gb"] = total / 1e9, free / 1e9
    figures["shared_with_others"] = free < _FREE_SHARE * total
    figures["sum_on_device"] = float(torch.ones(1000, device="cuda").sum())
    figures["usable"] = True


def _facts_of_agent() -> list[dict[str, Any]]:
    """Return what an agent reports of the GPUs; [] without the driver or nvidia-ml-py."""
    nvml = load_nvml()
    return [] if nvml is None else [msgspec.structs.asdict(gpu) for gpu in GpuReader(nvml).read()]


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def _nccl_version() -> str:
    untyped: Any = torch.cuda
    try:
        return ".".join(map(str, untyped.nccl.version()))
    except (AttributeError, RuntimeError):
        return "none"
