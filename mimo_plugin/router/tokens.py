# SPDX-License-Identifier: Apache-2.0
"""The reader of prompts that the options ask for, kept up with the workers."""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path

import aiohttp

from mimo_plugin.errors import one_line, setting_error
from mimo_plugin.router.prompt_local import LocalTokenizer
from mimo_plugin.router.prompt_render import RenderClient
from mimo_plugin.router.prompts import PromptReader
from mimo_plugin.router.settings import Settings
from mimo_plugin.router.workers import Worker, Workers

log = logging.getLogger(__name__)


class Tokens:
    """Makes the reader, tells it which names are the model's own, and has workers checked.

    Args:
        settings: all options.
        session: to workers.
        workers: known ones.

    Raises:
        ConfigError: the tokenizer can't be loaded.
    """

    def __init__(
        self, settings: Settings, session: aiohttp.ClientSession, workers: Workers
    ) -> None:
        self._workers = workers
        self._headers = (
            {"Authorization": f"Bearer {settings.worker_key}"} if settings.worker_key else {}
        )
        self._local = load(settings) if settings.tokenizer == "local" else None
        self._render = RenderClient(self._renderers, session=session)
        self.reader = PromptReader(self._local, self._render, mode=settings.tokenizer)
        self._checks: dict[str, asyncio.Task[str]] = {}

    def worker_changed(self, worker: Worker) -> None:
        """Other models, or up again: its tokens are compared with ours."""
        known = self._workers.by_url.values()
        self.reader.base_models = frozenset(
            name for w in known if w.facts is not None for name in w.facts.names - w.facts.adapters
        )
        engines = {w.facts.engine for w in known if w.facts is not None}
        self._render.kind = "sglang" if engines == {"sglang"} else "vllm"
        if self._local is None or not worker.up or worker.url in self._checks:
            return
        task = asyncio.create_task(self.reader.check(worker.url, self._headers))
        self._checks[worker.url] = task
        task.add_done_callback(_report)

    def worker_removed(self, worker: Worker) -> None:
        """It is no more."""
        task = self._checks.pop(worker.url, None)
        if task is not None:
            task.cancel()
        self.reader.checks.forget(worker.url)

    async def close(self) -> None:
        """End threads and questions."""
        tasks = list(self._checks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._render.close()
        if self._local is not None:
            self._local.close()

    def _renderers(self) -> list[str]:
        return [
            worker.url
            for worker in self._workers.ready()
            if worker.facts is not None and worker.facts.engine == self._render.kind
        ]


def load(settings: Settings) -> LocalTokenizer:
    """The model's tokenizer, with the workers' chat template.

    Raises:
        ConfigError: it, or the template, can't be loaded.
    """
    # A prompt is one text: threads for it cost more than they bring (2 ms of CPU at 8 KB).
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    template = None
    if settings.chat_template is not None:
        try:
            template = Path(settings.chat_template).expanduser().read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise setting_error(
                "--chat-template", settings.chat_template, "a readable file", one_line(error)
            ) from None
    return LocalTokenizer.load(
        settings.model, trust_remote_code=settings.trust_remote_code, chat_template=template
    )


def _report(task: asyncio.Task[str]) -> None:
    if not task.cancelled() and task.exception() is not None:
        log.error("comparing tokens with a worker failed", exc_info=task.exception())
