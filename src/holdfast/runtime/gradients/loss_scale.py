"""Loss scaling for float16: torch's GradScaler, controlled by the step result instead of this rank's gradients.

Small float16 gradients vanish. So the loss is multiplied by a scale before backward, and the reduced gradients are
divided by it before norm and clipping. If any gradient on any rank is not finite, the step result reports it: all ranks
skip the optimizer in that step and reduce the scale. The scale is part of the state, like the optimizer's.

A plain script that accumulates gradients divides each micro-batch's loss by the number of micro-batches before it is
scaled. So its float16 gradients are as small as for the mean loss of the whole batch. Here the loss is divided by the
next power of two, which is exact, and by the rest after the reduction. So gradients overflow or vanish as often as in a
plain script.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from torch.amp.grad_scaler import GradScaler

from holdfast.errors import BadInputError
from holdfast.protocol.commit import Commit

#: The scaler's name in the state, next to the user's `extra`.
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
        """Use a scaler; its user must not call its methods.

        Args:
            scaler: None or a disabled one: the scale is always 1.
            parameters: all trained ones.
            device: the model's.
            micro_batches: M, per step.

        Raises:
            BadInputError: it is not a GradScaler, or parameters are in float16.
        """
        given = cast(object, scaler)  # The script may pass any object.
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
        # The scaler rounds its scale to float32 at its first use. Done here, so that idle ranks do it, too.
        self._scaler.scale(torch.zeros((), device=device))

    @property
    def value(self) -> float:
        """The scaler's present scale, of a step's mean loss."""
        return self._scaler.get_scale()

    @property
    def factor(self) -> float:
        """The present factor of a micro-batch's gradients."""
        return self.value / self._divisor

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the scaled loss, on which backward() is called."""
        return self._scaler.scale(loss) / self._divisor if self._scaler.is_enabled() else loss

    def has_overflowed(self, v: Commit) -> bool:
        """Return whether the scale explains why a step's gradients are not finite. The same on every rank.

        It does not if the loss itself is not finite, or if the scale is at most 1 already.
        """
        return v.nonfinite > 0 and self._scaler.is_enabled() and self.value > 1.0 and math.isfinite(v.loss_sum)

    def update(self, *, skipped: bool) -> None:
        """Update the scale after a step exactly as torch does: reduce it after a skipped step, and raise it after
        `growth_interval` steps that were not skipped, if it stays finite. Nothing without a scaler.
        """
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
    """Return the user's additional state by name, plus the scaler as `NAME` if it is enabled.

    Raises:
        BadInputError: `extra` is not a mapping, or contains a scaler, which would scale nothing there.
    """
    if extra is not None and not isinstance(cast(object, extra), Mapping):
        raise BadInputError(f'extra is a {type(extra).__name__}: give things by name, such as extra={{"ema": ema}}')
    extra = dict(extra or {})
    for name, thing in extra.items():
        if isinstance(thing, GradScaler):
            raise BadInputError(f"extra[{name!r}] is a GradScaler: pass it as scaler=..., so that it scales the loss")
    return {**extra, NAME: scaler} if scaler is not None and scaler.is_enabled() else extra
