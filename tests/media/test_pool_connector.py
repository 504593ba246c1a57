# SPDX-License-Identifier: Apache-2.0
"""The connector for vLLM: vLLM's rules for downloads, our decoding, errors that become HTTP 4xx."""

import asyncio
import base64
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
from vllm.multimodal.video import VIDEO_LOADER_REGISTRY, VideoLoader  # noqa: E402

from mimo_plugin.config_vision import VisionConfig  # noqa: E402
from mimo_plugin.engines.vllm import media, media_pool, media_switch, register  # noqa: E402
from mimo_plugin.errors import ContractError  # noqa: E402
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
            time.sleep(8)
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


QUICK = media.MediaSettings(pool=PoolSettings(workers=2, queue_timeout_s=2.0))


@pytest.fixture(scope="module", autouse=True)
def no_pool_is_left():
    yield
    for pool in media_pool._pools.values():
        pool.close(grace_s=0.0)
    media_pool._pools.clear()
    media_pool._engines.clear()


@pytest.fixture(autouse=True)
def few_retries(monkeypatch):
    monkeypatch.setenv("VLLM_MEDIA_FETCH_MAX_RETRIES", "1")
    if hasattr(envs, "disable_envs_cache"):
        envs.disable_envs_cache()


def connector(settings=QUICK, media_io_kwargs=None, **given):
    token = {"token": media_pool.remember(settings)}
    return media.MimoMediaConnector(
        {**(media_io_kwargs or {}), media_pool.TOKEN_KEY: token},
        connection=HTTPConnection(reuse_client=False),
        **given,
    )


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
    assert time.monotonic() - before_s < 7.9  # the answer would have come after eight


@pytest.mark.parametrize("name", [name for name in HOSTILE if name not in ("1xN", "Nx1")])
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


def test_limits_are_vllms_unless_an_engine_has_its_own(monkeypatch):
    jpeg = data_url(SOUND["jpeg"])  # 47 x 33 = 1551 pixels
    monkeypatch.setenv("VLLM_MAX_IMAGE_PIXELS", "1550")
    assert "1550 (max_pixels)" in refused(connector(), jpeg)[1]
    monkeypatch.setenv("VLLM_MAX_IMAGE_PIXELS", "0")
    assert fetch(connector(), jpeg).size == (47, 33)
    assert fetch(connector(), data_url(HOSTILE["1xN"][0])).size == (900, 1)  # the model's affair
    limits = MediaLimits(max_expansion=2, expansion_floor_bytes=1000)
    bounded = connector(media.MediaSettings(pool=QUICK.pool, limits=limits))
    assert "allowed: up to 2 (max_expansion)" in refused(bounded, jpeg)[1]


def test_wrong_settings_of_a_request_are_refused_as_in_stock():
    given = {"media_io_kwargs": {"image": {"rgba_background_color": [0, 0]}}}
    url = data_url(SOUND["jpeg"])
    assert refused(connector(**given), url) == refused(stock(**given), url)


def test_a_hanging_decoder_is_a_400_and_a_full_pool_a_503():
    settings = PoolSettings(workers=1, max_queued=1, queue_timeout_s=0.5, job_timeout_s=1.5)
    pool = media.media_pool(settings)

    async def play():
        made, url = connector(media.MediaSettings(pool=settings)), data_url(SOUND["jpeg"])
        hanging = asyncio.create_task(pool.run(jobs.sleep, seconds=60))
        while pool.stats().running == 0:
            await asyncio.sleep(0.01)
        first = asyncio.create_task(made.fetch_image_async(url))
        while pool.stats().queued == 0:
            await asyncio.sleep(0.01)
        second = asyncio.create_task(made.fetch_image_async(url))
        return await asyncio.gather(hanging, first, second, return_exceptions=True)

    hanging, first, second = asyncio.run(play())
    assert isinstance(hanging, DecodeTimeout) and status_of(hanging) == 400
    assert first.size == (47, 33)  # it waited for the new worker
    assert status_of(second) == 503 and "fix: retry later" in str(second)


# -- engines ---------------------------------------------------------------------------------


@pytest.fixture
def registry(monkeypatch):
    monkeypatch.setattr(MEDIA_CONNECTOR_REGISTRY, "name2class", {"http": MediaConnector})
    return MEDIA_CONNECTOR_REGISTRY


def engine(api_processes=1, **media_io):
    multimodal = SimpleNamespace(media_io_kwargs=media_io)
    return SimpleNamespace(
        model_config=SimpleNamespace(multimodal_config=multimodal),
        parallel_config=SimpleNamespace(_api_process_count=api_processes),
    )


def connector_for(registry, vllm_config, environ=None):
    """What vLLM does for a request."""
    return registry.load(
        (environ or {}).get("VLLM_MEDIA_CONNECTOR", "http"),
        media_io_kwargs=vllm_config.model_config.multimodal_config.media_io_kwargs,
        allowed_local_media_path="",
        allowed_media_domains=["a"],
    )


def switch_on(vllm_config, environ=None, broken=None, **settings):
    media_switch.switch_on(vllm_config, VisionConfig(**settings), environ or {}, lambda tag: broken)


def test_each_engine_of_a_process_has_its_own_settings_and_others_have_vllms(registry):
    given = {"image": {"image_mode": "L"}}
    first, second, stock_one = engine(**given), engine(), engine()
    switch_on(first, decode_workers=3)
    switch_on(second, decode_workers=2, decode_queue=5, decode_wait_s=1, decode_timeout_s=2,
              decode_memory_mib=7, decode_max_expansion=50)  # fmt: skip
    assert type(connector_for(registry, stock_one)) is MediaConnector
    made = [connector_for(registry, one) for one in (first, second)]
    assert [type(one) for one in made] == [media.MimoMediaConnector] * 2
    assert [one.settings.pool.workers for one in made] == [3, 2]
    assert made[0].allowed_media_domains == ["a"] and made[0].media_io_kwargs["image"]
    assert given == {"image": {"image_mode": "L"}}  # the user's object
    assert made[1].settings.pool == PoolSettings(
        workers=2, max_queued=5, queue_timeout_s=1, job_timeout_s=2, memory_bytes=7 << 20
    )
    assert made[1].settings.limits.max_expansion == 50
    pools = [media.media_pool(one.settings.pool) for one in made]
    assert pools[0] is not pools[1]
    assert media.media_pool() is pools[1]  # without settings: the engine configured last
    assert media.media_pool(PoolSettings(**vars(pools[0].settings))) is pools[0]


def test_api_processes_share_the_cores(registry, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(24))
    found = []
    for processes in (1, 4, 99):
        one = engine(processes)
        switch_on(one)
        found.append(connector_for(registry, one).settings.pool.workers)
    assert found == [8, 6, 1]


def test_nothing_changes_where_nothing_is_asked_for(registry):
    one = engine()
    switch_on(one, decode="stock")
    media_switch.register_named({}, lambda tag: None)
    media_switch.register_named({"VLLM_MEDIA_CONNECTOR": "http"}, lambda tag: None)
    assert registry.name2class == {"http": MediaConnector}
    assert one.model_config.multimodal_config.media_io_kwargs == {}


def test_settings_of_the_pool_hold_for_other_jobs_too(registry):
    """Videos are read in the pool, whoever decodes pictures."""
    switch_on(engine(), decode="stock", decode_workers=3, decode_memory_mib=9)
    assert media.media_pool().settings.memory_bytes == 9 << 20


def test_the_variable_gives_every_engine_the_pool(registry):
    environ = {"VLLM_MEDIA_CONNECTOR": "mimo"}
    media_switch.register_named(environ, lambda tag: None)
    assert registry.name2class["http"] is MediaConnector
    made = connector_for(registry, engine(), environ)
    assert type(made) is media.MimoMediaConnector
    assert made.settings == media.MediaSettings()
    one = engine()
    switch_on(one, environ, decode_workers=1)
    assert connector_for(registry, one, environ).settings.pool.workers == 1


def test_a_connector_of_the_user_s_own_wins(registry, caplog):
    environ = {"VLLM_MEDIA_CONNECTOR": "theirs"}
    registry.register("theirs")(type("Theirs", (MediaConnector,), {}))
    one = engine()
    switch_on(one, environ)
    assert type(connector_for(registry, one, environ)).__name__ == "Theirs"
    assert one.model_config.multimodal_config.media_io_kwargs == {}
    assert "'theirs'" in caplog.text
    assert media_switch.why_not("auto", environ) is None
    reason = media_switch.why_not("pool", environ)
    assert "VLLM_MEDIA_CONNECTOR is 'theirs'" in reason and "fix: unset" in reason
    for same in ({}, {"VLLM_MEDIA_CONNECTOR": "http"}, {"VLLM_MEDIA_CONNECTOR": "mimo"}):
        assert media_switch.why_not("pool", same) is None


def test_a_connector_that_stands_for_vllms_is_left_alone(registry, caplog):
    theirs = type("Theirs", (MediaConnector,), {})
    registry.register("http")(theirs)
    one = engine()
    switch_on(one)
    assert type(connector_for(registry, one)) is theirs
    assert "Theirs" in caplog.text
    switch_on(engine())  # a second engine


def test_a_vllm_that_lacks_something_decodes_itself(registry, caplog):
    """Named, it is refused before (see register); with auto the log says so."""
    assert media_switch.contracts_of("pool") == (media_switch.MEDIA_POOL,)
    assert media_switch.contracts_of("auto") == media_switch.contracts_of("stock") == ()
    one = engine()
    switch_on(one, broken="vllm.x: gone")
    assert type(connector_for(registry, one)) is MediaConnector
    assert "vllm.x: gone" in caplog.text
    with pytest.raises(ContractError, match="VLLM_MEDIA_CONNECTOR.*gone"):
        media_switch.register_named({"VLLM_MEDIA_CONNECTOR": "mimo"}, lambda tag: "gone")


def test_its_contract_rows_are_checked_where_it_is_named(monkeypatch):
    checked = []

    def problems(tags):
        checked.append(tags)
        return ("vllm.x: gone",)

    monkeypatch.setattr(register, "_contract_problems", problems)
    for settings in ({"decode": "pool"}, {}, {"decode": "stock"}):
        one = SimpleNamespace(additional_config={"mimo": {"vision": settings}})
        with pytest.raises(ContractError, match="vllm.x: gone"):
            register.activate(one, environ={})
    assert checked == [("vision", media_switch.MEDIA_POOL), ("vision",), ("vision",)]


def test_a_token_that_a_client_made_up_is_refused():
    url = data_url(SOUND["jpeg"])
    for token in ("made up", 3, ["x"]):
        made = media.MimoMediaConnector({media_pool.TOKEN_KEY: {"token": token}})
        kind, text, code = refused(made, url)
        assert kind is MediaError and code == 400 and "media_io_kwargs.mimo_plugin" in text


def test_a_budget_of_the_request_is_charged():
    """vLLM 0.33 counts the decoded bytes of a request; a connector that forgets has no limit."""
    made, charged = connector(), []
    made.decoded_budget = SimpleNamespace(charge=charged.append)
    fetch(made, data_url(SOUND["jpeg"]))
    assert charged == [4 * 47 * 33]


def test_what_pools_do_is_counted_once_and_by_lane():
    def counted(payload, part):
        return {(name, *labels): value for name, labels, value in payload[part]}

    report, settings = media_pool.PoolReport(), PoolSettings(workers=1, job_timeout_s=5.0)
    report.drain()
    made = connector(media.MediaSettings(pool=settings))
    item = fetch(made, data_url(SOUND["jpeg"]))
    with pytest.raises(MediaError):
        fetch(made, data_url(b"no picture"))
    with pytest.raises(MediaError):
        media.media_pool(settings).run_sync(jobs.crash, timeout_s=60.0)
    payload = report.drain()
    counters, gauges = counted(payload, "inc"), counted(payload, "set")
    jobs_done = {key[1:]: value for key, value in counters.items() if key[0] == "media_jobs"}
    assert jobs_done == {("short", "done"): 1, ("short", "failed"): 1, ("long", "crashed"): 1}
    assert counters["media_workers_started", "short"] == 1
    assert counters["media_run_seconds", "short"] > 0
    assert gauges["media_result_bytes", "short"] >= item.size[0] * item.size[1] * 3
    assert gauges["media_workers", "short"] >= 1
    assert report.drain() is None


def test_videos_are_left_to_vllms_loader():
    assert connector().fetch_video.__func__ is MediaConnector.fetch_video
    assert connector().fetch_video_async.__func__ is MediaConnector.fetch_video_async


@pytest.fixture
def loaders(monkeypatch):
    """Video loaders: ``shapes`` counts bytes, ``hang`` waits for the event that is returned."""
    release = threading.Event()

    def loader(wait):
        def load_bytes(cls, data, **options):
            assert not wait or release.wait(60)
            return np.zeros((1, 2, len(data), 3), np.uint8), {"loader": options}

        return type("Loader", (VideoLoader,), {"load_bytes": classmethod(load_bytes)})

    made = {"shapes": loader(False), "hang": loader(True)}
    monkeypatch.setattr(VIDEO_LOADER_REGISTRY, "name2class", made)
    yield release
    release.set()


@pytest.mark.parametrize("way", ["http", "data", "frames", "file"])
def test_videos_come_as_from_vllm(site, tmp_path, loaders, way):
    (tmp_path / "a.mp4").write_bytes(b"film")
    url = {
        "http": f"{site}/jpeg",  # any bytes
        "data": data_url(b"film", "video/mp4"),
        "frames": data_url(SOUND["jpeg"], "video/jpeg"),
        "file": f"file://{tmp_path}/a.mp4",
    }[way]
    video = {"video": {"video_backend": "shapes", "num_frames": 4}}
    found = []
    for make in (connector, stock):
        made = make(allowed_local_media_path=str(tmp_path), media_io_kwargs=video)
        item = asyncio.run(made.fetch_video_async(url))
        found.append((item.media[0].tolist(), item.media[1], item.original_bytes))
    assert found[0] == found[1]


def test_videos_that_take_long_do_not_keep_pictures_waiting(loaders):
    """As many of them as vLLM has threads for all media, and one more."""
    at_once = envs.VLLM_MEDIA_LOADING_THREAD_COUNT + 1

    async def play():
        made = connector(media_io_kwargs={"video": {"video_backend": "hang"}})
        film = data_url(b"film", "video/mp4")
        films = [asyncio.create_task(made.fetch_video_async(film)) for _ in range(at_once)]
        picture = await asyncio.wait_for(made.fetch_image_async(data_url(SOUND["jpeg"])), 60)
        assert not any(film.done() for film in films)
        loaders.set()
        return picture, await asyncio.gather(*films)

    picture, films = asyncio.run(play())
    assert picture.size == (47, 33) and len(films) == at_once
