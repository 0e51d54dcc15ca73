"""Warnings about settings of the script that a checkpoint replaces: the checkpoint's values are used."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from holdfast.runtime.state.state import TrainingState

_NAMED = 3


def changed_settings(
    script: Mapping[tuple[str, int], Mapping[str, object]], checkpoint: Mapping[tuple[str, int], Mapping[str, object]]
) -> Iterator[str]:
    """Yield one warning for each option of the optimizers that differs between the script and the checkpoint; it has
    both values, and, except for the learning rate, how to change the option.

    Args:
        script, checkpoint: the options of each parameter group, as `Optimizers.settings`, before and after the
            checkpoint was loaded. A group that only one of them has is not compared.
    """
    both = [group for group in script if group in checkpoint]
    options = dict.fromkeys(option for group in both for option in script[group])
    for option in options:
        mine = [script[group].get(option) for group in both]
        theirs = [checkpoint[group].get(option) for group in both]
        if mine == theirs:
            continue
        called, remedy = "learning rate", ""
        if option != "lr":  # A schedule may drive the learning rate, so no line in the loop could change it.
            called = option
            remedy = (
                f": to change it, set group[{option!r}] of optimizer.param_groups in the loop, before "
                "step.micro_batches()"
            )
        theirs_text, mine_text = _format_values(theirs), _format_values(mine)
        yield f"the checkpoint's {called} {theirs_text} is used, not the script's {mine_text}{remedy}"


def changed_frozen(script: Mapping[int, str], state: TrainingState) -> str:
    """Return a warning that names the parameters that the checkpoint has frozen or unfrozen, or "".

    Args:
        script: the parameters that the script had frozen, by index, before the checkpoint was loaded.
        state: the state after that.
    """
    now = state.frozen_parameters()
    parts = [
        f"{verb} {_format_names([*names])}"
        for verb, names in (
            ("freezes", [name for number, name in now.items() if number not in script]),
            ("trains", [name for number, name in script.items() if number not in now]),
        )
        if names
    ]
    if not parts:
        return ""
    return (
        f"the checkpoint {' and '.join(parts)}, unlike the script before job.protect(): the checkpoint counts; to "
        "change it, call requires_grad_() in the loop, before step.micro_batches()"
    )


def _format_values(values: Sequence[object]) -> str:
    """Return the value of all groups if it is the same, else a list of their values."""
    return str(values[0] if all(value == values[0] for value in values) else list(values))


def _format_names(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{', '.join(names[:_NAMED])}{more}"
