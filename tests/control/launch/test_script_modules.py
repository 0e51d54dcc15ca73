"""`-m NAME` resolves to the same file as in Python, without importing anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.control.launch.script_modules import module_file, with_script
from holdfast.errors import BadInputError
from holdfast.protocol.job_spec import JobSpec


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    package = tmp_path / "training" / "deep"
    package.mkdir(parents=True)
    for place in (package.parent, package):
        (place / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (package / "train.py").write_text("")
    (package / "__main__.py").write_text("")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "file"),
    [("training.deep.train", "training/deep/train.py"), ("training.deep", "training/deep/__main__.py")],
)
def test_a_module_or_package_main_is_found_without_importing_it(folder: Path, name: str, file: str) -> None:
    assert module_file(name, [str(folder)]) == str(folder / file)
    assert with_script(JobSpec(module=name), str(folder)).script == str(folder / file)


@pytest.mark.parametrize("name", ["training", "training.deep.other", "training.deep.train.more", "nothing_at_all"])
def test_a_missing_module_is_refused(folder: Path, name: str) -> None:
    with pytest.raises(BadInputError, match=f"there is no module {name} of Python in {folder}"):
        module_file(name, [str(folder)])


def test_a_script_together_with_a_module_is_refused() -> None:
    with pytest.raises(BadInputError, match=r"script is train\.py and module is training: give one of them"):
        with_script(JobSpec(script="train.py", module="training"), "/")
    assert with_script(JobSpec(script="train.py"), "/") == JobSpec(script="train.py")
