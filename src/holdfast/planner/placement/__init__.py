"""Where expert replicas live, for inference engines: EPLB's names and arrays, with failures and moves in mind.

Plain functions of numpy arrays (torch tensors are taken and given, too, and torch is not imported):

- `rebalance_experts`: DeepSeek's EPLB's signature and results, and more on request: every expert on several nodes or
  racks, few moves from the placement there is, some ranks missing.
- `repair`: what to do at once when ranks are lost; every survivor computes the same, without a word.
- `VllmPolicy`, `sglang_rebalance_experts`: the forms in which vLLM and SGLang call.
"""

from holdfast.planner.placement.engines import VllmPolicy as VllmPolicy
from holdfast.planner.placement.engines import sglang_rebalance_experts as sglang_rebalance_experts
from holdfast.planner.placement.rebalance import rebalance_experts as rebalance_experts
from holdfast.planner.placement.repairing import RepairedPlacement as RepairedPlacement
from holdfast.planner.placement.repairing import repair as repair
