"""Refuses training that holdfast does not control, in which each worker would train the whole model alone."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from holdfast.errors import BadInputError

_OPTIMIZERS = "torch.optim.optimizer"
#: frameworks with their own training loop: module -> class and method that start the loop
_LOOPS = {
    "transformers.trainer": ("Trainer", "train"),
    "lightning.pytorch.trainer.trainer": ("Trainer", "fit"),
    "pytorch_lightning.trainer.trainer": ("Trainer", "fit"),
}
_REMEDY = "call holdfast.init(), job.protect(...), and train in a loop over job.steps(...)"


class TrainingGuard(MetaPathFinder):
    """Watches a worker process until its script has called `job.protect()`.

    It is an entry of `sys.meta_path`, so that it sees the imports of frameworks. It refuses the training loops of
    frameworks, and the first step of any torch optimizer before `holdfast.init()`.
    """

    def __init__(self) -> None:
        self._stop_watching: Callable[[], None] | None = None
        self._expects_script = True

    @classmethod
    def find_installed(cls) -> TrainingGuard | None:
        """Return the guard of this process, or None if it has none, or no longer has one."""
        return next((finder for finder in sys.meta_path if isinstance(finder, cls)), None)

    def install(self) -> None:
        """Become an entry of `sys.meta_path`, and guard the frameworks that are imported already."""
        sys.meta_path.insert(0, self)
        for name in (_OPTIMIZERS, *_LOOPS):
            if name in sys.modules:
                self._guard_module(sys.modules[name])

    def allow_optimizers(self) -> None:
        """Allow the steps of all optimizers: the script has called `holdfast.init()`.

        Training loops of frameworks stay refused.
        """
        if self._stop_watching is not None:
            self._stop_watching()
        self._expects_script = False

    def remove(self) -> None:
        """Stop watching, and allow optimizers and training loops: the script has called `job.protect()`, or is over."""
        self.allow_optimizers()
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find torch's optimizer module or a framework's module as Python would, and guard it once it is loaded.

        Return None if it does not exist, and for every other module.
        """
        if fullname not in (_OPTIMIZERS, *_LOOPS):
            return None
        others = (finder.find_spec(fullname, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((spec for spec in others if spec is not None), None)
        loader: Any = spec.loader if spec is not None else None
        if loader is not None:
            load = loader.exec_module

            def load_and_watch(module: ModuleType) -> None:
                load(module)
                self._guard_module(module)

            loader.exec_module = load_and_watch
        return spec

    def _guard_module(self, module: ModuleType) -> None:
        """Refuse optimizer steps in torch's module, unless they are allowed.

        In a framework's module, replace the training loop by one that raises BadInputError while the guard is
        installed.
        """
        found: Any = module
        if module.__name__ == _OPTIMIZERS:
            if self._expects_script:
                self._stop_watching = found.register_optimizer_step_pre_hook(self._refuse_step).remove
            return
        kind, method = _LOOPS[module.__name__]
        loop = getattr(getattr(found, kind), method)

        @functools.wraps(loop)
        def refuse(*args: object, **options: object) -> object:
            """Run the training loop if the guard was removed.

            Raises:
                BadInputError: the guard is still installed.
            """
            if self in sys.meta_path:
                name = f"{module.__name__.split('.')[0]}.{kind}.{method}()"
                raise BadInputError(f"{name} would train the whole model on each node, into one folder: {_REMEDY}")
            return loop(*args, **options)

        setattr(getattr(found, kind), method, refuse)

    def _refuse_step(self, optimizer: object, *_: object) -> None:
        raise BadInputError(
            f"a step of {type(optimizer).__name__} before holdfast.init(): each worker would train the whole model "
            f"alone; {_REMEDY}"
        )
