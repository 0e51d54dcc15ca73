"""Loads a script's main module again in a loader worker, if it defines the data set or collate function.

The script runs under another name than `__main__`, at most up to `holdfast.init()`. So its definitions before that
exist, and nothing is trained.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.abc import InspectLoader
from pathlib import Path
from types import CodeType, ModuleType

import msgspec

from holdfast.runtime.data.parcels import LOADED_MAIN, MAIN


class ScriptReachedInit(BaseException):
    """Raised by `holdfast.init()` in a loader worker, to stop the script there."""


class MainModule(msgspec.Struct, frozen=True, kw_only=True):
    """The location of a script: its file, or its module's name if it was started by `-m`. Both are "" if unknown."""

    path: str = ""
    name: str = ""

    @classmethod
    def of_this_process(cls) -> MainModule:
        """Return the location of this process's script: its module's name if it has one (`-m`), else the absolute path
        of its file, or neither.
        """
        main = sys.modules[MAIN]
        spec = getattr(main, "__spec__", None)
        if spec is not None:
            return cls(name=spec.name)
        path = getattr(main, "__file__", None)
        return cls(path=str(Path(path).absolute()) if path else "")


class LoadedMain:
    """The script's module in a loader worker, loaded on demand."""

    def __init__(self, main: MainModule) -> None:
        self._main = main
        self._module: ModuleType | None = None

    def __call__(self) -> ModuleType:
        """Return the script's module; the first call runs the script up to `holdfast.init()`.

        Raises:
            AttributeError: there is no script, or it defines the requested name after `holdfast.init()`.
            BaseException: an exception of the script.
        """
        if self._module is None:
            self._module = self._load()
        return self._module

    def _load(self) -> ModuleType:
        """Run the script as a new module, at most up to `holdfast.init()`, and return it. It replaces `__main__`, so
        that pickles find it.

        Raises:
            AttributeError: it cannot be found.
            BaseException: an exception of the script.
        """
        module = _Script(LOADED_MAIN)
        code = self._code(module)
        sys.modules[LOADED_MAIN] = sys.modules[MAIN] = module
        try:
            exec(code, module.__dict__)
        except ScriptReachedInit:
            module.__dict__["__stopped__"] = True
        return module

    def _code(self, module: ModuleType) -> CodeType:
        """Return the script's compiled code, and set `__file__` of its new module, and `__package__` if it was started
        by `-m`.

        Raises:
            AttributeError: it has no file, or its module cannot be found.
            OSError, SyntaxError: its file cannot be read or compiled.
        """
        if self._main.name:
            spec = importlib.util.find_spec(self._main.name)
            loader = spec.loader if spec is not None else None
            code = loader.get_code(self._main.name) if isinstance(loader, InspectLoader) else None
            if spec is None or code is None:
                raise AttributeError(f"there is no module {self._main.name} that could be loaded again")
            module.__package__, module.__file__ = spec.parent, spec.origin
            return code
        if not self._main.path:
            raise AttributeError("the script's module has no file: define data set and collate function in a module")
        module.__file__ = self._main.path
        return compile(Path(self._main.path).read_bytes(), self._main.path, "exec")


class _Script(ModuleType):
    """A script's module that explains why a name is missing."""

    def __getattr__(self, name: str) -> object:
        """Raise AttributeError for a missing name; if the script was stopped at `holdfast.init()`, it says that
        definitions belong above.
        """
        stopped = self.__dict__.get("__stopped__", False) and not name.startswith("__")
        why = "; in loader workers the script is run up to holdfast.init(): define it above that" if stopped else ""
        raise AttributeError(f"the script {self.__dict__.get('__file__')} has no {name!r}{why}")
