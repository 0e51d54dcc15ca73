"""The model of examples/moe_gpt.py with recorded expert assignments instead of the gate's choices.

    python benchmarks/fixed_routing.py --record FILE.npz [arguments of the example]
    holdfast run benchmarks/fixed_routing.py --routing FILE.npz [arguments of the example]

`precision.py` trains it. If two experts score nearly equal, rounding may change the gate's choice, and the loss then
differs by more than rounding. Here the choices of the untrained gate on the job's own text are recorded once, so that
two runs differ by rounding alone. The gate's weights are still learned.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import holdfast
from holdfast.runtime.moe.gates.routing import RecordedRouting
from holdfast.runtime.moe.layer.expert_layer import moe_layers
from holdfast.runtime.moe.layer.moe_layer import MoE
from holdfast.runtime.tensors import seed_all

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from moe_gpt import Bytes, MoEGPT, loss_of, parse_arguments, read_text

#: Samples whose tokens are routed for the record.
RECORDED_SAMPLES = 64


def main() -> None:
    """Record the assignments or train with them, depending on the options."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--record", type=Path)
    parser.add_argument("--routing", type=Path)
    own, sys.argv[1:] = parser.parse_known_args()
    args = parse_arguments()
    seed_all(args.seed)
    dataset = Bytes(read_text(args.text), args.context)
    job = holdfast.init()
    model = MoEGPT(args).to(job.device, torch.float64 if args.dtype == "float64" else torch.float32)
    if own.record is not None:
        record_routing(model, dataset, own.record)
        return
    use_recorded_routing(model, own.routing)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    batches = {"global_batch": args.global_batch, "micro_batch": args.micro_batch}
    job.protect(model, optimizer, dataset, **batches, seed=args.seed, max_grad_norm=1.0)
    for step in job.steps(args.steps):
        for batch in step.micro_batches():
            step.backward(loss_of(model, batch, args.dtype))
        step.apply()


def record_routing(model: MoEGPT, dataset: Bytes, file: Path) -> None:
    """Write each layer's choices, `(tokens, top_k)`, for the first samples of the text."""
    chosen: dict[str, list[torch.Tensor]] = {}
    for layer, moe in enumerate(moe_layers(model)):
        rows = chosen.setdefault(f"layer{layer}", [])
        assert isinstance(moe, MoE)
        moe.gate.register_forward_hook(_recorder(rows))
    with torch.no_grad():
        for sample in range(min(RECORDED_SAMPLES, len(dataset))):
            model(dataset[sample][0].unsqueeze(0))
    arrays: dict[str, Any] = {name: torch.cat(rows).numpy() for name, rows in chosen.items()}
    np.savez(file, **arrays)


def _recorder(rows: list[torch.Tensor]) -> Callable[[torch.nn.Module, Any, Any], None]:
    return lambda _gate, _input, choice: rows.append(choice.experts)


def use_recorded_routing(model: MoEGPT, file: Path) -> None:
    """Make each layer use its recorded assignments."""
    with np.load(file) as recorded:
        for layer, moe in enumerate(moe_layers(model)):
            assert isinstance(moe, MoE)
            moe.routing = RecordedRouting(recorded[f"layer{layer}"], seed=layer)


if __name__ == "__main__":
    main()
