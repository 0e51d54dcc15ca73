"""Gates compared with plain versions of the papers' formulas, and their refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from holdfast.errors import BadInputError
from holdfast.runtime.moe.gates.gate import Choice, TopKGate, check_choice
from holdfast.runtime.moe.gates.router import Router, jitter_stream

LOGITS = torch.randn(40, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_weights_are_normalised_unless_each_token_has_one_expert() -> None:
    two = TopKGate(8, 2)(LOGITS)
    assert torch.allclose(two.weights.sum(1), torch.ones(40, dtype=torch.float64))
    one = TopKGate(8, 1)(LOGITS)
    assert torch.equal(one.weights[:, 0], LOGITS.softmax(1).max(1).values)
    plain = TopKGate(8, 2, normalise=False, scale=2.5)(LOGITS)
    assert torch.allclose(plain.weights, 2.5 * LOGITS.softmax(1).topk(2).values)


def test_a_fixed_choice_keeps_the_gates_weights() -> None:
    chosen = torch.tensor([[3, 1]] * 40)
    choice = TopKGate(8, 2)(LOGITS, chosen)
    shares = LOGITS.softmax(1)[:, [3, 1]]
    assert torch.equal(choice.experts, chosen)
    assert torch.allclose(choice.weights, shares / shares.sum(1, keepdim=True))


def deepseek_v3(logits: torch.Tensor, bias: torch.Tensor, groups: int, kept: int, top_k: int) -> list[dict[int, float]]:
    """Choose token by token; return each token's weights by expert, normalised and times 2.5."""
    found = []
    for scores in logits.sigmoid().tolist():
        biased = [score + b for score, b in zip(scores, bias.tolist(), strict=True)]
        size = len(scores) // groups
        members = [range(g * size, (g + 1) * size) for g in range(groups)]
        value = [sum(sorted((biased[e] for e in group), reverse=True)[:2]) for group in members]
        best = sorted(range(groups), key=lambda g: -value[g])[:kept]
        allowed = [e for g in best for e in members[g]]
        chosen = sorted(allowed, key=lambda e: -biased[e])[:top_k]
        total = sum(scores[e] for e in chosen)
        found.append({e: 2.5 * scores[e] / total for e in chosen})
    return found


def test_sigmoid_scores_groups_and_bias_match_deepseek_v3() -> None:
    gate = TopKGate(8, 3, score="sigmoid", scale=2.5, groups=4, groups_kept=2, bias_rate=0.1).double()
    assert gate.bias is not None
    gate.bias.copy_(torch.linspace(-0.4, 0.4, 8))
    choice = gate(LOGITS)
    wanted = deepseek_v3(LOGITS, gate.bias, groups=4, kept=2, top_k=3)
    for chosen, weights, token in zip(choice.experts.tolist(), choice.weights.tolist(), wanted, strict=True):
        assert dict(zip(chosen, weights, strict=True)) == pytest.approx(token, rel=1e-12)
    assert gate(LOGITS[:0]).experts.shape == (0, 3)


def test_group_best_1_ranks_groups_by_their_best_expert_alone() -> None:
    """DeepSeek-V2: the group with the single best expert wins, although another group is better overall."""
    logits = torch.tensor([[3.0, -9.0, 2.9, 2.8]])
    assert TopKGate(4, 1, groups=2, groups_kept=1, group_best=1)(logits).experts.item() == 0
    assert TopKGate(4, 1, groups=2, groups_kept=1, group_best=2)(logits).experts.item() == 2


def test_a_single_expert_is_always_chosen() -> None:
    assert TopKGate(1, 1)(LOGITS[:, :1]).weights.tolist() == [[1.0]] * 40


def test_the_bias_favours_rarely_chosen_experts_without_changing_weights() -> None:
    gate = TopKGate(4, 1, bias_rate=0.25)
    assert gate.balancing is not None
    gate.balancing.update(torch.tensor([8, 1, 3, 4]))
    assert gate.bias is not None
    assert gate.bias.tolist() == [-0.25, 0.25, 0.25, 0.0]
    assert "bias" in gate.state_dict()
    logits = torch.tensor([[1.0, 0.9, 0.0, 0.0]])
    choice = gate(logits)
    assert choice.experts.item() == 1
    assert choice.weights.item() == pytest.approx(logits.softmax(1)[0, 1].item())


def test_the_balancing_loss_is_smallest_for_an_even_load() -> None:
    gate = TopKGate(4, 1, aux_loss=0.5)
    even = torch.arange(400).reshape(-1, 1) % 4
    # Even probabilities: E x sum(1/E x share) = 1, whatever the shares.
    assert gate(torch.zeros(400, 4), even).aux_loss.item() == pytest.approx(0.5)
    skewed = gate(torch.tensor([[0.0, 0.0, 50.0, 0.0]]), torch.tensor([[2]])).aux_loss
    assert skewed.item() == pytest.approx(2.0)
    assert TopKGate(4, 1)(torch.zeros(400, 4)).aux_loss.item() == 0.0
    own = TopKGate(4, 1, aux_loss=0.5, score="sigmoid")(torch.zeros(400, 4), even)
    assert own.aux_loss.item() == pytest.approx(0.5), "scores count as shares of their sum"


def test_the_z_loss_is_the_mean_square_of_the_logsumexp() -> None:
    logits = LOGITS.clone().requires_grad_()
    loss = TopKGate(8, 2, z_loss=0.01)(logits).aux_loss
    assert loss.item() == pytest.approx(0.01 * float(LOGITS.exp().sum(1).log().square().mean()), rel=1e-12)
    loss.backward()
    assert TopKGate(8, 2, z_loss=0.01)(LOGITS[:0]).aux_loss.item() == 0.0


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"top_k": 9}, "top_k=9"),
        ({"score": "hardmax"}, "score='hardmax'"),
        ({"groups": 3}, "8 experts cannot be divided into 3 groups"),
        ({"groups": 4, "groups_kept": 5}, "5 of 4 groups of 2 experts"),
        ({"groups": 4, "groups_kept": 1, "top_k": 3}, "enough for the 3 experts"),
        ({"groups": 4, "groups_kept": 2, "group_best": 3}, "group_best is 3: groups have 2 experts"),
        ({"aux_loss": -0.1}, "aux_loss is -0.1"),
        ({"z_loss": float("nan")}, "z_loss is nan"),
        ({"scale": 0.0}, "scale is 0.0"),
        ({"bias_rate": float("inf")}, "bias_rate is inf"),
        ({"bias_rate": "1e-3"}, "bias_rate is '1e-3': it must be a number"),
        ({"top_k": "2"}, "top_k is '2': it must be a whole number"),
        ({"groups": 2.0}, "groups is 2.0: it must be a whole number"),
    ],
)
def test_invalid_gate_options_are_refused_with_a_one_line_error(options: dict[str, Any], error: str) -> None:
    with pytest.raises(BadInputError) as refusal:
        TopKGate(**({"experts": 8, "top_k": 2} | options))
    assert error in str(refusal.value)
    assert "\n" not in str(refusal.value)


def answer(experts: Any = None, weights: Any = None, aux_loss: Any = None) -> Choice:
    return Choice(
        experts=torch.zeros(5, 2, dtype=torch.int64) if experts is None else experts,
        weights=torch.ones(5, 2) if weights is None else weights,
        aux_loss=torch.zeros(()) if aux_loss is None else aux_loss,
    )


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ((torch.zeros(5, 2), torch.ones(5, 2)), "returned a tuple: it must return a holdfast.Choice"),
        (answer(experts=torch.zeros(5, 3, dtype=torch.int64)), r"experts \(5, 3\)"),
        (answer(weights=torch.ones(4, 2)), r"weights \(4, 2\)"),
        (answer(aux_loss=torch.zeros(2)), r"an aux_loss \(2,\)"),
        (answer(experts=torch.full((5, 2), 4)), "chose expert 4: there are 4 experts, 0 to 3"),
        (answer(experts=torch.full((5, 2), -1)), "chose expert -1"),
        (answer(experts=torch.zeros(5, 2)), "experts as torch.float32"),
        (answer(weights=torch.ones(5, 2, dtype=torch.int64)), "weights as torch.int64: they must be floating-point"),
        (answer(weights=[[1.0, 1.0]] * 5), "returned weights as list: it must be a tensor"),
        (answer(aux_loss=0.5), "returned an aux_loss as float: it must be a tensor"),
    ],
)
def test_an_invalid_choice_of_a_gate_is_refused(given: object, error: str) -> None:
    with pytest.raises(BadInputError, match=error):
        check_choice(given, torch.nn.Identity(), tokens=5, top_k=2, experts=4)


def router(jitter: float) -> Router:
    return Router(16, 4, jitter=jitter, generator=torch.Generator().manual_seed(1))


def test_jitter_depends_only_on_its_stream() -> None:
    tokens, shaken = torch.randn(6, 16), router(0.1).requires_grad_(False)
    streams = [
        jitter_stream(*place) for place in ((7, 3, 2, 0), (8, 3, 2, 0), (7, 4, 2, 0), (7, 3, 1, 0), (7, 3, 2, 1))
    ]
    first = shaken(tokens, streams[0])
    torch.manual_seed(99)
    assert torch.equal(shaken(tokens, streams[0]), first), "jitter must not draw from the global generator"
    assert all(not torch.equal(shaken(tokens, other), first) for other in streams[1:])
    calm = router(0.0).requires_grad_(False)(tokens)
    assert 0 < float((first - calm).abs().max()) <= 0.1 * float((tokens.abs() @ shaken.weight.abs().T).max())
    assert torch.equal(shaken.eval()(tokens, streams[0]), calm)


def test_logits_are_never_in_half_precision() -> None:
    tokens = torch.randn(6, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = router(0.0)(tokens)
    assert torch.equal(logits, router(0.0)(tokens))
    assert router(0.0).bfloat16()(tokens.bfloat16()).dtype == torch.float32


@pytest.mark.parametrize("jitter", [-0.1, 1.0, float("nan")])
def test_invalid_jitter_is_refused(jitter: float) -> None:
    with pytest.raises(BadInputError, match="jitter is"):
        router(jitter)
