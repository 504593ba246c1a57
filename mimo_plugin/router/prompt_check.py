# SPDX-License-Identifier: Apache-2.0
"""Does a worker make the tokens that are made here? Asked once a worker, on sample requests.

A server may have been started with another template, other template settings or another tokenizer.
Then what is computed here would be wrong, so from the first difference on workers are asked.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mimo_plugin.router.prompt_render import RenderClient

logger = logging.getLogger(__name__)

_TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look up a word.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}},
    },
}
_CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "look_up", "arguments": '{"word": "tide", "times": [1, 2]}'},
}


@dataclass(frozen=True)
class Sample:
    """One sample request.

    Attributes:
        kind: what a difference turns off: ``text``, ``chat`` or ``tools``.
        body: the request.
    """

    kind: str
    body: Mapping[str, Any]


def _chat(*contents: Any, **more: Any) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {
        "messages": [{"role": roles[i % 2], "content": c} for i, c in enumerate(contents)],
        **more,
    }


_TURNS = ("Hello there!", "  Good day.\n", "Größe 12 — 你好 👋 <b>x</b>\r\n\tdone ")
SAMPLES = (
    Sample("text", {"prompt": "The tide came in, 3 hours LATE.\n\n  Größe 你好 👋"}),
    Sample("text", {"prompt": " x", "add_special_tokens": False}),
    Sample("chat", _chat(*_TURNS)),
    Sample("chat", _chat(*_TURNS[:2], add_generation_prompt=False, continue_final_message=True)),
    Sample("chat", _chat([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])),
    Sample(
        "chat", {"messages": [{"role": "system", "content": "Be brief."}, *_chat("Hi")["messages"]]}
    ),
    Sample(
        "chat", {"messages": [{"role": "developer", "content": "Short."}, *_chat("Hi")["messages"]]}
    ),
    Sample("chat", _chat("Hi", chat_template_kwargs={"enable_thinking": False})),
    Sample("chat", _chat("Hi", reasoning_effort="low")),
    Sample(
        "chat",
        {
            "messages": [
                {"role": "user", "content": "2+2?"},
                {"role": "assistant", "content": "4", "reasoning_content": "Easy."},
                {"role": "user", "content": "3+3?"},
            ]
        },
    ),
    Sample("tools", _chat("Hi", tools=[_TOOL], tool_choice="none")),
    Sample(
        "tools",
        {
            "messages": [
                {"role": "user", "content": "tide?"},
                {"role": "assistant", "content": None, "tool_calls": [_CALL]},
                {"role": "tool", "tool_call_id": "call_1", "content": "The sea's rise and fall."},
            ],
            "tools": [_TOOL],
            "tool_choice": "none",
        },
    ),
)


class Checks:
    """What the workers' answers were."""

    def __init__(self) -> None:
        self._different: dict[str, dict[str, str]] = {}
        self._same: set[str] = set()

    @property
    def state(self) -> str:
        """``different``, ``same`` or ``unchecked``."""
        return "different" if self._different else "same" if self._same else "unchecked"

    @property
    def difference(self) -> str | None:
        """The first difference, in words."""
        for worker, kinds in self._different.items():
            for kind, detail in kinds.items():
                return f"{worker}: {kind}: {detail}"
        return None

    def differs(self, kind: str) -> bool:
        """Whether some worker's tokens of such requests are others than ours."""
        return any(kind in kinds for kinds in self._different.values())

    def forget(self, worker: str) -> None:
        """A worker is gone; what it said no longer counts."""
        self._different.pop(worker, None)
        self._same.discard(worker)

    async def run(
        self,
        worker: str,
        render: RenderClient,
        local: Callable[[Sample], Awaitable[list[int] | None]],
        model: str | None,
        headers: Mapping[str, str],
    ) -> str:
        """Compare all samples with one worker; returns ``same``, ``different`` or ``unchecked``."""
        self.forget(worker)
        different: dict[str, str] = {}
        compared = 0
        for sample in SAMPLES:
            ours = await local(sample)
            if ours is None:
                continue
            body = {**sample.body, **({"model": model} if model else {})}
            path = "/v1/completions" if sample.kind == "text" else "/v1/chat/completions"
            theirs = await render.render(path, body, headers, worker)
            if theirs is None:
                continue
            compared += 1
            if theirs.token_ids != ours and sample.kind not in different:
                at = next(
                    (
                        i
                        for i, (a, b) in enumerate(zip(ours, theirs.token_ids, strict=False))
                        if a != b
                    ),
                    min(len(ours), len(theirs.token_ids)),
                )
                different[sample.kind] = (
                    f"token {at} of {len(ours)} here, {len(theirs.token_ids)} there; "
                    f"request {str(dict(sample.body))[:160]}"
                )
        for kind, detail in different.items():
            logger.error(
                "mimo router: worker %s makes other tokens of %s requests than are made here (%s); "
                "it is asked for them from now on, which costs time: start the router with the "
                "worker's chat template and settings",
                worker,
                kind,
                detail,
            )
        if different:
            self._different[worker] = different
        elif compared:
            self._same.add(worker)
        return "different" if different else "same" if compared else "unchecked"
