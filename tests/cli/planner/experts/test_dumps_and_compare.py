"""Tests of loads written by inference engines, read without torch, and of `--compare eplb`."""

from __future__ import annotations

import json
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from holdfast.cli import app
from holdfast.cli.planner.experts.dumps import read_dump
from holdfast.errors import BadInputError

LOADS = np.random.default_rng(0).integers(0, 1000, (3, 2, 8))


def plan(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["experts", "plan", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def safetensors(path: Path, tables: dict[str, tuple[str, np.ndarray]]) -> Path:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    body = b""
    for name, (kind, table) in tables.items():
        data = table.tobytes()
        header[name] = {"dtype": kind, "shape": table.shape, "data_offsets": [len(body), len(body) + len(data)]}
        body += data
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)
    return path


def test_torch_files_are_read_exactly(tmp_path):
    torch = pytest.importorskip("torch")
    path = tmp_path / "dump.pt"
    recorded = torch.tensor(LOADS)
    for content in (
        {"rank": 0, "logical_count": recorded, "average_utilization_rate_over_window": None},
        recorded,
        recorded.to(torch.float32),
        recorded.to(torch.bfloat16).to(torch.float64),
        {"model": recorded.permute(2, 1, 0).contiguous().permute(2, 1, 0)},
    ):
        torch.save(content, path)
        wanted = (
            content if isinstance(content, torch.Tensor) else next(v for v in content.values() if hasattr(v, "dim"))
        )
        np.testing.assert_array_equal(read_dump(path), wanted.numpy())
    torch.save(recorded.to(torch.bfloat16), path)
    np.testing.assert_array_equal(read_dump(path), recorded.to(torch.bfloat16).float().numpy())


def test_code_in_a_torch_file_is_not_executed(tmp_path):
    torch = pytest.importorskip("torch")
    path, ran = tmp_path / "evil.pt", tmp_path / "ran"

    class Evil:
        def __reduce__(self):
            return Path.touch, (ran,)

    torch.save({"logical_count": Evil()}, path)
    with pytest.raises(BadInputError, match=r"which is not a tensor"):
        read_dump(path)
    assert not ran.exists()


def test_a_tensor_larger_than_its_storage_is_refused(tmp_path):
    torch = pytest.importorskip("torch")
    path = tmp_path / "cut.pt"
    torch.save(torch.tensor(LOADS), path)
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in entries.items():
            archive.writestr(name, data[:64] if name.endswith("/data/0") else data)
    with pytest.raises(BadInputError, match="a tensor is larger than its storage"):
        read_dump(path)


def test_huge_tensors_and_compressed_files_are_refused(tmp_path):
    torch = pytest.importorskip("torch")
    path = tmp_path / "large.pt"
    torch.save(torch.zeros(1).expand(1, 1 << 15, 1 << 15), path)
    with pytest.raises(BadInputError, match="a tensor has 1073741824 numbers: 268435456 at the most"):
        read_dump(path)
    torch.save(torch.zeros(1 << 16), path)
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in entries.items():
            archive.writestr(name, data)
    with pytest.raises(BadInputError, match="it is compressed"):
        read_dump(path)


def test_safetensors_and_npy_files_are_read(tmp_path):
    path = safetensors(
        tmp_path / "x.safetensors",
        {"bias": ("F32", np.ones(3, "<f4")), "layers": ("I64", LOADS), "half": ("BF16", np.ones(2, "<u2"))},
    )
    np.testing.assert_array_equal(read_dump(path), LOADS)
    table = tmp_path / "x.npy"
    np.save(table, LOADS[0])
    np.testing.assert_array_equal(read_dump(table), LOADS[:1])


def test_invalid_dump_files_are_refused_with_the_reason(tmp_path):
    def said(name: str, data: bytes) -> str:
        path = tmp_path / name
        path.write_bytes(data)
        with pytest.raises(BadInputError) as error:
            read_dump(path)
        assert "\n" not in str(error.value)
        return str(error.value)

    assert "not a .pt file of tensors" in said("x.pt", b"nothing")
    assert "not a .safetensors file of tensors (it is cut off)" in said("x.safetensors", b"\xff" * 9)
    assert "not a .safetensors file" in said("x.safetensors", (2).to_bytes(8, "little") + b"[]")
    assert "not a .npy file of tensors" in said("x.npy", pickle.dumps([1]))
    two = safetensors(tmp_path / "two.safetensors", {"a": ("I64", LOADS), "b": ("I64", LOADS)})
    with pytest.raises(BadInputError, match="holds a, b: keep the loads alone, or name them logical_count"):
        read_dump(two)
    flat = safetensors(tmp_path / "flat.safetensors", {"logical_count": ("I64", LOADS.ravel())})
    with pytest.raises(BadInputError, match="no table of two or three axes"):
        read_dump(flat)
    with pytest.raises(BadInputError, match="cannot be read"):
        read_dump(tmp_path / "none.pt")


def test_a_dump_gives_the_same_plan_as_its_summed_loads(tmp_path):
    dump, table, sglang = tmp_path / "x.npy", tmp_path / "x.json", tmp_path / "sglang.json"
    np.save(dump, LOADS)
    table.write_text(json.dumps(LOADS.sum(axis=0).tolist()))
    sglang.write_text(json.dumps({"logical_count": LOADS.tolist()}))
    size = ("--nodes", 4, "--expert-slots", 5, "--json")
    plans = {plan("--loads", path, *size) for path in (dump, table, sglang)}
    assert len(plans) == 1


def test_eplb_and_holdfast_are_compared_on_a_recording(tmp_path):
    rng = np.random.default_rng(0)
    drift = np.cumprod(rng.uniform(0.7, 1.4, (6, 2, 16)), axis=0) * (rng.pareto(1.2, (2, 16)) * 1000 + 10)
    path = tmp_path / "drift.npy"
    np.save(path, drift.astype(int))
    size = ("--loads", path, "--nodes", 4, "--expert-slots", 12, "--gpus-per-node", 2, "--compare", "eplb")
    found = json.loads(plan(*size, "--json"))
    assert found["windows"] == 6
    by_name = {row["policy"]: row for row in found["policies"]}
    assert set(by_name) == {
        "never moved",
        "eplb",
        "holdfast, f = 1",
        "holdfast, f = 1, 2 %",
        "holdfast, f = 2",
        "holdfast, f = 2, 2 %",
    }
    eplb, ours, safe = by_name["eplb"], by_name["holdfast, f = 1"], by_name["holdfast, f = 2"]
    assert ours["busiest_gpu"]["planned"] <= eplb["busiest_gpu"]["planned"] + 1e-9
    assert by_name["never moved"]["busiest_gpu"]["came"] > ours["busiest_gpu"]["came"]
    assert ours["moved_share"] < eplb["moved_share"]
    assert safe["survives"]["1"] == 1.0 > eplb["survives"]["1"]
    shown = plan(*size)
    assert "never moved" in shown
    assert "it pays if one takes less than" in shown


def test_a_comparison_of_one_window_does_not_mention_moves(tmp_path):
    path = tmp_path / "one.csv"
    path.write_text("9,5,1,1\n4,4,4,4\n")
    shown = plan("--loads", path, "--nodes", 2, "--expert-slots", 4, "--compare", "eplb")
    assert "pays" not in shown
    assert "eplb" in shown


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--compare", "magic"), "--compare magic: there is eplb to compare with"),
        (("--compare", "eplb", "--gpus-per-node", 3), "--gpus-per-node is 3: it must divide the 4 slots of a node"),
        (("--compare", "eplb", "--gpus-per-node", 0), "--gpus-per-node is 0"),
        (("--compare", "eplb", "--groups", 3), "--groups is 3: it must divide the 4 experts"),
        (("--compare", "eplb", "--groups", 0), "--groups is 0: it must divide the 4 experts"),
        (("--compare", "eplb", "--fault-threshold", 3), "fault_threshold is 3"),
        (("--compare", "eplb", "--pareto", "--racks", "racks.txt"), "--racks, --pareto: with --compare that changes"),
        (("--gpus-per-node", 2), "--gpus-per-node: without --compare that changes nothing: leave it out"),
    ],
)
def test_invalid_comparison_options_are_refused_with_the_reason(tmp_path, arguments, words):
    path = tmp_path / "one.csv"
    path.write_text("9,5,1,1\n")
    with pytest.raises(BadInputError) as error:
        plan("--loads", path, "--nodes", 2, "--expert-slots", 4, *arguments)
    assert words in str(error.value)
    with pytest.raises(BadInputError, match="EPLB's nodes have equal slots"):
        plan("--loads", path, "--expert-slots", "4,5", "--compare", "eplb")


def test_a_recording_without_tokens_is_refused_in_plans_and_comparisons(tmp_path):
    path = tmp_path / "other.npz"
    np.savez(path, load=np.ones((1, 2, 4)))
    for compared in ((), ("--compare", "eplb")):
        with pytest.raises(BadInputError, match="holds no array named tokens: save tokens"):
            plan("--loads", path, "--nodes", 2, "--expert-slots", 4, *compared)
