# SPDX-License-Identifier: Apache-2.0
"""The connector for vLLM: vLLM's rules for downloads, our decoding, errors that become HTTP 4xx."""

import asyncio
import base64
import functools
import http.server
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("vllm")

from vllm import envs  # noqa: E402
from vllm.connections import HTTPConnection  # noqa: E402
from vllm.entrypoints.serve.exception_handling.error_response import (  # noqa: E402
    create_error_response,
)
from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY, MediaConnector  # noqa: E402

from mimo_plugin.engines.vllm import media  # noqa: E402
from mimo_plugin.media.limits import DecodeTimeout, MediaError, MediaLimits  # noqa: E402
from mimo_plugin.media.pool import PoolSettings  # noqa: E402
from tests.media import jobs  # noqa: E402
from tests.media.pictures import HOSTILE, SOUND  # noqa: E402

pytestmark = pytest.mark.vllm


class Handler(http.server.BaseHTTPRequestHandler):
    """Serves the pictures by name; /moved/NAME redirects, /slow answers late, /big is endless."""

    def do_GET(self):
        _, *folder, name = self.path.split("/")
        if folder == ["moved"]:
            self.send_response(302)
            self.send_header("Location", f"/{name}")
            self.end_headers()
        elif name == "slow":
            time.sleep(3)
        elif name == "big":
            self.send_response(200)
            self.end_headers()
            for _ in range(64):
                self.wfile.write(bytes(1 << 20))
        elif name in SOUND or name in HOSTILE:
            self.send_response(200)
            self.send_header("Content-Type", "image/png")  # often wrong, never read
            self.end_headers()
            self.wfile.write(SOUND[name] if name in SOUND else HOSTILE[name][0])
        else:
            self.send_error(404)

    def log_message(self, *args):
        pass


class Server(http.server.ThreadingHTTPServer):
    def handle_error(self, request, client_address):
        pass  # the client went away, on purpose


@pytest.fixture(scope="module")
def site():
    server = Server(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


@pytest.fixture(scope="module", autouse=True)
def quick_pool():
    before = media._settings
    media.configure(media.MediaSettings(pool=PoolSettings(workers=2, queue_timeout_s=2.0)))
    yield
    media.media_pool().close(grace_s=0.0)
    media._pool = None
    media.configure(before)


@pytest.fixture(autouse=True)
def few_retries(monkeypatch):
    monkeypatch.setenv("VLLM_MEDIA_FETCH_MAX_RETRIES", "1")
    if hasattr(envs, "disable_envs_cache"):
        envs.disable_envs_cache()


def connector(**given):
    return media.MimoMediaConnector(connection=HTTPConnection(reuse_client=False), **given)


def stock(**given):
    return MediaConnector(connection=HTTPConnection(reuse_client=False), **given)


def fetch(made, url):
    return asyncio.run(made.fetch_image_async(url))


def data_url(data, kind="image/png"):
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def status_of(error):
    return create_error_response(error).error.code


def test_it_is_selected_by_its_name():
    media.register()
    media.register()
    made = MEDIA_CONNECTOR_REGISTRY.load("mimo", media_io_kwargs=None, allowed_media_domains=["a"])
    assert type(made) is media.MimoMediaConnector
    assert made.allowed_media_domains == ["a"]
    assert type(MEDIA_CONNECTOR_REGISTRY.load("http")) is MediaConnector


@pytest.mark.parametrize("way", ["http", "data", "file", "moved"])
@pytest.mark.parametrize("blocking", [False, True])
def test_each_way_gives_what_stock_gives(site, tmp_path, way, blocking):
    data = SOUND["png-rgba"]
    (tmp_path / "a.jpg").write_bytes(data)  # a wrong extension, too
    url = {
        "http": f"{site}/png-rgba",
        "moved": f"{site}/moved/png-rgba",
        "data": data_url(data, "image/jpeg"),
        "file": f"file://{tmp_path}/a.jpg",
    }[way]
    found = []
    for kind in (connector, stock):
        made = kind(allowed_local_media_path=str(tmp_path))
        item = made.fetch_image(url) if blocking else fetch(made, url)
        found.append((np.asarray(item.media).tolist(), item.original_bytes, item.io_config))
    assert found[0] == found[1]


def refused(make, url):
    with pytest.raises(Exception) as caught:
        fetch(make, url)
    return type(caught.value), str(caught.value), status_of(caught.value)


@pytest.mark.parametrize("case", ["domain", "no redirect", "404", "scheme", "path", "base64"])
def test_vllms_rules_for_downloads_hold(site, tmp_path, monkeypatch, case):
    given, url = {}, f"{site}/jpeg"
    if case == "domain":
        given = {"allowed_media_domains": ["example.org"]}
    elif case == "no redirect":
        monkeypatch.setenv("VLLM_MEDIA_URL_ALLOW_REDIRECTS", "0")
        url = f"{site}/moved/jpeg"
    elif case == "path":
        given, url = {"allowed_local_media_path": str(tmp_path)}, "file:///etc/hostname"
    else:
        url = {"404": f"{site}/none", "scheme": "ftp://a/b", "base64": "data:image/png;base64,$"}[
            case
        ]
    if case == "no redirect":
        # no body arrives; stock says so in its own words
        kind, _, code = refused(connector(), url)
        assert issubclass(kind, MediaError) and code == 400
    else:
        ours = refused(connector(**given), url)
        assert ours == refused(stock(**given), url)
        assert 400 <= ours[2] < 500


def test_vllms_size_limit_and_time_out_hold(site, monkeypatch):
    monkeypatch.setenv("VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB", "1")
    _, text, code = refused(connector(), f"{site}/big")
    assert "exceeds VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB=1" in text and code == 422
    monkeypatch.setenv("VLLM_IMAGE_FETCH_TIMEOUT", "1")
    before_s = time.monotonic()
    with pytest.raises(asyncio.TimeoutError):
        fetch(connector(), f"{site}/slow")
    assert time.monotonic() - before_s < 2.9  # the answer would have come after three


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_input_is_answered_with_400_and_others_go_on(site, name):
    async def play():
        made = connector()
        urls = [f"{site}/jpeg", f"{site}/{name}", data_url(HOSTILE[name][0]), f"{site}/webp"]
        return await asyncio.gather(*map(made.fetch_image_async, urls), return_exceptions=True)

    good, *bad, also_good = asyncio.run(play())
    assert (good.size, also_good.size) == ((47, 33), (22, 18))
    for error in bad:
        assert type(error) is MediaError
        answer = create_error_response(error).error
        assert answer.code == 400
        assert "allowed: " in answer.message and "\n" not in answer.message


def test_vllms_pixel_limit_holds_and_ours_may_be_lower(monkeypatch):
    jpeg = data_url(SOUND["jpeg"])  # 47 x 33 = 1551 pixels
    monkeypatch.setenv("VLLM_MAX_IMAGE_PIXELS", "1550")
    assert "1550 (max_pixels)" in refused(connector(), jpeg)[1]
    monkeypatch.setenv("VLLM_MAX_IMAGE_PIXELS", "0")
    assert fetch(connector(), jpeg).size == (47, 33)
    before = media._settings
    for ours, theirs, allowed in ((1000, "1200", 1000), (1300, "1200", 1200), (900, "0", 900)):
        monkeypatch.setenv("VLLM_MAX_IMAGE_PIXELS", theirs)
        limits = MediaLimits(max_pixels=ours)
        media.configure(media.MediaSettings(pool=before.pool, limits=limits))
        assert f"{allowed} (max_pixels)" in refused(connector(), jpeg)[1]
    media.configure(before)


def test_wrong_settings_of_a_request_are_refused_as_in_stock():
    given = {"media_io_kwargs": {"image": {"rgba_background_color": [0, 0]}}}
    url = data_url(SOUND["jpeg"])
    assert refused(connector(**given), url) == refused(stock(**given), url)


def test_a_hanging_decoder_is_a_400_and_a_full_pool_a_503(monkeypatch):
    before = media._settings
    settings = PoolSettings(workers=1, max_queued=1, queue_timeout_s=0.5, job_timeout_s=1.5)
    media.configure(media.MediaSettings(pool=settings))

    async def play():
        made, url = connector(), data_url(SOUND["jpeg"])
        hang = functools.partial(media.media_pool().run, jobs.sleep, seconds=60)
        hanging = asyncio.create_task(hang())
        while media.media_pool().stats().running == 0:
            await asyncio.sleep(0.01)
        tasks = [asyncio.create_task(made.fetch_image_async(url)) for _ in range(2)]
        return await asyncio.gather(hanging, *tasks, return_exceptions=True)

    hanging, first, second = asyncio.run(play())
    media.configure(before)
    assert isinstance(hanging, DecodeTimeout) and status_of(hanging) == 400
    assert first.size == (47, 33)  # it waited for the new worker
    assert status_of(second) == 503 and "fix: retry later" in str(second)


def test_other_pool_settings_close_the_old_pool():
    old = media.media_pool()
    before = media._settings
    media.configure(media.MediaSettings(pool=before.pool, limits=MediaLimits()))
    assert media.media_pool() is old  # limits alone need no other processes
    media.configure(media.MediaSettings(pool=PoolSettings(workers=1)))
    assert media.media_pool() is not old
    with pytest.raises(Exception, match="closed"):
        old.run_sync(jobs.filled, shapes=[])
    media.configure(before)


def test_videos_are_left_to_vllms_loader(monkeypatch):
    made = connector()
    assert made.fetch_video.__func__ is MediaConnector.fetch_video
    assert SimpleNamespace(**made.media_io_kwargs) == SimpleNamespace()
