"""torchtitan's trainer with a job's loop: its model, loss, optimizer and schedule, on replicas that join and leave."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Iterator
from typing import Any

import torch

from holdfast import BadInputError, Job, Step
from holdfast.integrations.torchtitan.configs import check_config, layout_of
from holdfast.integrations.torchtitan.dims import JobParallelDims
from holdfast.integrations.torchtitan.metrics import JobMetrics, StepLine
from holdfast.integrations.torchtitan.package import import_module
from holdfast.integrations.torchtitan.samples import LoaderStreams

logger = logging.getLogger(__name__)

_spmd: Any = import_module("distributed.spmd_types").spmd
_config: Any = import_module("config")
_losses: Any = import_module("components.loss")
_distributed: Any = import_module("distributed.utils")
_tools: Any = import_module("tools.utils")
_Trainer: Any = import_module("trainer").Trainer
#: metrics of a step: its largest loss, and its number of ignored labels
_LARGEST, _IGNORED = "torchtitan/max_loss", "torchtitan/ignored_tokens"


class ElasticTrainer(_Trainer):
    """A torchtitan `Trainer` for a job. holdfast manages processes, groups, data, clipping and checkpoints."""

    def __init__(self, config: Any, job: Job) -> None:
        """Make the model in the job's layout, its loss, its optimizer and its schedule.

        Args:
            config: a `Trainer.Config`. The trainer keeps a copy.
            job: the result of `holdfast.init(layout=layout_of(config))`.

        Raises:
            BadInputError: the config sets something that a job cannot do or does itself.
        """
        # torchtitan's __init__ is not called: it needs a GPU, a launcher's environment, and its own process group.
        self.layout = layout_of(config)
        check_config(config)
        self.config = config = copy.deepcopy(config)
        self.job, self.device = job, job.device
        self._check_mesh()
        # torchtitan keeps its meshes in the computing thread.
        torch.autograd.set_multithreading_enabled(False)
        self.parallel_dims = JobParallelDims(job, config.parallelism.spmd_backend)
        _distributed.set_spmd_backend(config.parallelism.spmd_backend)
        self._seed()
        self.model_config = config.model_spec.model
        self.model_config.update_from_config(config=config)
        self.loss_fn = self._build_loss()
        model, flops = self._build_model()
        self.model_parts = [model]
        self.optimizers = config.optimizer.build(model_parts=self.model_parts)
        if len(self.optimizers) != 1:
            kinds = ", ".join(type(one).__name__ for one in self.optimizers)
            raise BadInputError(
                f"the config's optimizer is of several kinds ({kinds}): give all parameters to one kind"
            )
        self.lr_schedulers = config.lr_scheduler.build(optimizers=self.optimizers, training_steps=config.training.steps)
        self.metrics = JobMetrics(config, self.parallel_dims, self.device, flops)
        self.step, self.ntokens_seen = 0, 0
        self.train_context = _distributed.get_spmd_context(parallel_dims=self.parallel_dims)
        self.fwd_bwd_fn = self._forward_backward
        self._protected = False
        self._current_step: Step | None = None

    # ---- the model ----

    def _check_mesh(self) -> None:
        """Check that the job has the config's layout. In a script that runs alone, all sizes may be 1.

        Raises:
            BadInputError: the layouts differ; or, with sequence parallelism, the sequence length is not a multiple of
                the tensor-parallel degree.
        """
        shard, tensor = self.job.mesh.shape
        if (shard, tensor) not in ((self.layout.shard, self.layout.tensor), (1, 1)):
            raise BadInputError(
                f"the job's layout is shard {shard} x tensor {tensor}, and the config's {self.layout}: "
                "give holdfast.init(layout=layout_of(config))"
            )
        length = self.config.training.seq_len
        if self.config.parallelism.enable_sequence_parallel and length % self.layout.tensor:
            raise BadInputError(
                f"training.seq_len is {length}, and must be a multiple of tensor_parallel_degree, {self.layout.tensor}"
            )

    def _seed(self) -> None:
        """Seed as torchtitan does, with the same seed on all workers. A seed of None becomes 0, also in the config."""
        debug = self.config.debug
        debug.seed = 0 if debug.seed is None else debug.seed
        if self.device.type != "cpu":
            _distributed.set_determinism(self.parallel_dims, self.device, debug, distinct_seed_mesh_dims=[])
        torch.manual_seed(debug.seed)  # pyright: ignore[reportUnknownMemberType] - torch leaves it untyped

    def _build_loss(self) -> Any:
        """Build the loss. A chunked loss calls backward() itself, which the job must do, so its inner loss is used."""
        config = self.config.loss
        if isinstance(config, _losses.ChunkedLossWrapper.Config):
            logger.info(
                "the loss is computed in one piece: ChunkedLossWrapper calls backward() itself, which a job must do"
            )
            config = config.loss_fn
        return config.build(compile_config=self.config.compile)

    def _build_model(self) -> tuple[Any, int]:
        """Build the model, shard it, and initialize its weights. Return it and its FLOP per token.

        On a GPU it is sharded before it has weights, as torchtitan does: DTensor then draws the same random numbers for
        every layout. On CPUs DTensor does not, so there the full model is made first.
        """
        config = self.config
        on_cpu = self.device.type == "cpu"
        with torch.device("cpu" if on_cpu else "meta"), self._default_dtype():
            model: Any = self.model_config.build()
        model.verify_module_protocol()
        _, flops = self.model_config.get_nparams_and_flops(model, config.training.seq_len)
        if on_cpu:
            self._init_weights(model)
        model = self._parallelize(model)
        if not on_cpu:
            model.to_empty(device=self.device)
            self._init_weights(model)
        model.train()
        return model, flops

    def _parallelize(self, model: Any) -> Any:
        """Apply torchtitan's sharding, activation checkpointing and compilation to the model, as the config sets.
        Return the model.

        Raises:
            BadInputError: this version of torch cannot shard it with the backend `spmd_types`.
        """
        config = self.config
        try:
            return config.model_spec.parallelize_fn(
                model,
                parallel_dims=self.parallel_dims,
                training=config.training,
                parallelism=config.parallelism,
                compile_config=config.compile,
                ac_config=config.activation_checkpoint,
                dump_folder=config.dump_folder,
            )
        except ValueError as error:
            # torch 2.13's fully_shard() needs DTensors if a mesh has other dimensions than shards. torchtitan's newest
            # backend gives it plain tensors with annotations, which later versions of torch accept.
            if config.parallelism.spmd_backend != "spmd_types" or "must be DTensors" not in str(error):
                raise
            raise BadInputError(
                f"torch {torch.__version__} cannot shard a model under parallelism.spmd_backend 'spmd_types': give "
                f"'partial_dtensor' or 'full_dtensor', or a later torch ({error})"
            ) from error

    def _default_dtype(self) -> Any:
        return _tools.set_default_dtype(_config.TORCH_DTYPE_MAP[self.config.training.dtype])

    def _init_weights(self, model: Any) -> None:
        with torch.no_grad():
            model.init_weights(buffer_device=None)

    # ---- the loop ----

    def protect(self, data: Any = None, **options: Any) -> None:
        """Call `job.protect` with the model, optimizer and schedule, and the config's batch sizes, seed and clipping.
        `train` calls this if the script has not.

        Args:
            data: a data set of (inputs by name, labels), such as `TokenWindows`, or anything else that `job.protect`
                accepts. None: the config's data loader, with as many data-parallel ranks as a step has micro-batches.
            options: further options of `job.protect`, such as `num_workers`.
        """
        training = self.config.training
        self.job.protect(
            self.model_parts[0],
            next(iter(self.optimizers)),
            self._make_streams() if data is None else data,
            global_batch=training.global_batch_size,
            micro_batch=self._micro_batch,
            seed=self.config.debug.seed,
            max_grad_norm=training.max_norm,
            extra={"lr_scheduler": next(iter(self.lr_schedulers))},
            **options,
        )
        self._protected = True

    def train(self, data: Any = None) -> None:
        """Train until `training.steps` steps are applied.

        Args:
            data: see `protect`.
        """
        if not self._protected:
            self.protect(data)
        for step in self.job.steps(self.config.training.steps):
            self.train_step(step)

    def train_step(self, step: Step) -> bool:
        """Run one attempt at a step: forward and backward of its micro-batches on this worker, then `step.apply()`.
        Return whether it was applied.

        If torchtitan would log the step, the largest loss is collected over all workers, and rank 0 logs the results
        after it is applied.
        """
        self.step, self._current_step = step.number, step
        rates, wanted = self.lr_schedulers.get_metrics(), self.metrics.is_logged(step.number)
        for inputs, labels in self._time_batches(step.micro_batches()):
            ignored = int((labels == _losses.IGNORE_INDEX).sum())
            if ignored:
                step.log({_IGNORED: ignored}, reduce="sum")
            tokens = torch.tensor(labels.numel(), device=self.device)
            loss = self.forward_backward_step(input_dict=inputs, labels=labels, global_valid_tokens=tokens)
            if wanted:
                step.log({_LARGEST: loss.detach() * (labels.numel() / max(labels.numel() - ignored, 1))}, reduce="max")
        applied = step.apply()
        if applied and wanted:
            self.metrics.log_step(self._make_step_line(step, rates), rank=self.job.rank, trainer=self)
        return applied

    def close(self) -> None:
        """Write torchtitan's metrics that are not yet written."""
        self.metrics.close()

    def _forward_backward(self, inputs: Any, labels: Any, tokens: Any, more: dict[str, Any]) -> torch.Tensor:
        """Run forward and backward of one part of a micro-batch, as torchtitan's `fwd_bwd_fn`, and return the loss.

        `step.backward(loss)` replaces loss.backward(), so that the step gets the gradients. The loss is divided by
        `tokens`, all tokens of the part, including ignored ones. Each counted token then has the same weight in every
        micro-batch, as in torchtitan's sum over the global batch.

        Args:
            more: further inputs of the model by name.
        """
        assert self._current_step is not None
        with self.train_context():
            predicted = self.model_parts[0](inputs, **more)
            named = {"positions": more["positions"]} if "positions" in more else {}
            loss, _ = self.loss_fn(predicted, labels, tokens, **named)
            del predicted
            with _spmd.no_typecheck():
                self._current_step.backward(loss)
        return loss

    def _make_step_line(self, step: Step, rates: dict[str, float]) -> StepLine:
        """Return the results of an applied step for the log, with the mean loss of the tokens that are not ignored."""
        tokens = self.config.training.global_batch_size * self.config.training.seq_len
        counted = max(tokens - step.metrics.get(_IGNORED, 0.0), 1.0)
        return StepLine(
            number=step.number,
            loss=step.loss * tokens / counted,
            largest=step.metrics.get(_LARGEST, step.loss),
            norm=step.grad_norm,
            tokens=tokens * step.number,
            rates=rates,
        )

    @property
    def _micro_batch(self) -> int:
        """Size of a replica group's micro-batch. torchtitan's local batch size is that of one worker along `shard`."""
        return self.config.training.local_batch_size * self.layout.shard

    def _make_streams(self) -> LoaderStreams:
        """Return the config's data loader, with its tokenizer, as streams: one loader for each data-parallel rank, each
        of whose batches is a micro-batch.
        """
        config = self.config
        tokenizer = config.tokenizer.build(tokenizer_path=config.hf_assets_path)

        def build(rank: int, world: int) -> Any:
            return config.dataloader.build(
                dp_world_size=world,
                dp_rank=rank,
                tokenizer=tokenizer,
                seq_len=config.training.seq_len,
                local_batch_size=self._micro_batch,
                snapshot_every_n_steps=None,
            )

        return LoaderStreams(build)

    def _time_batches(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the micro-batches, and count each one's tokens and the seconds it was waited for in `metrics`."""
        while True:
            before = time.perf_counter()
            batch = next(batches, None)
            if batch is None:
                return
            self.metrics.count_micro_batch(batch[1].numel(), time.perf_counter() - before)
            yield batch
