"""The wheel, installed outside the repository, has the examples and runs the demo."""

from __future__ import annotations

import os
import re
import site
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

from holdfast.cli.examples import example_names
from places import ROOT


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(folder)]
    subprocess.run([*command, str(ROOT)], check=True, timeout=300, cwd=folder)
    return next(folder.glob("holdfast-*.whl"))


def test_the_wheel_contains_only_the_package_and_the_examples(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
    package = {
        f"holdfast/{path.relative_to(ROOT / 'src' / 'holdfast')}" for path in _files_in(ROOT / "src" / "holdfast")
    }
    examples = {f"holdfast/{path.relative_to(ROOT)}" for path in _files_in(ROOT / "examples")}
    assert found == package | examples


def _files_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts]


def test_the_long_description_has_no_relative_links(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith("/METADATA"))
        metadata = Parser().parsestr(archive.read(name).decode())
    described = str(metadata.get_payload())
    links = re.findall(r"\]\(([^)]+)\)", described)
    assert links
    assert [link for link in links if not link.startswith("https://")] == []
    assert {"Repository", "Documentation", "Issues"} <= {
        url.split(",")[0] for url in metadata.get_all("Project-URL", [])
    }


def test_the_demo_runs_from_an_installed_wheel(wheel: Path, tmp_path: Path) -> None:
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True, timeout=300)
    python = environment / "bin" / "python"
    # The dependencies come from this environment, but its editable install of holdfast is not used.
    packages = next((environment / "lib").glob("python*/site-packages"))
    (packages / "dependencies.pth").write_text("\n".join(site.getsitepackages()))
    install = [str(python), "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(install, check=True, timeout=300)

    def holdfast(*arguments: str) -> str:
        command = [str(environment / "bin" / "holdfast"), *arguments]
        clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(
            command, env=clean, cwd=tmp_path, timeout=300, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert str(packages) in subprocess.check_output(
        [str(python), "-c", "import holdfast; print(holdfast.__file__)"], text=True, cwd=tmp_path
    )
    assert [line.split()[0] for line in holdfast("examples", "list").splitlines()[:-2]] == example_names()
    printed = holdfast("demo", "--steps", "24", "--out", "demo")
    assert "node-1" in printed
    assert (tmp_path / "demo" / "demo.png").stat().st_size > 10_000
    events = (tmp_path / "demo" / "demo.jsonl").read_text()
    assert '"event":"node_left"' in events
    assert '"nodes_joined"' in events
