"""A checkpoint written by one world loads in another, equal in every bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from moe_cases import EXPERTS, batch, loss_of, random_placement, settle, small_model
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from holdfast.runtime.moe.expert_shards.saving import assign_savers, hosted_pairs, named_rows
from holdfast.runtime.moe.expert_shards.shards import ExpertShards
from holdfast.runtime.moe.layer.expert_layer import moe_layers


def trained() -> tuple[Any, ExpertShards]:
    """Return a model with all experts after one step of Adam."""
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters())
    loss_of(model, batch(1, 0)).backward()
    optimizer.step()
    return model, ExpertShards(moe_layers(model), optimizer)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_checkpoint_of_four_ranks_loads_on_three(tmp_path: Path) -> None:
    rng = np.random.default_rng(9)
    four, three = random_placement(rng, 4), random_placement(rng, 3)
    saved = assign_savers(four, EXPERTS)
    for rank in range(4):
        _, shards = trained()
        settle(shards, four, rank)
        rows = named_rows(shards, saved[rank])
        if rows:
            save(rows, storage_writer=FileSystemWriter(tmp_path / str(rank)), no_dist=True)
    written = sum(file.stat().st_size for file in tmp_path.rglob("*.distcp"))
    rows_bytes = sum(
        row.numel() * row.element_size() for row in named_rows(trained()[1], hosted_pairs(trained()[1])).values()
    )
    # Each row is stored alone, not with the whole stack behind it; torch adds about 1.5 KB per tensor.
    assert written < 2 * rows_bytes + 4096 * 9 * 6
    where = {pair: rank for rank, pairs in enumerate(saved) for pair in pairs}
    _, whole = trained()
    wanted = named_rows(whole, hosted_pairs(whole))
    specs = [whole.describe(layer) for layer in range(len(EXPERTS))]
    assert set(where) == set(hosted_pairs(whole))
    for rank in range(3):
        model = small_model()
        shards = ExpertShards(moe_layers(model), torch.optim.AdamW(model.parameters()))
        settle(shards, three, rank)
        for layer, spec in enumerate(specs):
            shards.set_optimizer_state(layer, spec)
        for pair in hosted_pairs(shards):
            load(named_rows(shards, [pair]), storage_reader=FileSystemReader(tmp_path / str(where[pair])), no_dist=True)
        got = named_rows(shards, hosted_pairs(shards))
        assert got.keys() <= wanted.keys()
        assert any(name.endswith("w1.exp_avg") for name in got) or not got
        assert all(torch.equal(row, wanted[name]) for name, row in got.items())
        assert all(shards.describe(layer).values == specs[layer].values for layer in range(len(EXPERTS)))
