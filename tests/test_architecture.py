"""The rules of docs/architecture.md: allowed imports, no cycles, packages without torch, and an up-to-date map."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import holdfast
from holdfast.cli.command_table import COMMANDS
from holdfast.protocol.events import EVENTS
from module_index import HEADING, module_index
from places import ROOT

#: Otherwise each xdist process would parse all files again.
pytestmark = pytest.mark.xdist_group("architecture")

SOURCE = ROOT / "src" / "holdfast"
BASE = {"clock", "errors"}
MAY_IMPORT: dict[str, set[str]] = {
    "protocol": set(),
    "planning": set(),
    "planner": {"protocol", "planning", "coordination"},
    "coordination": {"protocol", "planning"},
    "observability": {"protocol"},
    "control": {"protocol", "coordination", "planning", "observability"},
    "runtime": {"protocol", "planning", "coordination", "observability", "control.link"},
    "cli": {"protocol", "planning", "planner", "coordination", "observability", "control"},
    "integrations": set(holdfast.__all__),
}
#: The third-party packages that a package may import.
OUTSIDE: dict[str, set[str]] = {
    "protocol": {"msgspec"},
    "planning": {"numpy", "scipy"},
    "planner": {"msgspec", "numpy", "scipy"},
    "coordination": {"msgspec", "numpy"},
    "observability": {"msgspec", "prometheus_client"},
    "control": {"httpx", "msgspec", "prometheus_client", "starlette", "uvicorn", "websockets", "xxhash"},
    "runtime": {"msgspec", "numpy", "torch", "triton"},
    "cli": {"matplotlib", "msgspec", "numpy", "rich", "scipy", "typer"},
    "integrations": {"torch", "transformers", "torchtitan"},
    "": {"fsspec", "msgspec"},
}
#: Files that import or run modules by name: the name is computed, or pyright cannot resolve the module.
IMPORT_BY_NAME = {
    "__init__.py",
    "cli/command_table.py",
    "control/agent/gpus.py",
    "control/agent/worker_process.py",
    "control/agent/zygote.py",
    "integrations/torchtitan/package.py",
    "observability/metric_rows.py",
    "runtime/data/main_module.py",
}
#: Standard library and base modules without I/O, clocks and randomness.
PURE = {
    *(
        "__future__",
        "abc",
        "bisect",
        "collections",
        "dataclasses",
        "enum",
        "functools",
        "hashlib",
        "heapq",
        "ipaddress",
    ),
    *("itertools", "math", "operator", "re", "statistics", "sys", "types", "typing", "warnings"),
    *("holdfast.errors", "holdfast.patterns", "holdfast.step_samples"),
}
WITHOUT_TORCH = (
    "protocol",
    "control",
    "coordination",
    "observability",
    "planning",
    "planner",
    "cli",
)


#: The folders with type checks.
CHECKED = ["src", "benchmarks", "examples", "tests/simulation", "tests/harness"]


def files() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


@cache
def parsed(path: Path) -> ast.Module:
    """Return a file's syntax tree, cached for all tests here."""
    return ast.parse(path.read_text())


@cache
def import_statements(path: Path) -> list[ast.Import | ast.ImportFrom]:
    """Return the import statements of a file, including function bodies."""
    return [node for node in ast.walk(parsed(path)) if isinstance(node, ast.Import | ast.ImportFrom)]


def imports(path: Path) -> Iterator[str]:
    """Yield the dotted names of all modules that a file imports, including in function bodies."""
    for node in import_statements(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        else:
            assert node.level == 0, f"{path} has a relative import"
            module = node.module or ""
            yield from (f"{module}.{alias.name}" for alias in node.names) if module == "holdfast" else (module,)


def package_of(path: Path) -> str:
    relative = path.relative_to(SOURCE)
    return relative.parts[0] if len(relative.parts) > 1 else ""


@pytest.mark.parametrize("package", sorted(MAY_IMPORT))
def test_packages_import_only_allowed_packages(package: str) -> None:
    allowed = MAY_IMPORT[package] | BASE | {package} | _base_modules()
    for path in (SOURCE / package).rglob("*.py"):
        for name in imports(path):
            if name.startswith("holdfast."):
                _, room, *rest = name.split(".")
                assert {room, ".".join((room, *rest[:1]))} & allowed, f"{path.relative_to(SOURCE)} imports {name}"


def _base_modules() -> set[str]:
    """Return the base modules: top-level modules that import no other holdfast module than each other."""
    modules = {path.stem: path for path in SOURCE.glob("*.py") if not path.stem.startswith("_")}
    base = dict(modules)
    while True:
        bad = {
            stem
            for stem, path in base.items()
            for name in imports(path)
            if name.startswith("holdfast.") and name.split(".")[1] not in base
        }
        if not bad:
            return set(base)
        base = {stem: path for stem, path in base.items() if stem not in bad}


def test_base_modules_import_only_each_other() -> None:
    assert _base_modules() >= BASE


@pytest.mark.parametrize("package", sorted(OUTSIDE))
def test_packages_import_only_listed_dependencies(package: str) -> None:
    for path in files():
        for name in imports(path) if package_of(path) == package else ():
            top = name.split(".")[0]
            known = top in sys.stdlib_module_names or top == "holdfast"
            assert known or top in OUTSIDE[package], f"{path.relative_to(SOURCE)} imports {name}"


def test_dependencies_are_listed_for_every_package() -> None:
    assert OUTSIDE.keys() == MAY_IMPORT.keys() | {""}


def test_only_listed_files_import_modules_by_name() -> None:
    """The other tests here read import statements, so `importlib.import_module` would bypass them."""
    found = set()
    for path in files():
        named = {name for node in ast.walk(parsed(path)) if isinstance(node, ast.stmt) for name in _names(node)}
        called = {node.id for node in ast.walk(parsed(path)) if isinstance(node, ast.Name)}
        if named & {"importlib", "importlib.import_module", "runpy"} or called & {"__import__", "exec", "eval"}:
            found.add(str(path.relative_to(SOURCE)))
    assert found == IMPORT_BY_NAME


def test_torch_is_imported_only_in_runtime_and_integrations() -> None:
    for path in files():
        if package_of(path) not in ("runtime", "integrations"):
            torch = [name for name in imports(path) if name.split(".")[0] == "torch" and package_of(path)]
            assert not torch, f"{path.relative_to(SOURCE)} imports torch"


def test_triton_is_not_imported_at_the_top_level() -> None:
    """Only Triton's own files import it, and no module imports those files at the top level."""
    for path in files():
        if not path.stem.startswith("triton_"):
            top = {name for node in parsed(path).body for name in _names(node)}
            late = [name for name in top if name.split(".")[0] == "triton" or ".triton_" in name]
            assert not late, f"{path.relative_to(SOURCE)} imports {late}"


def _names(node: ast.stmt) -> Iterator[str]:
    """Yield the modules that a statement imports."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_torch_free_packages_do_not_load_torch() -> None:
    """A fresh process imports every module except runtime's, and checks for torch after each package."""
    packages = {"": ["holdfast"]} | {package: list(_modules(package)) for package in WITHOUT_TORCH}
    code = (
        "import importlib, sys\n"
        f"for package, names in {packages!r}.items():\n"
        "    for name in names: importlib.import_module(name)\n"
        "    if 'torch' in sys.modules: sys.exit(f'importing {package or names} brings torch')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def _modules(package: str) -> Iterator[str]:
    for path in (SOURCE / package).rglob("*.py"):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        if parts[-1] != "__main__":
            yield ".".join(("holdfast", *(part for part in parts if part != "__init__")))


def test_coordination_does_no_io_and_reads_no_clock() -> None:
    allowed = PURE | OUTSIDE["coordination"] | {f"holdfast.{package}" for package in MAY_IMPORT["coordination"]}
    allowed |= {"holdfast.coordination"}
    for path in (SOURCE / "coordination").rglob("*.py"):
        tops = {".".join(name.split(".")[: 2 if name.startswith("holdfast.") else 1]) for name in imports(path)}
        assert tops <= allowed, f"{path.relative_to(SOURCE)} imports {tops - allowed}"
        called = [node.func for node in ast.walk(parsed(path)) if isinstance(node, ast.Call)]
        called = {name.id for name in called if isinstance(name, ast.Name)} & {"open", "print", "input"}
        assert not called, f"{path.relative_to(SOURCE)} calls {called}"


def test_packages_have_no_import_cycles() -> None:
    """For each package at any depth, its modules and subpackages have an order without forward imports.

    This includes function bodies and imports for types. A package's own `__init__` counts as a module: it may import
    the
    contents of the package, but then they may not import the package.
    """
    graph = _import_graph()
    circles = {}
    for package in {name.rpartition(".")[0] for name in graph} - {""}:
        within: dict[str, set[str]] = {}
        for module, needs in graph.items():
            if part := _part_of(package, module):
                within.setdefault(part, set()).update(filter(None, (_part_of(package, name) for name in needs)))
        while within:
            free = {part for part, needs in within.items() if not (needs - {part}) & within.keys()}
            if not free:
                circles[package] = sorted(within)
                break
            within = {part: needs for part, needs in within.items() if part not in free}
    assert circles == {}


def _part_of(package: str, module: str) -> str:
    """Return the direct part of a package that contains a module, or "" if the module is outside."""
    if module == package:
        return "__init__"
    return module.removeprefix(f"{package}.").split(".")[0] if module.startswith(f"{package}.") else ""


@cache
def _import_graph() -> dict[str, set[str]]:
    """Return the modules of holdfast that each module imports."""
    modules = {_module(path): path for path in files()}
    return {
        module: modules.keys() & set(_imported_modules(path, set(modules))) - {module}
        for module, path in modules.items()
    }


def test_no_private_name_is_imported() -> None:
    """This covers names and modules. pyright reports `module._name`."""
    private = [
        f"{path.relative_to(SOURCE)} imports {name}"
        for path in files()
        for node in import_statements(path)
        for name in _names(node)
        if name.startswith("holdfast.") and any(re.match(r"_(?!_\w+__$)", part) for part in name.split("."))
    ]
    assert private == []


def test_every_module_in_the_wheel_is_reachable() -> None:
    """Reachable from the commands, `import holdfast`, the integrations, and modules run by name (`python -m`).

    `holdfast examples copy` writes the examples, so their imports count as well.
    """
    graph, paths = _import_graph(), {_module(path): path for path in files()}
    found = {name for name in graph if name.startswith("holdfast.integrations")}
    found |= {"holdfast", "holdfast.__main__", "holdfast.placement"}
    found |= {f"holdfast.cli.{row.module}" for row in COMMANDS.values()}
    found |= {name for path in (ROOT / "examples").glob("*.py") for name in imports(path) if name in graph}
    new = set(found)
    while new:
        named = {
            node.value
            for module in new
            for node in ast.walk(parsed(paths[module]))
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in graph
        }
        parents = {module.rpartition(".")[0] for module in new} - {""}
        new = (set().union(*(graph[module] for module in new)) | named | parents) - found
        found |= new
    assert sorted(graph.keys() - found) == []


def _module(path: Path) -> str:
    parts = ("holdfast", *path.relative_to(SOURCE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imported_modules(path: Path, modules: set[str]) -> Iterator[str]:
    for node in import_statements(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif node.module:
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in modules else node.module for name in whole)


def test_every_package_has_a_docstring() -> None:
    for folder in {path.parent for path in files()}:
        assert ast.get_docstring(parsed(folder / "__init__.py")), f"{folder} does not"


def test_package_docstrings_name_only_existing_files_and_names() -> None:
    known = {"holdfast", *EVENTS} | {name for path in files() for name in _defined_names(path)}
    for path in files():
        if path.name == "__init__.py":
            for named in re.findall(r"`([\w./]+)`", ast.get_docstring(parsed(path)) or ""):
                exists = any(path.parent.rglob(named)) if named.endswith(".py") else set(named.split(".")) <= known
                assert exists, f"{path.relative_to(SOURCE)} names {named}"


def _defined_names(path: Path) -> Iterator[str]:
    """Yield the names of a module and its packages, and of all its definitions."""
    yield from (path.stem, *path.relative_to(ROOT).parts[:-1])
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def test_the_architecture_map_names_only_existing_files() -> None:
    """A name after `::` must occur in that file."""
    known = [*files(), *(ROOT / "tests").rglob("*.py")]
    for page in ("docs/architecture.md", "CONTRIBUTING.md"):
        for named, _, name in re.findall(r"`([\w/]+\.py)(::(\w+))?`", (ROOT / page).read_text()):
            found = [path for path in known if f"/{path.relative_to(ROOT)}".endswith(f"/{named}")]
            assert any(not name or name in _defined_names(path) for path in found), f"{page}: {named} {name}"


def test_all_pages_name_only_existing_files() -> None:
    for page in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").rglob("*.md")):
        named = re.findall(r"(?<![\w/.-])(?:src|tests|benchmarks|examples|docs)/[\w/.-]+\.\w+", page.read_text())
        missing = {name for name in named if not (ROOT / name).exists()} - {"tests/FOLDER/test_NAME.py"}
        assert not missing, f"{page.name} names {missing}"


def test_the_architecture_map_names_only_existing_folders() -> None:
    for page in ("docs/architecture.md", "CONTRIBUTING.md"):
        for named in re.findall(r"`(\w+(?:/\w+)*/?)`", (ROOT / page).read_text()):
            if named.split("/")[0] in MAY_IMPORT.keys() | {"tests", "src"} and "/" in named:
                assert any((root / named).is_dir() for root in (SOURCE, ROOT)), f"{page}: {named}"


def test_the_architecture_map_lists_every_folder_and_module() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    packages, _, index = page.partition(HEADING)
    folders = {path.parent.relative_to(SOURCE).as_posix() for path in files() if not path.stem.startswith("__")}
    assert folders - {"."} <= set(re.findall(r"^\| `([\w/]+)` \| .+ \|$", packages, re.MULTILINE))
    assert index == module_index(), "run: python tests/module_index.py"


def test_the_architecture_map_has_the_table_of_allowed_imports() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    rows = re.findall(r"^\| (`.*`) \| (.*) \|$", page[: page.index("## The packages")], re.MULTILINE)
    table = {name: allowed for names, allowed in rows for name in re.findall(r"`(\w+)`", names)}
    assert table.keys() == MAY_IMPORT.keys()
    assert table.pop("integrations") == "the names exported by `holdfast`"
    assert table.pop("cli") == "all of these but `runtime`"
    assert MAY_IMPORT["cli"] == table.keys() - {"runtime"}
    for name, allowed in table.items():
        assert {one.replace("/", ".") for one in re.findall(r"`([\w/]+)`", allowed)} == MAY_IMPORT[name], name


def test_test_files_have_unique_names() -> None:
    """pytest imports test files by name: two equal names work alone, but not in one run."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, times in names.items() if times > 1] == []


def test_pyright_is_strict_in_all_checked_folders() -> None:
    """`make types`, which .ci/run calls, uses these settings; a comment may silence one rule on one line."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pyright"]
    assert settings["typeCheckingMode"] == "strict"
    assert settings["include"] == CHECKED
    assert settings["exclude"] == ["**/test_*.py"]
    assert not {"strict", "ignore", "executionEnvironments"} & settings.keys()
    assert not settings["enableTypeIgnoreComments"]
    softened = {name for name, value in settings.items() if name.startswith("report") and value != "error"}
    assert not softened


def test_only_listed_files_relax_the_type_checks() -> None:
    checked = [path for folder in CHECKED for path in (ROOT / folder).rglob("*.py")]
    comments = {path.name for path in checked if "\n# pyright: " in path.read_text()}
    assert comments == {"solvers.py", "triton_jit.py", "triton_kernels.py"}


def test_tensor_axes_are_written_in_one_style() -> None:
    """Write `(L, E)`, not `[L, E]`, and quote names with backticks, not with stars."""
    other = re.compile(r"`\[(?:[A-Z]|\.\.\.)(?:, |\]| [+-] )|(?<![\w*`)\]])\*[a-z_]+\*(?![\w*])")
    found = [
        f"{path.relative_to(SOURCE)}:{number}"
        for path in files()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if other.search(line)
    ]
    assert found == []
