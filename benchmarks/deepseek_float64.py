"""Train the tiny DeepSeek-V3 of examples/deepseek_tiny.py entirely in float64, for benchmarks/precision.py.

transformers computes norms and routers in float32 even in a float64 model. A difference in the last bit, caused by a
different summation order, can then round a value in the other direction, which changes it by 6e-8. The losses of two
plain runs whose first weights differed by 1e-15 were 7e-9 apart within 60 steps, without holdfast. This would hide the
effect that the benchmark measures, so casts from float64 to float32 are skipped here.

    python benchmarks/deepseek_float64.py --dtype float64 [options of examples/deepseek_tiny.py]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
import deepseek_tiny


class KeepFloat64(TorchFunctionMode):
    """Ignores casts from float64 to float32."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], torch.Tensor) and args[0].dtype == torch.float64:
            if func is torch.Tensor.float:
                return args[0]
            args = [_widen(each) for each in args]
            kwargs = {name: _widen(each) for name, each in kwargs.items()}
        return func(*args, **kwargs)


def _widen(argument: Any) -> Any:
    return torch.float64 if argument is torch.float32 else argument


def main() -> None:
    """Train as the example does."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds to wait in each micro-batch, for tests")
    own, sys.argv[1:] = parser.parse_known_args()
    plain_loss = deepseek_tiny.loss_of

    def loss_of(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        time.sleep(own.pause)
        return plain_loss(model, batch)

    deepseek_tiny.loss_of = loss_of
    with KeepFloat64():
        deepseek_tiny.main()


if __name__ == "__main__":
    main()
