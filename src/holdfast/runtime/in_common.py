"""What all workers of a job must have in common: software, model, settings, as people would say them."""

from __future__ import annotations

import hashlib
import platform
from importlib.metadata import PackageNotFoundError, version

import msgspec
import numpy
import torch

from holdfast.protocol.messages.worker import CHECKPOINT_EVERY
from holdfast.runtime.gradients.workload import Workload

#: of a model's list of tensors; a hash of all that it says goes beside it
_LISTED_CHARACTERS = 8000


def describe_configuration(workload: Workload, device: torch.device, *, checkpoint_every: int | str) -> dict[str, str]:
    """Return it by name; of a model that is spread over a unit's places it says the same in all of them."""
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
        "state": everything,  # what the list has no room for, and the optimizer's settings
    }
    if (experts := workload.experts) is not None:
        config |= {"experts": experts.experts, "expert tensors": experts.describe_layers()}
        config["hash of the first experts (call torch.manual_seed before the model is made)"] = experts.fingerprint()
    return {name: str(value)[:_LISTED_CHARACTERS] for name, value in config.items()}


def _scipy_version() -> str:
    """Return scipy's version. Only a few features need it, so a job without them runs where it is missing."""
    try:
        return version("scipy")
    except PackageNotFoundError:
        return "not installed"
