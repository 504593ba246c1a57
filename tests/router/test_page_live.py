# SPDX-License-Identifier: Apache-2.0
"""The page on the real router: what it reads is what the router says."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from playwright.sync_api import expect

from tests.router.workers import FakeWorker, Front, routing

NEXT_MS = 8000


class Running:
    """A router and two workers, in a thread of their own."""

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.loop = asyncio.new_event_loop()
        self.front: Front | None = None
        self.workers: list[FakeWorker] = []
        self._started, self._ended = threading.Event(), asyncio.Event()
        self._thread = threading.Thread(target=lambda: self.loop.run_until_complete(self._main()))

    async def _main(self) -> None:
        self.workers = [await FakeWorker().start() for _ in range(2)]
        async with routing(*self.workers, **self.options) as self.front:
            self._started.set()
            await self._ended.wait()

    def __enter__(self) -> Running:
        self._thread.start()
        assert self._started.wait(20)
        return self

    def __exit__(self, *_: object) -> None:
        self.loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(20)
        self.loop.close()

    def call(self, make: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """Run it beside the router."""
        return asyncio.run_coroutine_threadsafe(make(), self.loop).result(20)


def label(worker):
    return worker.url.removeprefix("http://")


def test_requests_workers_drain_and_what_is_resident(browse):
    with Running() as running:
        front, (one, two) = running.front, running.workers
        for text in ("hello", "again"):
            status, _, _ = running.call(
                lambda text=text: front.chat(text, headers={"X-Session-Id": "chat-1"}, stream=True)
            )
            assert status == 200
        page = browse(front.url, real_time=True)
        expect(page.locator("#health")).to_have_text("2 of 2 workers ready")
        rows = page.locator("#workers > tbody th")
        expect(rows).to_contain_text([label(one), label(two)])
        expect(rows.first).to_contain_text("vllm 0.32.0")
        decisions = page.locator("#decisions > tbody")
        expect(decisions).to_have_count(2)
        expect(decisions.first.locator(".c-status")).to_have_text("200")
        expect(decisions.first.locator(".c-ttft")).to_have_text(re.compile(r"^\d+ ms$"))
        decisions.first.locator(".c-why").click()
        expect(decisions.first.locator(".candidates tbody tr")).to_have_count(2)
        expect(page.locator("#tile-requests [data-note]")).to_contain_text("2 since start")

        page.get_by_role("button", name=f"Drain {label(one)}").click()
        expect(page.locator("#workers .state")).to_have_text(["draining", "ready"], timeout=NEXT_MS)
        assert running.call(lambda: front.get("/health"))[1]["ready_workers"] == 1
        page.get_by_role("button", name=f"Resume {label(one)}").click()
        expect(page.locator("#workers .state")).to_have_text(["ready", "ready"], timeout=NEXT_MS)

        page.get_by_label("A prompt, or a JSON list of messages").fill("hello")
        page.get_by_role("button", name="Look up").click()
        expect(page.locator(".found tbody tr")).to_have_count(2)

        running.call(two.stop)
        expect(page.locator("#workers .state")).to_have_text(["ready", "down"], timeout=NEXT_MS)


def test_with_an_admin_key(browse):
    with Running(admin_key="secret") as running:
        page = browse(running.front.url, expected="status of 401", real_time=True)
        page.get_by_role("button", name="Enter a key").click(timeout=NEXT_MS)
        page.get_by_label("Admin key").fill("secret")
        page.keyboard.press("Enter")
        expect(page.locator("#workers > tbody")).to_have_count(2, timeout=NEXT_MS)
