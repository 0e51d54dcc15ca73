"""Streams that are gone through: one per micro-batch of a step, whose states after each step all workers know.

Each of the M micro-batches of a step is the next one of a stream of its own. Where it stands after a step is its note
(gradients.notes): gathered before the step can pass, in force with it, and part of the training state from then on. So
whoever computes the micro-batch of the next step, a joiner or a resumed job among them, goes on where it stands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import msgspec

from holdfast.errors import BadInputError
from holdfast.runtime.data.datasets import JobData
from holdfast.runtime.data.sampling import StepSizes
from holdfast.runtime.data.torch_loader import Collate
from holdfast.runtime.notes import NoteSource
from holdfast.runtime.state import tree
from holdfast.runtime.tensors import collate as default_collate

#: of a stream, after a step
MAX_STATE_BYTES = 4096
#: streams that were not gone on with for so many steps are somebody else's now
_KEPT_STEPS = 8
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[tree.Node] = msgspec.msgpack.Decoder(tree.Node)


class StatefulStream(Protocol):
    """Data that are gone through, in as many streams as a step has micro-batches."""

    def open(self, micro_batch: int, micro_batches: int) -> Any:
        """Return one pass through the stream of a micro-batch: an iterator, or something iterable, of micro-batches.

        Where it has `state_dict()` and `load_state_dict()`, it goes on from its state, else it is gone through from its
        beginning. At its end it is opened again; `set_epoch(number)` is called first, where it has that.
        """
        ...


class Shards:
    """The streams of an iterable data set that can be cut into shards, as those of Hugging Face's `datasets`."""

    def __init__(self, dataset: Any, collate: Collate | None, micro_batch: int) -> None:
        self._dataset = dataset
        self._collate = default_collate if collate is None else collate
        self._micro_batch = micro_batch

    def check_shards(self, micro_batches: int) -> None:
        """Look whether there are shards for so many streams.

        Raises:
            BadInputError: there are not, or nobody can know.
        """
        kind = type(self._dataset).__name__
        if not callable(getattr(self._dataset, "shard", None)):
            raise BadInputError(
                f"the data set is a {kind}, which has its samples neither by number nor in shards, so that nobody "
                "could say who takes which: give it __len__ and __getitem__; or shard(num_shards, index), state_dict() "
                "and load_state_dict(); or give an object with batch(step, micro_batch), or with open(micro_batch, "
                "micro_batches)"
            )
        shards = getattr(self._dataset, "num_shards", getattr(self._dataset, "n_shards", micro_batches))
        if shards < micro_batches:
            raise BadInputError(
                f"the data set has {shards} shards and a step {micro_batches} micro-batches, each of which is a stream "
                "of its own: make more shards of it, or fewer, larger micro-batches"
            )

    def open(self, micro_batch: int, micro_batches: int) -> Any:
        """Return one pass through the samples of a micro-batch's stream."""
        return self._dataset.shard(num_shards=micro_batches, index=micro_batch)

    def next_batch(self, samples: Iterator[Any]) -> Any:
        """Return the next micro-batch of samples."""
        return self._collate([next(samples) for _ in range(self._micro_batch)])


class Fetched(NamedTuple):
    """A micro-batch, and where its stream stands after it: "" where it cannot say."""

    batch: Any
    state: bytes


class _Passes:
    """One stream: its passes one after the other."""

    def __init__(self, open_pass: Callable[[], Any], name: str, at: int, state: bytes) -> None:
        """Stand after step `at`, as `state` says; b"": at the beginning."""
        self.at = at
        self._open_pass, self._name = open_pass, name
        self._number = 0
        self._start_pass(tree.unpack(_decoder.decode(state), []) if state else None)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._items)
        except StopIteration:
            self._number += 1
            self._start_pass(None)
        for item in self._items:
            return item
        raise BadInputError(
            f"{self._name} has nothing in it: each needs one micro-batch, or sample, at least; look whether the "
            "files are there, or take fewer, larger micro-batches"
        )

    @property
    def state(self) -> bytes:
        """Where it stands; b"" where it cannot say.

        Raises:
            BadInputError: it is too large, or of something that cannot be sent.
        """
        if not hasattr(self._pass, "state_dict"):
            return b""
        where = f"the state of {self._name}"
        packed = tree.pack({"pass": self._number, "state": self._pass.state_dict()}, None, where)
        state = _encoder.encode(packed)
        if len(state) > MAX_STATE_BYTES:
            raise BadInputError(
                f"{where} has {len(state)} bytes, and may have {MAX_STATE_BYTES}: keep in it where the stream stands, "
                "and not what it has read (no buffer of samples); or leave state_dict() out, and it is gone through "
                "again where another worker goes on with it; or give an object with batch(step, micro_batch)"
            )
        return state

    def _start_pass(self, state: Any) -> None:
        if state is not None:
            self._number = state["pass"]
        one = self._pass = self._open_pass()
        if not (hasattr(one, "__iter__") or hasattr(one, "__next__")):
            raise BadInputError(
                f"{self._name}: open() or shard() returned a {type(one).__name__}: it must return an iterator, or "
                "something iterable"
            )
        if hasattr(one, "set_epoch"):
            one.set_epoch(self._number)
        if state is not None:
            one.load_state_dict(state["state"])
        self._items: Iterator[Any] = one if hasattr(one, "__next__") else iter(one)


@dataclass(frozen=True, slots=True)
class StreamPosition:
    """Where a stream is known to stand: after step `at`, `state`."""

    at: int
    state: bytes


class StreamFetcher:
    """Fetches the next micro-batch of a stream; it goes on with those that stand where they should."""

    def __init__(self, stream: StatefulStream | Shards, micro_batches: int) -> None:
        self._stream = stream
        self._micro_batches = micro_batches
        self._streams: dict[int, _Passes] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_streams": {}}

    def __call__(self, step: int, micro_batch: int, standing: StreamPosition) -> Fetched:
        passes = self._streams.pop(micro_batch, None)
        if passes is None or not standing.at <= passes.at < step:
            name = f"the stream of micro-batch {micro_batch}"
            passes = _Passes(lambda: self._stream.open(micro_batch, self._micro_batches), name, *_as_pair(standing))
        stream, batch = self._stream, None
        while passes.at < step:
            batch = stream.next_batch(passes) if isinstance(stream, Shards) else next(passes)
            passes.at += 1
        fetched = Fetched(batch, passes.state)
        self._streams[micro_batch] = passes
        self._streams = {number: one for number, one in self._streams.items() if one.at > step - _KEPT_STEPS}
        return fetched


class StreamedData(JobData, NoteSource):
    """Data in M streams, and where each of them stands; to be kept with the training state."""

    of_parts = False

    def __init__(self, stream: StatefulStream | Shards, sizes: StepSizes) -> None:
        """Stand at the beginning of all streams.

        Raises:
            BadInputError: the data cannot be cut into so many.
        """
        if isinstance(stream, Shards):
            stream.check_shards(sizes.micro_batches)
        super().__init__(sizes, StreamFetcher(stream, sizes.micro_batches), keep_apart=True)
        self._positions = [StreamPosition(0, b"")] * sizes.micro_batches
        self._current_state = b""
        self._merged_states: list[bytes] = []
        self._at = 0

    def fetch_argument(self, step: int, micro_batch: int) -> StreamPosition:
        """Return where its stream stands, as far as that is known."""
        return self._positions[micro_batch]

    def on_fetched(self, step: int, micro_batch: int, fetched: Fetched) -> Any:
        """Keep where its stream stands after it, for its note."""
        self._current_state = fetched.state
        return fetched.batch

    # ---- notes ----

    def make_note(self) -> bytes:
        """Where the stream of the micro-batch at hand stands after it."""
        return self._current_state

    def merge(self, notes: Sequence[bytes], of_ranks: Sequence[bytes]) -> None:
        """All ranks know where all streams stand after the step."""
        self._merged_states = list(notes)

    def apply(self) -> None:
        """They do."""
        self._at += 1
        self._positions = [
            StreamPosition(self._at, state) if state else StreamPosition(0, b"") for state in self._merged_states
        ]

    # ---- state ----

    def state_dict(self) -> dict[str, Any]:
        """Return where all streams stand."""
        return {"at": self._at, "states": [standing.state for standing in self._positions]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Stand there.

        Raises:
            ValueError: these are the streams of other micro-batches.
        """
        states: list[bytes] = state["states"]
        if len(states) != self.order.micro_batches:
            raise ValueError(f"{len(states)} streams of data there, {self.order.micro_batches} micro-batches here")
        self._at = state["at"]
        self._positions = [StreamPosition(self._at, one) if one else StreamPosition(0, b"") for one in states]


def _as_pair(standing: StreamPosition) -> tuple[int, bytes]:
    return standing.at, standing.state
