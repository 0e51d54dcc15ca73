"""A script for which a node was of no use: that it has changed is told once."""

from __future__ import annotations

from pathlib import Path

from holdfast.control.pool_node.watched_scripts import WatchedScripts, looks


def test_a_change_is_told_once_whether_it_has_come_changed_or_gone(tmp_path: Path) -> None:
    script, scripts = tmp_path / "train.py", WatchedScripts()
    for write in (lambda: script.write_text("1"), lambda: script.write_text("22"), script.unlink):
        scripts.refused(str(script), looks(str(script)))
        assert not scripts.changed()
        write()
        assert scripts.changed()
        assert not scripts.changed()


def test_no_more_are_watched_than_anybody_looks_at(tmp_path: Path) -> None:
    scripts = WatchedScripts()
    for number in range(300):
        scripts.refused(str(tmp_path / f"{number}.py"), None)
    (tmp_path / "0.py").write_text("")
    assert not scripts.changed(), "forgotten"
    (tmp_path / "299.py").write_text("")
    assert scripts.changed()
