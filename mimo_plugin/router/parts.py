# SPDX-License-Identifier: Apache-2.0
"""Stand-ins until the parts are there."""

from __future__ import annotations

import asyncio
from typing import Any


class EventReader:
    def __init__(self, *args: Any, **kw: Any) -> None:
        self.status: dict[str, Any] = {"connected": False}

    async def run(self) -> None:
        await asyncio.Event().wait()


class ApproximateIndex:
    def __init__(self, hash_tokens: int) -> None:
        self._n = hash_tokens
        self._all: dict[str, set[int]] = {}

    def lookup(self, hashes: Any, max_hit_tokens: int) -> dict[str, int]:
        found = {}
        for target, held in self._all.items():
            count = 0
            for h in hashes:
                if h not in held:
                    break
                count += 1
            if count:
                found[target] = min(count, max_hit_tokens // self._n) * self._n
        return found

    def record(self, target: str, hashes: Any, now_s: float) -> None:
        self._all.setdefault(target, set()).update(hashes)

    def correct(self, target: str, hashes: Any, cached_tokens: int) -> None:
        pass

    def remove(self, target: str) -> None:
        self._all.pop(target, None)


class PromptError(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


class PromptReader:
    async def read(self, path: str, body: Any, headers: Any) -> Any:
        from mimo_plugin.router.prompt import Prompt

        text = str(body.get("prompt") or body.get("messages") or "")
        ids = list(text.encode()[: 1 << 16])
        return Prompt(ids, max(1, len(ids)), session=headers.get("X-Session-Id"))
