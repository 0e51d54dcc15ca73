"""Checks that state without shards is equal on all ranks of a replica group.

Nothing would ever make it equal: each rank receives the state of its own role. Any difference at the start would
persist, and a matrix product that is distributed over ranks would mix several models.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import msgspec

from holdfast.errors import BadInputError
from holdfast.runtime.checkpoints.parts import stored_names
from holdfast.runtime.groups.communicator import Communicator
from holdfast.runtime.groups.gathering import gather_bytes
from holdfast.runtime.state.memory import host_bytes
from holdfast.runtime.state.state import TrainingState

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(dict[str, bytes])


def check_replicated(state: TrainingState, groups: Iterable[Communicator]) -> None:
    """Compare this rank's tensors without shards with the other ranks of its replica group, by hashes.

    All of its ranks must call it. With no groups, nothing is hashed or compared.

    Args:
        groups: the groups of the replica group, one for each dimension.

    Raises:
        BadInputError: a tensor differs; the message names one. All ranks of that group raise it.
        HaltedError, PeerLostError: another rank is lost.
    """
    hashes: dict[str, bytes] = {}
    for group in groups:
        hashes = hashes or _hash_replicated(state)
        digest = hashlib.blake2b(_encoder.encode(hashes), digest_size=16).digest()
        if len(set(gather_bytes(group, digest, "comparison of state"))) > 1:
            _raise_difference(
                [_decoder.decode(one) for one in gather_bytes(group, _encoder.encode(hashes), "comparison of state")]
            )


def _hash_replicated(state: TrainingState) -> dict[str, bytes]:
    """Return hashes of all tensors without shards, by name."""
    view = state.capture()
    named = enumerate(zip(stored_names(view.manifest), view.tensors, strict=True))
    alike = [(name, tensor) for number, (name, tensor) in named if number not in view.spread]
    return {name: hashlib.blake2b(host_bytes(tensor), digest_size=16).digest() for name, tensor in alike}


def _raise_difference(all_hashes: list[dict[str, bytes]]) -> None:
    """Raise an error that names the first tensor with different hashes.

    Args:
        all_hashes: per rank, the hashes of its tensors by name.

    Raises:
        BadInputError: always.
    """
    names = dict.fromkeys(name for one in all_hashes for name in one)
    name = next((name for name in names if len({one.get(name) for one in all_hashes}) > 1), "")
    raise BadInputError(
        f"{name!r} is not sharded, and differs between the ranks of a replica group: make it equal on all of them, for "
        "example by torch.manual_seed(...) before the model is made; shard tensors that belong to parts of a parameter "
        "like the parameter (parameter.detach().clone(), not parameter.to_local())"
    )
