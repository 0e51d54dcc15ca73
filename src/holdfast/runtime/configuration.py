"""Describes the software, the model and the settings that all workers of a job must have in common."""

from __future__ import annotations

import hashlib
import platform
from importlib.metadata import PackageNotFoundError, version

import msgspec
import numpy
import torch

from holdfast.protocol.messages.worker import CHECKPOINT_EVERY
from holdfast.runtime.gradients.workload import Workload

#: at most this many characters of a model's list of tensors are kept; a hash covers the rest
_LISTED_CHARACTERS = 8000


def describe_configuration(workload: Workload, device: torch.device, *, checkpoint_every: int | str) -> dict[str, str]:
    """Return all that workers of a job must have in common, as text by name: versions of software, device type, sample
    settings, order of updates, the model's tensors with a hash, and the experts. Long texts are cut off.

    All ranks of a replica group return the same, even if the model is sharded.

    Args:
        checkpoint_every: steps between checkpoints, or `auto`.
    """
    software = {"torch": torch.__version__, "numpy": numpy.__version__, "scipy": _scipy_version()}
    state, order = workload.state.capture().manifest.global_manifest, workload.loader.order
    everything = hashlib.blake2b(msgspec.msgpack.encode(state), digest_size=16).hexdigest()
    tensors = ", ".join(
        f"{t.name} {t.dtype} {'x'.join(map(str, t.shape)) or 'scalar'}{t.placed and f' ({t.placed})'}"
        for t in state.tensors
    )
    config: dict[str, object] = {
        "Python": platform.python_version(),
        **software,
        "device": device.type,
        "samples": order.length,
        "global batch": order.global_batch,
        "micro-batch": order.micro_batch,
        "seed": order.seed,
        # All workers save after the same steps.
        CHECKPOINT_EVERY: checkpoint_every,
        **workload.updates.describe(),
        "tensors": tensors[:_LISTED_CHARACTERS],
        "state": everything,  # covers the part of the list that is cut off, and the optimizer's settings
    }
    if (experts := workload.experts) is not None:
        config |= {"experts": experts.experts, "expert tensors": experts.describe_layers()}
        config["hash of the first experts (call torch.manual_seed before the model is made)"] = experts.fingerprint()
    return {name: str(value)[:_LISTED_CHARACTERS] for name, value in config.items()}


def _scipy_version() -> str:
    """Return scipy's version, or "not installed". Few features need it: a job without them runs where it is missing."""
    try:
        return version("scipy")
    except PackageNotFoundError:
        return "not installed"
