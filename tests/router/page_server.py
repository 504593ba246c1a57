# SPDX-License-Identifier: Apache-2.0
"""A router that only pretends: it serves the page's files, and JSON that a test sets."""

from __future__ import annotations

import argparse
import asyncio
import random
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from aiohttp import web

from mimo_plugin.core.cost import PrefillCost
from mimo_plugin.core.load import Speed
from mimo_plugin.core.reservations import Reservations
from mimo_plugin.core.routing import Router
from mimo_plugin.core.targets import Request, Target
from mimo_plugin.router.page import HEADERS, page_files
from tools.browser import ensure

Json = dict[str, Any]
MODEL = "XiaomiMiMo/MiMo-V2-Flash"


def target(name: str, rank: int | None = None, **more: Any) -> Json:
    """One target as ``/workers`` tells of it."""
    events = {
        "connected": True,
        "next_seq": 4211,
        "gaps": 0,
        "replays": 0,
        "restarts": 0,
        "batches": 4211,
        "last_event_age_s": 0.4,
        "decode_errors": 0,
    }
    found: Json = {
        "name": name if rank is None else f"{name}#{rank}",
        "rank": rank,
        "in_flight": 2,
        "decoding": 3,
        "decode_tokens": 48_210,
        "wait_s": 0.42,
        "recent_work_s": 11.5,
        "sessions": 17,
        "blocks": 38_112,
        "trusted": True,
        "hit_tokens": 1_204_224,
        "prompt_tokens": 1_604_118,
        "requests": 1043,
        "errors": 0,
        "events": events,
    }
    changed = more.pop("events", {})
    found["events"] = None if changed is None else events | changed
    return found | more


def worker(url: str, *targets: Json, **more: Any) -> Json:
    """One worker as ``/workers`` tells of it."""
    found: Json = {
        "url": url,
        "state": "ready",
        "role": "both",
        "model": MODEL,
        "engine": "vllm",
        "version": "0.32.0",
        "exact": True,
        "targets": list(targets) or [target(url)],
    }
    return found | more


def candidate(name: str, hit_tokens: int, cost: float, **more: Any) -> Json:
    """One candidate of a decision."""
    found: Json = {
        "target": name,
        "hit_tokens": hit_tokens,
        "reserved": False,
        "wait_s": 0.1,
        "prefill_s": 0.05,
        "media_s": 0.0,
        "cost": cost,
        "in_bound": True,
    }
    return found | more


def decision(request: str, *candidates: Json, age_s: float = 1.0, **more: Any) -> Json:
    """One decision as ``/decisions`` tells of it; the first candidate, unless another is named."""
    found: Json = {
        "time_s": time.time() - age_s,
        "request": request,
        "path": "/v1/chat/completions",
        "model": MODEL,
        "session": "chat-17",
        "prompt_tokens": 1536,
        "target": candidates[0]["target"],
        "reason": "cost",
        "hit_tokens": candidates[0]["hit_tokens"],
        "predicted_hit_tokens": candidates[0]["hit_tokens"],
        "actual_hit_tokens": candidates[0]["hit_tokens"],
        "queue": 1.25,
        "ttft_s": 0.182,
        "status": 200,
        "retries": 0,
        "candidates": list(candidates),
    }
    return found | more


class PageServer:
    """Runs in a thread of its own, on a loopback port that stays the same over stop and start.

    Attributes:
        workers, decisions: what is answered.
        resident: what ``/resident`` answers.
        key: when set, what changes workers wants it.
        guard_all: what shows them wants it too.
        broken: what should be JSON is none.
        slow_s: before ``/workers`` answers.
        posted: (path with query, headers, body) of all that was posted.
        polls: how often ``/workers`` was asked.
    """

    def __init__(self) -> None:
        self.workers: list[Json] = []
        self.decisions: list[Json] = []
        self.resident: Json = {"prompt_tokens": 0, "targets": {}}
        self.key = ""
        self.guard_all = False
        self.broken = False
        self.slow_s = 0.0
        self.posted: list[tuple[str, dict[str, str], str]] = []
        self.polls = 0
        self._port = 0
        self._loop = asyncio.new_event_loop()
        self._runner: web.AppRunner | None = None
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Listen."""
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(20)

    def stop(self) -> None:
        """Listen no more; ``start`` takes the same port again."""
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(20)

    def close(self) -> None:
        """Stop for good."""
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(20)
        self._loop.close()

    async def _start(self) -> None:
        app = web.Application()
        for path in page_files():
            app.router.add_get(path, self._file)
        app.router.add_get("/workers", self._workers)
        app.router.add_get("/decisions", self._decisions)
        app.router.add_post("/resident", self._resident)
        app.router.add_post("/workers/drain", self._drain)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self._port, reuse_address=True)
        await site.start()
        self._port = self._runner.addresses[0][1]

    async def _stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _file(self, request: web.Request) -> web.Response:
        file = page_files()[request.path]
        headers = {**HEADERS, "Content-Type": file.content_type, "ETag": file.etag}
        return web.Response(body=file.body, headers=headers)

    def _refused(self, request: web.Request) -> web.Response | None:
        if not self.key or request.headers.get("Authorization") == f"Bearer {self.key}":
            return None
        message = "admin key: found none or a wrong one"
        return web.json_response({"error": {"message": message}}, status=401)

    async def _workers(self, request: web.Request) -> web.Response:
        self.polls += 1
        await asyncio.sleep(self.slow_s)
        if self.broken:
            return web.Response(text="<html>a proxy's error page</html>")
        refused = self._refused(request) if self.guard_all else None
        return refused or web.json_response({"workers": self.workers})

    async def _decisions(self, request: web.Request) -> web.Response:
        limit = int(request.query["limit"])
        return web.json_response({"decisions": self.decisions[:limit]})

    async def _resident(self, request: web.Request) -> web.Response:
        self.posted.append((request.path_qs, dict(request.headers), await request.text()))
        return web.json_response(self.resident)

    async def _drain(self, request: web.Request) -> web.Response:
        self.posted.append((request.path_qs, dict(request.headers), await request.text()))
        refused = self._refused(request)
        if refused is not None:
            return refused
        for one in self.workers:
            if one["url"] == request.query["url"]:
                one["state"] = "draining" if request.query["on"] == "true" else "ready"
        return web.json_response({})


def example(seed: int = 13) -> tuple[list[Json], list[Json], Json]:
    """Workers, decisions and an answer of ``/resident`` as a busy router would have them.

    The decisions are the real router's, on workers that keep all that they were sent.
    """
    rng = random.Random(seed)
    a, b, c, d = (f"http://10.0.0.{i}:8000" for i in (1, 2, 3, 4))
    targets = [Target(a), Target(b), Target(c, 0), Target(c, 1), Target(d)]
    kept: dict[str, dict[str, int]] = {one.name: {} for one in targets}  # tokens by session
    asked = ""

    def lookup(_hashes: object, limit: int) -> dict[str, int]:
        shared = {name: 832 if held else 0 for name, held in kept.items()}  # a system prompt
        return {
            name: min(limit, max(held.get(asked, 0) // 64 * 64, shared[name]))
            for name, held in kept.items()
        }

    speed = Speed(PrefillCost(8000.0), tokens_per_s=1200.0)
    nothing = Reservations(64, 64, every_block=True)
    router = Router(lookup, nothing, speed, random.Random(seed))
    for one in targets:
        router.set_target(one)
    lengths = dict.fromkeys((f"chat-{i}" for i in range(60)), 900)
    decisions: list[Json] = []
    running: list[tuple[float, Request]] = []
    end_s = time.time() - 0.4
    now_s = end_s - 300
    while True:
        now_s += rng.expovariate(0.4 + 0.7 * (int(end_s - now_s) % 90 < 40))
        if now_s > end_s:
            break
        for first_s, begun in [one for one in running if one[0] <= now_s]:
            router.first_token(begun, first_s)
            router.done(begun, first_s)
            running.remove((first_s, begun))
        i = len(decisions)
        asked = rng.choice([*lengths])
        prompt = lengths[asked] + rng.choice([120, 380, 730, 2210])
        request = Request(f"req-{i:04d}", (), prompt, None if i % 13 == 4 else asked)
        found = router.choose(request, now_s)
        router.sent(request, found, now_s)
        chosen = found.chosen
        running.append((now_s + chosen.wait_s + chosen.prefill_s, request))
        kept[found.target][asked] = lengths[asked] = prompt + 260
        young = now_s > end_s - 1.1
        decisions.append(
            decision(
                request.id,
                *(asdict(one) for one in found.candidates),
                age_s=time.time() - now_s,
                prompt_tokens=prompt,
                session=request.session,
                target=found.target,
                reason=found.reason,
                hit_tokens=chosen.hit_tokens,
                predicted_hit_tokens=chosen.hit_tokens,
                queue=found.queue,
                actual_hit_tokens=None
                if young
                else max(0, chosen.hit_tokens - 64 * (i % 40 == 11)),
                ttft_s=None if young else chosen.wait_s + chosen.prefill_s * (0.8 + rng.random()),
                status=None if young else (502 if i % 90 == 70 else 200),
                retries=1 if i % 90 == 70 else 0,
            )
        )
    decisions.reverse()
    workers = [
        worker(a, target(a, in_flight=1, wait_s=0.0, recent_work_s=6.2, sessions=21)),
        worker(b, target(b, in_flight=4, wait_s=1.31, recent_work_s=18.9, decoding=9)),
        worker(
            c,
            target(c, 0, recent_work_s=7.7, blocks=19_204, requests=512),
            target(
                c, 1, recent_work_s=5.1, blocks=17_911, trusted=False, events={"gaps": 1}, wait_s=0
            ),
            state="draining",
        ),
        worker(
            d,
            target(
                d, events=None, trusted=True, hit_tokens=804_010, recent_work_s=3.4, sessions=12
            ),
            engine="sglang",
            version="0.5.23",
            exact=False,
        ),
    ]
    hits = ((1408, 1504), (512, 1376), (0, 0), (512, 512), (480, 480))
    resident = {
        "prompt_tokens": 1536,
        "targets": {
            one.name: {"hit_tokens": hit, "full_tokens": full}
            for one, (hit, full) in zip(targets, hits, strict=True)
        },
    }
    return workers, decisions, resident


def draw(path: Path) -> None:
    """Make the picture of the documentation."""
    from PIL import Image
    from playwright.sync_api import sync_playwright

    server = PageServer()
    server.workers, found, _ = example()
    drop = 1  # so that the one which did not go where most of it is comes second
    younger_s = time.time() - 0.7 - found[drop]["time_s"]
    server.decisions = [one | {"time_s": one["time_s"] + younger_s} for one in found[drop:]]
    server.start()
    with sync_playwright() as playwright:
        page = playwright.chromium.launch(executable_path=ensure()).new_page(
            viewport={"width": 1280, "height": 1330}
        )
        page.goto(server.url)
        page.wait_for_timeout(4500)
        page.locator("#decisions .line").nth(1).click()
        page.mouse.move(0, 0)
        page.screenshot(path=path)
    server.close()
    picture = Image.open(path).convert("RGB")
    method, dither = Image.Quantize.MAXCOVERAGE, Image.Dither.NONE
    picture.quantize(256, method, dither=dither).save(path, optimize=True)


def main() -> None:
    """Serve the example until interrupted, or make a picture of it (``--picture PATH``)."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    if options.picture is not None:
        draw(options.picture)
        return
    server = PageServer()
    server.workers, server.decisions, server.resident = example()
    server.start()
    print(server.url, flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
