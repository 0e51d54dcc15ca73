"""Files and options are read into a struct: an error is one line with the place and the remedy."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import pytest
from msgspec import Meta

from holdfast.documents import Given, build_struct, check_known, keys_of, load_toml, open_given, read_toml
from holdfast.errors import BadInputError


class Inner(msgspec.Struct, frozen=True, kw_only=True):
    every: Annotated[int, Meta(ge=1, le=9)] = 3
    wait: Annotated[float, Meta(ge=0, extra={"unit": "seconds"})] = 0.0
    place: Annotated[str, Meta(extra={"path": True})] = ""


class Outer(msgspec.Struct, frozen=True, kw_only=True):
    name: Annotated[str, Meta(description="a name")] = ""
    kind: Annotated[Literal["tall", "small"], Meta()] = "tall"
    on: bool = False
    least: Annotated[float, Meta(ge=0)] = 0.5
    words: tuple[str, ...] = ()
    numbers: tuple[Annotated[int, Meta(ge=1)], ...] = ()
    inner: Inner = Inner()


INNER = ("inner.every", "inner.wait", "inner.place")


def options_with(key: str, text: str) -> dict[str, Given]:
    return {key: Given(text, f"--{key}", text=True)}


def file(folder: Path, text: str) -> Path:
    path = folder / "one.toml"
    path.write_text(text)
    return path


def test_keys_are_the_paths_of_fields() -> None:
    keys = keys_of(Outer)
    assert list(keys) == ["name", "kind", "on", "least", "words", "numbers", *INNER]
    assert keys["name"].description == "a name"
    assert keys["inner.every"].default == 3
    assert [name for name, key in keys.items() if key.is_flag] == ["on"]
    assert keys["kind"].choices == ("tall", "small")


def test_missing_keys_have_their_defaults() -> None:
    assert build_struct(Outer, {}) == Outer()


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("name", "123", "123"),
        ("kind", "small", "small"),
        ("on", "true", True),
        ("least", "2", 2.0),
        ("words", '["a", "b c"]', ("a", "b c")),
    ],
)
def test_text_is_parsed_by_the_type_of_its_key(key: str, text: str, value: object) -> None:
    assert getattr(build_struct(Outer, options_with(key, text)), key) == value


@pytest.mark.parametrize(
    ("key", "text", "complaint"),
    [
        ("inner.every", "0", "--inner.every is 0: it must be a whole number from 1 to 9"),
        ("inner.every", "x", "--inner.every is 'x': it must be a whole number from 1 to 9"),
        ("inner.every", "2.5", "--inner.every is 2.5: it must be a whole number from 1 to 9"),
        ("inner.every", "9" * 80, f"--inner.every is '{'9' * 59}...: it must be a whole number from 1 to 9"),
        ("least", "-1", "--least is -1: it must be a number, 0 or more"),
        ("least", "nan", "--least is nan: it must be a number"),
        ("least", "inf", "--least is inf: it must be a number"),
        ("inner.wait", "soon", "--inner.wait is 'soon': it must be a number of seconds, or a time such as 90s"),
        ("inner.wait", "-1", "--inner.wait is -1: it must be a number of seconds"),
        ("kind", "big", "--kind is 'big': it must be one of tall, small"),
        ("on", "yes", "--on is 'yes': it must be true or false"),
        ("numbers", "2", "--numbers is 2: it must be a list of whole numbers, 1 or more"),
        ("numbers", "[2, 0]", "--numbers is '[2, 0]': it must be a list of whole numbers, 1 or more"),
        ("words", "a", "--words is 'a': it must be a list of texts"),
        ("words", "[" * 5000, "...: it must be a list of texts"),
        ("inner.every", "5\nname = 1", "--inner.every is '5\\nname = 1': it must be a whole number from 1 to 9"),
    ],
)
def test_a_bad_value_is_reported_with_the_expected_type_and_range(key: str, text: str, complaint: str) -> None:
    with pytest.raises(BadInputError) as caught:
        build_struct(Outer, options_with(key, text))
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_is_read_with_its_sections(tmp_path: Path) -> None:
    given = read_toml(file(tmp_path, 'name = "n"\n[inner]\nwait = "4h"\nplace = "below"\n'), Outer)
    assert build_struct(Outer, given) == Outer(name="n", inner=Inner(wait=14400.0, place=str(tmp_path / "below")))
    absolute = read_toml(file(tmp_path, '[inner]\nwait = 5\nplace = "/there"\n'), Outer)
    assert build_struct(Outer, absolute).inner == Inner(wait=5.0, place="/there")


def test_later_values_take_precedence(tmp_path: Path) -> None:
    given = read_toml(file(tmp_path, "[inner]\nevery = 2\n"), Outer) | options_with("inner.every", "7")
    assert build_struct(Outer, given).inner.every == 7


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("nme = 1", "nme is not known; the nearest one is name"),
        ("[inner]\nevry = 1", "inner.evry is not known; the nearest one is inner.every"),
        ("[iner]\nevery = 1", "iner is not known"),
        ("inner = 3", "inner is 3: it must be a section, [inner]"),
        ('[inner]\nevery = "2"', "inner.every is '2': it must be a whole number from 1 to 9"),
        ("name = 5", "name is 5: it must be text"),
        ("on = 1", "on is 1: it must be true or false"),
        ("words = [1]", "words is [1]: it must be a list of texts"),
        ("name = [", "is not valid TOML"),
        ("a = " + "[" * 5000, "is not valid TOML"),
        ("least = " + "9" * 5000, "is not valid TOML"),
        ('"\\u001b[2J" = 1', "is not known"),
        ('"inner.every" = 2', '"inner.every" is one key with a dot: leave the quotes out'),
        ('[inner]\nplace = "a\\u0000b"', "inner.place is 'a\\x00b': no path can hold a NUL"),
        (f"{'x' * 5000} = 1", f"{'x' * 60}... is not known"),
        ("#" * (1 << 20) + "\nname = 'n'", "is larger than 1048576 bytes"),
    ],
    ids=range(16),
)
def test_a_bad_file_is_reported_by_name_in_one_line(text: str, complaint: str, tmp_path: Path) -> None:
    path = file(tmp_path, text)
    with pytest.raises(BadInputError) as caught:
        build_struct(Outer, read_toml(path, Outer))
    message = str(caught.value)
    assert str(path) in message
    assert complaint in message
    assert message.isprintable()


def test_an_unreadable_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=r"none\.toml: cannot be read: No such file"):
        read_toml(tmp_path / "none.toml", Outer)
    path = tmp_path / "bytes.toml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(BadInputError, match="is not valid TOML"):
        read_toml(path, Outer)


def test_a_known_key_is_accepted() -> None:
    check_known("name", keys_of(Outer), "name")


def test_a_pipe_is_read_to_its_end_and_a_pipe_without_a_writer_is_empty(tmp_path: Path) -> None:
    """The shell makes a pipe of `<(command)`; a pipe without a writer must not block forever."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    assert load_toml(path) == {}
    with open_given(path) as file:
        writer = os.open(path, os.O_WRONLY)
        os.write(writer, b"all ")
        assert file.read(4) == b"all "
        os.write(writer, b"of it")
        os.close(writer)
        assert file.read() == b"of it"


@pytest.mark.parametrize("device", ["/dev/zero", "/dev/null"])
def test_a_device_is_refused(device: str) -> None:
    with pytest.raises(BadInputError, match=f"^{device}: cannot be read: it is a device: give a file$"):
        load_toml(Path(device))
