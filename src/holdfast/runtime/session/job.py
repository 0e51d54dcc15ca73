"""The interface of a training script: `holdfast.init()`, `job.protect(...)`, `job.steps(...)`."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from holdfast.clock import SystemClock
from holdfast.control.link.exit_after_exception import ScriptErrorHook
from holdfast.control.link.progress_page import NoProgress, open_progress
from holdfast.control.link.solo_exit import SoloExitHook
from holdfast.control.link.training_guard import TrainingGuard
from holdfast.control.link.worker_link import WorkerLink
from holdfast.control.link.worker_settings import WorkerSettings
from holdfast.environment import LOADER, log_level
from holdfast.errors import BadInputError
from holdfast.protocol.commit import Commit, Wish
from holdfast.protocol.job_spec import AUTO, Backend
from holdfast.protocol.layouts.layout import WHOLE, Layout
from holdfast.runtime.checkpoints.best import BestChoice
from holdfast.runtime.checkpoints.saver_setup import make_saver
from holdfast.runtime.configuration import describe_configuration
from holdfast.runtime.data.batch_summary import summarize_data
from holdfast.runtime.data.loading import MicroBatchLoader
from holdfast.runtime.data.main_module import ScriptReachedInit
from holdfast.runtime.data.torch_loader import DataOptions
from holdfast.runtime.dtensor.replica_position import WHOLE_REPLICA
from holdfast.runtime.evaluation.shards import ModelEvaluation
from holdfast.runtime.faults.orders import Faults
from holdfast.runtime.gradients.emulation import set_up_emulation
from holdfast.runtime.gradients.workload import ScriptObjects, Workload, make_workload
from holdfast.runtime.groups.transport_choice import choose_device
from holdfast.runtime.layouts.starting import Initializer, materialize
from holdfast.runtime.session.building import GroupBuilder
from holdfast.runtime.session.replica_group.forming import JoinResult, form_replica_group, join_replica_group
from holdfast.runtime.session.replica_group.layout_list import GivenLayout, check_micro_batch, parse_layouts
from holdfast.runtime.session.replica_group.spread_model import SpreadModel
from holdfast.runtime.session.session import Identity, Link, Session
from holdfast.runtime.session.solo import SoloLink
from holdfast.runtime.session.step import Step
from holdfast.runtime.snapshots.snapshots import make_snapshots
from holdfast.runtime.state.refusals import check_function, frozen_warning, untrained_warning
from holdfast.runtime.warm_up.shadow import ShadowAttempt
from holdfast.storage import storage_at

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

logger = logging.getLogger(__name__)

_ALONE = "alone/0/0"
#: at most this many characters of a script's reason to stop are kept
_REASON_CHARACTERS = 1000

Every = int | Literal["auto"]


class Job:
    """This process's part in a job; made by `holdfast.init()`."""

    def __init__(
        self,
        settings: WorkerSettings | None,
        *,
        layout: GivenLayout | None = None,
        checkpoint_dir: str | Path | None = None,
        checkpoint_every: Every = AUTO,
    ) -> None:
        """Use the settings of an agent, or train alone. With several ranks per replica, wait until they have met.

        Args:
            settings: from the agent; None if this worker trains alone.
            layout: how a replica is distributed over the local ranks of its replica group, which is formed here. If
                several are given, one of them is in force. None: nothing is distributed. A worker that trains alone
                holds the whole model.
            checkpoint_dir: for a worker that trains alone; an agent's settings take precedence.
            checkpoint_every: for a worker that trains alone; an agent's settings take precedence.

        Raises:
            BadInputError: a checkpoint directory is given here, and the job has none; or the layout is not possible.
            HoldfastError: the agent is gone, or another rank hangs.
        """
        if settings and checkpoint_dir and not settings.spec.checkpoint.dir:
            # The coordinator must search the directory before it starts any script.
            raise BadInputError(
                f"holdfast.init(checkpoint_dir={str(checkpoint_dir)!r}) is only for a script that runs alone, and this "
                f"job was started without a checkpoint directory: start it with --checkpoint-dir {checkpoint_dir}"
            )
        only, self._layouts = parse_layouts(layout)
        self._settings = settings
        self._checkpoint_dir = settings.spec.checkpoint.dir if settings else checkpoint_dir
        self._checkpoint_every = settings.spec.checkpoint.every if settings else checkpoint_every
        self._session: Session | None = None
        self._last_words: ScriptErrorHook | None = None
        self._ended = False
        #: warnings that rank 0 logs for all workers
        self._warnings: list[str] = []
        self._after_apply: Callable[[Step], None] | None = None
        self._step: Step | None = None
        local, self._zygote = (settings.local_rank, settings.zygote) if settings else (0, "")
        self._backend: Backend = settings.spec.backend if settings else AUTO
        #: the device for the model
        self.device = choose_device(local, self._backend)
        self._link: WorkerLink | None = None
        self._joined = JoinResult(WHOLE, None)
        if settings and self._layouts:
            self._link = WorkerLink(settings.socket)
            self._joined = join_replica_group(
                self._link, settings.worker, self._layouts, self.device, backend=self._backend
            )
        elif settings and only is not None and only.places > 1:
            self._link = WorkerLink(settings.socket)
            self._joined = JoinResult(
                only, form_replica_group(self._link, settings.worker, only, self.device, backend=self._backend)
            )
        self._spread = (
            SpreadModel(self._joined.replica_group, self.device, self._layouts) if layout is not None else None
        )

    @property
    def layout(self) -> Layout:
        """The layout in force, as long as this process lives. Without a layout, one rank holds the whole model."""
        return self._joined.layout

    @property
    def rank(self) -> int:
        """This worker's rank; it may change from step to step."""
        return self._session.rank if self._session else 0

    @property
    def world_size(self) -> int:
        """The number of workers that train together; it may change from step to step."""
        return self._session.world if self._session else 1

    @property
    def mesh(self) -> DeviceMesh:
        """The ranks that hold one replica of the model together, by "shard" and "tensor", as a DeviceMesh of torch.

        Raises:
            BadInputError: there is no layout.
        """
        return self._replica.mesh

    def mesh_as(self, **dimensions: str) -> DeviceMesh:
        """Return `mesh` with other names: `job.mesh_as(dp="shard", cp="", tp="tensor")`; "": a dimension of size 1."""
        return self._replica.rename_dimensions(dimensions)

    @property
    def _replica(self) -> SpreadModel:
        """The replica as torch sees it.

        Raises:
            BadInputError: the script gave no layout.
        """
        if self._spread is None:
            raise BadInputError(
                "job.mesh: every worker holds the whole model; for a mesh give "
                "holdfast.init(layout=holdfast.Layout(shard=N, tensor=M))"
            )
        return self._spread

    def materialize(self, model: torch.nn.Module, *initializers: Initializer) -> None:
        """Initialize a model that was made on the meta device and then spread over a replica group.

        Each module resets its parameters. Then each of `initializers` is called as by `model.apply(initializer)`, to
        fill other parameters and buffers. The values are the same as in the whole model. Call it before you make the
        optimizer.

        Raises:
            BadInputError: a parameter or a buffer got no value, or `protect` was called before.
        """
        if self._session is not None:
            raise BadInputError("call job.materialize(...) before job.protect(...): it initializes the model again")
        materialize(model, initializers, self.device, self._spread.place if self._spread is not None else WHOLE_REPLICA)

    def protect(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer],
        data: Any,
        *,
        updates: Sequence[str] | None = None,
        global_batch: int,
        micro_batch: int,
        seed: int = 0,
        collate: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        prefetch_factor: int | None = None,
        pin_memory: bool = False,
        max_grad_norm: float | Mapping[str, float] | None = None,
        scaler: torch.amp.GradScaler | None = None,
        extra: Mapping[str, Any] | None = None,
        after_apply: Callable[[Step], None] | None = None,
    ) -> None:
        """Register the model, the optimizer and the data, and join the job.

        From now on, do not call `loss.backward()`, `optimizer.step()` or `scheduler.step()`. Call `step.backward(loss)`
        and `step.apply()` instead.

        Args:
            model: on `job.device`. All workers must make the same model. Its values come from the first worker.
            optimizer: of the model's parameters. Several optimizers are given by name: each step updates one of them,
                `step.update`.
            data: a data set or DataLoader, a `Stream`, or a function of the step that returns one (docs/data.md).
            updates: with several optimizers, the order in which steps update them, repeated; None: each once.
            global_batch: samples per step, independent of the number of workers.
            micro_batch: samples per forward pass.
            seed: for the order of samples, and for all random numbers within micro-batches.
            collate: makes a micro-batch from a list of samples; None: torch's default_collate.
            num_workers: as in torch's DataLoader. Data set and collate function must be picklable for it.
            prefetch_factor: as in torch's DataLoader.
            pin_memory: as in torch's DataLoader.
            max_grad_norm: the gradient of the global batch is clipped to this norm. With several optimizers: by name.
            scaler: for float16. It scales the loss. If a gradient is not finite on any worker, all workers skip the
                optimizer. Do not call its methods.
            extra: more state by name: objects with state_dict() and load_state_dict(). Schedulers of torch are stepped
                once for each step that updates their optimizer. Schedulers that need a metric must be stepped in
                `after_apply`.
            after_apply: the script's own part of a step, such as a moving average of the weights in `extra`. It is
                called within `apply()` on all workers, before the state is saved or sent. It may change the model and
                `extra`, and must depend only on the state and the results of the step. Changes of `extra` anywhere else
                are refused. If it raises an exception, the step is saved and the job ends.

        Raises:
            BadInputError: an argument is wrong, or `protect` was called before.
        """
        if self._session is not None:
            raise BadInputError("job.protect() was called twice: a job trains one model")
        place = self._spread.configure_model(model) if self._spread is not None else WHOLE_REPLICA
        order = {"seed": seed, "global_batch": global_batch, "micro_batch": micro_batch}
        options = DataOptions(collate, num_workers, prefetch_factor, pin_memory)
        check_micro_batch(self._layouts, micro_batch)
        loader = MicroBatchLoader(data, device=self.device, options=options, zygote=self._zygote, place=place, **order)
        given = ScriptObjects(model, optimizer, updates, max_grad_norm, scaler, extra, after_apply is not None)
        self._after_apply = check_function(after_apply)
        workload = make_workload(given, loader, self.device, place)
        workload.delay = set_up_emulation(self._settings.spec.experiments, model) if self._settings else None
        optimizers = workload.state.optimizers
        warnings = (loader.difference, untrained_warning(model, optimizers), frozen_warning(optimizers))
        self._warnings = list(filter(None, warnings))
        self._session = self._open_session(workload)

    def steps(self, count: int) -> Iterator[Step]:
        """Yield steps until `count` steps are applied. Resumes at the job's step; repeats steps that a failure undid.

        The loop ends once all workers of the job have finished. It can be used once. Due evaluations run between steps.
        A standby first gets shadow steps, which never count.

        Raises:
            SystemExit: the job is done, and this worker does not have the last state, because it was a standby or still
                joining. Code after the loop, such as saving the model on rank 0, is not for it.
            BadInputError: `protect` was not called, or other parameters are trained now; or the loop was used before;
                or the count is negative.
            StepUseError: the loop continued without `step.apply()`.
        """
        session = self._session
        if session is None:
            raise BadInputError("call job.protect(...) before job.steps(...)")
        if self._ended:
            raise BadInputError("job.steps() was used up: a job has one loop over its steps")
        if count < 0:
            raise BadInputError(f"job.steps({count}): the number of steps must not be negative")
        session.workload.state.check_parameters()
        session.workload.loader.last_step = count
        settings = session.workload.state.settings
        while (work := session.next_compute()) is not None:
            if isinstance(work, ShadowAttempt):
                settings.start_attempt()
                step = Step(work, work.conclude, shadow=True)
            else:
                compute, generation = work
                if not session.run_due_evaluations(compute.step - 1, generation):
                    continue
                if compute.step > count:
                    session.finish()
                    continue
                self._log_warnings(session)
                settings.start_attempt()
                step = Step(
                    attempt := session.start_attempt(compute, generation), partial(session.conclude_attempt, attempt)
                )
            self._step = step
            try:
                yield step
            except GeneratorExit:
                self._on_loop_left(session)
                raise
            step.check_applied()
        self._ended = True
        if self._last_words is not None:
            self._last_words.remove()
        session.close()
        if not session.has_final_state:
            raise SystemExit(0)  # Code after the loop is only for workers that have the trained model and a rank.

    def evaluate(
        self,
        fn: Callable[[Any], Mapping[str, torch.Tensor | float]],
        data: Any,
        *,
        every: int,
        name: str = "eval",
        monitor: str = "loss",
        mode: Literal["min", "max"] = "min",
        save_top_k: int = 0,
    ) -> None:
        """Evaluate the model every few steps, on all workers together. Call it after `protect` and before `steps`.

        The data is split into shards, in order, and the workers share the shards. After a failure, only shards in
        progress are repeated. The results do not depend on which worker computes a shard. The next step has them in
        `metrics`, as `name/key`, and so do the job's events (`evaluated`).

        Args:
            fn: gets a batch on `job.device`, and returns means over its samples by name: numbers, or tensors of one
                element, with the same names for each batch. Means over all data weight batches by their samples. It is
                called without gradients, seeded by step and shard. It must call a model with MoE layers once. It may
                call model.eval(): modes, random generators and running statistics are restored afterwards. It must not
                change anything else.
            data: a map-style data set, in batches of `micro_batch`, or a DataLoader with its own batch size. The order
                of the DataLoader is not used.
            every: evaluate after each step with a number that is a multiple of it, and after the last step.
            monitor: the value that decides which state is best.
            mode: whether the least ("min") or the greatest ("max") value is best.
            save_top_k: keep this many of the best states in the checkpoint directory, as best-NAME-STEP.

        Raises:
            BadInputError: an argument is wrong, or `protect` was not called.
        """
        session = self._session
        if session is None:
            raise BadInputError("call job.protect(...) before job.evaluate(...)")
        choice = BestChoice(monitor=monitor, mode=mode, keep=save_top_k)
        batch = session.workload.loader.order.micro_batch
        session.add_evaluation(ModelEvaluation(fn, data, every=every, name=name, micro_batch=batch, choice=choice))

    @contextmanager
    def pause(self, reason: str = "") -> Generator[None, None, None]:
        """Announce that the script runs other code than training: `with job.pause("evaluation"): ...`.

        A worker that evaluates while others wait for it is then not removed as hung, for half an hour. A `step.apply()`
        within the block does not belong to the pause. The first 64 bytes of the reason are kept.

        Raises:
            BadInputError: before `protect`.
        """
        if self._session is None:
            raise BadInputError("call job.protect(...) before job.pause(...)")
        with self._session.pause(reason):
            yield

    def await_saved(self) -> None:
        """Wait until checkpoints that are being written are complete. Called when the script ends."""
        if self._session is not None:
            self._session.await_saved()

    def _log_warnings(self, session: Session) -> None:
        """Log, once and on rank 0, differences from plain PyTorch that `protect` found and a user may not expect."""
        warnings, self._warnings = self._warnings, []
        for warning in warnings if session.rank == 0 else ():
            logger.warning("%s", warning)

    def stop(self, reason: str) -> None:
        """End the loops of all workers after the same step, save, and end the job as done (exit code 0).

        One worker is enough. Other workers may call it at other steps, or not at all. If it is called before
        `step.apply()`, the current step is the last one; after it, the next step is. A `break` that all workers
        reach at the same step ends the loop at once.

        Args:
            reason: part of the job's last event; at most 1000 characters are kept.

        Raises:
            BadInputError: before `protect`.
        """
        if self._session is None:
            raise BadInputError("call job.protect(...) before job.stop(...)")
        self._session.raise_wish(Wish.STOP, reason[:_REASON_CHARACTERS])

    def checkpoint(self) -> None:
        """Save the state after the current step, or after the next one if `step.apply()` was called.

        One worker is enough. If a checkpoint is still being written, the new one follows it.

        Raises:
            BadInputError: before `protect`, or if there is no checkpoint directory.
        """
        if self._session is None:
            raise BadInputError("call job.protect(...) before job.checkpoint()")
        if not self._checkpoint_dir:
            raise BadInputError("job.checkpoint(): there is no checkpoint directory; give --checkpoint-dir")
        self._session.raise_wish(Wish.SAVE)

    def _on_loop_left(self, session: Session) -> None:
        """Record that the script left the loop early, by `break` or by an exception; the script's end will show which.

        A script that trains alone also saves its state now. Does nothing if the interpreter is already shutting down.
        """
        if sys.is_finalizing():
            return
        session.left_loop.record()
        if self._settings is None:
            session.left_loop.save()

    def _call_after_apply(self, number: int, commit: Commit) -> None:
        """Set the results of the loop's step, and call the script's `after_apply`, which must be given, with it.

        Raises:
            RuntimeError: the loop is at another step, or there is no `after_apply`.
        """
        step = self._step
        if self._after_apply is None or step is None or step.number != number:
            raise RuntimeError(f"broken invariant: step {number} is applied, the loop is at {step and step.number}")
        step.on_applied(commit)
        self._after_apply(step)

    def _open_session(self, workload: Workload) -> Session:
        """Create the session, announce this worker, and remove the `TrainingGuard`.

        With an agent, a hook then reports errors of the script. Without one, a `SoloLink` answers instead of the
        coordinator. With a layout, the replicated state is compared between the ranks first.
        """
        settings = self._settings
        if self._spread is not None:
            self._spread.prepare(workload.state)
        every = self._checkpoint_every if self._checkpoint_dir else 0
        config = describe_configuration(workload, self.device, checkpoint_every=every)
        storage = storage_at(self._checkpoint_dir) if self._checkpoint_dir else None
        identity = Identity(worker=_ALONE, host="127.0.0.1", alone=True)
        if settings:
            page = self._joined.replica_group.proposals if self._joined.replica_group is not None else None
            slots = settings.spec.experts.slots
            identity = Identity(worker=settings.worker, host=settings.host, slots=slots, proposals=page)
        agent = (self._link or WorkerLink(settings.socket)) if settings else None
        link: Link = agent if agent is not None else SoloLink(storage, in_time=self._checkpoint_every == AUTO)
        faults = Faults(lambda: agent.agent_pid if agent is not None else None)
        session = Session(
            identity,
            link=link,
            workload=workload,
            groups=GroupBuilder(self.device, identity.host, self._backend),
            faults=faults,
            clock=SystemClock(),
            saver=make_saver(storage, settings, identity.worker, self._checkpoint_every, link.send, faults, workload),
            snapshots=make_snapshots(settings, workload, link.send, self._joined.snapshots),
            verify_state=settings.spec.experiments.verify_state if settings else 0,
            after_apply=self._call_after_apply if self._after_apply else None,
            progress=open_progress(settings) if settings else NoProgress(),
        )
        session.attach(config, summarize_data(workload.loader) if settings else ())
        if settings:
            self._last_words = ScriptErrorHook(
                session.on_script_end, session.locate_error, session.hold_state, session.left_loop.save
            )
            self._last_words.install()
        if guard := TrainingGuard.find_installed():
            guard.remove()
        return session


def init(
    *, layout: GivenLayout | None = None, checkpoint_dir: str | Path | None = None, checkpoint_every: Every = AUTO
) -> Job:
    """Connect to the agent that started this process. Without an agent, the script trains alone.

    With a layout, waits until all processes that share a replica have called it. In a loader process, which only needs
    the definitions above this call, the script ends here.

    Args:
        layout: how processes of a node share one replica of the model; None: each process has a whole replica. Several
            layouts, in order of preference, or a dict {least number of nodes: layout}: one of them is in force,
            `job.layout`, and another one may follow when the number of nodes changes.
        checkpoint_dir: folder or URL for the checkpoints of a script that trains alone; it resumes from there. With an
            agent, the job's options decide, and the job must have a checkpoint directory if one is given here.
        checkpoint_every: steps between these checkpoints; "auto": the period that wastes least time.

    Raises:
        BadInputError: the agent's settings in the environment are wrong; a checkpoint directory is given, and the job
            has none; or the layout does not fit the workers of a node, or differs between them.
    """
    level = log_level(os.environ)
    if level:
        logging.getLogger("holdfast").setLevel(level.upper())
    if LOADER in os.environ:
        raise ScriptReachedInit
    settings = WorkerSettings.from_environment(os.environ)
    if guard := TrainingGuard.find_installed():
        guard.allow_optimizers()
    if settings is None:
        SoloExitHook(lambda: None).install()  # So an error in init() gives the same exit code as a later one.
    job = Job(settings, layout=layout, checkpoint_dir=checkpoint_dir, checkpoint_every=checkpoint_every)
    if settings is None:
        SoloExitHook(job.await_saved).install()
    return job
