# SPDX-License-Identifier: Apache-2.0
"""Where stored responses are: ``/v1/responses`` keeps them at the worker that made them."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

_MADE = re.compile(rb'(?<!\\)"id"\s*:\s*"(resp_[\w-]{1,100})"')
_ASKED = re.compile(r"/v1/responses/([^/]+)(/cancel|/input_items)?")
_KEPT = 100_000

PATH = "/v1/responses"


class Responses:
    """Targets of the last responses, by id."""

    def __init__(self) -> None:
        self._targets: OrderedDict[str, str] = OrderedDict()

    def note(self, path: str, head: bytes, target: str) -> None:
        """An answer begins; if it is a response, this is where it will be."""
        if path != PATH:
            return
        found = _MADE.search(head)
        if found is not None:
            self._targets[found[1].decode()] = target
            while len(self._targets) > _KEPT:
                self._targets.popitem(last=False)

    def home(self, parsed: Mapping[str, Any] | None) -> str | None:
        """The target that has the response which a new one goes on from; None: not known."""
        before = parsed.get("previous_response_id") if parsed is not None else None
        return self._targets.get(before) if isinstance(before, str) else None

    def where(self, path: str) -> str | None:
        """The target of the response that a path names; None: not known here."""
        asked = _ASKED.fullmatch(path)
        return self._targets.get(asked[1]) if asked is not None else None

    @staticmethod
    def is_stored(path: str) -> bool:
        """Whether a path names a response that some worker has."""
        return _ASKED.fullmatch(path) is not None
