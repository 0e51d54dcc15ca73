"""`rebalance_experts` with the signatures that vLLM and SGLang call.

Axes: L layers, E experts, R slots.
"""

from __future__ import annotations

from typing import Any

from holdfast.planner.placement.rebalance import rebalance_experts
from holdfast.planner.placement.tensors import sum_over_steps


class VllmPolicy:
    """A policy for vLLM's `EplbState`, which uses the class without an instance.

    Subclass it to set options that vLLM does not pass.
    """

    fault_threshold: int = 1
    racks: Any = None
    move_budget: int | None = None

    @classmethod
    def rebalance_experts(
        cls,
        weight: Any,
        num_replicas: int,
        num_groups: int,
        num_nodes: int,
        num_ranks: int,
        old_global_expert_indices: Any = None,
    ) -> Any:
        """Return the expert in each slot `(L, R)`; arguments as for `holdfast.planner.placement.rebalance_experts`."""
        return rebalance_experts(
            weight,
            num_replicas,
            num_groups,
            num_nodes,
            num_ranks,
            fault_threshold=cls.fault_threshold,
            racks=cls.racks,
            move_budget=cls.move_budget,
            old_indices=old_global_expert_indices,
        )[0]


def sglang_rebalance_experts(
    weight: Any,
    num_replicas: int,
    num_groups: int | None,
    num_nodes: int,
    num_gpus: int,
    enable_hierarchical: bool,
    active_ranks: Any = None,
    *,
    fault_threshold: int = 1,
    move_budget: int | None = None,
    old_indices: Any = None,
) -> tuple[Any, Any, Any]:
    """Balance as SGLang's algorithms `deepseek` and, with `active_ranks`, `elasticity_aware`.

    `weight` is `(L, E)`, or `(steps, L, E)` as SGLang records it; steps are summed. Its types, and the results, are as
    for `holdfast.planner.placement.rebalance_experts`. Without `enable_hierarchical` or `num_groups`, all experts are
    one group.
    """
    groups = num_groups if enable_hierarchical and num_groups is not None else 1
    return rebalance_experts(
        sum_over_steps(weight),
        num_replicas,
        groups,
        num_nodes,
        num_gpus,
        fault_threshold=fault_threshold,
        move_budget=move_budget,
        old_indices=old_indices,
        active_ranks=active_ranks,
    )
