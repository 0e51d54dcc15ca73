"""The names that messages carry, with their limits, and what all messages have in common.

Everything that crosses a socket is one struct of this package, encoded with MessagePack. Each carries or travels inside
(job, term, generation): what is stale is refused by the machines, what is malformed never gets past the decoder.
Steps count from 1; `applied == 0` is the initial state. Times are unix seconds, sizes bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec
from msgspec import Meta

PROTOCOL = 13
#: What msgspec raises for bytes that it cannot decode. Bad UTF-8 and deep nesting are not its own DecodeError.
MALFORMED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
#: of what is sent at a time, and of a message from a worker or an agent
MAX_MESSAGE_BYTES = 1 << 20
#: of what a coordinator sends at a time; a larger message comes in parts
MAX_PART_BYTES = 1 << 16
#: of all parts of one: a plan of some hundred thousand workers
MAX_WHOLE_BYTES = 64 << 20

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
Name = Annotated[str, Meta(pattern=NAME_PATTERN)]
RACK_PATTERN = r"^[A-Za-z0-9._-]{0,64}$"
WorkerId = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}/[0-9]{1,4}/[0-9a-f]{1,32}$")]
Text = Annotated[str, Meta(max_length=8192)]
#: A host name or an IP address, or "". Looking up any other text may fail with an error that is not an OSError.
ADDRESS_PATTERN = r"^(?=.{0,253}$)([A-Za-z0-9_:%-]{1,63}\.)*[A-Za-z0-9_:%-]{0,63}$"
Address = Annotated[str, Meta(pattern=ADDRESS_PATTERN)]
Rack = Annotated[str, Meta(pattern=RACK_PATTERN)]
#: how often a node fails, the usual one being 1: the least and the greatest that may be said
FAILURE_RATES = (1e-3, 1e3)
FailureRate = Annotated[float, Meta(ge=FAILURE_RATES[0], le=FAILURE_RATES[1])]
Count = Annotated[int, Meta(ge=0)]
#: how long something has taken; no infinity, and not no number
Seconds = Annotated[float, Meta(ge=0.0, le=1e12)]
#: in bytes per second, likewise
Rate = Annotated[float, Meta(ge=0.0, le=1e15)]
Blob = Annotated[bytes, Meta(max_length=65536)]
#: of a rendezvous key: the addresses at which one rank can be reached by each of the others
MAX_KEY_BYTES = 1 << 19
KeyValue = Annotated[bytes, Meta(max_length=MAX_KEY_BYTES)]
KeyName = Annotated[str, Meta(max_length=1024)]
#: of what one worker posts for a generation, and of a bundle of what several have posted (`posted_bytes`)
MAX_POSTED_BYTES = MAX_KEY_BYTES + (1 << 16)
#: of a key, or of what a worker has posted, beside its text and its value
_AROUND_BYTES = 64


def worker_id(node: str, index: int, nonce: str) -> str:
    """Return the id of one worker process: node, index on the node, and a nonce that no other process ever has."""
    return f"{node}/{index}/{nonce}"


def node_of(worker: str) -> str:
    """Return the node that a worker id names."""
    return worker.split("/", 1)[0]


def seat_of(worker: str) -> str:
    """Return the place that a worker fills: its node and its index there, whichever process that is."""
    return worker.rpartition("/")[0]


def index_of(worker: str) -> int:
    """Return the index on its node that a worker id names."""
    return int(worker.split("/")[1])


def key_of(rank: int, name: str) -> str:
    """Return the rendezvous key that a rank posts under a name: no other rank may."""
    return f"{rank}:{name}"


def is_key_of(rank: int, key: str) -> bool:
    """Tell whether a rendezvous key is a rank's own."""
    return key.startswith(f"{rank}:")


def posted_bytes(keys: Mapping[str, bytes]) -> int:
    """Return how much of a message these rendezvous keys of a worker take at the most."""
    each = (len(key.encode()) + len(value) + _AROUND_BYTES for key, value in keys.items())
    return sum(each) + 4 * _AROUND_BYTES  # (the worker's id)


class Struct(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all messages: immutable. Each class gives its tag, which is part of the wire and file formats.

    A class can be renamed; its tag must stay.
    """
