"""Properties of a regular expression that hold for all texts: how long a search may take, and how a match can begin.

Python's `re` backtracks: `(a+)+$` takes twice as long for each further letter, `.*a.*b.*c` a thousand times as long for
ten times as many. A running search cannot be interrupted.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import inf
from typing import Any

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # `sre_parse` is the old name of `re._parser`.
    import sre_parse

#: ways to divide a text between the repeats of a pattern that a search tries in one or two seconds
_WAYS = 3e8
#: a repeat with at least this maximum is treated as unbounded
_LONG = 16
#: largest accepted number of ways in which short repeats and alternatives match one text
_CHOICES = 1e5
#: number of beginnings of a pattern that are examined
_BEGINNINGS = 64
_CHARACTERS = [*map(chr, range(128)), "\u00e9"]

_REPEATS = ("MAX_REPEAT", "MIN_REPEAT")
_Node = tuple[Any, Any]


@lru_cache(maxsize=1024)
def explain_slowness(pattern: str) -> str:
    """Return why a search may never end, or "" if it ends soon."""
    ways = _count_ways(_parse(pattern))
    if ways == inf:
        return "it repeats a part that itself has repeats or alternatives: a search may never end"
    return f"there are {ways:.0e} ways in which a text may match it: a search may never end" if ways > _CHOICES else ""


@lru_cache(maxsize=1024)
def choose_searched_length(pattern: str, most: int) -> int:
    """Return how many characters of a text, at most `most`, can be searched in one or two seconds.

    The more long repeats of the pattern can share a text in several ways, the fewer characters.
    """
    free = _count_flexible_repeats(_parse(pattern))
    ways, factorial = _WAYS, 1
    for number in range(2, free + 2):
        factorial *= number
    return most if free < 2 else min(most, int((ways * factorial) ** (1 / (free + 1))))


def can_match_beginning(pattern: str, beginnings: Sequence[str]) -> bool:
    """Whether a pattern may match in a text with one of these beginnings (in lower case) and any end.

    True if unknown. It can only be False if every alternative is anchored at the start of the text.
    """
    compiled = re.compile(pattern, re.IGNORECASE)
    if compiled.flags & re.MULTILINE:
        return True
    for anchored, text, closed in _list_openings(_parse(pattern)):
        if not anchored or any(text.startswith(one) or (not closed and one.startswith(text)) for one in beginnings):
            return True
    return False


def _parse(pattern: str) -> list[_Node]:
    """Return the nodes of a pattern, as Python's own parser yields them, without its warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return list(sre_parse.parse(pattern, re.IGNORECASE).data)


def _node_name(node: _Node) -> str:
    return str(node[0])


def _inner_patterns(node: _Node) -> list[list[_Node]]:
    """Return the patterns inside a node: the body of a repeat, group or assertion, each alternative of a branch or
    condition; [] for other nodes.
    """
    name, value = _node_name(node), node[1]
    if name in (*_REPEATS, "POSSESSIVE_REPEAT"):
        return [list(value[2])]
    if name == "SUBPATTERN":
        return [list(value[3])]
    if name == "BRANCH":
        return [list(one) for one in value[1]]
    if name in ("ASSERT", "ASSERT_NOT"):
        return [list(value[1])]
    if name == "ATOMIC_GROUP":
        return [list(value)]
    if name == "GROUPREF_EXISTS":
        return [list(one) for one in value[1:] if one is not None]
    return []


def _count_ways(nodes: list[_Node]) -> float:
    """Return in how many ways short repeats and alternatives can match a text; inf if that grows with its length.

    It grows if a long repeat contains a repeat or an alternative.
    """
    ways = 1.0
    for node in nodes:
        inside = max(map(_count_ways, _inner_patterns(node)), default=1.0)
        name = _node_name(node)
        if name in _REPEATS:
            least, most = int(node[1][0]), int(node[1][1])
            if most >= _LONG:
                inside = inf if inside > 1.0 or _has_variable_repeat(node) else 1.0
            else:
                inside = (most - least + 1) * min(inside, 1e12) ** most
        elif name == "BRANCH":
            inside *= _count_choices(_inner_patterns(node))
        ways = min(ways * inside, inf)
    return ways


def _has_variable_repeat(node: _Node) -> bool:
    return any(
        _node_name(one) in _REPEATS and one[1][0] != one[1][1]
        for body in _inner_patterns(node)
        for one in _flatten(body)
    )


def _count_choices(bodies: list[list[_Node]]) -> int:
    """Return how many alternatives may be tried without success: 1 if each begins with a different letter."""
    letters = {body[0][1] for body in bodies if body and _node_name(body[0]) == "LITERAL"}
    return 1 if len(letters) == len(bodies) else len(bodies)


def _flatten(nodes: list[_Node]) -> Iterator[_Node]:
    """Yield all nodes, each followed by the nodes inside it."""
    for node in nodes:
        yield node
        for body in _inner_patterns(node):
            yield from _flatten(body)


def _inline_groups(nodes: list[_Node]) -> list[_Node]:
    """Return a sequence with its groups replaced by their contents."""
    return [
        one
        for node in nodes
        for one in (_inline_groups(_inner_patterns(node)[0]) if _node_name(node) == "SUBPATTERN" else [node])
    ]


def _count_flexible_repeats(nodes: list[_Node]) -> int:
    """Return how many long repeats can leave part of their match to the node that follows them."""
    line, free = _inline_groups(nodes), 0
    for place, node in enumerate(line):
        name = _node_name(node)
        if name in _REPEATS and node[1][1] >= _LONG and node[1][0] != node[1][1]:
            follows = line[place + 1] if place + 1 < len(line) else None
            free += follows is not None and _can_overlap(list(node[1][2]), follows)
        else:
            inside = max(
                (_count_flexible_repeats([*body, *line[place + 1 : place + 2]]) for body in _inner_patterns(node)),
                default=0,
            )
            free += inside * (int(node[1][1]) if name in _REPEATS else 1)
    return free


def _can_overlap(body: list[_Node], follows: _Node) -> bool:
    """Whether the repeated pattern and the next node can match the same character."""
    mine, theirs = (_matched_characters(body[0]) if len(body) == 1 else None), _matched_characters(follows)
    return mine is None or theirs is None or bool(mine & theirs)


def _matched_characters(node: _Node) -> set[str] | None:
    """Return which of `_CHARACTERS` a one-character node matches, in both cases; None for other nodes or if unknown."""
    name, value = _node_name(node), node[1]
    if name == "ANY":
        return set(_CHARACTERS)
    if name == "LITERAL":
        return {chr(value).lower(), chr(value).upper()}
    if name == "NOT_LITERAL":
        return set(_CHARACTERS) - {chr(value).lower(), chr(value).upper()}
    if name != "IN":
        return None
    found, negated = set[str](), False
    for kind, what in value:
        if str(kind) == "NEGATE":
            negated = True
        elif str(kind) == "LITERAL":
            found |= {chr(what).lower(), chr(what).upper()}
        elif str(kind) == "RANGE":
            letters = (one for one in _CHARACTERS if what[0] <= ord(one) <= what[1])
            found |= {case for one in letters for case in (one.lower(), one.upper())}
        elif (category := _category_characters(str(what))) is None:
            return None
        else:
            found |= category
    return set(_CHARACTERS) - found if negated else found


def _category_characters(name: str) -> set[str] | None:
    escape = {"CATEGORY_DIGIT": r"\d", "CATEGORY_SPACE": r"\s", "CATEGORY_WORD": r"\w"}.get(name)
    return None if escape is None else {one for one in _CHARACTERS if re.fullmatch(escape, one)}


def _list_openings(nodes: list[_Node]) -> Iterator[tuple[bool, str, bool]]:
    """Yield the beginnings of texts that a pattern matches.

    Each is (whether a match must start at the beginning of the text, its first letters in lower case, whether the text
    ends with them). After `_BEGINNINGS` alternatives it yields one that fits every text.
    """
    ways = [(False, "", _inline_groups(nodes))]
    for _ in range(_BEGINNINGS):
        if not ways:
            return
        anchored, text, rest = ways.pop()
        while rest:
            name, value = _node_name(rest[0]), rest[0][1]
            if name == "BRANCH":
                ways += [(anchored, text, [*_inline_groups(body), *rest[1:]]) for body in _inner_patterns(rest[0])]
                break
            if name == "AT" and str(value) in ("AT_BEGINNING", "AT_BEGINNING_STRING") and not text:
                anchored, rest = True, rest[1:]
            elif name == "LITERAL":
                text, rest = text + chr(value).lower(), rest[1:]
            else:
                closed = name == "AT" and str(value) in ("AT_END", "AT_END_STRING") and len(rest) == 1
                yield anchored, text, closed
                break
        else:
            yield anchored, text, False
    if ways:
        yield False, "", False
