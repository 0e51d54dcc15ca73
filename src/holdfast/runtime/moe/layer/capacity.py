"""Expert capacity: the maximum number of a micro-batch's tokens per expert; surplus tokens skip the expert.

It is counted within each micro-batch, so that the same tokens are dropped in any world.

Shape letters: T tokens, K experts per token, E experts, A assignments (T*K), M of them kept, D model dimension.
"""

from __future__ import annotations

import math

import torch


def select_assignments(chosen_TK: torch.Tensor, experts: int, factor: float) -> torch.Tensor:
    """Return the assignments within the capacity, `(M,)`, ascending; assignment a is choice a % K of token a // K.

    Every expert computes at most `factor` times its even share, rounded up. The first choices of all tokens precede any
    second choice (GShard), and earlier tokens precede later ones.
    """
    tokens, top_k = chosen_TK.shape
    if not chosen_TK.numel():
        return chosen_TK.reshape(-1)
    room = math.ceil(factor * tokens * top_k / experts)
    by_choice_A = chosen_TK.T.reshape(-1)
    order_A = by_choice_A.argsort(stable=True)
    counts_E = torch.bincount(by_choice_A, minlength=experts)
    starts_E = counts_E.cumsum(0) - counts_E
    place_A = torch.arange(order_A.numel(), device=order_A.device) - starts_E[by_choice_A[order_A]]
    kept_M = order_A[place_A < room]
    return (kept_M % tokens * top_k + kept_M // tokens).sort().values


def gather_kept(tokens_TD: torch.Tensor, kept_M: torch.Tensor, top_k: int) -> torch.Tensor:
    """Return the token of each kept assignment, `(M, D)`."""
    # Expand to all assignments first: then no gradient is a sum of colliding rows in a device-dependent order.
    every_AD = tokens_TD.unsqueeze(1).expand(-1, top_k, -1).reshape(-1, tokens_TD.shape[1])
    return every_AD.index_select(0, kept_M)


def sum_kept(done_MD: torch.Tensor, kept_M: torch.Tensor, tokens: int, top_k: int) -> torch.Tensor:
    """Return the sum of each token's rows, `(T, D)`; zeros for a token without rows.

    Args:
        done_MD: the experts' outputs for the kept assignments.
        kept_M: the assignments, from `select_assignments`.
    """
    none_1D = done_MD.new_zeros((1, done_MD.shape[1]))
    place_A = torch.full((tokens * top_k,), done_MD.shape[0], dtype=torch.int64, device=kept_M.device)
    place_A[kept_M] = torch.arange(kept_M.numel(), device=kept_M.device)
    by_choice_TKD = torch.cat([done_MD, none_1D]).index_select(0, place_A).view(tokens, top_k, done_MD.shape[1])
    return by_choice_TKD.sum(dim=1)
