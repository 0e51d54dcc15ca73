"""Data streams with state: one stream per micro-batch of a step. All workers know their positions after each step.

Each of the M micro-batches of a step is the next item of its own stream. The stream's position after a step is its note
(`runtime.notes`): gathered before the step can pass, in force with it, and then part of the training state. So any
worker can compute the micro-batch of the next step, including a joined worker or a resumed job.
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
from holdfast.runtime.micro_batch_notes import NoteSource
from holdfast.runtime.state import tree
from holdfast.runtime.tensors import collate as default_collate

#: the limit for the state of one stream
MAX_STATE_BYTES = 4096
#: open streams are dropped after this many steps without use; another worker reads them now
_KEPT_STEPS = 8
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[tree.Node] = msgspec.msgpack.Decoder(tree.Node)


class StatefulStream(Protocol):
    """Data that are iterated, in as many streams as a step has micro-batches."""

    def open(self, micro_batch: int, micro_batches: int) -> Any:
        """Return one pass through the stream of a micro-batch: an iterator or iterable of micro-batches.

        If it has `state_dict()` and `load_state_dict()`, it continues from its state, otherwise from its beginning. At
        its end it is opened again; `set_epoch(number)` is called first, if it exists.
        """
        ...


class Shards:
    """The streams of an iterable data set that can be split into shards, as in Hugging Face's `datasets`."""

    def __init__(self, dataset: Any, collate: Collate | None, micro_batch: int) -> None:
        self._dataset = dataset
        self._collate = default_collate if collate is None else collate
        self._micro_batch = micro_batch

    def check_shards(self, micro_batches: int) -> None:
        """Check that the data set can be split into this many streams: it has shard(), and enough shards. A data set
        that does not tell how many shards it has is accepted.

        Raises:
            BadInputError: there are too few, or the data set has no shards.
        """
        kind = type(self._dataset).__name__
        if not callable(getattr(self._dataset, "shard", None)):
            raise BadInputError(
                f"the data set is a {kind}, which has neither indices nor shards, so its samples cannot be divided "
                "among workers: give it __len__ and __getitem__; or shard(num_shards, index), state_dict() "
                "and load_state_dict(); or give an object with batch(step, micro_batch), or with open(micro_batch, "
                "micro_batches)"
            )
        shards = getattr(self._dataset, "num_shards", getattr(self._dataset, "n_shards", micro_batches))
        if shards < micro_batches:
            raise BadInputError(
                f"the data set has {shards} shards, but a step has {micro_batches} micro-batches, and each needs "
                "its own stream: split it into more shards, or use fewer, larger micro-batches"
            )

    def open(self, micro_batch: int, micro_batches: int) -> Any:
        """Return one pass through the samples of a micro-batch's stream."""
        return self._dataset.shard(num_shards=micro_batches, index=micro_batch)

    def next_batch(self, samples: Iterator[Any]) -> Any:
        """Return the next micro-batch of samples."""
        return self._collate([next(samples) for _ in range(self._micro_batch)])


class Fetched(NamedTuple):
    """A micro-batch, and the stream's state after it (b"" if the stream has no state)."""

    batch: Any
    state: bytes


class _Passes:
    """One stream: its passes one after the other."""

    def __init__(self, open_pass: Callable[[], Any], name: str, at: int, state: bytes) -> None:
        """Continue after step `at` with a state; b"": at the beginning."""
        self.at = at
        self._open_pass, self._name = open_pass, name
        self._number = 0
        self._start_pass(tree.unpack(_decoder.decode(state), []) if state else None)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        """Return the next item; at the end of a pass, start the next pass.

        Raises:
            BadInputError: that pass is empty.
        """
        try:
            return next(self._items)
        except StopIteration:
            self._number += 1
            self._start_pass(None)
        for item in self._items:
            return item
        raise BadInputError(
            f"{self._name} is empty: each needs at least one micro-batch, or sample; check that the files "
            "exist, or use fewer, larger micro-batches"
        )

    @property
    def state(self) -> bytes:
        """The number of the pass and the stream's own state, encoded; b"" if the stream has no state_dict().

        Raises:
            BadInputError: the state is larger than `MAX_STATE_BYTES`, or has values that cannot be sent.
        """
        if not hasattr(self._pass, "state_dict"):
            return b""
        where = f"the state of {self._name}"
        packed = tree.pack({"pass": self._number, "state": self._pass.state_dict()}, None, where)
        state = _encoder.encode(packed)
        if len(state) > MAX_STATE_BYTES:
            raise BadInputError(
                f"{where} has {len(state)} bytes, and at most {MAX_STATE_BYTES} are allowed: store the position of the "
                "stream, not data that it has read (no buffer of samples); or omit state_dict(), then another worker "
                "reads the stream from its beginning; or give an object with batch(step, micro_batch)"
            )
        return state

    def _start_pass(self, state: Any) -> None:
        """Open the stream for a pass, tell it the pass's number by `set_epoch`, if it has that, and restore its state.

        Args:
            state: the pass's number and the stream's state, from `state`, decoded; None to start the present pass at
                its beginning.

        Raises:
            BadInputError: the opened object cannot be iterated.
        """
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
    """The known position of a stream."""

    #: the step after which the state was taken
    at: int
    state: bytes


class StreamFetcher:
    """Fetches the next micro-batch of a stream. It continues open streams that have the right position."""

    def __init__(self, stream: StatefulStream | Shards, micro_batches: int) -> None:
        self._stream = stream
        self._micro_batches = micro_batches
        self._streams: dict[int, _Passes] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for pickling, without the open streams."""
        return {**self.__dict__, "_streams": {}}

    def __call__(self, step: int, micro_batch: int, position: StreamPosition) -> Fetched:
        """Return a stream's micro-batch of a step, with the state after it. If the stream is not open here near
        that step, it is opened again at `position`; micro-batches before `step` are read and dropped.
        """
        passes = self._streams.pop(micro_batch, None)
        if passes is None or not position.at <= passes.at < step:
            name = f"the stream of micro-batch {micro_batch}"
            passes = _Passes(lambda: self._stream.open(micro_batch, self._micro_batches), name, *_as_pair(position))
        stream, batch = self._stream, None
        while passes.at < step:
            batch = stream.next_batch(passes) if isinstance(stream, Shards) else next(passes)
            passes.at += 1
        fetched = Fetched(batch, passes.state)
        self._streams[micro_batch] = passes
        self._streams = {number: one for number, one in self._streams.items() if one.at > step - _KEPT_STEPS}
        return fetched


class StreamedData(JobData, NoteSource):
    """Data in M streams, and their positions, which are part of the training state."""

    of_parts = False

    def __init__(self, stream: StatefulStream | Shards, sizes: StepSizes) -> None:
        """Start at the beginning of all streams.

        Raises:
            BadInputError: the data cannot be split into this many streams.
        """
        if isinstance(stream, Shards):
            stream.check_shards(sizes.micro_batches)
        super().__init__(sizes, StreamFetcher(stream, sizes.micro_batches), keep_apart=True)
        self._positions = [StreamPosition(0, b"")] * sizes.micro_batches
        self._current_state = b""
        self._merged_states: list[bytes] = []
        self._at = 0

    def fetch_argument(self, step: int, micro_batch: int) -> StreamPosition:
        """Return the known position of its stream."""
        return self._positions[micro_batch]

    def on_fetched(self, step: int, micro_batch: int, fetched: Fetched) -> Any:
        """Keep the stream's state after the micro-batch, for its note."""
        self._current_state = fetched.state
        return fetched.batch

    # ---- notes ----

    def make_note(self) -> bytes:
        """Return the state of the current micro-batch's stream after it."""
        return self._current_state

    def merge(self, notes: Sequence[bytes], of_ranks: Sequence[bytes]) -> None:
        """Keep the states of all streams after the step."""
        self._merged_states = list(notes)

    def apply(self) -> None:
        """Put the merged states in force as the positions after this step; a stream without a state is read from its
        beginning.
        """
        self._at += 1
        self._positions = [
            StreamPosition(self._at, state) if state else StreamPosition(0, b"") for state in self._merged_states
        ]

    # ---- state ----

    def state_dict(self) -> dict[str, Any]:
        """Return the positions of all streams."""
        return {"at": self._at, "states": [position.state for position in self._positions]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the positions of all streams; one without a state is read from its beginning.

        Raises:
            ValueError: the state has another number of micro-batches.
        """
        states: list[bytes] = state["states"]
        if len(states) != self.order.micro_batches:
            raise ValueError(f"{len(states)} streams of data there, {self.order.micro_batches} micro-batches here")
        self._at = state["at"]
        self._positions = [StreamPosition(self._at, one) if one else StreamPosition(0, b"") for one in states]


def _as_pair(position: StreamPosition) -> tuple[int, bytes]:
    return position.at, position.state
