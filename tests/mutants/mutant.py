"""Definition of a mutant, and its insertion into a module by qualified name and syntax, not by line text."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast


class StaleMutantError(Exception):
    """The code that a mutant changes is not in its function exactly once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mutant:
    """One error inserted into a module of holdfast: a replaced expression or replaced statements.

    Comments, line breaks and the rest of the function may change. If the module moves, only `module` changes.
    """

    name: str
    #: The module below `holdfast`, for example `coordination.turn`.
    module: str
    #: The function, method or class, for example `Turn.change`; empty for the module's own level.
    qualname: str = ""
    #: The replaced code: an expression or whole statements that occur exactly once.
    old: str
    #: The code that replaces it. `pass` removes statements.
    new: str
    #: The consequence if no test detects the mutant.
    why: str
    #: Whether a few schedules detect it.
    quick: bool = False
    #: The test files (below tests/) that must detect it. Empty: schedules of the simulation and the unit tests of
    #: coordination and protocol. Mutants of the runtime and of control need it, as no schedule runs their code.
    tests: tuple[str, ...] = ()
    #: Why the mutant changes nothing; empty if it does.
    equivalent: str = ""

    @property
    def file(self) -> str:
        """The module's file below src/holdfast."""
        return f"{self.module.replace('.', '/')}.py"

    def put_into(self, text: str) -> str:
        """Return the module's text with the mutant in it; comments are lost.

        Raises:
            StaleMutantError: `old` is not in `qualname` exactly once.
        """
        module = ast.parse(text)
        place, new = self.find(module)
        place.put(new)
        if "msgspec." in self.new:
            module.body.insert(2, ast.parse("import msgspec").body[0])  # The docstring and __future__ come first.
        return ast.unparse(ast.fix_missing_locations(module))

    def find(self, module: ast.Module) -> tuple[Place, ast.expr | list[ast.stmt]]:
        """Return the changed place and its replacement.

        Raises:
            StaleMutantError: the same as for `put_into`.
        """
        scope = _scope(module, self.qualname)
        old, new = ast.parse(self.old).body, ast.parse(self.new).body
        places: list[Place] = []
        becomes: ast.expr | list[ast.stmt] = new
        if scope is not None:
            match old, new:
                case [ast.Expr(value=before)], [ast.Expr(value=after)]:
                    places, becomes = list(_expressions(scope, before)), after
                case [ast.Assign(targets=[ast.Name(name)], value=before)], [ast.Assign(value=after)]:
                    places = list(_statements(scope, old))
                    if not places:  # `name=value` in a call
                        places, becomes = list(_arguments(scope, name, before)), after
                case _:
                    places = list(_statements(scope, old))
        if len(places) != 1:
            where = f"{self.module}:{self.qualname}"
            raise StaleMutantError(f"{self.name}: {self.old!r} is {len(places)} times in {where}: change the mutant")
        return places[0], becomes


@dataclass(frozen=True, slots=True)
class Place:
    """The position of a piece of syntax: a field of a node, or `count` entries of a list field."""

    node: ast.AST
    field: str
    index: int | None = None
    count: int = 1

    def put(self, replacement: ast.expr | list[ast.stmt]) -> None:
        """Replace the syntax at this place."""
        if self.index is None:
            setattr(self.node, self.field, replacement)
            return
        entries = replacement if isinstance(replacement, list) else [replacement]
        getattr(self.node, self.field)[self.index : self.index + self.count] = entries


def _scope(module: ast.Module, qualname: str) -> ast.AST | None:
    """Return the function or class with this name, or None."""
    scope: ast.AST = module
    for name in filter(None, qualname.split(".")):
        definitions = (node for node in ast.walk(scope) if isinstance(node, ast.FunctionDef | ast.ClassDef))
        found = next((node for node in definitions if node.name == name and node is not scope), None)
        if found is None:
            return None
        scope = found
    return scope


def _expressions(scope: ast.AST, wanted: ast.expr) -> Iterator[Place]:
    """Yield the places of all expressions equal to this one."""
    for node in ast.walk(scope):
        for field, value in ast.iter_fields(node):
            if isinstance(value, ast.expr) and _same(value, wanted):
                yield Place(node, field)
            for index, entry in enumerate(_nodes(value)):
                if isinstance(entry, ast.expr) and _same(entry, wanted):
                    yield Place(node, field, index)


def _arguments(scope: ast.AST, name: str, value: ast.expr) -> Iterator[Place]:
    """Yield the places of the values of all keyword arguments with this name and value."""
    for node in ast.walk(scope):
        if isinstance(node, ast.keyword) and node.arg == name and _same(node.value, value):
            yield Place(node, "value")


def _statements(scope: ast.AST, wanted: list[ast.stmt]) -> Iterator[Place]:
    """Yield the places of exactly this sequence of statements."""
    for node in ast.walk(scope):
        for field in ("body", "orelse", "finalbody"):
            block = _nodes(getattr(node, field, None))
            for index in range(len(block) - len(wanted) + 1):
                if all(map(_same, block[index : index + len(wanted)], wanted)):
                    yield Place(node, field, index, len(wanted))


def _nodes(value: object) -> list[ast.AST]:
    """Return the entries of a node's list field."""
    return cast("list[ast.AST]", value) if isinstance(value, list) else []


def _same(one: ast.AST, other: ast.AST) -> bool:
    """Whether two pieces of syntax are equal, without comparing whether names are read or written."""
    return type(one) is type(other) and ast.dump(one).replace("Store()", "Load()") == ast.dump(other).replace(
        "Store()", "Load()"
    )
