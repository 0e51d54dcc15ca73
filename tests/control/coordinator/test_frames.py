"""Short WebSocket frames that are parsed at once, and the detection of frame ends."""

from __future__ import annotations

import os

from hypothesis import given, settings
from hypothesis import strategies as st
from websockets.frames import Frame, Opcode

from holdfast.control.serving.frames import LARGE_BYTES, SMALL_BYTES, FrameTracker, ReadBuffer, decode_short_frame

SHORT = st.builds(Frame, st.sampled_from(Opcode), st.binary(max_size=125))
LONG = st.builds(Frame, st.just(Opcode.BINARY), st.sampled_from([b"x" * size for size in (126, 127, 65_535, 65_536)]))


@settings(deadline=None)
@given(st.lists(SHORT | LONG, max_size=6), st.lists(st.integers(1, 400), max_size=200))
def test_frame_ends_are_detected_however_the_stream_is_split(frames: list[Frame], cuts: list[int]) -> None:
    whole = [frame.serialize(mask=bool(number % 3)) for number, frame in enumerate(frames)]
    ends = {sum(map(len, whole[:number])) for number in range(len(whole) + 1)}
    data, at, follows = b"".join(whole), 0, FrameTracker()
    for cut in [*cuts, len(data)]:
        follows.process(data[at : at + cut])
        at = min(at + cut, len(data))
        assert follows.is_between_frames is (at in ends)


@given(st.binary(min_size=1, max_size=125))
def test_a_short_message_is_decoded_unchanged(message: bytes) -> None:
    frame = Frame(Opcode.BINARY, message).serialize(mask=True)
    assert decode_short_frame(frame) == message
    assert decode_short_frame(frame + b"\0") is None, "the data is longer than this frame"
    assert decode_short_frame(frame[:-1]) is None
    # A first part, text, a further part, an end, a ping, and a compressed frame.
    for wrong in (0x02, 0x81, 0x80, 0x88, 0x89, 0xC2):
        assert decode_short_frame(bytes([wrong]) + frame[1:]) is None


@given(st.binary(max_size=200))
def test_other_data_is_left_to_the_parser(data: bytes) -> None:
    message = decode_short_frame(data)
    if message is not None:
        assert data[:2] == bytes([0x82, 0x80 | len(message)])
        assert len(data) == len(message) + 6
    assert decode_short_frame(Frame(Opcode.BINARY, os.urandom(126)).serialize(mask=True)) is None
    assert decode_short_frame(Frame(Opcode.BINARY, b"unmasked").serialize(mask=False)) is None


@given(st.lists(st.integers(1, 3 * LARGE_BYTES), max_size=6))
def test_the_read_buffer_returns_all_data_in_few_reads(sizes: list[int]) -> None:
    buffer = ReadBuffer()
    for size in sizes:
        came, got, reads = os.urandom(size), b"", 0
        while len(got) < size:
            count = min(len(buffer.room), size - len(got))
            buffer.room[:count] = came[len(got) : len(got) + count]
            got += buffer.get_data(count)
            reads += 1
        assert got == came
        assert reads <= 2 + size // LARGE_BYTES
        buffer.room[0] = 7
        assert buffer.get_data(1) == b"\7"
        assert len(buffer.room) == SMALL_BYTES, "a connection with little data must keep a small buffer"
