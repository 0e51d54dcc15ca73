"""Tests of required figures and of their table."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from asked import Figure, print_report, read_figures, table_lines, write_figures

from places import BENCHMARKS


def test_a_limit_applies_to_the_median_or_to_each_value() -> None:
    values = (0.1, 0.2, 0.9)
    assert Figure(name="x", values=values, asked=0.2).is_reached is True
    assert Figure(name="x", values=values, asked=0.19).is_reached is False
    assert Figure(name="x", values=values, asked=0.2, each=True).is_reached is False
    assert Figure(name="x", values=values, asked=0.2, at_least=True).is_reached is True
    assert Figure(name="x", values=values, asked=0.2, at_least=True, each=True).is_reached is False
    assert Figure(name="x", values=values, asked=0.1, at_least=True, each=True).is_reached is True


def test_an_unmeasured_figure_with_a_limit_is_not_reached() -> None:
    assert Figure(name="x", values=(), asked=1.0).is_reached is False
    assert Figure(name="x", values=(1.0,)).is_reached is None
    assert "not measured" in table_lines([Figure(name="x", values=(), asked=1.0)])[1]


def test_a_limit_can_depend_on_the_median_of_another_figure() -> None:
    figure = Figure(name="a move", values=(0.03,), unit="s").with_limit_above((0.01, 0.02, 0.5), 0.01, "joins")
    assert figure.asked == pytest.approx(0.03)
    assert figure.how == "joins 0.020 + 0.01 s"
    # Without a value to compare with, the figure does not count as reached.
    assert Figure(name="a move", values=(0.03,)).with_limit_above((), 0.01, "joins").is_reached is False


def test_the_table_lists_limits_measurements_and_results() -> None:
    figures = [
        Figure(name="a move", values=(0.010, 0.020, 0.015), asked=0.03, unit="s", how="joins 0.020 + 0.01 s"),
        Figure(name="times", values=(200.0,), asked=15.0, at_least=True, unit="x"),
        Figure(name="lost", values=(2.0, 3.5), asked=3.0, each=True, unit="%"),
        Figure(name="beside", values=(4e-13,)),
    ]
    _, move, times, lost, beside = table_lines(figures)
    assert "<= 0.030 s" in move
    assert "0.015 s (0.010..0.020; 3)" in move
    assert move.endswith("reached   [joins 0.020 + 0.01 s]")
    assert ">= 15.000 x" in times
    assert "200 x (200..200; 1)" in times
    assert "each <= 3.000 %" in lost
    assert lost.endswith("NOT REACHED")
    assert "4.0e-13" in beside
    assert "reached" not in beside


def test_figures_are_appended_to_a_file(tmp_path: Path) -> None:
    path = tmp_path / "out" / "figures.jsonl"
    assert read_figures(path) == []
    first, second = Figure(name="a", values=(1.0,)), Figure(name="b", values=(), asked=2.0, each=True)
    write_figures(path, [first])
    write_figures(path, [second])
    write_figures(None, [first])
    assert read_figures(path) == [first, second]


def test_the_report_returns_zero_only_if_all_figures_are_reached(capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = Figure(name="good", values=(1.0,), asked=1.0), Figure(name="bad", values=(2.0,), asked=1.0)
    assert print_report([good], {"move.py": 0}) == 0
    assert print_report([good, bad], {"move.py": 0}) == 1
    assert "not reached: bad" in capsys.readouterr().out
    assert print_report([good], {"move.py": 1}) == 1
    assert "move.py ended with 1" in capsys.readouterr().out
    assert print_report([], {}) == 1


def test_a_failed_benchmark_does_not_stop_the_next_one(tmp_path: Path) -> None:
    for name, code in (("one.py", 3), ("two.py", 0)):
        line = f'{{"name": "of {name}", "values": [1.0], "asked": 2.0}}'
        script = f"import pathlib, sys\npathlib.Path(sys.argv[2]).open('a').write('{line}\\n')\nsys.exit({code})\n"
        (tmp_path / name).write_text(script)
    command = [sys.executable, str(BENCHMARKS / "asked.py"), str(tmp_path / "one.py"), str(tmp_path / "two.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "of one.py" in done.stdout
    assert "of two.py" in done.stdout
    assert "one.py ended with 3" in done.stdout
