"""Tests of classic expert parallelism: the members, and the chunk of experts that each holds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.coordination.experts.blobs import decode_experts, encode_experts, experts_by_layer
from holdfast.coordination.experts.static_experts import assign_chunks, choose_ep_size, count_usable, place_static
from holdfast.planning import Shortage
from holdfast.protocol.names import worker_id
from holdfast.protocol.plan import ExpertShape

PROPERTY = settings(derandomize=True, deadline=None, max_examples=150)


def shape_of(experts: int, slots: int = 6, layers: int = 2) -> ExpertShape:
    return ExpertShape(layers=layers, experts=experts, slots=slots)


def workers_of(count: int) -> list[str]:
    return [worker_id(f"n{index}", 0, f"{index:x}") for index in range(count)]


def chunk_blob(shape: ExpertShape, ep_size: int, chunks: set[int]) -> bytes:
    counts = np.zeros((shape.layers, shape.experts), dtype=np.int64)
    size = shape.experts // ep_size
    for chunk in chunks:
        counts[:, chunk * size : (chunk + 1) * size] = 1
    return encode_experts(counts)


def test_the_models_of_the_paper_have_its_ep_sizes() -> None:
    assert [choose_ep_size(shape_of(experts), 0) for experts in (8, 12, 16)] == [2, 2, 4]
    assert choose_ep_size(shape_of(8), 4) == 4
    assert choose_ep_size(None, 0) == 1
    refused = choose_ep_size(shape_of(8), 3)
    assert isinstance(refused, Shortage)
    assert "EP size of 3" in str(refused)
    assert "--ep-size 2 or 4 or 8" in str(refused)
    assert isinstance(choose_ep_size(shape_of(8), 1), Shortage)  # 8 experts do not fit 6 slots


@pytest.mark.parametrize(("workers", "ep_size", "wanted"), [(10, 4, 8), (7, 4, 4), (3, 4, 0), (5, 2, 4), (5, 1, 5)])
def test_the_world_size_is_the_largest_multiple_of_the_ep_size(workers: int, ep_size: int, wanted: int) -> None:
    assert count_usable(workers, ep_size) == wanted


@PROPERTY
@given(st.data())
def test_members_hold_equal_chunks_and_no_held_chunk_is_lost(data: st.DataObject) -> None:
    ep_size = data.draw(st.integers(1, 4))
    shape = shape_of(2 * ep_size)
    workers = workers_of(data.draw(st.integers(ep_size, 11)))
    # Two chunks: while experts move, a worker holds both its old and its new chunk.
    owned = {w: data.draw(st.sets(st.integers(0, ep_size - 1), max_size=2)) for w in workers}
    held = {w: chunk_blob(shape, ep_size, chunks) for w, chunks in owned.items() if chunks}
    chosen = assign_chunks(workers, held, shape, ep_size)
    assert len(chosen) == count_usable(len(workers), ep_size)
    assert np.bincount(list(chosen.values()), minlength=ep_size).tolist() == [len(workers) // ep_size] * ep_size
    live = set().union(*owned.values())
    assert set().union(*(owned[worker] for worker in chosen)) == live
    members = [worker for worker in workers if worker in chosen]
    plan = place_static(shape, members, held, chosen, asked=2)
    assert plan.given == min(2, len(workers) // ep_size)
    total = np.sum([decode_experts(blob, shape) for blob in plan.placement], axis=0)
    assert (total == len(workers) // ep_size).all()
    moved = sum(chosen[worker] in live - owned[worker] for worker in members)
    assert plan.moves == moved * 2 * shape.layers


@PROPERTY
@given(st.integers(1, 4), st.integers(1, 3), st.integers(0, 6))
def test_training_workers_keep_their_chunks_when_others_join(ep_size: int, replicas: int, fresh: int) -> None:
    shape = shape_of(2 * ep_size)
    workers = workers_of(ep_size * replicas + fresh)
    members = workers[: ep_size * replicas]
    held = {worker: chunk_blob(shape, ep_size, {rank % ep_size}) for rank, worker in enumerate(members)}
    chosen = assign_chunks(workers, held, shape, ep_size)
    assert all(chosen[worker] == rank % ep_size for rank, worker in enumerate(members))


def test_the_world_of_a_dense_model_is_also_a_multiple_of_the_ep_size() -> None:
    assert list(assign_chunks(workers_of(5), {}, None, 2)) == workers_of(5)[:4]


def test_the_placement_is_the_same_in_all_layers() -> None:
    shape, workers = shape_of(8, layers=3), workers_of(4)
    plan = place_static(shape, workers, {}, assign_chunks(workers, {}, shape, 2), asked=2)
    assert plan.moves == 0
    assert {experts_by_layer(blob, shape) for blob in plan.placement} == {((0, 1, 2, 3),) * 3, ((4, 5, 6, 7),) * 3}
