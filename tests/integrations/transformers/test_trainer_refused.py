"""The Trainer of transformers in a job that does not support it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from holdfast.control.link.training_guard import TrainingGuard
from holdfast.errors import BadInputError

pytestmark = pytest.mark.xdist_group("transformers")


@pytest.fixture
def guard() -> Iterator[TrainingGuard]:
    """The guard of worker processes."""
    guard = TrainingGuard()
    guard.install()
    yield guard
    guard.remove()


@pytest.mark.parametrize("name", ["Trainer", "Seq2SeqTrainer"])
def test_the_transformers_trainer_is_refused_until_the_guard_is_removed(
    name: str, request: pytest.FixtureRequest
) -> None:
    import transformers  # The guard inspects the imported modules, so this import comes first.

    guard: TrainingGuard = request.getfixturevalue("guard")
    kind = getattr(transformers, name)
    trainer = kind.__new__(kind)  # Its __init__ needs a missing package.
    guard.allow_optimizers()
    with pytest.raises(BadInputError, match=r"^transformers\.Trainer\.train\(\) would train the whole"):
        trainer.train()
    guard.remove()
    with pytest.raises(AttributeError):
        trainer.train()
