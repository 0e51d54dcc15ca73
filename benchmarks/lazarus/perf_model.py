"""Computes the time of DeepSeek-V3's layers on a GPU, with shallowsim's formulae for prefill and its recorded numbers.

Times are ms for one sequence on `tp` GPUs of a node. Loads are balanced; a GPU with more load takes proportionally
longer. The source has no backward pass; `figure_13.py` states how it is modelled.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

MIB = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerTimes:
    """Times of one layer in ms: attention on one GPU and on `tp` GPUs, a dense MLP, and the parts of an MoE."""

    attention: float
    attention_tp: float
    dense: float
    shared: float
    routed: float
    dispatch: float
    combine: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PerfModel:
    """One GPU and the model's dimensions."""

    dims: dict[str, float]
    gpu: dict[str, float]
    constants: dict[str, Any]

    @classmethod
    def read(cls, file: Path, gpu: str = "H200") -> Self:
        """Read one GPU from the recorded numbers."""
        whole: dict[str, Any] = json.loads(file.read_text())
        return cls(dims=whole["model_dims"], gpu=whole["gpu_table"][gpu], constants=whole["constants"])

    def layer(self, tokens: int, *, tp: int, dp: int, kv_hit: float = 0.0) -> LayerTimes:
        """Return the times for sequences of this many tokens on `dp` groups of `tp` GPUs."""
        whole, spread = self._attention(tokens, tp, kv_hit)
        expert = 3 * self.dims["dim"] * self.dims["moe_inter"]
        shared = self._gemm(tokens / tp * expert) + self._load(expert)
        held = self.dims["experts"] / dp / tp
        routed = self._gemm(tokens * self.dims["topk"] / tp * expert) + self._load(expert) * held
        mlp = 3 * self.dims["dim"] * self.dims["inter"]
        dispatch, combine = self._all_to_all(tokens, tp)
        return LayerTimes(
            attention=whole,
            attention_tp=spread,
            dense=self._gemm(tokens * mlp) + self._load(mlp),
            shared=shared,
            routed=routed,
            dispatch=dispatch,
            combine=combine,
        )

    # ---- inside ----

    def _rate(self, precision: str) -> float:
        """Return GFLOP per ms."""
        free = (self.gpu["sm"] - self.gpu["comm_sm"]) / self.gpu["sm"]
        return self.gpu[precision] * self.constants["efficiency"] * free

    def _gemm(self, multiplications: float) -> float:
        return 2e-9 * multiplications / self._rate("fp8")

    def _load(self, weights: float) -> float:
        return weights / MIB / (self.gpu["mem_bw"] * self.constants["efficiency"])

    def _attention(self, tokens: int, tp: int, kv_hit: float) -> tuple[float, float]:
        """Return the time on one GPU and on `tp` GPUs."""
        d = self.dims
        query = d["dim"] * d["q_lora"] + d["q_lora"] * d["heads"] * (d["nope"] + d["rope"])
        down = d["dim"] * (d["kv_lora"] + d["rope"])
        up = d["kv_lora"] * d["heads"] * (d["nope"] + d["v"])
        out = d["heads"] * d["v"] * d["dim"]
        scores = d["heads"] * tokens * tokens * (d["rope"] + d["nope"] + d["v"])
        discount = self.constants["mla_discount"]
        gemm = self._gemm(tokens * (query + down * (1 - kv_hit) + up)) / discount
        attention = 2e-9 * (scores + tokens * out) / self._rate("fp16") / discount
        alone = gemm + attention + self._load(query + down + up + out)
        reduced = tokens * d["dim"] * 2 / MIB / (self.gpu["nvlink_bw"] * self.constants["efficiency"])
        return alone, alone / tp + reduced + self.constants["tp_allreduce_static_ms"] + self.constants["mla_static_ms"]

    def _all_to_all(self, tokens: int, tp: int) -> tuple[float, float]:
        """Return the times of dispatch and combine between nodes."""
        per_node = self.gpu["gpu_per_node"]
        others = self.constants["dispatch_nodes_max"] - 1
        size = others * (per_node / tp) * tokens * self.dims["topk"] / per_node * self.dims["dim"] / MIB
        rate = self.gpu["pcie_bw"] * self.constants["efficiency"] * per_node
        static = self.constants["prefill_a2a_static_ms"]
        # Halved as in the source, which assumes FP4 on every GPU.
        return size / 2 / rate + static, 2 * size / rate + static
