"""Objects that a script may not protect: refused before training, with one sentence that says what to do instead."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import TensorDataset

from holdfast import MoE
from holdfast.errors import BadInputError
from holdfast.runtime.session.job import Job

DATA = TensorDataset(torch.zeros(8, 2))


def protect(model: torch.nn.Module, optimizer: Any = None, **options: Any) -> None:
    optimizer = optimizer or SGD(model.parameters(), lr=0.1)
    Job(None).protect(model, optimizer, DATA, global_batch=4, micro_batch=2, **options)


def other() -> SGD:
    return SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)


@pytest.mark.parametrize(
    ("thing", "words"),
    [
        (other, r"extra\['x'\] is an optimizer, which would never step: give all of them by name"),
        (lambda: LambdaLR(other(), lambda _: 1.0), r"extra\['x'\] is a LambdaLR of an optimizer that is not protected"),
    ],
)
def test_an_extra_that_would_have_no_effect_is_refused(thing: Callable[[], object], words: str) -> None:
    with pytest.raises(BadInputError, match=words) as caught:
        protect(torch.nn.Linear(2, 2), extra={"x": thing()})
    assert "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def group() -> Iterator[None]:
    """A process group of one, as in a script for torchrun."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def made() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 2))


def tensor_parallel() -> nn.Module:
    model = made()
    sharded = distribute_tensor(model[0].weight.detach(), init_device_mesh("cpu", (1,)), [Shard(0)])
    model[0].weight = nn.Parameter(sharded)
    return model


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(
    ("wrapped", "words"),
    [
        (lambda: DistributedDataParallel(made()), "the model is torch's DistributedDataParallel: drop the wrapper"),
        (lambda: nn.Sequential(DistributedDataParallel(made())), "module '0' is torch's DistributedDataParallel: drop"),
        (lambda: DataParallel(made()), "the model is torch's DataParallel: drop the wrapper"),
        (
            lambda: fully_shard(made()),
            "the model is torch's FSDPModule: every worker holds the whole model; leave fully_shard",
        ),
        (
            lambda: FullyShardedDataParallel(made(), device_id=torch.device("cpu")),
            "the model is torch's FullyShardedDataParallel: drop the wrapper",
        ),
        (tensor_parallel, r"parameter '0\.weight' is a DTensor: every worker holds the whole model"),
        (lambda: nn.SyncBatchNorm(2), "the model is torch's SyncBatchNorm: leave convert_sync_batchnorm"),
        (lambda: made().to("meta"), r"parameter '0\.weight' is on meta and .* is cpu: call model\.to\(job\.device\)"),
        (lambda: nn.LazyLinear(2), "parameter 'weight' has no shape yet: let a batch run"),
    ],
)
@pytest.mark.filterwarnings("ignore")  # Some of these cause torch's own warnings.
def test_a_model_wrapped_by_another_framework_is_refused(wrapped: Callable[[], nn.Module], words: str) -> None:
    optimizer = SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    with pytest.raises(BadInputError, match=words) as caught:
        protect(wrapped(), optimizer)
    assert "\n" not in str(caught.value)


def shared(model: nn.Sequential, first: slice, second: slice) -> nn.Sequential:
    flat = torch.zeros(20)
    model[0].weight = nn.Parameter(flat[first].view(4, 2))
    model[1].weight = nn.Parameter(flat[second].view(2, 4))
    return model


def test_parameters_with_overlapping_memory_are_refused() -> None:
    with pytest.raises(BadInputError, match=r"parameters '0\.weight' and '1\.weight' share memory: give each its own"):
        protect(shared(made(), slice(8), slice(7, 15)))
    model = made()
    model[0].bias = nn.Parameter(torch.zeros(1).expand(4))
    with pytest.raises(BadInputError, match=r"parameter '0\.bias' repeats elements in memory"):
        protect(model)
    protect(shared(made(), slice(8), slice(8, 16)))
    tied = made()
    tied[1] = tied[0]
    protect(tied)


@pytest.fixture
def compiles() -> Iterator[None]:
    """Reset torch.compile, so that later tests in this process are not affected."""
    yield
    torch.compiler.reset()


@pytest.mark.usefixtures("compiles")
def test_a_compiled_function_as_the_model_is_refused() -> None:
    model = made()
    compiled: Any = torch.compile(lambda x: model(x), backend="eager")
    with pytest.raises(BadInputError, match=r"the model is a function: give the torch\.nn\.Module .* in the loop"):
        protect(compiled, SGD(model.parameters(), lr=0.1))


@pytest.mark.usefixtures("compiles")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_checkpoints_of_compiled_and_plain_models_are_interchangeable(tmp_path: Path) -> None:
    """With all of it compiled, one layer, or the loop's function: checkpoints are interchangeable."""

    def train(steps: int, directory: str, compiled: str = "") -> list[torch.Tensor]:
        torch.manual_seed(0)
        model: Any = made()
        if compiled == "layer":
            model[0] = torch.compile(model[0], backend="eager")
        net: Any = torch.compile(model, backend="eager") if compiled in ("model", "called") else model
        if compiled == "model":
            model = net
        job = Job(None, checkpoint_dir=directory, checkpoint_every=2)
        data = TensorDataset(torch.arange(16.0).view(8, 2))
        job.protect(model, SGD(model.parameters(), lr=0.01), data, global_batch=4, micro_batch=2)
        for step in job.steps(steps):
            for (x,) in step.micro_batches():
                step.backward(net(x).square().mean())
            assert step.apply()
        return [parameter.detach() for parameter in model.parameters()]

    whole = train(4, "")
    for steps, compiled in enumerate(("model", "layer", "called", ""), start=1):
        found = train(steps, str(tmp_path), compiled)
    assert all(here.equal(there) for here, there in zip(found, whole, strict=True))


def test_experts_outside_the_model_are_refused() -> None:
    """They would not migrate with the model's experts, and fail at the first step after a placement."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), MoE(2, 4, experts=2))
    average = torch.optim.swa_utils.AveragedModel(model)
    with pytest.raises(BadInputError, match=r"extra\['ema'\] has experts \(holdfast.MoE\): experts of the model move"):
        protect(model, extra={"ema": average})
    protect(model, extra={"ema": torch.optim.swa_utils.AveragedModel(model[0])})
