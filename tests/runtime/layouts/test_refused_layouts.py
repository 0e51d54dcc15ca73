"""Misuse of layouts, refused with one sentence that says what to do instead."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.utils.data import TensorDataset

from holdfast.control.link.solo_exit import SoloExitHook
from holdfast.errors import BadInputError
from holdfast.protocol.layouts.layout import Layout
from holdfast.protocol.plan import Role
from holdfast.runtime.layouts.mesh import ReplicaMesh
from holdfast.runtime.layouts.sharded import check_spread
from holdfast.runtime.session.job import Job, init

DATA = TensorDataset(torch.zeros(8, 2))


@pytest.fixture(autouse=True)
def _no_groups_left() -> Iterator[None]:
    yield
    if distributed.is_initialized():
        distributed.destroy_process_group()


def made() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 2))


def protect(job: Job, model: nn.Module) -> None:
    job.protect(model, SGD(model.parameters(), lr=0.1), DATA, global_batch=4, micro_batch=2)


def ddp(model: nn.Module, job: Job) -> nn.Module:
    return DistributedDataParallel(model, process_group=job.mesh.get_group("shard"))


def ddp_inside(model: nn.Module, job: Job) -> nn.Module:
    return nn.Sequential(ddp(model, job))


def on_another_mesh(model: nn.Module, _: Job) -> nn.Module:
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    return model


def as_it_is(model: nn.Module, _: Job) -> nn.Module:
    return model


@pytest.mark.parametrize(
    ("wrapped", "words"),
    [
        (ddp, "the model is torch's DistributedDataParallel: drop the wrapper"),
        (ddp_inside, "module '0' is torch's DistributedDataParallel: drop"),
        (on_another_mesh, r"parameter '0\.weight' is sharded over another mesh than the job's"),
        (as_it_is, r"parameter '0\.weight' is not sharded"),
    ],
)
def test_a_model_not_sharded_according_to_the_layout(
    wrapped: Callable[[nn.Module, Job], nn.Module], words: str
) -> None:
    """In a replica group of several ranks, the error names the wrapper that hides an unsharded parameter."""
    job = Job(None, layout=Layout())
    model = wrapped(made(), job)
    untyped: Any = job
    untyped._spread._replica.layout = Layout(shard=2)
    with pytest.raises(BadInputError, match=words) as caught:
        protect(job, model)
    assert "\n" not in str(caught.value)


def test_a_mesh_with_destroyed_groups() -> None:
    """The script created its own mesh first, and torch can no longer name that mesh's groups."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    model = made()
    fully_shard(model, mesh=init_device_mesh("cpu", (1,), mesh_dim_names=("own",)))
    distributed.destroy_process_group()
    job = Job(None, layout=Layout())
    with pytest.raises(BadInputError, match=r"parameter '0\.weight' is sharded over another mesh than the job's"):
        protect(job, model)


def test_an_equal_mesh_destroyed_earlier_does_not_disturb_training() -> None:
    """DTensor's caches refer to the mesh that first ran an operation, and that mesh's groups are gone."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    fully_shard(made(), mesh=init_device_mesh("cpu", (1, 1), mesh_dim_names=("shard", "tensor"))["shard"])
    distributed.destroy_process_group()
    job, model = Job(None, layout=Layout()), made()
    fully_shard(model, mesh=job.mesh["shard"])
    protect(job, model)
    for step in job.steps(1):
        for (inputs,) in step.micro_batches():
            step.backward(model(inputs).square().mean())
        assert step.apply()


def test_a_sharding_that_checkpoints_cannot_describe() -> None:
    """Without this check, the error would come with the first checkpoint, hours later."""
    job, model = Job(None, layout=Layout()), made()
    untyped: Any = DTensor
    part = untyped.from_local(
        torch.zeros(3, 2), job.mesh["tensor"], [Shard(0)], run_check=False, shape=torch.Size((4, 2)), stride=(2, 1)
    )
    model[0].weight = nn.Parameter(part)
    with pytest.raises(BadInputError, match=r"parameter '0\.weight', of the shape \(4, 2\), is sharded as tensor"):
        protect(job, model)


def test_fully_shard_over_a_mesh_created_by_the_script() -> None:
    """As without holdfast: then the groups are torch's default group, which has no connections here."""
    replica, model = ReplicaMesh(Layout(shard=2), Role(place=1), torch.device("cpu")), made()
    try:
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        with pytest.raises(
            BadInputError, match=r"the model is wrapped by fully_shard\(\) over another mesh than the job's"
        ):
            check_spread(model, replica)
    finally:
        replica.close()


@pytest.mark.parametrize(
    ("layout", "dimensions"),
    [(Layout(tensor=2), "tensor"), (Layout(shard=2, tensor=2), "tensor"), (Layout(shard=2), ("shard", "tensor"))],
    ids=str,
)
def test_fully_shard_along_another_dimension(layout: Layout, dimensions: str | tuple[str, ...]) -> None:
    """Ranks along tensor have the same samples, so their gradients would silently count twice."""
    replica, model = ReplicaMesh(layout, Role(place=1), torch.device("cpu")), made()
    try:
        fully_shard(model, mesh=replica.mesh["shard"])
        check_spread(model, replica)
        model = made()
        fully_shard(model[1], mesh=replica.mesh[dimensions])
        fully_shard(model, mesh=replica.mesh["shard"])
        with pytest.raises(
            BadInputError, match=r"module '1' is wrapped by fully_shard\(\) with another dimension than"
        ):
            check_spread(model, replica)
    finally:
        replica.close()


def test_gathered_parameters_of_a_forward_pass_affect_no_later_step() -> None:
    """FSDP2 keeps gathered parameters until a backward pass; an extra forward pass must have no effect."""

    def losses(*, spread: bool, looks: bool) -> list[float]:
        torch.manual_seed(1)
        job, model, found = Job(None, layout=Layout()), made(), []
        if spread:
            fully_shard(model, mesh=job.mesh["shard"])
        data = TensorDataset(torch.rand(8, 2))

        def observe(_: object) -> None:
            with torch.no_grad():
                found.append(float(model(data.tensors[0]).sum()))

        job.protect(model, SGD(model.parameters(), lr=0.1), data, global_batch=4, micro_batch=2, after_apply=observe)
        for step in job.steps(4):
            for (inputs,) in step.micro_batches():
                step.backward(model(inputs).square().mean())
                if looks:
                    observe(step)
            step.apply()
            found.append(step.loss)
        distributed.destroy_process_group()
        return [one for number, one in enumerate(found) if not looks or number % 4 > 1]

    assert losses(spread=True, looks=True) == losses(spread=False, looks=False)


def sharded(module: nn.Module, job: Job) -> None:
    fully_shard(module, mesh=job.mesh["shard"])


def replaced(module: nn.Module, _: Job) -> None:
    module.weight = nn.Parameter(torch.zeros(2, 4))


@pytest.mark.parametrize(("layout", "change"), [(Layout(), sharded), (None, replaced)])
def test_parameters_replaced_after_protect(layout: Layout | None, change: Callable[[nn.Module, Job], None]) -> None:
    """The replaced parameters would never be trained, because sums and optimizer steps use the old ones."""
    job, model = Job(None, layout=layout), made()
    protect(job, model)
    change(model[1], job)
    with pytest.raises(BadInputError, match=r"parameter '1\.weight' is not the one that job\.protect\(\) was given"):
        next(iter(job.steps(1)))


def test_parameters_replaced_after_the_optimizer_was_created() -> None:
    job, model = Job(None, layout=Layout()), made()
    optimizer = SGD(model.parameters(), lr=0.1)
    sharded(model, job)
    with pytest.raises(BadInputError, match=r"make it after all functions that replace parameters \(fully_shard, "):
        job.protect(model, optimizer, DATA, global_batch=4, micro_batch=2)


def test_invalid_calls_of_materialize() -> None:
    job, model, wrong = Job(None, layout=Layout()), made(), cast(Any, "reset")
    with pytest.raises(BadInputError, match=r"is given a str: give the torch\.nn\.Module"):
        job.materialize(wrong)
    with pytest.raises(BadInputError, match=r"job\.materialize\(model, 'reset'\): give functions of a module"):
        job.materialize(model, wrong)
    protect(job, model)
    with pytest.raises(BadInputError, match=r"call job\.materialize\(\.\.\.\) before job\.protect\(\.\.\.\)"):
        job.materialize(model)


def test_an_invalid_layout_ends_a_standalone_script_as_bad_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    wrong: Any = (2, 1)
    with pytest.raises(BadInputError, match=r"holdfast\.init\(layout=\(2, 1\)\) is a tuple: give holdfast\.Layout\("):
        init(layout=wrong)
    assert isinstance(sys.excepthook, SoloExitHook)
