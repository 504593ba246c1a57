# SPDX-License-Identifier: Apache-2.0
"""Pictures decoded in the pool of a real server with two API processes.

That answers are those of stock decoding is in ``test_vllm_vision.py``, whose servers use the pool
except for the stock one. Here: downloads, and input that hurts a decoder.
"""

from __future__ import annotations

import http.client
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from integration_tests.media_site import CRASH, HANG, bad_decoder, site
from integration_tests.vision_client import (
    Refused,
    VisionClient,
    image_part,
    noise,
    served,
    text_part,
)
from tools import tiny_omni

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

FETCH_TIMEOUT_S, SLOW_S, DECODE_TIMEOUT_S = 2, 8, 3.0
PICTURE = noise(160, 200, 1)
SHORT = text_part("describe it")
VISION = {"decode": "pool", "decode_workers": 2, "decode_timeout_s": DECODE_TIMEOUT_S}


@pytest.fixture(scope="module")
def pictures():
    with site({"a.png": PICTURE, "b.png": noise(180, 180, 2)}, SLOW_S) as root:
        yield root


@pytest.fixture(scope="module")
def client(serve_module, tmp_path_factory):
    folder = bad_decoder(tmp_path_factory.mktemp("bad-decoder"))
    server = serve_module(
        tiny_omni.make(tmp_path_factory.mktemp("tiny-omni")),
        "--max-model-len=4096",
        "--api-server-count=2",
        *("--limit-mm-per-prompt", '{"image": 4, "video": 0, "audio": 0}'),
        "--allowed-media-domains=127.0.0.1",
        *("--additional-config", json.dumps({"mimo": {"vision": VISION}})),
        plugin="mimo:vision",
        environment={
            "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]),
            "VLLM_IMAGE_FETCH_TIMEOUT": str(FETCH_TIMEOUT_S),
            "VLLM_MEDIA_FETCH_MAX_RETRIES": "1",
            "VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB": "1",
        },
    )
    return VisionClient(server)


def url_part(url):
    return {"type": "image_url", "image_url": {"url": url}}


def jobs(client, outcome):
    return client.server.metric("mimo:media_jobs_total", lane="short", outcome=outcome) or 0.0


def wait_for(holds, timeout_s=40.0):
    """Each API process hands its counters over with its next answer, at the latest in 10 s."""
    deadline_s = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline_s, "did not happen"
        time.sleep(0.2)


def test_a_picture_is_the_same_however_it_comes(client, pictures):
    before = jobs(client, "done")
    asked = [
        [image_part(PICTURE), SHORT],
        [url_part(f"{pictures}/a.png"), SHORT],
        [url_part(f"{pictures}/moved/a.png"), SHORT],
    ]
    first, *others = [served(client.ask(*parts)) for parts in asked]
    assert others == [first, first]
    assert served(client.ask(url_part(f"{pictures}/b.png"), SHORT)).logprobs != first.logprobs
    wait_for(lambda: jobs(client, "done") >= before + 4)
    assert "pictures are decoded in 2 processes" in client.server.log_text()


@pytest.mark.parametrize(
    ("path", "status", "word"),
    [
        ("none.png", {422}, "404"),
        ("big", {422}, "VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB"),
        ("slow", set(range(400, 600)), ""),
    ],
)
def test_downloads_that_fail_are_refused(client, pictures, path, status, word):
    refused = client.ask(url_part(f"{pictures}/{path}"), SHORT)
    assert isinstance(refused, Refused), refused
    assert refused.status in status and word in refused.reason, refused


def test_other_domains_are_refused(client, pictures):
    refused = client.ask(url_part(f"{pictures.replace('127.0.0.1', 'localhost')}/a.png"), SHORT)
    assert isinstance(refused, Refused) and refused.status == 400
    assert "allowed domains" in refused.reason


def test_a_picture_that_hurts_its_decoder_costs_its_own_request(client):
    """One that crashes, one that hangs, and good ones beside them, all at once."""
    before = {outcome: jobs(client, outcome) for outcome in ("crashed", "timeout", "done")}
    bad = {"ended": image_part(PICTURE + CRASH), "longer": image_part(PICTURE + HANG)}
    good = [[image_part(noise(130 + 10 * i, 140, i)), SHORT] for i in range(6)]
    answers = client.at_once([*([part, SHORT] for part in bad.values()), *good])
    for answer, word in zip(answers, bad, strict=False):
        assert isinstance(answer, Refused) and answer.status == 400, answer
        assert word in answer.reason
    for parts, together in zip(good, answers[len(bad) :], strict=True):
        alone = served(client.ask(*parts))
        assert (alone.prompt, alone.tokens) == (served(together).prompt, together.tokens)
        assert alone.logprobs == pytest.approx(together.logprobs, abs=1e-4)
    wait_for(
        lambda: (
            jobs(client, "crashed") == before["crashed"] + 1
            and jobs(client, "timeout") == before["timeout"] + 1
            and jobs(client, "done") >= before["done"] + 6
        )
    )
    assert client.server.metric("mimo:media_workers", lane="short") <= 4


def test_pictures_are_fetched_and_decoded_while_a_forward_pass_runs(client, pictures):
    """The second request is answered in full before the first one has all its tokens."""
    body = {
        "model": client.server.model,
        "messages": [{"role": "user", "content": [image_part(PICTURE), SHORT]}],
        "max_tokens": 3000,
        "min_tokens": 3000,
        "stream": True,
    }
    before = jobs(client, "done")
    connection = http.client.HTTPConnection("127.0.0.1", client.server.port, timeout=120)
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/chat/completions", json.dumps(body).encode(), headers)
    stream = connection.getresponse()
    assert stream.readline().startswith(b"data: ")
    with ThreadPoolExecutor(1) as pool:
        whole = pool.submit(stream.read)
        fresh = image_part(noise(333, 222, 77))
        served(client.ask(url_part(f"{pictures}/b.png"), fresh, SHORT))
        assert not whole.done()
        assert whole.result().rstrip().endswith(b"[DONE]")
    connection.close()
    wait_for(lambda: jobs(client, "done") >= before + 3)
