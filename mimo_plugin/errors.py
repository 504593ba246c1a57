# SPDX-License-Identifier: Apache-2.0
"""Typed errors. Each carries one finished line: setting, value found, what is allowed, the fix."""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class MimoError(Exception):
    """Base of everything the plugin raises on purpose.

    The message is a single line that a user can act on without a traceback.
    """


class ConfigError(MimoError):
    """A setting has an unknown name, a wrong type or a value out of range."""


class FeatureUnavailable(MimoError):
    """A feature was asked for that this version, this engine or this model can't run."""


class ContractError(MimoError):
    """An upstream symbol that a feature relies on is missing or has changed."""


class VersionError(MimoError):
    """The engine's version (or the plugin's, across processes) is outside what was tested."""


_FOUND_MAX_CHARS = 120


def setting_error(setting: str, found: object, allowed: str, fix: str) -> ConfigError:
    """Build the one-line error for a bad setting.

    Args:
        setting: full name as the user writes it, e.g. ``mimo.kv.swa_share``.
        found: the value found; shown by ``repr``, cut when very long.
        allowed: what would be accepted, in words.
        fix: what to do, in words.
    """
    shown = repr(found)
    if len(shown) > _FOUND_MAX_CHARS:
        shown = shown[: _FOUND_MAX_CHARS - 3] + "..."
    return ConfigError(one_line(f"{setting}: found {shown}; allowed: {allowed}; fix: {fix}"))


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that looks most like ``name``, or None when none is close."""
    by_folded = {k.casefold(): k for k in known}
    close = get_close_matches(name.casefold(), list(by_folded), n=1, cutoff=0.5)
    return by_folded[close[0]] if close else None


def one_line(text: object) -> str:
    """Collapse all white space, so that a message stays one log line."""
    return " ".join(str(text).split())
