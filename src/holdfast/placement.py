"""Expert placement for inference engines: the public name of `holdfast.planner.placement`."""

from holdfast.planner.placement import RepairedPlacement as RepairedPlacement
from holdfast.planner.placement import VllmPolicy as VllmPolicy
from holdfast.planner.placement import rebalance_experts as rebalance_experts
from holdfast.planner.placement import repair as repair
from holdfast.planner.placement import sglang_rebalance_experts as sglang_rebalance_experts
