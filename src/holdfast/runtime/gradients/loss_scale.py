"""Loss scaling for float16: torch's GradScaler, told by v instead of by this rank's own gradients.

Small float16 gradients vanish: the loss is multiplied by a scale before backward, and the reduced gradients are divided
by it before norm and clipping. Where any of them is not finite, on any rank, v says so to everybody: all leave the
optimizer alone at that step and take the scale back. The scale is state, as the optimizer's.

A plain script that accumulates divides each micro-batch's loss by their number before it is scaled, so that gradients
on their way through float16 are as small as those of the whole batch's mean loss. Here they are divided by the next
power of two before, which rounds nothing, and by the rest after the reduction: as many steps overflow, and as few
vanish.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from torch.amp.grad_scaler import GradScaler

from holdfast.errors import BadInputError
from holdfast.protocol.commit import Commit

#: The scaler's name in the state, beside the user's `extra`.
NAME = "torch.amp.GradScaler"


class LossScale:
    """The scale of a job: the same on every rank at every step."""

    def __init__(
        self,
        scaler: GradScaler | None,
        parameters: Iterable[torch.nn.Parameter],
        device: torch.device,
        *,
        micro_batches: int = 1,
    ) -> None:
        """Use a scaler from now on; its user calls none of its methods.

        Args:
            scaler: None or a disabled one: the scale is 1 and stays so.
            parameters: all that are trained.
            device: the model's.
            micro_batches: M, per step.

        Raises:
            BadInputError: it is no GradScaler, or parameters are float16 themselves.
        """
        given = cast(object, scaler)  # a script's own, whatever it says it is
        if given is not None and not isinstance(given, GradScaler):
            raise BadInputError(f"scaler is a {type(given).__name__}: give a torch.amp.GradScaler, or None")
        self._scaler = scaler if scaler is not None else GradScaler(enabled=False)
        self._divisor = 1.0
        if not self._scaler.is_enabled():
            return
        if any(parameter.dtype == torch.float16 for parameter in parameters):
            raise BadInputError(
                "a loss scale needs parameters in float32: keep the model in float32 and compute in float16 under "
                "torch.autocast"
            )
        self._divisor = float(1 << (micro_batches - 1).bit_length())
        # The scaler rounds its scale to float32 at its first use: here, so that a rank that computes nothing does too.
        self._scaler.scale(torch.zeros((), device=device))

    @property
    def value(self) -> float:
        """The scaler's own scale now, of a step's mean loss."""
        return self._scaler.get_scale()

    @property
    def factor(self) -> float:
        """What a micro-batch's gradients are multiplied by now."""
        return self.value / self._divisor

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Return what to call backward() on."""
        return self._scaler.scale(loss) / self._divisor if self._scaler.is_enabled() else loss

    def has_overflowed(self, v: Commit) -> bool:
        """Return whether the scale explains why a step's gradients are not finite. The same on every rank.

        It does not if the loss itself is not finite, or if the scale is at most 1 already.
        """
        return v.nonfinite > 0 and self._scaler.is_enabled() and self.value > 1.0 and math.isfinite(v.loss_sum)

    def update(self, *, skipped: bool) -> None:
        """A step is applied: back off after a skipped one, grow after so many good ones, exactly as torch does."""
        state = self._scaler.state_dict()
        if not state:
            return
        scale, good = state["scale"], state["_growth_tracker"] + 1
        if skipped:
            scale, good = scale * state["backoff_factor"], 0
        elif good == state["growth_interval"]:
            grown = torch.tensor(scale * state["growth_factor"], dtype=torch.float32)
            scale, good = float(grown) if grown.isfinite() else scale, 0
        self._scaler.load_state_dict({**state, "scale": scale, "_growth_tracker": good})


def add_scaler(extra: Mapping[str, Any] | None, scaler: GradScaler | None) -> dict[str, Any]:
    """Return the state that a user adds, the scaler's among it; a disabled one has none.

    Raises:
        BadInputError: `extra` is no mapping, or a scaler is among it, where it would scale nothing.
    """
    if extra is not None and not isinstance(cast(object, extra), Mapping):
        raise BadInputError(f'extra is a {type(extra).__name__}: give things by name, such as extra={{"ema": ema}}')
    extra = dict(extra or {})
    for name, thing in extra.items():
        if isinstance(thing, GradScaler):
            raise BadInputError(f"extra[{name!r}] is a GradScaler: pass it as scaler=..., where it scales the loss")
    return {**extra, NAME: scaler} if scaler is not None and scaler.is_enabled() else extra
