"""`holdfast examples`: the example scripts that are installed with holdfast, listed and copied."""

from __future__ import annotations

import ast
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

import holdfast
from holdfast.cli.help import HelpfulGroup, HelpfulTyper
from holdfast.cli.output import AsJson, print_json, print_line
from holdfast.errors import BadInputError

#: not an example of a training script
_TOOLS = {"changed_lines"}
#: the same script without holdfast, for comparison, has this after its name
PLAIN = "_plain"

app = HelpfulTyper(cls=HelpfulGroup, help="List and copy example training scripts.")


def register(to: typer.Typer) -> None:
    """Add this module's commands."""
    to.add_typer(app, name="examples")


@app.command("list")
def list_examples(as_json: AsJson = False) -> None:
    """List the examples, each with a one-line description."""
    described = {name: _describe(example_file(name)) for name in example_names()}
    if as_json:
        print_json(described)
        return
    width = max(map(len, described))
    for name, description in described.items():
        print_line(f"{name:{width}}  {description}")
    print_line("")
    print_line("holdfast examples copy NAME")


@app.command("copy")
def copy_example(
    name: Annotated[str, typer.Argument(metavar="NAME", help="An example, as `holdfast examples list` names it.")],
    to: Annotated[Path, typer.Option("--to", metavar="DIR", help="Copy into this folder.")] = Path(),
    as_json: AsJson = False,
) -> None:
    """Copy an example into a folder. The modules that it imports and the same script without holdfast are copied, too.

    Existing files are not overwritten: if one of them differs, nothing is copied.
    """
    source = example_file(name)
    files = [source, *imported_files(source)]
    plain = source.with_name(f"{source.stem}{PLAIN}.py")
    if plain.exists():
        files = sorted({*files, plain, *imported_files(plain)}, key=lambda file: (file != source, file))
    targets = [to / file.relative_to(source.parent) for file in files]
    try:
        _copy_files(files, targets)
    except OSError as error:
        raise BadInputError(f"{error.filename} cannot be written: {error.strerror}; give another --to DIR") from None
    if as_json:
        print_json({"copied": [str(target) for target in targets]})
        return
    for target in targets:
        print_line(str(target))
    if source.suffix == ".py":
        print_line(f"\nholdfast run --nodes 2 {shlex.quote(str(targets[0]))}")


def _copy_files(files: Sequence[Path], targets: Sequence[Path]) -> None:
    """Copy files, unless one of the targets exists with another content.

    Raises:
        BadInputError: such a target exists; nothing has been copied.
    """
    missing: list[tuple[Path, Path]] = []
    for file, target in zip(files, targets, strict=True):
        if not target.exists() and not target.is_symlink():  # A link to a missing file does not "exist".
            missing.append((file, target))
        elif not target.is_file() or target.read_bytes() != file.read_bytes():
            raise BadInputError(f"{target} exists and differs: move it, or copy into another folder with --to DIR")
    for file, target in missing:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)


def examples_folder() -> Path:
    """Return the folder of the examples: inside the installed package, or next to `src` in a clone."""
    package = Path(holdfast.__file__).parent
    inside = package / "examples"
    return inside if inside.is_dir() else package.parent.parent / "examples"


def example_names() -> list[str]:
    """Return the names of all examples."""
    return sorted(_example_files())


def example_file(name: str) -> Path:
    """Return an example's file.

    Raises:
        BadInputError: no example has this name.
    """
    file = _example_files().get(name.removesuffix(".py"))
    if file is None:
        raise BadInputError(f"there is no example {name!r}: `holdfast examples list` lists them")
    return file


def _example_files() -> dict[str, Path]:
    """Return the file of each example by name: scripts and TOML files.

    Tools, and versions of a script without holdfast, are not examples of their own.
    """
    root = examples_folder()
    files = [*root.glob("*.py"), *root.glob("*.toml"), *(root / "gallery").glob("*.py")]
    named = {file.name.removesuffix(".py"): file for file in files}
    return {name: file for name, file in named.items() if name not in _TOOLS and not name.endswith(PLAIN)}


def imported_files(script: Path) -> Sequence[Path]:
    """Return the files next to a script that it imports, directly or through other such files.

    [] if the script is not a .py file.
    """
    if script.suffix != ".py":
        return []
    found: dict[Path, None] = {}
    waiting = [script]
    while waiting:
        for module in _imported_modules(waiting.pop()):
            file = script.parent.joinpath(*module.split(".")).with_suffix(".py")
            if file.is_file() and file != script and file not in found:
                found[file] = None
                waiting.append(file)
    return sorted(found)


def _imported_modules(file: Path) -> list[str]:
    """Return the names of the modules that a file imports absolutely.

    For `from a import b` these are both `a` and `a.b`, because `b` may be a module.
    """
    modules: list[str] = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            modules += [name.name for name in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            modules += [node.module, *(f"{node.module}.{name.name}" for name in node.names)]
    return modules


def _describe(file: Path) -> str:
    """Return the first line of a script's docstring, or of a file's first comment."""
    text = file.read_text(encoding="utf-8")
    described = ast.get_docstring(ast.parse(text)) if file.suffix == ".py" else text.lstrip("# ")
    return (described or "").split("\n")[0]
