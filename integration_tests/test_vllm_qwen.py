# SPDX-License-Identifier: Apache-2.0
"""The vision feature in ``vllm serve`` with a Qwen-VL model: the answers are stock's, bit for bit.

Stock computes with Pillow here (``use_fast`` false); by default it takes another resize, which the
feature does not imitate. The family is the one that differs most from MiMo: image features of
several depths and a processor of its own. ``MIMO_TEST_QWEN`` names another of ``tiny_qwen``'s.
"""

from __future__ import annotations

import os

import pytest

from integration_tests.side_by_side import start_all
from integration_tests.vision_client import (
    Answer,
    Refused,
    VisionClient,
    clip,
    image_part,
    letter,
    noise,
    served,
    text_of,
    text_part,
    video_part,
)
from tools import tiny_qwen

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

FAMILY = os.environ.get("MIMO_TEST_QWEN", "qwen3_vl")
PILLOW = ("--mm-processor-kwargs", '{"use_fast": false}')
ARGUMENTS = (
    "--max-model-len=4096",
    "--block-size=32",
    "--limit-mm-per-prompt",
    '{"image": 8, "video": 2}',
    "--trust-request-mm-kwargs",
    "--media-io-kwargs",
    '{"video": {"num_frames": 4, "fps": -1}}',
)
SHORT = text_part("describe it")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    size = tiny_qwen.TinyQwen(family=FAMILY)
    return tiny_qwen.make(tmp_path_factory.mktemp("tiny-qwen"), size)


@pytest.fixture(scope="module")
def clients(serve_module, model):
    """Stock and the plugin as a user starts it, side by side."""

    def client(*arguments, plugin=None):
        return lambda: VisionClient(serve_module(model, *ARGUMENTS, *arguments, plugin=plugin))

    return start_all({"stock": client(*PILLOW), "plugin": client(plugin="mimo:vision")})


@pytest.fixture(scope="module")
def stock(clients):
    return clients["stock"]


@pytest.fixture(scope="module")
def plugin(clients):
    return clients["plugin"]


def requests():
    """Images of several sizes (one shrunk by the host), several in a request, and videos."""
    large, small, wide = noise(1500, 1300, 1), noise(200, 200, 2), noise(120, 900, 3, "JPEG")
    return [
        [image_part(noise(300, 400, 0)), SHORT],
        [image_part(small), text_part("and"), image_part(wide, "image/jpeg"), SHORT],
        [image_part(large), image_part(small), image_part(noise(37, 640, 4)), SHORT],
        [video_part(clip(9, 96, 128)), SHORT],
        [image_part(small), video_part(clip(4, 64, 64)), image_part(large), SHORT],
        [text_part("no media at all")],
    ]


def test_everything_is_stock_s(stock, plugin):
    for parts in requests():
        assert served(plugin.ask(*parts)) == served(stock.ask(*parts))


def test_what_is_in_the_picture_matters(stock):
    """Control: an answer that does not depend on the pixels would prove nothing."""
    one, other = (served(stock.ask(image_part(noise(300, 400, s)), SHORT)) for s in (10, 11))
    assert one.prompt == other.prompt
    assert one.logprobs != other.logprobs


def test_concurrent_requests_get_what_they_would_alone(plugin, stock):
    asked = [
        [image_part(noise(160 + 32 * i, 200, 20 + i)), image_part(letter(c)), SHORT]
        for i, c in enumerate("ABCDEF")
    ]
    together = [served(answer) for answer in plugin.at_once(asked)]
    for parts, answer in zip(asked, together, strict=True):
        alone = served(stock.ask(*parts))
        assert (answer.prompt, answer.tokens) == (alone.prompt, alone.tokens)
        assert answer.logprobs == pytest.approx(alone.logprobs, abs=1e-4)


def test_settings_of_a_request_act_as_in_stock(plugin, stock, model):
    picture = image_part(noise(512, 512, 5))
    for kwargs in ({"max_pixels": 128 * 128}, {"images_kwargs": {"max_pixels": 256 * 256}}):
        mine = served(plugin.ask(picture, SHORT, mm_processor_kwargs=kwargs))
        assert mine == served(stock.ask(picture, SHORT, mm_processor_kwargs=kwargs))
        assert 0 < text_of(model, mine.prompt).count("<|image_pad|>") <= 100
    refused = plugin.ask(picture, SHORT, mm_processor_kwargs={"do_resize": False})
    assert isinstance(refused, Refused) and refused.status == 400
    assert "do_resize" in refused.reason


def test_hostile_input_is_a_client_error_and_others_go_on(plugin):
    jpeg = noise(300, 400, 7, "JPEG")
    bad = {
        "200 times": [image_part(noise(20, 6000, 6))],
        "truncated": [image_part(jpeg[: len(jpeg) // 2], "image/jpeg")],
        "image": [image_part(b"hello, I am text", "image/png")],
        "video": [video_part(b"hello, I am text" * 100)],
    }
    good = [image_part(noise(130, 140, 12)), SHORT]
    answers = plugin.at_once([good, *([*parts, SHORT] for parts in bad.values()), good])
    assert isinstance(answers[0], Answer) and answers[0].prompt == answers[-1].prompt
    for word, answer in zip(bad, answers[1:-1], strict=True):
        assert isinstance(answer, Refused) and 400 <= answer.status < 500, answer
        assert word in answer.reason


def test_the_counters_prove_that_the_feature_acted(plugin):
    def count(name, **labels):
        return plugin.server.metric(f"mimo:vision_{name}_total", **labels) or 0.0

    served(plugin.ask(image_part(noise(64, 64, 92)), SHORT))  # what the start counted is out
    passes, items = count("kernel_passes", backend="cpu"), count("items", kind="image")
    served(plugin.ask(image_part(noise(210, 220, 90)), image_part(noise(99, 99, 91)), SHORT))
    assert count("items", kind="image", form="pixels") == items + 2
    assert 1 <= count("kernel_passes", backend="cpu") - passes <= 2
    served(plugin.ask(video_part(clip(5, 64, 64)), SHORT))  # a video is none of ours
    assert count("items") == items + 2
