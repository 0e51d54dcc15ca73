"""Hugging Face's transformers: Mixture-of-Experts models made elastic, and plain again."""

from __future__ import annotations

from holdfast.integrations.transformers.convert import elastic_experts, plain_experts

__all__ = ["elastic_experts", "plain_experts"]
