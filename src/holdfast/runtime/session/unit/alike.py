"""What is not spread over the places of a unit, and of which each has a copy of its own, must be the same in all.

Nothing would ever make it so: each place gets the state of its own role. What differs at the begin would go on to, and
a matrix product that is shared would be of several models.
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
    """Compare with the other places what this one has a whole copy of; all of them must call it.

    Args:
        groups: of the unit, one for each dimension.

    Raises:
        BadInputError: something differs.
        HaltedError, PeerLostError: another place is gone.
    """
    mine: dict[str, bytes] = {}
    for group in groups:
        mine = mine or _hash_replicated(state)
        whole = hashlib.blake2b(_encoder.encode(mine), digest_size=16).digest()
        if len(set(gather_bytes(group, whole, "what is alike"))) > 1:
            _raise_difference(
                [_decoder.decode(one) for one in gather_bytes(group, _encoder.encode(mine), "what is alike")]
            )


def _hash_replicated(state: TrainingState) -> dict[str, bytes]:
    """Return hashes of all tensors that are not spread, by name."""
    view = state.capture()
    named = enumerate(zip(stored_names(view.manifest), view.tensors, strict=True))
    alike = [(name, tensor) for number, (name, tensor) in named if number not in view.spread]
    return {name: hashlib.blake2b(host_bytes(tensor), digest_size=16).digest() for name, tensor in alike}


def _raise_difference(known: list[dict[str, bytes]]) -> None:
    names = dict.fromkeys(name for one in known for name in one)
    name = next((name for name in names if len({one.get(name) for one in known}) > 1), "")
    raise BadInputError(
        f"{name!r} is not spread over the places of a unit, and not the same in all of them: make it alike in each, as "
        "by torch.manual_seed(...) before the model is made; and let what belongs to parts of parameters be spread as "
        "they are (parameter.detach().clone(), not parameter.to_local())"
    )
