"""State that the MoE layers of one worker share: the present micro-batch, and whether the step is void.

Axes: E experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch.autograd.graph import GradientEdge

from holdfast.errors import BadInputError
from holdfast.planning.arrays import IntArray


@dataclass(kw_only=True, slots=True)
class StepState:
    """One per binding, shared by all layers. The runtime sets the micro-batch; the layers report failures.

    A collective that fails inside forward or backward must not raise in the user's loop: the layer returns zeros and
    marks the step void here. All later collectives of the layers are skipped, so that the loop reaches the step's end,
    where the runtime checks `void`.
    """

    step: int = 0
    micro_batch: int = 0
    #: part of the micro-batch's samples on this local rank, 0-based, and the number of parts (layouts)
    part: int = 0
    parts: int = 1
    #: the job's seed, from which a layer's random numbers follow, together with step and micro-batch
    seed: int = 0
    #: the failure that made the step void, or None; a void state stays void, until a new one is bound
    void: Exception | None = None
    #: number of layers, and the layer that must be called next
    layers: int = 1
    next_layer: int = 0
    #: number of all-to-alls in a micro-batch, forward and backward (0 in a world of one), and those so far
    expected_exchanges: int = 0
    exchanges: int = 0
    #: called once, with the reason, when the step becomes void, so that the other workers learn of it early
    on_void: Callable[[Exception], None] | None = None
    #: assignments per expert `(E,)` of each layer in this attempt at a step, of all ranks
    loads: dict[int, IntArray] = field(default_factory=dict[int, "IntArray"])
    #: start of the backward pass of the layer that was called last, with zeros like its output, or None
    output: tuple[GradientEdge, torch.Tensor] | None = None
    #: whether the micro-batch is being skipped, so that its gradients are zero on all ranks
    skipping: bool = False
    #: how often this rank's gates chose each expert, `(E,)`, in the present micro-batch, for layers that count it
    micro_batch_choices: dict[int, torch.Tensor] = field(default_factory=dict[int, torch.Tensor])
    #: the same in all micro-batches of this attempt that have had their backward
    choices: dict[int, torch.Tensor] = field(default_factory=dict[int, torch.Tensor])

    def start_attempt(self) -> None:
        """Start an attempt at a step: forget the loads and choices of the attempt before it."""
        self.loads.clear()
        self.choices.clear()

    def start_micro_batch(self, step: int, micro_batch: int, part: int = 0, parts: int = 1) -> None:
        """Start a micro-batch that this rank computes, or in which it only serves the other ranks: layer 0 comes next,
        and no exchange has happened.

        Args:
            micro_batch: this rank's own; ranks that exchange tokens compute different ones. If it only serves: the
                number of the round.
            part, parts: the part of its samples on this local rank, 0-based, and the number of parts.
        """
        self.step = step
        self.micro_batch = micro_batch
        self.part = part
        self.parts = parts
        self.next_layer = self.exchanges = 0
        self.output = None
        self.micro_batch_choices.clear()

    def finish_micro_batch(self) -> None:
        """Add the choices of a micro-batch to those of the attempt, after its backward.

        Raises:
            BadInputError: it did not use all layers in both directions, so the ranks' collectives no longer match. Not
                raised if the step is void.
        """
        if self.void is None and self.exchanges != self.expected_exchanges:
            raise BadInputError(
                f"the micro-batch made {self.exchanges} of {self.expected_exchanges} token exchanges: in a job of "
                "several workers each micro-batch must use every MoE layer once, and its loss depend on all of them"
            )
        for layer, counts_E in self.micro_batch_choices.items():
            self.choices[layer] = self.choices[layer] + counts_E if layer in self.choices else counts_E
        self.output = None
        self.micro_batch_choices.clear()

    def add_loads(self, layer: int, tokens_E: IntArray) -> None:
        """Add the assignments per expert of a layer's forward, over all ranks."""
        self.loads[layer] = self.loads[layer] + tokens_E if layer in self.loads else tokens_E

    def mark_void(self, error: Exception) -> None:
        """Mark the step void, and call `on_void`; only the first reason counts.

        The traceback is dropped, because its frames would keep the dead group's sockets open.
        """
        if self.void is None:
            error.__context__ = error.__cause__ = None
            self.void = error.with_traceback(None)
            if self.on_void is not None:
                self.on_void(self.void)

    def enter_layer(self, layer: int) -> None:
        """Check that a layer's forward starts in its turn, and expect the next layer.

        Raises:
            BadInputError: another layer is next. A rank without a micro-batch serves its experts layer by layer, in the
                order of registration; another order would mix up the ranks' collectives.
        """
        if layer != self.next_layer:
            raise BadInputError(
                f"MoE layer {layer} is called, but layer {self.next_layer} is next: in a job of several workers each "
                "MoE layer must be called once per micro-batch, in the order in which the model registers them "
                "(no activation checkpointing around them)"
            )
        self.next_layer = (layer + 1) % self.layers
