"""Typed access to parts of torch without type annotations.

Axes: N rows, K columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.utils.data
from numpy.typing import NDArray


def to_ints(tensor: torch.Tensor) -> list[int]:
    """Return the elements of an integer vector, `(N,)`. Waits for the device."""
    untyped: Any = tensor
    return untyped.tolist()


def to_floats(tensor: torch.Tensor) -> list[float]:
    """Return the elements of a vector, `(N,)`, as Python floats. Waits for the device."""
    untyped: Any = tensor
    return untyped.tolist()


def to_int_rows(tensor: torch.Tensor) -> list[list[int]]:
    """Return the rows of an integer tensor, `(N, K)`, as lists of Python ints."""
    untyped: Any = tensor
    return untyped.tolist()


def to_float_rows(tensor: torch.Tensor) -> list[list[float]]:
    """Return the rows of a matrix, `(N, K)`, as lists of Python floats."""
    untyped: Any = tensor
    return untyped.tolist()


def split_tensor(tensor: torch.Tensor, sizes: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """Return views of consecutive parts of the first axis. The sizes must add up to its length."""
    untyped: Any = tensor
    return untyped.split(list(sizes))


def from_array(array: NDArray[Any]) -> torch.Tensor:
    """Return a tensor on the host that shares the array's memory and has its dtype."""
    untyped: Any = torch
    return untyped.from_numpy(array)


def from_buffer(buffer: object) -> torch.Tensor:
    """Return a tensor of bytes, `(N,)`, that shares the memory of a non-empty buffer."""
    untyped: Any = torch
    return untyped.frombuffer(buffer, dtype=torch.uint8)


def apply_function(function: type[torch.autograd.Function], *arguments: object) -> torch.Tensor:
    """Return the result of a differentiable function with one result."""
    untyped: Any = function
    return untyped.apply(*arguments)


def copy_each(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each source into its target, in as few launches as torch can."""
    untyped: Any = torch
    untyped._foreach_copy_(targets, sources)


def compute_row_norms(matrix: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the Euclidean norm of each row of `(N, K)`, summed in a dtype, `(N,)`."""
    untyped: Any = torch.linalg
    return untyped.vector_norm(matrix, dim=1, dtype=dtype)


def collate(samples: list[Any]) -> Any:
    """Make a batch of samples as torch's loader does."""
    untyped: Any = torch.utils.data
    return untyped.default_collate(samples)


def is_unbatched_collate(collate: object) -> bool:
    """Return whether a collate function is that of a loader without batches: it converts single samples to tensors."""
    untyped: Any = torch.utils.data
    return collate is untyped.default_convert


def named_modules(model: torch.nn.Module) -> tuple[tuple[str, torch.nn.Module], ...]:
    """Return all modules of a model with their names, including itself, each once."""
    untyped: Any = model
    return tuple(untyped.named_modules())


def strip_wrapper_prefixes(name: str) -> str:
    """Return a tensor's name without the prefixes of compiled modules and of activation checkpointing."""
    return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")


def has_extra_state(module: torch.nn.Module) -> bool:
    """Return whether a module's class saves more than parameters and buffers."""
    own: Any = type(module)
    plain: Any = torch.nn.Module
    return own.get_extra_state is not plain.get_extra_state


def seed_all(seed: int) -> None:
    """Seed torch's global generators of all devices."""
    untyped: Any = torch
    untyped.manual_seed(seed)


def fork_rng() -> AbstractContextManager[None]:
    """Return a context that restores the states of torch's global generators at its end."""
    untyped: Any = torch.random
    return untyped.fork_rng()


def call_with_parameters(module: torch.nn.Module, parameters: dict[str, torch.Tensor], *arguments: object) -> object:
    """Return a module's result with other parameters, given by name, instead of its own."""
    untyped: Any = torch.func
    return untyped.functional_call(module, parameters, arguments)


def is_readable(device: torch.device) -> bool:
    """Return whether a device's memory can be read: waits for a GPU's kernels. After some CUDA errors it cannot."""
    if device.type != "cuda":
        return True
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return False
    return True
