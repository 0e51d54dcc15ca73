"""Writes a checkpoint as one file for `torch.load(FILE, weights_only=True)`: a program used by the commands.

The file's state is a dict: `step`, `model` (as for `model.load_state_dict`, except for experts), `experts`, `optimizer`
(as its state_dict), `extra`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import Any, cast

import torch

from holdfast.errors import BadInputError, HoldfastError
from holdfast.protocol.checkpoints.directory import DamagedCheckpointError
from holdfast.protocol.checkpoints.joining import EXPERTS, is_of_model, read_whole_tensors
from holdfast.protocol.checkpoints.names import parse_name
from holdfast.protocol.checkpoints.tensor_files import CODES
from holdfast.protocol.names import MALFORMED
from holdfast.runtime.checkpoints.global_terms import decode_manifest
from holdfast.runtime.checkpoints.parts import stored_names
from holdfast.runtime.checkpoints.saver import STATE, read_side_file
from holdfast.runtime.checkpoints.stored_tensors import load_tensors
from holdfast.runtime.state import tree
from holdfast.storage import Storage, error_text, storage_at

_DTYPES = {code: name for name, code in CODES.items()}


def read_state(storage: Storage, checkpoint: str, *, model_only: bool) -> dict[str, Any]:
    """Return the state of a checkpoint as a dict of only tensors, numbers, texts, and collections of them: `step`,
    `model`, `experts`, `optimizer` and `extra`; with `model_only` without the last two and without the optimizer's
    tensors in `experts`.

    Raises:
        DamagedCheckpointError: it cannot be read.
    """
    try:
        manifest = decode_manifest(read_side_file(storage, checkpoint, STATE))
    except MALFORMED as error:
        raise DamagedCheckpointError(f"{checkpoint}/{STATE} cannot be read: {error}") from None
    names = stored_names(manifest)
    specs = dict(zip(names, manifest.tensors, strict=True))
    wanted = {name: spec for name, spec in specs.items() if is_of_model(name) or not model_only}
    tensors = {name: torch.empty(spec.shape, dtype=tree.dtype_of(spec.dtype)) for name, spec in wanted.items()}
    for whole in read_whole_tensors(storage, checkpoint):
        name, box = whole.piece.name, whole.piece.box
        if name.startswith(EXPERTS) and (is_of_model(name) or not model_only):
            tensors[name] = torch.empty(box.shape, dtype=tree.dtype_of(_DTYPES[whole.piece.code]))
    load_tensors(storage, checkpoint, tensors)
    ordered = [tensors.get(name, torch.empty(0)) for name in names]
    models = manifest.parameters + manifest.buffers
    state: dict[str, Any] = {
        "step": parse_name(checkpoint).step,
        "model": {spec.name: tensor for spec, tensor in zip(manifest.tensors[:models], ordered, strict=False)},
        "experts": {name: tensor for name, tensor in tensors.items() if name.startswith(EXPERTS)},
    }
    if not model_only:
        state["optimizer"] = _to_plain(tree.unpack(manifest.optimizer, ordered))
        state["extra"] = {name: _to_plain(tree.unpack(node, ordered)) for name, node in manifest.extra.items()}
    return state


def _to_plain(value: Any) -> Any:
    """Return a value with dicts, tuples and lists instead of other collections, also inside it; torch reads these
    without executing anything. Sets become sorted lists. Tensors, strings, bytes and values that cannot be iterated
    stay unchanged.
    """
    if isinstance(value, dict):
        return {key: _to_plain(item) for key, item in cast(dict[Any, Any], value).items()}
    if isinstance(value, tuple):
        return tuple(_to_plain(item) for item in cast(tuple[Any, ...], value))
    if isinstance(value, (str, bytes)) or not hasattr(value, "__iter__") or isinstance(value, torch.Tensor):
        return value
    items = list(cast(Iterable[Any], value))
    return [_to_plain(item) for item in (sorted(items, key=repr) if isinstance(value, (set, frozenset)) else items)]


def main(place: str, checkpoint: str, output: str, what: str) -> None:
    """Write the state of a checkpoint into one file by `torch.save`; an existing file is replaced only once the new one
    is complete.

    Args:
        place: the checkpoint directory.
        output: the file.
        what: "model" for the model alone.

    Raises:
        HoldfastError: the checkpoint cannot be read, or the file cannot be written.
    """
    state = read_state(storage_at(place), checkpoint, model_only=what == "model")
    partial = f"{output}.{os.getpid()}"
    try:
        with open(partial, "wb") as file:
            torch.save(state, file)
        os.replace(partial, output)
    except (OSError, RuntimeError) as error:
        # torch closes its archive even after an error, and then replaces the error of a full disk by its own one.
        disk = error if isinstance(error, OSError) else error.__context__
        if not isinstance(disk, OSError):
            raise
        raise BadInputError(f"--output {output} cannot be written: {error_text(disk)}") from None
    finally:
        if os.path.exists(partial):
            os.unlink(partial)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except HoldfastError as failure:
        print(f"holdfast: {failure}", file=sys.stderr)
        sys.exit(failure.exit_code)
