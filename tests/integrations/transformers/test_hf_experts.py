"""Models of transformers compute the same with elastic experts, and are saved to the same files afterwards."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import DENSE_KIND, KINDS, ODD_KINDS, hf_model, loss_of, token_ids
from torch import nn

import holdfast
from holdfast.errors import BadInputError
from holdfast.integrations.transformers import elastic_experts, plain_experts
from holdfast.runtime.moe.expert_shards.shards import ExpertShards
from holdfast.runtime.moe.layer.expert_layer import moe_layers
from places import EXAMPLES

#: One group, so that only one process of xdist imports the library.
pytestmark = pytest.mark.xdist_group("transformers")

#: transformers builds a model without shared experts with a shared expert of width 0.
_NO_WIDTH = pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")


def from_disk(folder: Path, **options: Any) -> Any:
    """Load a model as a user does."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, **options)


@_NO_WIDTH
@pytest.mark.parametrize("kind", [*KINDS, *ODD_KINDS])
def test_elastic_experts_compute_the_same_as_the_plain_model(kind: str) -> None:
    """In float32, the loss, logits and all gradients differ by at most 1e-6 of the largest value."""
    plain, elastic, ids = hf_model(kind), elastic_experts(hf_model(kind)), token_ids()
    assert moe_layers(elastic)
    assert loss_of(elastic, ids).item() == pytest.approx(loss_of(plain, ids).item(), rel=1e-6)
    out, wanted = (model(input_ids=ids).logits for model in (elastic, plain))
    assert (out - wanted).abs().max() <= 1e-6 * wanted.abs().max()
    for model in (plain, elastic):
        loss_of(model, ids).backward()
    plain_experts(elastic)
    names = [name for name, _ in plain.named_parameters()]
    assert [name for name, _ in elastic.named_parameters()] == names
    for name in names:
        grad, wanted = elastic.get_parameter(name).grad, plain.get_parameter(name).grad
        assert grad is not None, name
        assert wanted is not None, name
        if not wanted.numel():
            continue
        assert (grad - wanted).abs().max() <= 1e-6 * wanted.abs().max().clamp(min=1.0), name
    assert type(elastic) is type(plain)
    assert [type(module) for module in elastic.modules()] == [type(module) for module in plain.modules()]


@_NO_WIDTH
@pytest.mark.parametrize("kind", [*KINDS, *ODD_KINDS])
def test_conversion_keeps_the_parameter_objects(kind: str) -> None:
    model = hf_model(kind)
    before = [id(parameter) for parameter in model.parameters()]
    assert [id(parameter) for parameter in elastic_experts(model).parameters()] == before
    assert [id(parameter) for parameter in plain_experts(model).parameters()] == before


def test_the_optimizer_state_of_the_plain_model_fits_the_elastic_one() -> None:
    model, ids = hf_model("gpt_oss"), token_ids()
    before = torch.optim.AdamW(model.parameters())
    loss_of(model, ids).backward()
    before.step()
    after = torch.optim.AdamW(elastic_experts(model).parameters())
    after.load_state_dict(before.state_dict())
    for parameter in model.parameters():
        assert torch.equal(after.state[parameter]["exp_avg"], before.state[parameter]["exp_avg"])


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_converted_and_restored_is_saved_with_the_same_bytes(kind: str, tmp_path: Path) -> None:
    hf_model(kind).save_pretrained(tmp_path / "first")
    for name, model in (
        ("of a config", hf_model(kind)),
        ("from disk", from_disk(tmp_path / "first")),
    ):
        elastic_experts(model)
        parameters = {id(parameter) for parameter in model.parameters()}
        loss_of(model, token_ids())
        assert plain_experts(model) is model
        assert {id(parameter) for parameter in model.parameters()} == parameters, "an earlier optimizer must stay valid"
        model.save_pretrained(tmp_path / name)
        files = {file.name: file.read_bytes() for file in (tmp_path / name).glob("*.safetensors")}
        assert files == {file.name: file.read_bytes() for file in (tmp_path / "first").glob("*.safetensors")}


@_NO_WIDTH
@pytest.mark.parametrize("kind", [*ODD_KINDS, "gpt_oss"])
def test_a_bfloat16_model_in_several_files_is_saved_with_the_same_bytes(kind: str, tmp_path: Path) -> None:
    hf_model(kind).to(torch.bfloat16).save_pretrained(tmp_path / "first", max_shard_size="20KB")
    contents: list[dict[str, bytes]] = []
    for converted in (False, True):
        model = from_disk(tmp_path / "first", dtype=torch.bfloat16)
        if converted:
            plain_experts(elastic_experts(model))
        model.save_pretrained(tmp_path / str(converted), max_shard_size="20KB")
        contents.append({file.name: file.read_bytes() for file in (tmp_path / str(converted)).glob("*.safetensors*")})
    assert contents[0] == contents[1]
    assert len(contents[0]) > 2


def test_a_trained_elastic_model_is_saved_and_loaded(tmp_path: Path) -> None:
    model, ids = elastic_experts(hf_model("deepseek_v3"), bias_rate=0.01), token_ids()
    job = holdfast.init()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = torch.utils.data.TensorDataset(ids)
    job.protect(model, optimizer, data, global_batch=2, micro_batch=1)
    losses = []
    for step in job.steps(6):
        for (texts,) in step.micro_batches():
            step.backward(loss_of(model, texts))
        step.apply()
        losses.append(step.loss)
    assert losses[-1] < 0.8 * losses[0]
    trained = loss_of(model, ids).item()
    plain_experts(model).save_pretrained(tmp_path)
    again = from_disk(tmp_path)
    assert loss_of(again, ids).item() == pytest.approx(trained, rel=1e-6)
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    moved = (again.get_buffer(bias) - hf_model("deepseek_v3").get_buffer(bias)) / 0.01
    assert moved.abs().max() > 0.5
    assert (moved - moved.round()).abs().max() < 1e-4, "the bias must move by whole multiples of the rate"


def test_the_deepseek_example_trains_and_saves_its_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    sizes = ("--layers", "2", "--dim", "16", "--context", "16", "--global-batch", "8", "--micro-batch", "4")
    monkeypatch.setattr(sys, "argv", ["deepseek_tiny.py", *sizes, "--steps", "20", "--save", str(tmp_path)])
    importlib.import_module("deepseek_tiny").main()
    losses = [float(line.split()[3]) for line in capsys.readouterr().out.splitlines() if line.startswith("step")]
    assert losses[1] < losses[0] < 6.0
    saved = from_disk(tmp_path)
    assert type(saved).__name__ == "DeepseekV3ForCausalLM"
    assert loss_of(saved, token_ids()).item() < 7.0


class StrangeExperts(nn.Module):
    """Experts of an unknown class."""


class MoEBlock(nn.Module):
    """An MoE block without experts."""


def strange() -> nn.Module:
    model = hf_model("mixtral")
    model.set_submodule("model.layers.1.mlp.experts", StrangeExperts())
    return model


def without(name: str) -> nn.Module:
    model = hf_model("gpt_oss")
    setattr(model.get_submodule("model.layers.0.mlp.experts"), name, None)
    return model


def emptied() -> nn.Module:
    model = hf_model("mixtral")
    for layer in range(2):
        model.set_submodule(f"model.layers.{layer}.mlp.experts", nn.Identity())
    return model


def reshaped() -> nn.Module:
    model = hf_model("olmoe")
    model.get_submodule("model.layers.1.mlp.experts").down_proj = nn.Parameter(torch.zeros(4, 32, 47))
    return model


def miscounted() -> nn.Module:
    model = hf_model("qwen3_moe")
    model.get_submodule("model.layers.1.mlp.experts").num_experts = 5
    return model


@pytest.mark.parametrize(
    ("model", "error"),
    [
        (
            lambda: nn.Sequential(nn.Linear(2, 2)),
            "Sequential has no experts: supported are MixtralExperts, Qwen2MoeExperts",
        ),
        (lambda: hf_model(DENSE_KIND), "^Qwen2MoeForCausalLM has no experts: supported are MixtralExperts"),
        (emptied, "^model.layers.0.mlp is a MixtralSparseMoeBlock, and experts of this class are not supported"),
        (
            strange,
            "model.layers.1.mlp.experts is a StrangeExperts, and experts of this class are not supported",
        ),
        (lambda: nn.Sequential(MoEBlock()), "0 is a MoEBlock, and experts of this class are not supported"),
        (lambda: holdfast.MoE(4, 4, 2), "MoE has elastic experts already"),
        (lambda: elastic_experts(hf_model("mixtral")), "MixtralForCausalLM has elastic experts already"),
        (lambda: without("down_proj_bias"), "no parameter 'down_proj_bias': its weights do not match GptOssExperts"),
        (reshaped, r"model.layers.1.mlp.experts: the experts' weights do not match: w1 \(4, 96, 32\)"),
        (miscounted, "is for 5 experts, but its weights are of 4"),
        (lambda: hf_model("qwen2_moe").to("meta"), "not loaded yet"),
    ],
)
def test_a_model_that_cannot_be_converted_is_refused_unchanged(model: object, error: str) -> None:
    given: nn.Module = model()  # type: ignore[operator]
    before = [type(module) for module in given.modules()]
    with pytest.raises(BadInputError, match=error) as refusal:
        elastic_experts(given)
    assert "\n" not in str(refusal.value)
    assert [type(module) for module in given.modules()] == before


def test_a_bias_rate_for_a_model_without_a_bias_is_refused() -> None:
    with pytest.raises(BadInputError, match="no buffer 'e_score_correction_bias'"):
        elastic_experts(hf_model("mixtral"), bias_rate=0.1)


@pytest.mark.parametrize("order", [[1, 0, 3, 2], [2, 0, 3, 1]])
def test_experts_in_permuted_rows_are_restored_in_order(order: list[int]) -> None:
    model, wanted = elastic_experts(hf_model("mixtral")), hf_model("mixtral").state_dict()
    for layer in moe_layers(model):
        layer.experts.row_experts = tuple(order)
        for weight in layer.experts.weights().values():
            weight.data = weight.data[order]
    plain = plain_experts(model).state_dict()
    assert all(torch.equal(plain[name], tensor) for name, tensor in wanted.items())


def test_rows_without_an_expert_are_omitted_from_the_plain_model() -> None:
    model, wanted = elastic_experts(hf_model("mixtral")), hf_model("mixtral").state_dict()
    shards = ExpertShards(moe_layers(model))
    for layer in range(2):
        shards.rearrange(layer, range(4), rows=6)
    plain = plain_experts(model).state_dict()
    assert all(torch.equal(plain[name], tensor) for name, tensor in wanted.items())


def test_a_model_with_experts_on_other_workers_cannot_be_made_plain() -> None:
    model = elastic_experts(hf_model("mixtral"))
    ExpertShards(moe_layers(model)).rearrange(1, [0, 3], rows=2)
    with pytest.raises(BadInputError, match=r"layers.1.mlp.experts: experts \[1, 2\] of 4 live on other workers"):
        plain_experts(model)
    assert len(moe_layers(model)) == 2, "a layer was changed"


def test_a_model_without_elastic_experts_cannot_be_made_plain() -> None:
    with pytest.raises(BadInputError, match="MixtralForCausalLM has no elastic experts"):
        plain_experts(hf_model("mixtral"))
