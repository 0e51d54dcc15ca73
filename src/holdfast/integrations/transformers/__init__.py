"""Mixture-of-Experts models of Hugging Face's transformers, converted to elastic experts and back."""

from __future__ import annotations

from holdfast.integrations.transformers.convert import elastic_experts, plain_experts

__all__ = ["elastic_experts", "plain_experts"]
