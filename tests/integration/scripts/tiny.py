"""Trains a tiny model with steps of milliseconds; writes its losses if requested."""

from __future__ import annotations

import argparse
import json
import os
import time
from functools import partial

import torch
from averaging import Averaging

import holdfast
from holdfast.runtime.groups.communicator import OPERATION_S
from holdfast.runtime.session import building

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--global-batch", type=int, default=24)
parser.add_argument("--micro-batch", type=int, default=4)
parser.add_argument("--step-seconds", type=float, default=0.0, help="make a step of one worker take this long")
parser.add_argument("--gate", help="wait before each step N of --gate-at until the file GATE-N exists")
parser.add_argument("--gate-at", type=int, nargs="+", default=[5])
parser.add_argument("--hidden", type=int, default=32, help="the width of the model")
parser.add_argument("--timeout", type=float, default=OPERATION_S, help="timeout of a collective, in seconds")
parser.add_argument("--hang-at", type=int, default=0, help="node-1 hangs in this step, in every attempt")
parser.add_argument("--pause-at", type=int, default=0, help="rank 0 pauses before this step")
parser.add_argument("--pause-seconds", type=float, default=1.0)
parser.add_argument("--dtype", default="float64")
parser.add_argument("--raise-at", type=int, default=0, help="after_apply raises at this step")
parser.add_argument("--raise-on", type=int, help="the rank that raises (default: all)")
parser.add_argument("--loader-workers", type=int, default=0)
parser.add_argument("--stop-at", type=int, default=0, help="rank 1 stops the job after this step")
parser.add_argument("--held-back", nargs=2, metavar=("NODE", "FILE"), help="NODE does not start while FILE exists")
parser.add_argument("--cold", action="store_true", help="raise in every shadow step")
parser.add_argument("--losses", help="write this worker's view of the losses here")
args = parser.parse_args()

if args.held_back:
    while f'"worker":"{args.held_back[0]}/' in os.environ["HOLDFAST_WORKER"] and os.path.exists(args.held_back[1]):
        time.sleep(0.01)
building.build_communicator = partial(building.build_communicator, timeout_s=args.timeout)
torch.manual_seed(0)
dtype = getattr(torch, args.dtype)
generator = torch.Generator().manual_seed(1)
x = torch.randn(96, 8, generator=generator, dtype=dtype)
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True).sin())

job = holdfast.init()
layers = torch.nn.Linear(8, args.hidden), torch.nn.Dropout(0.1), torch.nn.ReLU(), torch.nn.Linear(args.hidden, 1)
model = torch.nn.Sequential(*layers).to(job.device, dtype)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
averaging = Averaging(job, model[-1], args.raise_at, args.raise_on)
job.protect(
    model,
    optimizer,
    data,
    global_batch=args.global_batch,
    micro_batch=args.micro_batch,
    num_workers=args.loader_workers,
    max_grad_norm=1.0,
    seed=3,
    extra={"average": averaging.average},
    after_apply=averaging,
)
losses = []
for step in job.steps(args.steps):
    if args.cold and step.shadow:
        raise ValueError("no step for me")
    while args.gate and step.number in args.gate_at and not os.path.exists(f"{args.gate}-{step.number}"):
        time.sleep(0.01)
    if step.number == args.pause_at and job.rank == 0:
        with job.pause("evaluation"):
            time.sleep(args.pause_seconds)
    if step.number == args.stop_at and job.rank == 1:
        job.stop("good enough")
    for inputs, wanted in step.micro_batches():
        if step.number == args.hang_at and '"worker":"node-1/' in os.environ["HOLDFAST_WORKER"]:
            time.sleep(1e6)  # For example, a data loader waits for a file server.
        time.sleep(args.step_seconds * args.micro_batch / args.global_batch)
        step.backward(torch.nn.functional.mse_loss(model(inputs), wanted))
    if step.apply():
        losses.append(step.loss)
if args.losses:
    with open(args.losses, "w") as file:
        json.dump({"pid": os.getpid(), "losses": losses}, file)
