"""A change of a script that waits to run on a node is reported once."""

from __future__ import annotations

from pathlib import Path

from holdfast.control.pool_node.watched_scripts import WatchedScripts


def test_each_creation_change_or_removal_of_a_script_is_reported_once(tmp_path: Path) -> None:
    script, scripts = tmp_path / "train.py", WatchedScripts()
    scripts.add(str(script))
    for change in (lambda: script.write_text("1"), lambda: script.write_text("22"), script.unlink):
        assert not scripts.check_changed()
        change()
        assert scripts.check_changed()
    script.write_text("1")
    scripts.add(str(script))
    assert not scripts.check_changed(), "the script is unchanged since the last check"


def test_only_the_newest_scripts_are_watched(tmp_path: Path) -> None:
    scripts = WatchedScripts()
    for number in range(300):
        scripts.add(str(tmp_path / f"{number}.py"))
    (tmp_path / "0.py").write_text("")
    assert not scripts.check_changed(), "the script must be forgotten"
    (tmp_path / "299.py").write_text("")
    assert scripts.check_changed()
