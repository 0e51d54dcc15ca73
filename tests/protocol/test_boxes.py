"""Boxes of a tensor: whether they are all of it, and how a whole tensor is read from them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.protocol.checkpoints import directory
from holdfast.protocol.checkpoints.boxes import Box, cover_exactly, split_into_slabs
from holdfast.protocol.checkpoints.joining import join_into_file
from holdfast.protocol.checkpoints.names import CheckpointName
from holdfast.protocol.checkpoints.tensor_files import StoredPiece, make_header
from holdfast.storage import LocalStorage

NAME = CheckpointName(term=1, generation=1, step=1, nonce="ab")

shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def cut_up(draw: st.DrawFn, least: int = 0) -> tuple[tuple[int, ...], list[Box]]:
    """Draw a shape, and boxes that are all of it: each cut goes through one of those before it."""
    shape = tuple(draw(st.lists(st.integers(least, 5), min_size=min(least, 1), max_size=4)))
    boxes = [Box.of_whole(shape)]
    for _ in range(draw(st.integers(0, 6)) if shape else 0):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dimension = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, box.shape[dimension]))
        boxes += [_range_of(box, dimension, 0, at), _range_of(box, dimension, at, box.shape[dimension])]
    return shape, draw(st.permutations(boxes))


def _range_of(box: Box, dimension: int, start: int, stop: int) -> Box:
    offset, shape = list(box.offset), list(box.shape)
    offset[dimension], shape[dimension] = offset[dimension] + start, stop - start
    return Box(tuple(offset), tuple(shape))


def counted(boxes: list[Box], whole: tuple[int, ...]) -> np.ndarray:
    """Return how many boxes have each element."""
    times = np.zeros(whole, dtype=int)
    for box in boxes:
        times[box.slices_in(Box.of_whole(whole))] += 1
    return times


@st.composite
def strewn(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """Draw a shape, and boxes within it that may be anywhere."""
    shape = draw(shapes)
    boxes: list[Box] = []
    for _ in range(draw(st.integers(0, 4))):
        edges = [sorted((draw(st.integers(0, size)), draw(st.integers(0, size)))) for size in shape]
        boxes.append(Box(tuple(first for first, _ in edges), tuple(last - first for first, last in edges)))
    return shape, boxes


@given(cut_up())
def test_the_pieces_of_a_tensor_cover_it(case: tuple[tuple[int, ...], list[Box]]) -> None:
    whole, boxes = case
    assert cover_exactly(boxes, whole)


@given(st.one_of(strewn(), cut_up()), st.data())
def test_boxes_cover_a_tensor_if_each_element_is_in_exactly_one(
    case: tuple[tuple[int, ...], list[Box]], data: st.DataObject
) -> None:
    whole, boxes = case
    boxes = list(boxes)
    for change in data.draw(st.lists(st.sampled_from(("drop", "again")), max_size=2)):
        if boxes and change == "drop":
            boxes.pop(data.draw(st.integers(0, len(boxes) - 1)))
        elif boxes:
            boxes.append(data.draw(st.sampled_from(boxes)))
    each_once = bool((counted(boxes, whole) == 1).all())
    assert cover_exactly(boxes, whole) == (each_once if np.prod(whole) else bool(boxes))


@given(strewn())
def test_the_intersection_of_two_boxes_has_their_common_elements(case: tuple[tuple[int, ...], list[Box]]) -> None:
    whole, boxes = case
    for one in boxes:
        for other in boxes:
            both = counted([one, other], whole) == 2
            if one is other:
                both = counted([one], whole) == 1
            common = one.intersect(other)
            assert np.array_equal(counted([common] if common else [], whole) == 1, both)


def test_boxes_are_split_into_slabs_at_their_edges() -> None:
    boxes = [Box((0, 0), (2, 4)), Box((2, 0), (3, 2)), Box((2, 2), (1, 2)), Box((3, 2), (2, 2))]
    assert list(split_into_slabs(boxes, 0)) == [(0, 2, [0]), (2, 3, [1, 2]), (3, 5, [1, 3])]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Path]:
    return lambda: tmp_path_factory.mktemp("joined")


@settings(max_examples=30)
@given(cut_up(least=1))
def test_pieces_of_any_boxes_are_joined_into_the_whole_tensor(
    folder: Callable[[], Path], case: tuple[tuple[int, ...], list[Box]]
) -> None:
    whole, boxes = case
    values = np.arange(np.prod(whole, dtype=int), dtype="<i2").reshape(whole)
    storage, files = LocalStorage(folder()), []
    for part in range(len(boxes)):  # one piece a file: a file holds each tensor only once
        box = boxes[part]
        piece = StoredPiece(name="w", code="I16", box=box, whole=whole)
        data = np.ascontiguousarray(values[box.slices_in(Box.of_whole(whole))]).tobytes()
        name = f"part-{part:05d}-of-{len(boxes):05d}.safetensors"
        files.append(directory.write_file(storage, NAME.folder, name, [make_header([piece]), data]))
    directory.seal(storage, NAME, files)
    (described,), content = join_into_file(storage, NAME.folder, lambda _: True)
    assert (described.box, described.whole) == (Box.of_whole(whole), ())
    assert b"".join(content) == make_header([described]) + values.tobytes()


def test_the_header_of_a_dense_job_is_compatible_with_all_versions() -> None:
    """Earlier versions must read this header, and later versions must read earlier headers."""
    pieces = [
        StoredPiece(name="w", code="F32", box=Box((2, 0), (1, 3))),
        StoredPiece(name="s", code="F32", box=Box((), ()), begin=12),
    ]
    text = (
        '{"__metadata__":{"format":"pt","DCP_SHARDING_INFO":"{\\"w\\": {\\"saved_offsets\\": [2, 0]}, '
        '\\"s\\": {\\"saved_offsets\\": []}}"},"w":{"dtype":"F32","shape":[1,3],"data_offsets":[0,12]},'
        '"s":{"dtype":"F32","shape":[],"data_offsets":[12,16]}}'
    )
    header = make_header(pieces)
    assert header[8:].decode().rstrip() == text
    assert int.from_bytes(header[:8], "little") == len(header) - 8
    assert len(header) % 8 == 0
