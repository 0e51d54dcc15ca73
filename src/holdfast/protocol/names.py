"""Types of message fields with their limits, and the base class of all messages.

Each message is a struct of this package, encoded with MessagePack. It carries the job, the term and the generation, or
belongs to a connection that does. The state machines refuse stale messages, the decoder refuses malformed ones.
Steps count from 1; `applied == 0` is the initial state. Times are unix seconds, sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec
from msgspec import Meta

PROTOCOL = 13
#: Exceptions of msgspec for bytes that it cannot decode. Bad UTF-8 and deep nesting do not raise its DecodeError.
MALFORMED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
#: most bytes of a frame, and of a message from a worker or an agent
MAX_MESSAGE_BYTES = 1 << 20
#: most bytes of a frame from a coordinator; a larger message is sent in parts
MAX_PART_BYTES = 1 << 16
#: most bytes of all parts of a message: a plan with several hundred thousand workers
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
#: least and greatest failure rate of a node, relative to a usual one
FAILURE_RATES = (1e-3, 1e3)
FailureRate = Annotated[float, Meta(ge=FAILURE_RATES[0], le=FAILURE_RATES[1])]
Count = Annotated[int, Meta(ge=0)]
#: a duration; finite
Seconds = Annotated[float, Meta(ge=0.0, le=1e12)]
#: bytes per second; finite
Rate = Annotated[float, Meta(ge=0.0, le=1e15)]
Blob = Annotated[bytes, Meta(max_length=65536)]
#: most bytes of a rendezvous value: the addresses of one rank for all other ranks
MAX_KEY_BYTES = 1 << 19
KeyValue = Annotated[bytes, Meta(max_length=MAX_KEY_BYTES)]
KeyName = Annotated[str, Meta(max_length=1024)]
#: most bytes of the posts of one worker for a generation, and of a bundle of posts (`posted_bytes`)
MAX_POSTED_BYTES = MAX_KEY_BYTES + (1 << 16)
#: bytes of a key, or of a post, besides its text and value
_AROUND_BYTES = 64


def worker_id(node: str, index: int, nonce: str) -> str:
    """Return the id of a worker process: node, index on the node, and a nonce that is unique to the process."""
    return f"{node}/{index}/{nonce}"


def node_of(worker: str) -> str:
    """Return the node that a worker id names."""
    return worker.split("/", 1)[0]


def node_and_index_of(worker: str) -> str:
    """Return the node and the index of a worker, which remain when its process is replaced."""
    return worker.rpartition("/")[0]


def index_of(worker: str) -> int:
    """Return the index on its node that a worker id names."""
    return int(worker.split("/")[1])


def key_of(rank: int, name: str) -> str:
    """Return the rendezvous key of a rank for a name. No other rank may post it."""
    return f"{rank}:{name}"


def is_key_of(rank: int, key: str) -> bool:
    """Return whether a rendezvous key belongs to a rank."""
    return key.startswith(f"{rank}:")


def posted_bytes(keys: Mapping[str, bytes]) -> int:
    """Return the most bytes that these rendezvous keys of a worker take in a message."""
    each = (len(key.encode()) + len(value) + _AROUND_BYTES for key, value in keys.items())
    return sum(each) + 4 * _AROUND_BYTES  # for the worker's id


class Struct(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all messages: immutable. Each class gives its tag, which is part of the wire and file formats.

    A class can be renamed; its tag must stay.
    """
