"""Checks with the real torchtitan; test_titan.py runs each by name in a process forked with the package."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torchtitan.trainer
from torch.distributed.tensor import DTensor
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import IGNORE_INDEX, CrossEntropyLoss
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.models.llama3.config_registry import llama3_debugmodel

import holdfast
from holdfast.integrations.torchtitan import ElasticTrainer, JobParallelDims, TokenWindows, layout_of, trial_on_cpu
from holdfast.protocol.layouts.layout import Layout
from holdfast.protocol.plan import Role
from holdfast.runtime.layouts.mesh import ReplicaMesh
from tests.harness.local_world import Seat, run_world

LENGTH, SAMPLES, STEPS = 16, 8, 3


def config(**parallelism: Any) -> Any:
    """Return the config of the debug model with one layer on a CPU."""
    made = trial_on_cpu(llama3_debugmodel())
    made.model_spec.model.layers = made.model_spec.model.layers[:1]
    made.training.seq_len, made.training.steps = LENGTH, STEPS
    made.training.local_batch_size, made.training.global_batch_size = 2, SAMPLES
    made.metrics.log_freq, made.validator.enable = 1, False
    made.parallelism.data_parallel_shard_degree = 1
    made.parallelism.spmd_backend = "partial_dtensor"
    for name, value in parallelism.items():
        setattr(made.parallelism, name, value)
    return made


class Text(TokenWindows):
    """A text that can ignore half of the labels in every third window."""

    def __init__(self, *, ignored: bool) -> None:
        super().__init__(torch.arange(LENGTH * 64 + 1).mul(7919) % 251, LENGTH)
        self.ignored = ignored

    def __getitem__(self, number: int) -> Any:
        inputs, labels = super().__getitem__(number)
        if self.ignored and number % 3 == 0:
            labels = labels.clone()
            labels[: LENGTH // 2] = IGNORE_INDEX
        return inputs, labels


class Watched(ElasticTrainer):
    """A trainer that records the model's inputs and the log lines."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.seen: list[list[Any]] = []
        self.lines: list[Any] = []
        self.metrics.log_step = lambda line, **_: self.lines.append(line)

    def train_step(self, step: Any) -> bool:
        self.seen.append([])
        return super().train_step(step)

    def forward_backward_step(self, *, input_dict: Any, labels: Any, global_valid_tokens: Any) -> Any:
        self.seen[-1].append((input_dict["input"].clone(), input_dict["positions"].clone(), labels.clone()))
        return super().forward_backward_step(
            input_dict=input_dict, labels=labels, global_valid_tokens=global_valid_tokens
        )


def of_one_process(made: Any) -> tuple[Any, Any]:
    """Return the initial torchtitan model on one process and its loss function."""
    torch.manual_seed(0)
    made.model_spec.model.update_from_config(config=made)
    model = made.model_spec.model.build()
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    return model, CrossEntropyLoss.Config(global_vocab_size=2048).build(compile_config=made.compile)


def serial(seen: list[list[Any]]) -> list[tuple[float, float, int]]:
    """Train on one process as torchtitan's Trainer does; return each step's loss, norm and number of labels."""
    made = config()
    model, loss_fn = of_one_process(made)
    found: list[tuple[float, float, int]] = []
    optimizers = made.optimizer.build(model_parts=[model])
    schedulers = made.lr_scheduler.build(optimizers=optimizers, training_steps=STEPS)
    for batches in seen:
        optimizers.zero_grad()
        counted = sum(int((labels != IGNORE_INDEX).sum()) for _, _, labels in batches)
        total = 0.0
        for inputs, positions, labels in batches:
            loss, _ = loss_fn(model(inputs, positions=positions), labels, torch.tensor(counted))
            loss.backward()
            total += loss.item()
        # torch's own norm of half a million float32 values on a CPU has an error of 2e-4.
        norm = torch.stack([one.grad.double().norm() for one in model.parameters()]).norm()
        torch.nn.utils.clip_grad_norm_(model.parameters(), made.training.max_norm)
        optimizers.step()
        schedulers.step()
        found.append((total, norm.item(), counted))
    return found


def check_arithmetic() -> None:
    """On one process each step equals torchtitan's own trainer: loss, norm, clipping, optimizer and schedule."""
    for backend in ("partial_dtensor", "spmd_types"):
        made = config(spmd_backend=backend)
        trainer = Watched(made, holdfast.init(layout=layout_of(made)))
        trainer.train(Text(ignored=False))
        assert [line.number for line in trainer.lines] == [1, 2, 3]
        expected = serial(trainer.seen)
        assert [line.loss for line in trainer.lines] == pytest.approx([loss for loss, _, _ in expected], rel=1e-5)
        assert [line.norm for line in trainer.lines] == pytest.approx([norm for _, norm, _ in expected], rel=1e-4)
        assert [line.tokens for line in trainer.lines] == [SAMPLES * LENGTH * step for step in (1, 2, 3)]
        assert trainer.lines[1].rates == {"lr/AdamW": pytest.approx(8e-4)}  # This is the second of two warm-up steps.
        assert all(line.largest > line.loss for line in trainer.lines)
        holdfast_groups_away(trainer)


def holdfast_groups_away(trainer: Any) -> None:
    """Close the process groups of a single-process job, so that another job can start."""
    trainer.job._spread._replica.close()


def check_ignored() -> None:
    """Ignored labels have no weight and all others the same: the gradient equals torchtitan's up to a factor."""
    made = config()
    trainer = Watched(made, holdfast.init(layout=layout_of(made)))
    trainer.train(Text(ignored=True))
    (loss, norm, counted), *_ = serial(trainer.seen[:1])
    assert counted < SAMPLES * LENGTH
    assert trainer.lines[0].loss == pytest.approx(loss, rel=1e-5)
    assert trainer.lines[0].norm * SAMPLES * LENGTH / counted == pytest.approx(norm, rel=1e-4)


class Refused:
    """Refused configs: the name of a field, its value, and the text of the error."""

    CASES = (
        ("parallelism.data_parallel_replicate_degree", 2, "as many replicas as nodes have room for"),
        ("parallelism.pipeline_parallel_degree", 2, "stages cannot be trained yet"),
        ("parallelism.context_parallel_degree", 2, "contexts cannot be spread yet"),
        ("parallelism.expert_parallel_degree", 2, "holdfast.MoE"),
        ("parallelism.data_parallel_shard_degree", -1, "give the number of workers of a node"),
        ("training.global_batch_size", -1, "give the number of samples of a step"),
        ("training.enable_cpu_offload", True, "must be on the worker's device"),
        ("checkpoint.enable", True, "--checkpoint-dir"),
        ("validator.enable", True, "job.evaluate"),
        ("profiler.enable_profiling", True, "torch.profiler"),
        ("model_spec.post_optimizer_build_fn", print, "holdfast.MoE"),
        ("model_spec", None, "model_spec is None"),
    )


def check_refused() -> None:
    """Options that a job handles itself or does not support are refused before anything is built."""
    job: Any = SimpleNamespace(device=torch.device("cpu"), mesh=SimpleNamespace(shape=(1, 1)))
    for name, value, why in Refused.CASES:
        made = config()
        *path, last = name.split(".")
        part = made
        for one in path:
            part = getattr(part, one)
        setattr(part, last, value)
        with pytest.raises(holdfast.BadInputError, match=why):
            ElasticTrainer(made, job)
    job.mesh.shape = (2, 1)
    with pytest.raises(holdfast.BadInputError, match=r"layout is shard 2 x tensor 1.*layout_of\(config\)"):
        ElasticTrainer(config(), job)
    job.mesh.shape = (1, 3)
    with pytest.raises(holdfast.BadInputError, match=r"seq_len is 16, and must be a multiple of .* 3"):
        ElasticTrainer(config(tensor_parallel_degree=3), job)
    with pytest.raises(holdfast.BadInputError, match="windows of 16"):
        TokenWindows([1] * 16, 16)


def check_dims() -> None:
    """torchtitan finds the job's groups under its own names and needs no others."""
    replica = ReplicaMesh(Layout(shard=2, tensor=2), Role(place=3), torch.device("cpu"))
    job: Any = SimpleNamespace(mesh=replica.mesh, mesh_as=lambda **names: replica.rename_dimensions(names))
    for backend, storage in (("partial_dtensor", "fsdp"), ("full_dtensor", "dp_shard"), ("spmd_types", "dp_shard")):
        dims = JobParallelDims(job, backend)
        assert dims.world_mesh.size() == 4
        for name, of in ((storage, "shard"), ("batch", "shard"), ("loss", "shard"), ("tp", "tensor")):
            mesh = dims.get_mesh(name)
            assert (mesh.size(), mesh.get_local_rank()) == (2, 1), name
            assert mesh.get_group() is replica.groups[of], name
        assert all(dims.get_optional_mesh(name) is None for name in ("pp", "cp", "ep", "dp_replicate", "efsdp"))
        assert dims.get_mesh([storage, "tp"]).mesh_dim_names == (storage, "tp")
        expected = {storage, "batch", "loss", "tp"} | ({"dp"} if backend == "spmd_types" else set())
        assert set(dims.get_all_one_dimensional_meshes()) == expected
    replica.close()


def _spread_gradients(seat: Seat, backend: str) -> Any:
    layout = Layout(shard=2, tensor=2)
    replica = ReplicaMesh(layout, Role(place=seat.rank), torch.device("cpu"))
    groups = {}
    for number, (dimension, members) in enumerate(replica.connected_ranks.items(), 1):
        place, size = members.index(seat.rank), len(members)
        groups[dimension] = seat.connect(number * 10 + members[0], rank=place, size=size, halt=None)
    replica.swap(groups)
    job: Any = SimpleNamespace(
        device=torch.device("cpu"), mesh=replica.mesh, mesh_as=lambda **names: replica.rename_dimensions(names), rank=0
    )
    made = config(data_parallel_shard_degree=2, tensor_parallel_degree=2, spmd_backend=backend)
    try:
        trainer = ElasticTrainer(made, job)
    except holdfast.BadInputError as error:
        return str(error)
    losses: list[float] = []

    def backward(loss: torch.Tensor) -> None:
        loss.backward()
        losses.append(loss.item())

    trainer._current_step = SimpleNamespace(backward=backward)
    text = Text(ignored=False)
    mine = range(2) if seat.rank // 2 == 0 else range(2, 4)
    inputs, labels = torch.utils.data.default_collate([text[number] for number in mine])
    trainer.forward_backward_step(input_dict=inputs, labels=labels, global_valid_tokens=torch.tensor(4 * LENGTH))
    gradients = {name: _whole(one.grad) for name, one in trainer.model_parts[0].named_parameters()}
    seat.meet()
    replica.close()
    return losses[0], {name.replace("_checkpoint_wrapped_module.", ""): one for name, one in gradients.items()}


def _whole(tensor: Any) -> Any:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).numpy()


def check_spread() -> None:
    """With shard 2 and tensor 2, losses and gradients sum to a serial run's, because FSDP2 does not divide them."""
    model, loss_fn = of_one_process(config())
    text = Text(ignored=False)
    inputs, labels = torch.utils.data.default_collate([text[number] for number in range(4)])
    loss, _ = loss_fn(model(inputs["input"], positions=inputs["positions"]), labels, 4 * LENGTH)
    loss.backward()
    for backend in ("partial_dtensor", "full_dtensor"):
        found = run_world(4, _spread_gradients, backend)
        assert found[0][0] + found[2][0] == pytest.approx(loss.item(), rel=1e-5)
        assert found[0][0] == found[1][0]
        for name, parameter in model.named_parameters():
            for _, gradients in found:
                assert torch.allclose(torch.from_numpy(gradients[name]), parameter.grad, rtol=1e-3, atol=1e-6), name
    for result in run_world(4, _spread_gradients, "spmd_types"):
        assert not isinstance(result, str) or "give 'partial_dtensor'" in result  # A later torch supports it.


class CountingLoader(BaseDataLoader):
    """A user's data loader with tokens that show its rank; it pickles its state, as torchtitan's loaders do."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config: Any, *, dp_world_size: int, dp_rank: int, local_batch_size: int, **_: Any) -> None:
        self.rank, self.world, self.batch = dp_rank, dp_world_size, local_batch_size

    def __iter__(self) -> Iterator[Any]:
        for number in range(100):
            tokens = torch.full((self.batch, LENGTH), 10 * number + self.rank)
            yield {"input": tokens, "positions": torch.arange(LENGTH).expand(self.batch, -1)}, tokens.clone()

    def state_dict(self) -> Any:
        raise AssertionError("the loader's state must not be pickled")

    def load_state_dict(self, state_dict: Any) -> None:
        raise AssertionError("the loader's state must not be unpickled")


class NoTokenizer(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Any, **_: Any) -> None:
        super().__init__()

    def encode(self, *_: Any, **__: Any) -> list[int]:
        return []

    def decode(self, *_: Any, **__: Any) -> str:
        return ""

    def get_vocab_size(self) -> int:
        return 2048


def check_loader() -> None:
    """torchtitan's own data loader provides one rank per micro-batch; each continues from its position."""
    made = config()
    made.dataloader, made.tokenizer = CountingLoader.Config(), NoTokenizer.Config()
    trainer = Watched(made, holdfast.init(layout=layout_of(made)))
    trainer.train()
    tokens = [[int(inputs[0, 0]) for inputs, _, _ in batches] for batches in trainer.seen]
    assert tokens == [[10 * step + rank for rank in range(SAMPLES // 2)] for step in range(STEPS)]


if __name__ == "__main__":
    assert torchtitan.trainer
    globals()[f"check_{sys.argv[1]}"]()
