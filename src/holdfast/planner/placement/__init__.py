"""Expert placement for inference engines, with the signature and the arrays of EPLB.

Users import it as `holdfast.placement`. The functions take and return numpy arrays or torch tensors, without importing
torch.

- `rebalance_experts`: called as DeepSeek's EPLB, and with the same result arrays. Without options, the busiest GPU is
  never busier than with EPLB. Options put each expert on several nodes or racks, limit moves, and leave out lost ranks.
- `repair`: a placement for the remaining ranks after a loss. All ranks compute the same one, without communication.
- `VllmPolicy`, `sglang_rebalance_experts`: the interfaces that vLLM and SGLang call.
"""

from holdfast.planner.placement.engines import VllmPolicy as VllmPolicy
from holdfast.planner.placement.engines import sglang_rebalance_experts as sglang_rebalance_experts
from holdfast.planner.placement.rebalance import rebalance_experts as rebalance_experts
from holdfast.planner.placement.repairing import RepairedPlacement as RepairedPlacement
from holdfast.planner.placement.repairing import repair as repair
