"""What the MoE layers of one worker share: which micro-batch is under way, and whether the step is void already.

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
    """One per binding, shared by all layers. The runtime says what is under way; the layers say what broke.

    A collective that fails inside forward or backward must not surface in the user's loop: the layer answers with
    zeros and marks the step void here. From then on all collectives of the layers are skipped, so that the loop
    reaches the step's end, where the runtime looks at `void`.
    """

    step: int = 0
    micro_batch: int = 0
    #: Which part of the micro-batch's samples is here, 0-based, and of how many (layouts).
    part: int = 0
    parts: int = 1
    #: Of the job: what is random in a layer follows from it, with step and micro-batch.
    seed: int = 0
    #: The failure that made the step void; None while all is well. A void state stays void: bind a new one.
    void: Exception | None = None
    #: How many layers there are, and which is called next.
    layers: int = 1
    next_layer: int = 0
    #: All-to-alls that a micro-batch takes, forward and backward (0 in a world of one), and took so far.
    expected_exchanges: int = 0
    exchanges: int = 0
    #: Called once, with the reason, when the step becomes void: the sooner the others know, the better.
    on_void: Callable[[Exception], None] | None = None
    #: Assignments per expert `(E,)` of each layer in this attempt at a step, of all ranks.
    loads: dict[int, IntArray] = field(default_factory=dict[int, "IntArray"])
    #: Where the backward pass of the layer that was called last begins, with the shape of its output; None: nowhere.
    output: tuple[GradientEdge, torch.Tensor] | None = None
    #: The micro-batch at hand is being skipped: its own gradients count for nothing on any rank.
    skipping: bool = False
    #: How often this rank's gates chose each expert, `(E,)`, in the layers that count it: in the micro-batch under way,
    #: and in this attempt's that have had their backward.
    micro_batch_choices: dict[int, torch.Tensor] = field(default_factory=dict[int, torch.Tensor])
    choices: dict[int, torch.Tensor] = field(default_factory=dict[int, torch.Tensor])

    def start_attempt(self) -> None:
        """An attempt at a step begins: nothing is counted yet."""
        self.loads.clear()
        self.choices.clear()

    def start_micro_batch(self, step: int, micro_batch: int, part: int = 0, parts: int = 1) -> None:
        """A micro-batch, or a part of one, is about to be computed (or served)."""
        self.step, self.micro_batch, self.part, self.parts = step, micro_batch, part, parts
        self.next_layer = self.exchanges = 0
        self.output = None
        self.micro_batch_choices.clear()

    def finish_micro_batch(self) -> None:
        """A micro-batch has had its backward.

        Raises:
            BadInputError: it did not go through all layers, both ways; the ranks' collectives no longer match.
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
        """A layer's forward has so many assignments per expert, over all ranks."""
        self.loads[layer] = self.loads[layer] + tokens_E if layer in self.loads else tokens_E

    def mark_void(self, error: Exception) -> None:
        """Mark the step void; the first reason is kept, without frames: they keep the dead group's sockets open."""
        if self.void is None:
            error.__context__ = error.__cause__ = None
            self.void = error.with_traceback(None)
            if self.on_void is not None:
                self.on_void(self.void)

    def enter_layer(self, layer: int) -> None:
        """A layer's forward begins.

        Raises:
            BadInputError: it is not this layer's turn. A rank without a micro-batch serves its experts layer by layer,
                in the order in which the model registers them: another order would mix up the ranks' collectives.
        """
        if layer != self.next_layer:
            raise BadInputError(
                f"MoE layer {layer} is called where layer {self.next_layer} is due: in a job of several workers each "
                "MoE layer must be called once per micro-batch, in the order in which the model registers them "
                "(no activation checkpointing around them)"
            )
        self.next_layer = (layer + 1) % self.layers
