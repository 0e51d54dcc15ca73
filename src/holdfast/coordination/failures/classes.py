"""Classifies failures by a table of rules, the site's before our own; the first match counts.

Pure: the same rules and the same failure give the same class, in an agent and in the coordinator.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain

from holdfast.coordination.failures.class_table import TABLE
from holdfast.patterns import can_match_beginning, choose_searched_length, explain_slowness
from holdfast.protocol.failures import Detector, FailureKind, FailureRule, Severity

#: class of a failure that no rule matches
UNKNOWN = "unknown"
#: characters of a failure's detail that are searched
_MAX_LENGTH = 8192
#: prefixes of all searched texts
_PREFIXES = tuple(f"{kind}: " for kind in FailureKind)
#: a literal character that every match contains
_PLAIN = re.compile(r"(?:\\\W|[^\\.^$*+?{}\[\]|()])(?![*?{])")
#: surroundings in which a pattern is tried
_AROUND = ("", "x", " ", "\n", "0", "_")


@dataclass(frozen=True, slots=True)
class FailureClass:
    """The class of a failure."""

    #: name of the class, or `unknown`
    status: str
    #: what must be restarted or removed
    severity: Severity


class FailureClasses:
    """The rules of one job."""

    def __init__(self, site: Sequence[FailureRule] = ()) -> None:
        """Put the site's rules before our own.

        Raises:
            ValueError: A rule of the site is invalid (`find_rule_errors` explains which, and why).
        """
        self._site = tuple(
            (_compile_site_rule(rule), choose_searched_length(rule.pattern, _MAX_LENGTH), rule) for rule in site
        )

    def classify(self, kind: FailureKind, detector: Detector, detail: str) -> FailureClass:
        """Return the class and severity of the first rule that matches; the site's rules come before our own.

        A rule may be for one detector only. Without a match it is `unknown`, for which a process is restarted.

        Args:
            detail: the error text; at most 8192 characters are searched.
        """
        text = f"{kind}: {detail[:_MAX_LENGTH]}"
        for pattern, length, rule in chain(self._site, _compile_table()):
            if rule.detector is not None and rule.detector is not detector:
                continue
            found = pattern.search(text, 0, length)
            if found is not None:
                status = found.expand(rule.status).lower() if "\\" in rule.status else rule.status
                return FailureClass(status, rule.severity)
        return FailureClass(UNKNOWN, Severity.PROCESS)


def find_rule_errors(rules: Sequence[FailureRule]) -> Iterator[tuple[int, str]]:
    """Yield the errors in a site's rules: the index of the rule, and the reason.

    A rule is wrong if it is invalid, may take forever, never matches, or if an earlier rule always matches first.
    """
    earlier: list[tuple[int, re.Pattern[str], FailureRule]] = []
    for number, rule in enumerate(rules):
        try:
            pattern = _compile_site_rule(rule)
        except ValueError as error:
            yield number, str(error)
            continue
        if not can_match_beginning(rule.pattern, _PREFIXES):
            yield number, f"it can never match: the searched texts begin with one of {', '.join(_PREFIXES)}"
        for before, other, theirs in earlier:
            if theirs.detector in (None, rule.detector) and _shadows(other, rule.pattern):
                yield number, f"it can never match: rule {before + 1}, {theirs.pattern!r}, matches first"
                break
        earlier.append((number, pattern, rule))


@cache
def _compile_table() -> tuple[tuple[re.Pattern[str], int, FailureRule], ...]:
    """Compile our own rules at the first failure: that takes longer than starting a coordinator."""
    return tuple((_compile_rule(rule), _MAX_LENGTH, rule) for rule in TABLE)


def _compile_site_rule(rule: FailureRule) -> re.Pattern[str]:
    """Compile a rule's pattern as `_compile_rule`, but refuse one for which a search may take forever.

    Raises:
        ValueError: The pattern is invalid, or a search for it may take forever.
    """
    pattern = _compile_rule(rule)
    if why := explain_slowness(rule.pattern):
        raise ValueError(f"the pattern {rule.pattern!r} is refused: {why}")
    return pattern


def _compile_rule(rule: FailureRule) -> re.Pattern[str]:
    """Compile the pattern of a rule, which ignores case.

    Raises:
        ValueError: The pattern is invalid or ambiguous, or the status names a group that the pattern does not have.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", FutureWarning)
            pattern = re.compile(rule.pattern, re.IGNORECASE)
    except FutureWarning as error:
        why = f"the pattern {rule.pattern!r} may mean something else one day: {error}"
        raise ValueError(f"{why}; put a backslash before a literal character") from None
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"the pattern {rule.pattern!r} is not a regular expression: {error}") from None
    for group in re.findall(r"\\(.?)", rule.status):
        if not group.isdigit() or not 1 <= int(group) <= pattern.groups:
            raise ValueError(f"the status {rule.status!r} names a group that the pattern does not have")
    return pattern


def _shadows(earlier: re.Pattern[str], pattern: str) -> bool:
    """Return whether every text that matches a pattern certainly matches the earlier one, too.

    Only equal patterns, and patterns with literal texts in which the earlier one is always found, are recognized.
    """
    if earlier.pattern == pattern:
        return True
    return all(
        any(_is_always_found(earlier, text) for text in _required_texts(part)) for part in _split_alternatives(pattern)
    )


def _is_always_found(earlier: re.Pattern[str], text: str) -> bool:
    """Return whether a pattern is found in a text within any of a few typical surroundings."""
    return all(earlier.search(f"{before}{text}{after}") is not None for before in _AROUND for after in _AROUND)


def _split_alternatives(pattern: str) -> Iterable[str]:
    """Return the alternatives of a pattern; [""] if brackets or escapes make that uncertain."""
    if "|" in pattern and set(pattern) & set("([\\"):
        return ("",)
    return pattern.split("|")


def _required_texts(pattern: str) -> Iterator[str]:
    """Yield texts that every match of a pattern without alternatives contains, up to the first optional part."""
    text = ""
    place = 0
    while place < len(pattern) and pattern[place] not in "([{":
        found = _PLAIN.match(pattern, place)
        if found is not None:
            text += found.group().removeprefix("\\")
            place = found.end()
            continue
        if pattern[place] == "\\":
            break
        yield text
        text = ""
        place += 1
    yield text
