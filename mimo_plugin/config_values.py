# SPDX-License-Identifier: Apache-2.0
"""Validators of single settings.

Each takes the setting's name and value, and returns the value; all raise ``ConfigError`` with the
setting, the value found, what is allowed and the fix.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

from mimo_plugin.errors import nearest, setting_error

Validator = Callable[[str, object], Any]

CHECKPOINT_CLASSES = ("turn_end", "boundary", "junction", "prompt_end", "tail", "ladder")
"""Checkpoint classes, most valuable idea first; see docs for what each keeps."""


def listing(names: Iterable[str]) -> str:
    """Names in a message."""
    return ", ".join(names)


def refuse_unknown(
    where: str, raw: Mapping[str, Any], known: Iterable[str], hidden: Iterable[str] = ()
) -> None:
    """Refuse the first key of ``raw`` that is neither known nor hidden."""
    known = tuple(known)
    for key in raw:
        if key in known or key in hidden:
            continue
        close = nearest(str(key), known)
        fix = f"did you mean {close!r}?" if close else "remove it"
        raise setting_error(f"{where}.{key}", raw[key], f"keys {listing(known)}", fix)


def section(where: str, raw: object, validators: Mapping[str, Validator]) -> dict[str, Any]:
    """The validated values of a section; a key without a validator is refused."""
    if not isinstance(raw, Mapping):
        raise setting_error(
            where, raw, "an object, {} for all defaults", "write it as a JSON object"
        )
    refuse_unknown(where, raw, validators)
    return {key: validators[key](f"{where}.{key}", value) for key, value in raw.items()}


def boolean(setting: str, value: object) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise setting_error(setting, value, "true or false", "write true or false without quotes")
    return value


def text(setting: str, value: object) -> str:
    """A text."""
    if not isinstance(value, str):
        raise setting_error(setting, value, "a text", "write it in quotes")
    return value


def number(
    *, over: float | None = None, least: float | None = None, below: float | None = None,
    most: float | None = None,
) -> Validator:  # fmt: skip
    """A finite number with the given open (over, below) or closed (least, most) limits."""
    limits = [
        f"{sign} {limit:g}"
        for sign, limit in ((">", over), (">=", least), ("<", below), ("<=", most))
        if limit is not None
    ]
    allowed = f"a number {' and '.join(limits)}"

    def parse(setting: str, value: object) -> float:
        found = math.nan
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            with suppress(OverflowError):
                found = float(value)
        if not math.isfinite(found):
            raise setting_error(setting, value, allowed, "give a finite number")
        outside = (
            (over is not None and found <= over)
            or (least is not None and found < least)
            or (below is not None and found >= below)
            or (most is not None and found > most)
        )
        if outside:
            raise setting_error(setting, value, allowed, "give a number in that range")
        return found

    return parse


def is_whole(value: object, least: int) -> bool:
    """Whether ``value`` is an int (no bool) of at least ``least``."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def whole(least: int, unit: str) -> Validator:
    """A whole number of at least ``least``."""

    def parse(setting: str, value: object) -> int:
        if not is_whole(value, least):
            raise setting_error(
                setting, value, f"a whole number of {unit} >= {least}", "give a whole number"
            )
        return int(value)  # type: ignore[call-overload, no-any-return]

    return parse


def whole_or_none(least: int, unit: str, null: str) -> Validator:
    """A whole number of at least ``least``, or None; ``null`` says what None does."""

    def parse(setting: str, value: object) -> int | None:
        if value is None:
            return None
        if not is_whole(value, least):
            raise setting_error(
                setting, value, f"a whole number of {unit} >= {least}, or null", null
            )
        return int(value)  # type: ignore[call-overload, no-any-return]

    return parse


def one_of(names: tuple[str, ...]) -> Validator:
    """One of ``names``."""

    def parse(setting: str, value: object) -> str:
        if isinstance(value, str) and value in names:
            return value
        close = nearest(value, names) if isinstance(value, str) else None
        fix = f"did you mean {close!r}?" if close else "use one of them"
        raise setting_error(setting, value, listing(names), fix)

    return parse


def subset(names: tuple[str, ...], what: str) -> Validator:
    """At least one of ``names``, each once; returned in the order of ``names``."""
    allowed = f"a list out of {listing(names)}"

    def parse(setting: str, value: object) -> tuple[str, ...]:
        if not isinstance(value, (list, tuple)) or not value:
            raise setting_error(setting, value, allowed, f"name at least one {what}")
        chosen = [one_of(names)(setting, item) for item in value]
        if len(set(chosen)) != len(chosen):
            raise setting_error(setting, value, allowed, f"name each {what} once")
        return tuple(name for name in names if name in chosen)

    return parse


def token_ids(empty: str) -> Validator:
    """A list of token ids, in order, or None; ``empty`` says what an empty list asks for."""

    def parse(setting: str, value: object) -> tuple[int, ...] | None:
        if value is None:
            return None
        if not isinstance(value, (list, tuple)) or not all(is_whole(item, 0) for item in value):
            raise setting_error(
                setting,
                value,
                f"a list of token ids >= 0, [] {empty}, or null",
                "null takes them from the tokenizer's chat template",
            )
        return tuple(value)

    return parse


def token_ids_or_none(setting: str, value: object) -> tuple[int, ...] | None:
    """A list of token ids, without repetitions, or None."""
    found = token_ids("for no message boundaries")(setting, value)
    return None if found is None else tuple(dict.fromkeys(found))
