"""`holdfast checkpoints`: what lies in a checkpoint directory, whether it is whole, and its state as one file."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from holdfast.cli.help import HelpfulGroup, HelpfulTyper
from holdfast.cli.options import with_option_groups
from holdfast.cli.output import AsJson, print_json, print_line
from holdfast.errors import EXIT_FAILED, BadInputError
from holdfast.protocol.checkpoints.directory import (
    DamagedCheckpointError,
    find_checkpoints,
    list_folders,
    read_manifest,
)
from holdfast.protocol.checkpoints.directory import (
    verify as verify_files,
)
from holdfast.protocol.checkpoints.joining import is_of_model, join_into_file
from holdfast.protocol.checkpoints.names import CheckpointName
from holdfast.storage import LocalStorage, Storage, error_text, storage_at

Place = Annotated[str, typer.Argument(help="The checkpoint directory: a folder or a URL.", metavar="DIR")]
Step = Annotated[int | None, typer.Option("--step", metavar="STEP", help="The checkpoint of this step.")]
#: the process that writes torch's file: this one has no torch
_TORCH_FILE = "holdfast.runtime.checkpoints.torch_file"


def register(app: typer.Typer) -> None:
    """Add this module's group of commands."""
    group = HelpfulTyper(
        cls=HelpfulGroup,
        name="checkpoints",
        help="List, verify and export checkpoints.",
    )
    group.command("list")(with_option_groups(list_all))
    group.command("verify")(with_option_groups(verify))
    group.command("export")(with_option_groups(export))
    app.add_typer(group)


def list_all(directory: Place, as_json: AsJson = False) -> None:
    """List the checkpoints of a directory, oldest first. Unfinished ones are listed, too."""
    storage = _open_directory(directory)
    with _read_errors(directory):
        rows = [_describe(storage, name, complete) for name, complete in list_folders(storage)]
        best = [entry for entry in storage.entries() if entry.startswith("best-") and not entry.endswith(".json")]
    if as_json:
        print_json({"directory": directory, "checkpoints": rows, "best": best})
        return
    for row in rows:
        size = f"{row['bytes'] / 1e6:.1f} MB, {row['parts']} parts" if row["counts"] else row["why"]
        print_line(f"step {row['step']:>8}  {row['name']}  {size}")
    for entry in best:
        print_line(f"{entry}: kept for its evaluation")
    if not rows:
        print_line(f"{directory}: there is no checkpoint")


def verify(directory: Place, step: Step = None, as_json: AsJson = False) -> None:
    """Check that checkpoints are intact. If one is damaged, the exit code is 1."""
    storage = _open_directory(directory)
    with _read_errors(directory):
        names = [name for name in find_checkpoints(storage) if step in (None, name.step)]
    if not names:
        raise BadInputError(f"{directory}: there is no checkpoint{f' of step {step}' if step is not None else ''}")
    found: list[dict[str, Any]] = []
    for name in names:
        try:
            verify_files(storage, name.folder)
        except DamagedCheckpointError as error:
            found.append({"name": name.folder, "step": name.step, "intact": False, "why": str(error)})
        else:
            found.append({"name": name.folder, "step": name.step, "intact": True, "why": ""})
    if as_json:
        print_json({"directory": directory, "checkpoints": found})
    else:
        for one in found:
            print_line(f"{one['name']}: {'intact' if one['intact'] else 'damaged: ' + one['why']}")
    if not all(one["intact"] for one in found):
        raise typer.Exit(EXIT_FAILED)


def export(
    directory: Place,
    output: Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE", help="The file to write.")] = None,
    step: Step = None,
    format: Annotated[
        Literal["safetensors", "torch"],
        typer.Option("--format", help="Format of the file."),
    ] = "safetensors",
    model_only: Annotated[bool, typer.Option("--model-only", help="The model alone, without its optimizer.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write the state of a checkpoint to one file.

    It is the newest checkpoint, or the one of --step, and is verified first. An existing file is replaced.
    """
    if output is None:
        raise BadInputError("--output is missing: give the file to write")
    there = output.resolve()  # The file is replaced: a link or a device must not be.
    if (there.exists() and not there.is_file()) or not there.parent.is_dir():
        raise BadInputError(f"--output {output}: give a file, in a folder that is there")
    storage = _open_directory(directory)
    name = _choose_checkpoint(storage, directory, step)
    verify_files(storage, name.folder)
    if format == "torch":
        _export_torch(storage, name, there, model_only=model_only)
    else:
        _, content = join_into_file(storage, name.folder, is_of_model if model_only else lambda _: True)
        _write(output, there, _read_here(directory, content))
    size = there.stat().st_size
    if as_json:
        print_json({"checkpoint": name.folder, "step": name.step, "output": str(output), "bytes": size})
    else:
        print_line(f"{output}: the state of step {name.step}, {size / 1e6:.1f} MB")


def _read_here(directory: str, content: Iterator[bytes]) -> Iterator[bytes]:
    """Yield the content. An error while reading names the directory, and not the output file."""
    with _read_errors(directory):
        yield from content


def _write(output: Path, there: Path, content: Iterator[bytes]) -> None:
    """Write the content to the file `there`, completely or not at all.

    Args:
        output: the path as given, for the message.

    Raises:
        BadInputError: the file cannot be written; the message names --output.
    """
    try:
        LocalStorage(there.parent).write(there.name, content)
    except OSError as error:
        raise BadInputError(f"--output {output} cannot be written: {error_text(error)}") from None


def _export_torch(storage: Storage, name: CheckpointName, output: Path, *, model_only: bool) -> None:
    """Write the state as a torch file in another process. If it fails, exit with its exit code."""
    arguments = [storage.where, name.folder, str(output), "model" if model_only else "all"]
    done = subprocess.run([sys.executable, "-m", _TORCH_FILE, *arguments], env=os.environ, check=False)
    if done.returncode:
        raise typer.Exit(done.returncode)


def _choose_checkpoint(storage: Storage, directory: str, step: int | None) -> CheckpointName:
    """Return the newest checkpoint of a step, or of all steps for None.

    Raises:
        BadInputError: there is none; the message lists the newest steps.
    """
    with _read_errors(directory):
        names = find_checkpoints(storage)
    found = [name for name in names if step in (None, name.step)]
    if not found:
        steps = ", ".join(str(name.step) for name in names[-8:]) or "none"
        wanted = f" of step {step}" if step is not None else ""
        raise BadInputError(f"{directory}: there is no checkpoint{wanted}; the checkpoints are of steps: {steps}")
    return found[-1]


def _describe(storage: Storage, name: CheckpointName, complete: bool) -> dict[str, Any]:
    """Return the entry of a checkpoint in the list: name, step, size and parts. Only its manifest is read.

    `counts` is False, with a reason, if it is unfinished (not `complete`) or damaged.
    """
    row: dict[str, Any] = {
        "name": name.folder,
        "step": name.step,
        "term": name.term,
        "generation": name.generation,
        "counts": False,
        "bytes": 0,
        "parts": 0,
        "why": "it was never finished, or is being written",
    }
    if complete:
        try:
            _, files = read_manifest(storage, name.folder)
        except DamagedCheckpointError as error:
            return {**row, "why": f"damaged: {error}"}
        parts = sum(file.name.startswith("part-") for file in files)
        row |= {"counts": True, "bytes": sum(file.bytes for file in files), "parts": parts, "why": ""}
    return row


@contextmanager
def _read_errors(directory: str) -> Generator[None]:
    """Turn an OSError into a `BadInputError` that names the directory."""
    try:
        yield
    except OSError as error:
        raise BadInputError(f"{directory} cannot be read: {error_text(error)}") from None


def _open_directory(directory: str) -> Storage:
    """Return the storage at a path or URL.

    Raises:
        BadInputError: the path is not a folder.
    """
    storage = storage_at(directory)
    if isinstance(storage, LocalStorage) and not storage.folder.is_dir():
        raise BadInputError(f"{directory} is not a folder: give a checkpoint directory")
    return storage
