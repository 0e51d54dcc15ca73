"""The optimizer of each step: of several optimizers, each step updates one, in an order that the script gives.

Each update is a complete step, with a reduction, a norm and a commit operation. It does not change the parameters of
the other optimizers; gradients that autograd makes for them are dropped after each backward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard, cast

from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from holdfast.errors import BadInputError, StepUseError
from holdfast.runtime.dtensor.local import is_sharded
from holdfast.runtime.dtensor.replica_position import WHOLE_REPLICA, ReplicaPosition
from holdfast.runtime.gradients.step_guard import StepGuard, find_schedulers
from holdfast.runtime.moe.expert_shards.binding import dense_parameters
from holdfast.runtime.moe.expert_shards.choices import RoutingChoices
from holdfast.runtime.moe.expert_shards.gradients import ExpertGradients
from holdfast.runtime.moe.expert_shards.job_experts import JobExperts
from holdfast.runtime.moe.layer.expert_layer import expert_parameters
from holdfast.runtime.reduction.reduction import GradientBuckets, foreign_gradient_error
from holdfast.runtime.state.optimizers import (
    NAMELESS,
    Optimizers,
    format_names,
    parameters_of,
    unknown_parameter_message,
)
from holdfast.runtime.state.refusals import needs_metric
from holdfast.runtime.state.state import TrainingState


class Update:
    """A step's update of one optimizer."""

    def __init__(
        self,
        name: str,
        optimizer: Optimizer,
        state: TrainingState,
        *,
        max_norm: float | None,
        only: bool,
        guard: StepGuard,
        position: ReplicaPosition = WHOLE_REPLICA,
    ) -> None:
        """Manage the gradients of the optimizer's parameters.

        Args:
            name: of the optimizer.
            max_norm: its gradients are clipped to this norm; None for no clipping.
            only: whether it is the only optimizer, which has all gradients of the model.
            guard: of the job's optimizers.
            position: the part of a replica on this worker.
        """
        self.name = name
        self.max_norm = max_norm
        self._optimizer = optimizer
        self._state = state
        self._only = only
        self._position = position
        self._guard = guard
        experts = expert_parameters(state.model)
        self._experts = [(weight, weight.requires_grad) for weight in experts]
        self._dense = dense_parameters(state.model)
        self._in_model = {id(parameter) for parameter in (*self._dense, *experts)}
        self._make_buckets()
        mine = {id(parameter) for parameter in parameters_of(optimizer)}
        #: whether this optimizer steps the experts
        self.steps_experts = only or any(id(weight) in mine for weight in experts)
        #: schedulers of this optimizer, by their names in `extra`
        self.schedulers = {name: thing for name, thing in state.extra.items() if _is_schedule_of(thing, optimizer)}

    def _make_buckets(self) -> None:
        """Make empty buckets for the dense parameters that the optimizer trains now. Note the other optimizers'
        parameters, and which parameters are trained, to detect changes by the script.
        """
        mine = {id(parameter) for parameter in parameters_of(self._optimizer)}
        trained = self._dense if self._only else [p for p in self._dense if id(p) in mine]
        device = next((parameter.device for parameter in self._state.model.parameters()), None)
        self.buckets = GradientBuckets(trained, counts=self._position.is_counted_here, device=device)
        self._reduced = {id(parameter) for parameter in self.buckets.parameters} | {id(w) for w, _ in self._experts}
        #: parameters of the other optimizers; their gradients are dropped
        self._others: list[Parameter] = [] if self._only else [p for p in self._dense if id(p) not in mine]
        self._trained = self._describe_trained()

    @property
    def needs_backward(self) -> bool:
        """Whether its optimizer has a parameter that requires a gradient. If not, the loss needs no gradient."""
        return bool(self.buckets.parameters) or (self.steps_experts and bool(self._experts))

    @property
    def has_trainable(self) -> bool:
        """Whether any parameter of any optimizer requires a gradient."""
        dense = self._dense if self._only else self._state.optimizers.parameters
        return any(parameter.requires_grad for parameter in (*dense, *(weight for weight, _ in self._experts)))

    def _describe_trained(self) -> tuple[list[bool], list[int]]:
        """Return which parameters require a gradient, and how many parameters each group has."""
        groups = [len(group["params"]) for group in self._optimizer.param_groups]
        return [parameter.requires_grad for parameter in self._dense], groups

    def follow_script(self) -> None:
        """Make new buckets if the script has frozen, unfrozen or added parameters between two steps. Do nothing if it
        has not.

        Raises:
            StepUseError: it did so in the middle of a step, or in a way that other workers cannot follow; or nothing is
                left to train.
        """
        for weight, required in self._experts:
            if weight.requires_grad != required:
                raise StepUseError(
                    f"requires_grad of an expert weight of shape {tuple(weight.shape)} was changed after "
                    "job.protect(): experts move between workers, so freeze them before job.protect(), or by a "
                    "learning rate of 0"
                )
        if self._describe_trained() == self._trained:
            return
        if self.buckets.has_sums:
            raise StepUseError(
                "requires_grad or the optimizer's parameter groups were changed after a micro-batch of this step had "
                "its backward: change them in after_apply, or in the loop before step.micro_batches()"
            )
        if not self.has_trainable:
            raise StepUseError(
                "all parameters of all optimizers are frozen, so there is nothing left to train: call "
                "requires_grad_(True) on some of them, or end the job with job.stop(reason)"
            )
        self._check_added()
        for parameter in self.buckets.parameters:
            parameter.grad = None
        self._make_buckets()

    def _check_added(self) -> None:
        """Check the parameters that the script has unfrozen or added.

        Raises:
            StepUseError: a parameter is not the model's, is another optimizer's, or is not sharded.
        """
        optimizers = self._state.optimizers
        others = [(name, one) for name, one in optimizers.by_name.items() if name != self.name]
        elsewhere = {id(parameter): name for name, one in others for parameter in parameters_of(one)}
        for parameter in parameters_of(self._optimizer):
            if id(parameter) not in self._in_model:
                raise StepUseError(unknown_parameter_message(parameter))
            if id(parameter) in elsewhere:
                raise StepUseError(
                    f"a parameter of shape {tuple(parameter.shape)} was added to the {_describe_owner(self.name)}, and "
                    f"is in optimizer {elsewhere[id(parameter)]!r} too: each parameter belongs to one optimizer"
                )
        if self._position.layout.shard > 1:
            for parameter in self._dense:
                if parameter.requires_grad and not is_sharded(parameter):
                    raise StepUseError(
                        f"a parameter of shape {tuple(parameter.shape)} was unfrozen and is not sharded, so each "
                        "worker of the replica would train it on its own samples alone: include it in fully_shard()"
                    )

    def start_step(self, *, fresh: bool) -> None:
        """Start an attempt at a step of this optimizer: `p.grad` is None for all parameters.

        Args:
            fresh: drop the sums of gradients; else keep them, to continue the step.

        Raises:
            BadInputError: the script has made a scheduler that is not in `extra`.
        """
        self._guard.check()
        if fresh:
            self.buckets.zero()
        else:
            self.buckets.hide_sums()
        for parameter in self._others:
            parameter.grad = None

    def prepare_backward(self) -> None:
        """Follow changes of the trained parameters, check the gradients, and set `p.grad` to the sums so far, to which
        backward adds.

        Raises:
            StepUseError: the script has made or changed gradients, or frozen parameters in the middle of a step.
        """
        self.follow_script()
        if self.check_gradients():
            self.buckets.show_sums()

    def check_gradients(self) -> bool:
        """Check that the script has not made or changed gradients, including the other optimizers' parameters.

        Returns:
            Whether some sums of gradients are hidden, their `p.grad` being None, so that they must be shown before a
            backward.

        Raises:
            StepUseError: the script has made or changed one.
        """
        hidden = self.buckets.check_gradients()
        for parameter in self._others:
            if parameter.grad is not None:
                raise foreign_gradient_error(parameter)
        return hidden

    def collect(self) -> None:
        """Take over the gradients of a backward as the step's sums, and drop the gradients of the other optimizers'
        parameters.
        """
        self.buckets.collect()
        for parameter in self._others:
            parameter.grad = None

    def check_before_reduction(self) -> None:
        """Follow changes of the trained parameters. Check that the script has not changed gradients, and that the
        optimizer would only use gradients of the buckets and the experts.

        Raises:
            StepUseError: it has, or a parameter was frozen in the middle of the step, so replicas would differ.
        """
        self.follow_script()
        self.check_gradients()
        for parameter in parameters_of(self._optimizer):
            if parameter.grad is not None and id(parameter) not in self._reduced:
                raise StepUseError(
                    f"a parameter of shape {tuple(parameter.shape)} has a gradient that nothing reduces: its "
                    "requires_grad was set to False after a backward of this step; change it in after_apply, or in the "
                    "loop before step.micro_batches()"
                )

    def reducible_gradients(
        self, experts: JobExperts | None
    ) -> Sequence[GradientBuckets | ExpertGradients | RoutingChoices]:
        """Return all gradients to reduce: the buckets and, if this optimizer steps the experts, the experts' gradients
        and the routing choices. The objects of experts differ in each generation.
        """
        if experts is None or not self.steps_experts:
            return (self.buckets,)
        return (self.buckets, experts.gradients, experts.choices)

    def step(self) -> None:
        """Update the parameters by their present gradients."""
        with self._guard.allow_steps():
            self._optimizer.step()

    def advance_schedules(self) -> None:
        """Advance this optimizer's learning rate schedules in `extra` by one step, also after a skipped step; not those
        that need a metric.
        """
        for scheduler in self.schedulers.values():
            # torch counts calls of optimizer.step() to warn of a wrong order. A skipped step, or a received state, has
            # the right order without such a call.
            optimizer: Any = scheduler.optimizer
            optimizer._opt_called = True
            scheduler.step()


class Updates:
    """The order in which steps update a job's optimizers."""

    def __init__(
        self,
        state: TrainingState,
        order: Sequence[str] | None,
        max_grad_norm: float | Mapping[str, float] | None,
        position: ReplicaPosition = WHOLE_REPLICA,
    ) -> None:
        """Start with the first optimizer at step 1, and repeat after the last.

        Args:
            order: names of optimizers, each at least once; by default in the order in which they were given.
            max_grad_norm: for all, or by name.
            position: the part of a replica on this worker.

        Raises:
            BadInputError: a name is unknown or missing, a norm is not positive, there is nothing to train, or a
                scheduler is not in `extra`.
        """
        optimizers = state.optimizers
        self.order = _check_order(order, optimizers)
        norms = _check_norms(max_grad_norm, optimizers)
        only = len(optimizers.by_name) == 1
        guard = StepGuard(optimizers, state.extra)
        self._by_name = {
            name: Update(name, optimizer, state, max_norm=norms.get(name), only=only, guard=guard, position=position)
            for name, optimizer in optimizers.by_name.items()
        }
        if not any(update.has_trainable for update in self._by_name.values()):
            owner = "the model" if only else f"none of the optimizers {format_names(optimizers.by_name)}"
            raise BadInputError(
                f"{owner} has {'no' if only else 'a'} parameter that requires a gradient: there is nothing to train; "
                "call requires_grad_(True) on some before job.protect()"
            )
        self._positions: dict[str, int] = {}

    def record_schedules(self) -> None:
        """Record the schedules' positions, after a step is applied and before the script's `after_apply`."""
        self._positions = self._schedule_positions()

    def check_schedules(self) -> None:
        """Check the schedules' positions after the script's `after_apply`.

        Raises:
            BadInputError: the script has stepped one of them, too.
        """
        for name, place in self._schedule_positions().items():
            if place != self._positions.get(name, place):
                raise BadInputError(
                    f"extra[{name!r}] was stepped by the script as well: holdfast steps it at each step that updates "
                    "its optimizer; leave scheduler.step() out"
                )

    def _schedule_positions(self) -> dict[str, int]:
        return {
            name: _count_steps(scheduler)
            for update in self._by_name.values()
            for name, scheduler in update.schedulers.items()
        }

    def update_of_step(self, step: int) -> Update:
        """Return the update of a step; steps count from 1."""
        return self._by_name[self.order[(step - 1) % len(self.order)]]

    def describe(self) -> dict[str, object]:
        """Return the order of updates and the norms for clipping, by the options' names; without names of optimizers
        only the norm. All workers of a job must have the same.
        """
        norms = {name: update.max_norm for name, update in self._by_name.items()}
        if NAMELESS in norms:
            return {"max_grad_norm": norms[NAMELESS]}
        return {"updates": self.order, "max_grad_norm": norms}


def _describe_owner(name: str) -> str:
    return f"optimizer {name!r}" if name else "the model"


def _is_schedule_of(thing: object, optimizer: Optimizer) -> TypeGuard[LRScheduler]:
    """Return whether it is a schedule of this optimizer that can be stepped without a metric."""
    return isinstance(thing, LRScheduler) and thing.optimizer is optimizer and not needs_metric(thing)


def _count_steps(scheduler: LRScheduler) -> int:
    """Return a number that grows with each step; for a ChainedScheduler, the sum over the schedulers inside it."""
    if hasattr(scheduler, "last_epoch"):
        return scheduler.last_epoch
    return sum(one.last_epoch for one in find_schedulers([scheduler]) if hasattr(one, "last_epoch"))


def _check_order(order: Sequence[str] | None, optimizers: Optimizers) -> tuple[str, ...]:
    """Return the order in which steps update the optimizers; by default, each once.

    Raises:
        BadInputError: it is not a list of names, a name is unknown or left out, or there is only one optimizer, without
            a name.
    """
    names = list(optimizers.by_name)
    if order is None:
        return tuple(names)
    if NAMELESS in optimizers.by_name:
        raise BadInputError(
            'updates is for several optimizers by name, such as optimizer={"generator": a, "critic": b}'
        )
    given = cast(object, order)
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise BadInputError(f"updates is {given!r}: give the names of the optimizers in their order, in a list")
    for name in order:
        if name not in names:
            raise BadInputError(f"updates names {name!r}, not an optimizer: there are {format_names(names)}")
    if missing := [name for name in names if name not in order]:
        raise BadInputError(
            f"updates leaves out {format_names(missing)}: no step would ever update it; name it there, as often "
            "as its turn comes, or give no such optimizer"
        )
    return tuple(order)


def _check_norms(given: float | Mapping[str, float] | None, optimizers: Optimizers) -> dict[str, float]:
    """Return the norms by the optimizer's name, for the optimizers that are clipped; one number counts for all.

    Raises:
        BadInputError: a name is unknown, a norm is not a positive number, or it is a mapping for a single optimizer.
    """
    if given is None:
        return {}
    names = list(optimizers.by_name)
    if isinstance(given, Mapping) and NAMELESS in names:
        raise BadInputError("max_grad_norm is a mapping, but the job has one optimizer: give one number")
    norms: dict[str, float] = dict(given) if isinstance(given, Mapping) else dict.fromkeys(names, given)
    for name, norm in norms.items():
        if name not in names:
            raise BadInputError(f"max_grad_norm names {name!r}, not an optimizer: there are {format_names(names)}")
        number = cast(object, norm)
        if not isinstance(number, int | float) or not number > 0:
            by_name = isinstance(given, Mapping)
            option, none = (f"max_grad_norm[{name!r}]", "left out") if by_name else ("max_grad_norm", "None")
            raise BadInputError(f"{option} is {norm!r}: it must be positive, or {none} for no clipping")
    return norms
