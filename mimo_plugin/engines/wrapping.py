# SPDX-License-Identifier: Apache-2.0
"""Putting a function of ours around one of an engine's, once a process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

MARK = "mimo_plugin_wrapper"
"""Attribute of a function that stands around an engine's."""


def wrap_once(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Replace ``owner.name`` by what ``make`` makes of it; where that was done, nothing changes.

    Args:
        owner: a class or module of an engine.
        name: of a plain function there.
        make: from the engine's function to ours.
    """
    stock = getattr(owner, name)
    if not getattr(stock, MARK, False):
        wrapper = functools.wraps(stock)(make(stock))
        setattr(wrapper, MARK, True)
        setattr(owner, name, wrapper)
