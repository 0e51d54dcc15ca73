"""A training script whose rank 1 fails once at a step: out of memory, a wrong index, or an illegal memory access.

holdfast run --nodes 3 benchmarks/gpu_check/failing_gpt.py --fail memory --at 5 --marker FILE --steps 20
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

import holdfast

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "examples"))

#: A kernel that reads an unmapped address. torch compiles it with NVRTC, which needs no compiler.
READ_ADDRESS_8 = "template <typename T> T read_address_8(T x) { return x + *(const volatile T*)8; }"


def main() -> None:
    """Train, and fail once."""
    from dense_gpt import GPT, Bytes, argument_parser, loss_of, read_text

    parser = argument_parser(__doc__)
    parser.add_argument("--fail", choices=["memory", "index", "access"], required=True)
    parser.add_argument("--at", type=int, required=True, help="the step that fails")
    parser.add_argument("--marker", type=Path, required=True, help="file that is created by the failure")
    options = parser.parse_args()
    torch.manual_seed(options.seed)  # pyright: ignore[reportUnknownMemberType] - torch leaves it untyped
    job = holdfast.init()
    model = GPT(options.layers, options.dim, options.heads, options.context).to(job.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    data = Bytes(read_text(options.text), options.context)
    job.protect(model, optimizer, data, global_batch=options.global_batch, micro_batch=options.micro_batch)
    for step in job.steps(options.steps):
        for batch in step.micro_batches():
            if step.number == options.at and job.rank == 1 and not step.shadow and not options.marker.exists():
                options.marker.touch()
                _fail(options.fail, job.device)
            step.backward(loss_of(model, batch))
        step.apply()


def _fail(kind: str, device: torch.device) -> None:
    if kind == "memory":
        torch.empty(1 << 50, dtype=torch.uint8, device=device)
        return
    rows = torch.zeros(4, device=device)
    if kind == "index":
        # An assertion in the kernel fails.
        rows = rows[torch.tensor([1 << 20], device=device)]
    else:
        untyped: Any = torch.cuda
        rows = untyped.jiterator._create_jit_fn(READ_ADDRESS_8)(rows)
    # A GPU reports the error only when the result is read.
    print(rows.sum().item())


if __name__ == "__main__":
    main()
