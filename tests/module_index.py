"""Writes the list of all modules in docs/architecture.md from their docstrings: `python tests/module_index.py`."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "holdfast"
PAGE = ROOT / "docs" / "architecture.md"
#: The list begins below this heading and is the end of the page.
HEADING = "## All modules\n"


def module_index() -> str:
    """Return the list in Markdown: for each package its modules, each with the first sentence of its docstring."""
    lines: list[str] = []
    for folder in sorted({path.parent for path in SOURCE.rglob("*.py")}):
        modules = [path for path in sorted(folder.glob("*.py")) if not path.stem.startswith("__")]
        if modules:
            name = folder.relative_to(SOURCE).as_posix()
            lines += ["", f"`{name}`" if name != "." else "Directly in `src/holdfast`", ""]
            lines += [f"- `{path.stem}`: {first_sentence(path)}" for path in modules]
    return "\n".join(lines) + "\n"


def first_sentence(path: Path) -> str:
    """Return the first sentence of a module's docstring, on one line."""
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    paragraph = " ".join(text.split("\n\n", maxsplit=1)[0].split())
    return re.split(r"(?<=\.) (?=[A-Z`])", paragraph, maxsplit=1)[0]


if __name__ == "__main__":
    kept, heading, _ = PAGE.read_text().partition(HEADING)
    PAGE.write_text(kept + heading + module_index())
