# SPDX-License-Identifier: Apache-2.0
"""The vision feature in ``vllm serve``: same answers as stock, each fix with its own right value.

With the fixes off, prompt ids, tokens and logprobs of images and videos must be stock's to the last
bit (the backend ``reference`` does stock's arithmetic); the fast backend may differ by rounding.
"""

from __future__ import annotations

import json
import re
from fractions import Fraction

import pytest

from integration_tests.refusal import Refusal, check_refused, serve_all
from integration_tests.side_by_side import start_all
from integration_tests.vision_client import (
    Answer,
    Refused,
    VisionClient,
    clip,
    encode,
    image_part,
    letter,
    noise,
    served,
    text_of,
    text_part,
    video_part,
)
from tests.media.video_clips import sound_only, with_sound
from tools import tiny_omni
from tools.server import VllmServer

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

STOCK_FIXES = {
    "mean_std": "stock",
    "timestamps": "stock",
    "outer_tokens": "stock",
    "processor_kwargs": "stock",
}
MAX_PIXELS = 20_000_000
ARGUMENTS = (
    "--max-model-len=4096",
    "--limit-mm-per-prompt",
    '{"image": 8, "video": 2, "audio": 0}',
    "--trust-request-mm-kwargs",
    "--media-io-kwargs",
    '{"video": {"num_frames": 3, "fps": -1}}',
)
ENVIRONMENT = {"VLLM_MAX_IMAGE_PIXELS": str(MAX_PIXELS)}
SHORT = text_part("describe it")
LONG_CLIP_FRAMES = 601
"""At one frame a second the third of four frames is shown at 400 s."""
STOCK_FRAMES = {"frames": "stock"}
BY_THE_RULE = {"video": {"num_frames": -1}}
"""``media_io_kwargs`` that leave the frames to the checkpoint: here one a second."""

LETTERS = "AEFHKLTX"

ENCODER_TOKENS = 256
"""What one step and the encoder hold on the server ``imagenet``: the largest of its images."""
CONTEXT_TOKENS = 8192
NARROW = (
    f"--max-model-len={CONTEXT_TOKENS}",
    f"--max-num-batched-tokens={ENCODER_TOKENS}",
    "--max-num-seqs=8",
    "--limit-mm-per-prompt",
    '{"image": 2, "video": 0, "audio": 0}',
    "--trust-request-mm-kwargs",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_omni.make(tmp_path_factory.mktemp("tiny-omni"))


def vision(video=None, **settings):
    section = {"vision": settings} | ({} if video is None else {"video": video})
    return ["--additional-config", json.dumps({"mimo": section})]


@pytest.fixture(scope="module")
def clients(serve_module, model, tmp_path_factory):
    """Clients of the servers of the module, by the names of the fixtures below."""
    imagenet = tiny_omni.make(
        tmp_path_factory.mktemp("imagenet"),
        tiny_omni.TinyOmni(image_mean=(0.485, 0.456, 0.406), image_std=(0.229, 0.224, 0.225)),
    )
    room = vision(encoder_cache_tokens="limit")

    def client(*arguments, plugin=None):
        return lambda: VisionClient(
            serve_module(model, *ARGUMENTS, *arguments, plugin=plugin, environment=ENVIRONMENT)
        )

    return start_all(
        {
            "stock": client(),
            "unfixed": client(
                *vision(STOCK_FRAMES, backend="reference", **STOCK_FIXES),
                plugin="mimo:vision,video",
            ),
            "fixed": client(plugin="mimo"),
            "imagenet": lambda: VisionClient(
                serve_module(imagenet, *NARROW, *room, plugin="mimo:vision")
            ),
        }
    )


@pytest.fixture(scope="module")
def stock(clients):
    return clients["stock"]


@pytest.fixture(scope="module")
def unfixed(clients):
    """Both features with every fix off, stock's frames and stock's arithmetic."""
    return clients["unfixed"]


@pytest.fixture(scope="module")
def fixed(clients):
    """The feature as its user starts it, beside the others."""
    return clients["fixed"]


@pytest.fixture(scope="module")
def imagenet(clients):
    """The feature on a checkpoint with the statistics that stock has built in; a small encoder."""
    return clients["imagenet"]


def requests():
    """Images of several sizes (one shrunk on the host), several per request, and a video."""
    large, small, wide = noise(1500, 1300, 1), noise(200, 200, 2), noise(120, 900, 3, "JPEG")
    return [
        [image_part(noise(300, 400, 0)), SHORT],
        [image_part(small), text_part("and"), image_part(wide, "image/jpeg"), SHORT],
        [image_part(large), image_part(small), image_part(noise(37, 640, 4)), SHORT],
        [video_part(clip(9, 96, 128)), SHORT],
        [image_part(small), video_part(clip(4, 64, 64)), SHORT],
        [text_part("no media at all")],
    ]


# --- the same as stock -----------------------------------------------------------------------


def test_without_the_fixes_everything_is_stock_s(stock, unfixed):
    for parts in requests():
        assert served(unfixed.ask(*parts)) == served(stock.ask(*parts))


def test_stock_s_frames_whatever_a_request_asks_for(stock, unfixed):
    """A file that is read sparsely gives the frames and answers of stock's loader."""
    before = frames_of(unfixed)
    for asked in ({"num_frames": 5}, {"fps": 0.05}, {"num_frames": 2, "fps": 0.01}):
        options = {"media_io_kwargs": {"video": asked}}
        for data in (clip(LONG_CLIP_FRAMES, 64, 64), clip(90, 240, 320)):
            parts = [video_part(data), SHORT]
            assert served(unfixed.ask(*parts, **options)) == served(stock.ask(*parts, **options))
    read = {what: count - before[what] for what, count in frames_of(unfixed).items()}
    assert read["file"] == 3 * (LONG_CLIP_FRAMES + 90)
    assert 0 < read["taken"] <= read["decoded"] < read["file"] and not read["dropped"]


def test_frames_of_stock_s_loader_are_served_as_well(stock, unfixed):
    """A request that may choose the loader: its frames come as without the feature."""
    before = frames_of(unfixed)
    parts = [video_part(clip(9, 96, 130)), SHORT]
    options = {"media_io_kwargs": {"video": {"video_backend": "opencv", "num_frames": 4}}}
    assert served(unfixed.ask(*parts, **options)) == served(stock.ask(*parts, **options))
    assert frames_of(unfixed) == before


def frames_of(client):
    """Frames of the videos that the server has read."""
    whats = ("file", "decoded", "taken", "dropped")
    found = {w: client.server.metric("mimo:video_frames_total", what=w) for w in whats}
    return {what: count or 0.0 for what, count in found.items()}


def test_what_is_in_the_picture_matters(stock):
    """Control: an answer that does not depend on the pixels would prove nothing."""
    one, other = (served(stock.ask(image_part(noise(300, 400, s)), SHORT)) for s in (10, 11))
    assert one.prompt == other.prompt
    assert one.logprobs != other.logprobs


def test_concurrent_requests_get_what_they_would_alone(unfixed, stock):
    """Media of several requests in one encoder call: every one gets its own."""
    asked = [
        [image_part(noise(160 + 32 * i, 200, 20 + i)), image_part(letter(c)), SHORT]
        for i, c in enumerate("ABCDEF")
    ]
    together = [served(answer) for answer in unfixed.at_once(asked)]
    for parts, answer in zip(asked, together, strict=True):
        alone = served(stock.ask(*parts))
        assert (answer.prompt, answer.tokens) == (alone.prompt, alone.tokens)
        assert answer.logprobs == pytest.approx(alone.logprobs, abs=1e-4)


def test_letters_in_a_growing_chat(unfixed, stock):
    """B45: from the first to the eighth picture the answer is about the last one."""
    for client in (unfixed, stock):
        client.answers = []
        messages = []
        for character in LETTERS:
            parts = [image_part(letter(character)), text_part("which letter")]
            messages.append({"role": "user", "content": parts})
            answer = served(client.chat(messages))
            client.answers.append(answer)
            messages.append({"role": "assistant", "content": "it is " + character})
    assert unfixed.answers == stock.answers
    tokens = [tuple(a.logprobs) for a in unfixed.answers]
    assert len(set(tokens)) == len(LETTERS)


def test_the_counters_prove_that_the_feature_acted(unfixed):
    server: VllmServer = unfixed.server

    def count(name, **labels):
        return server.metric(f"mimo:vision_{name}_total", **labels) or 0.0

    served(unfixed.ask(image_part(noise(64, 64, 92)), SHORT))  # what the start counted is out
    before = count("kernel_passes"), count("kernel_items"), count("items")
    small, large = noise(210, 220, 90), noise(1400, 1400, 91)
    served(unfixed.ask(image_part(small), image_part(large), SHORT))
    passes, items, packed = count("kernel_passes"), count("kernel_items"), count("items")
    assert packed - before[2] == 2
    assert items - before[1] == 2
    assert 1 <= passes - before[0] <= 2
    assert count("kernel_items", backend="reference") == items
    assert count("items", kind="image", form="rows") >= 1
    assert count("bytes", kind="image", form="pixels") >= 210 * 220 * 3
    assert all(count(f"{work}_seconds") > 0 for work in ("host", "kernel", "encode"))
    # The processor's cache holds it: nothing is packed again.
    served(unfixed.ask(image_part(small), image_part(large), SHORT))
    assert count("items") == packed


# --- the fixes -------------------------------------------------------------------------------


def test_mean_and_std_are_the_checkpoint_s(fixed, stock, imagenet):
    """Right value: stock on a checkpoint whose values are ImageNet's, which it has built in.

    The answer comes from the fast backend, so this also compares that one with stock's arithmetic.
    """
    parts = [image_part(noise(300, 400, 0)), SHORT]
    mine, theirs = served(fixed.ask(*parts)), served(stock.ask(*parts))
    assert mine.prompt == theirs.prompt
    assert mine.logprobs != pytest.approx(theirs.logprobs, abs=1e-3)

    answer = served(imagenet.ask(*parts))
    assert answer.tokens == theirs.tokens
    assert answer.logprobs == pytest.approx(theirs.logprobs, abs=1e-3)
    log = fixed.server.log_text()
    assert "mimo vision: mean 122.77/116.75/104.09" in log and "from checkpoint" in log


def test_frames_are_labelled_with_their_times(fixed, stock, model):
    """B82: the third of four frames is shown at 400 s; stock says it is the third second."""
    video = [video_part(clip(LONG_CLIP_FRAMES, 64, 64)), SHORT]
    mine = text_of(model, served(fixed.ask(*video)).prompt)
    theirs = text_of(model, served(stock.ask(*video)).prompt)
    assert "<|video_start|>00:00<|vision_start|>" in mine
    assert "<|vision_end|>06:40<|vision_start|>" in mine
    assert "06:40" not in theirs and "<|vision_end|>00:02<|vision_start|>" in theirs


def test_no_vision_tokens_around_a_video(fixed, stock, model):
    video = [video_part(clip(4, 64, 64)), SHORT]
    mine = text_of(model, served(fixed.ask(*video)).prompt)
    theirs = text_of(model, served(stock.ask(*video)).prompt)
    assert "<|vision_start|><|video_start|>" in theirs
    assert "<|video_end|><|vision_end|>" in theirs
    assert "<|im_start|>user\n<|video_start|>" in mine
    assert "<|video_end|>describe" in mine
    assert mine.count("<|vision_start|>") == theirs.count("<|vision_start|>") - 1


def test_processor_kwargs_of_a_request(fixed, stock, model):
    picture = image_part(noise(512, 512, 5))

    def image_tokens(client, **kwargs):
        answer = served(client.ask(picture, SHORT, mm_processor_kwargs=kwargs))
        return text_of(model, answer.prompt).count("<|image_pad|>")

    assert image_tokens(fixed, max_pixels=128 * 128) == 16
    assert image_tokens(fixed, images_kwargs={"max_pixels": 256 * 256}) == 64
    assert image_tokens(fixed, size={"longest_edge": 64 * 128}) == 4
    assert image_tokens(stock, max_pixels=128 * 128) == image_tokens(fixed) == 256
    refused = fixed.ask(picture, SHORT, mm_processor_kwargs={"max_pixel": 4})
    assert isinstance(refused, Refused) and refused.status == 400
    assert "max_pixel" in refused.reason and "max_pixels" in refused.reason


def test_a_plain_switch_takes_the_feature_and_its_fast_backend(fixed):
    assert "features=kv,scheduler,vision,video" in fixed.server.log_text()
    assert fixed.server.metric("mimo:vision_kernel_passes_total", backend="cpu") > 0


# --- videos ----------------------------------------------------------------------------------


def test_the_checkpoint_says_which_frames(fixed, stock, model):
    """24 frames in 12 s: one a second by the checkpoint, others where a request asks for them."""
    video = video_part(clip(24, 64, 64, Fraction(2)))

    def patches(client, **asked):
        answer = served(client.ask(video, SHORT, media_io_kwargs={"video": asked}))
        return text_of(model, answer.prompt).count("<|video_pad|><|vision_end|>")

    assert patches(fixed, num_frames=-1) == 6
    assert patches(fixed, num_frames=8) == 4
    assert patches(fixed, fps=1.5) == 9
    assert patches(stock, num_frames=-1) == 12  # all of them


def test_times_of_a_variable_rate_are_those_of_the_frames(fixed, model):
    data = clip(8, 64, 64, times_s=(0.0, 1.0, 2.0, 3.0, 100.0, 200.0, 300.0, 400.0))
    answer = served(fixed.ask(video_part(data), SHORT, media_io_kwargs=BY_THE_RULE))
    text = text_of(model, answer.prompt)
    labels = re.findall(r"(\d\d:\d\d)<\|vision_start\|>", text)
    assert labels == ["00:00", "00:02", "01:40", "05:00"]


def test_a_large_video_comes_as_patch_rows(fixed, model):
    """Limits of a request must be said to the loader as well, which makes the rows."""
    video = video_part(clip(12, 480, 640))

    def ask(pixels=None, **asked):
        kwargs = {} if pixels is None else {"mm_processor_kwargs": {"max_pixels": pixels}}
        video_kwargs = {"video": {"num_frames": 8, **asked}}
        return fixed.ask(video, SHORT, media_io_kwargs=video_kwargs, **kwargs)

    before = fixed.server.metric("mimo:video_files_total", form="rows") or 0
    served(ask())
    assert fixed.server.metric("mimo:video_files_total", form="rows") == before + 1
    assert fixed.server.metric("mimo:vision_items_total", kind="video", form="rows") >= 1
    refused = ask(pixels=96 * 128)
    assert isinstance(refused, Refused) and refused.status == 400
    assert "fix: give them under media_io_kwargs.video as well" in refused.reason
    smaller = served(ask(pixels=96 * 128, max_pixels=96 * 128))
    assert text_of(model, smaller.prompt).count("<|video_pad|>") == 4 * 12


def test_sound_of_a_video_changes_nothing(fixed):
    """B43: the answer is that of the video without its sound, which is said once."""
    silent = clip(12, 64, 96)
    with_it = with_sound(silent, 12.0)
    expected = served(fixed.ask(video_part(silent), SHORT))
    for _ in range(2):
        assert served(fixed.ask(video_part(with_it), SHORT)) == expected
    assert fixed.server.log_text().count("audio tracks of videos are not read") == 1


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"frame_recovery": True}, "allowed keys: num_frames, fps"),
        ({"num_frames": 0}, "found 0; allowed: a whole number above 0"),
        ({"mimo_setup": "of another engine"}, "allowed: what the feature video writes at start"),
    ],
)
def test_options_of_a_request_that_can_not_be(fixed, asked, words):
    refused = fixed.ask(video_part(clip(4, 64, 64)), SHORT, media_io_kwargs={"video": asked})
    assert isinstance(refused, Refused) and refused.status == 400
    assert words in refused.reason


# --- hostile input ---------------------------------------------------------------------------


def hostile():
    """Requests that must be refused, with a word of the reason."""
    from PIL import Image

    jpeg, movie = noise(300, 400, 7, "JPEG"), clip(30, 64, 64)
    line = encode(Image.new("RGB", (5000, 1), "red"))
    huge = encode(Image.new("1", (10_000, 10_000)))
    return {
        "truncated": ([image_part(jpeg[: len(jpeg) // 2], "image/jpeg")], "truncated"),
        "one line": ([image_part(line)], "5000"),
        "100 megapixels": ([image_part(huge)], "100000000"),
        "no image": ([image_part(b"hello, I am text", "image/png")], "image"),
        "no video": ([video_part(b"hello, I am text" * 100)], "the video can't be opened"),
        "no frames": ([video_part(clip(0, 64, 64))], "the video"),
        "half a video": ([video_part(movie[: len(movie) // 2])], "a download that broke off"),
        "a picture": ([video_part(noise(64, 64, 7))], "it is a PNG image, no video"),
        "a playlist": ([video_part(b"#EXTM3U\nfile:///etc/passwd\n")], "it is a playlist"),
        "only sound": ([video_part(sound_only())], "no video stream; found: audio"),
        "empty": ([image_part(b"")], "image"),
    }


@pytest.mark.parametrize("name", sorted(hostile()))
def test_hostile_input_is_a_client_error_with_the_reason(fixed, name):
    parts, word = hostile()[name]
    answer = fixed.ask(*parts, SHORT)
    assert isinstance(answer, Refused), answer
    assert 400 <= answer.status < 500, answer
    assert word in answer.reason
    served(fixed.ask(image_part(noise(64, 64, 8)), SHORT))


def test_wrong_extension_is_what_the_bytes_say(fixed):
    png = noise(96, 96, 9)
    right = served(fixed.ask(image_part(png), SHORT))
    assert served(fixed.ask(image_part(png, "image/jpeg"), SHORT)) == right
    movie = served(fixed.ask(video_part(clip(4, 64, 64)), SHORT))
    assert served(fixed.ask(video_part(clip(4, 64, 64), "video/webm"), SHORT)) == movie


def test_others_go_on_beside_hostile_input(fixed):
    bad = [[*parts, SHORT] for parts, _ in hostile().values()]
    good = [image_part(noise(130, 140, 12)), SHORT]
    answers = fixed.at_once([*bad, good, *bad, good])
    served_ones = [answer for answer in answers if isinstance(answer, Answer)]
    assert len(served_ones) == 2
    assert fixed.server.alive()


def test_media_longer_than_the_context_are_refused(fixed):
    """Both numbers are said, and the engine goes on."""
    picture = image_part(noise(1500, 1500, 13))
    refused = fixed.ask(picture, picture, mm_processor_kwargs={"max_pixels": 1500 * 1500})
    assert isinstance(refused, Refused) and refused.status == 400
    assert "4096" in refused.reason
    length = int(re.search(r"[Ii]nput length \((\d+)\)", refused.reason)[1])
    assert length > 2 * (1500 // 32) ** 2
    served(fixed.ask(image_part(noise(64, 64, 8)), SHORT))


def test_an_item_longer_than_the_encoder_takes_is_refused(imagenet):
    """B42: both numbers are said, the engine goes on; the context would have room."""
    picture, small = image_part(noise(1024, 1024, 14)), image_part(noise(64, 64, 8))
    options = {"mm_processor_kwargs": {"max_pixels": 1024 * 1024}}
    for refused in (imagenet.ask(picture, SHORT, **options) for _ in range(2)):
        assert isinstance(refused, Refused) and refused.status == 400
        assert "1024 embedding tokens" in refused.reason
        assert f"at most {ENCODER_TOKENS}" in refused.reason
        served(imagenet.ask(small, SHORT))
    served(imagenet.ask(picture, SHORT))  # within the checkpoint's limit


def test_two_of_the_largest_images_are_held_at_once(imagenet):
    """B80: the cache has room for what the limits admit, and the log says so."""
    log = imagenet.server.log_text()
    assert f"encoder cache of {2 * ENCODER_TOKENS} embeddings" in log
    assert f"2 of image ({ENCODER_TOKENS} embeddings each, 2 in a prompt)" in log
    served(imagenet.ask(image_part(noise(512, 512, 15)), image_part(noise(512, 512, 16)), SHORT))


# --- refusals at start -----------------------------------------------------------------------


def test_asked_for_but_unfit(model, tiny_model):
    refusals = {
        "text": Refusal(["--plugin", "mimo:vision"], ["vision", "MiMoV2Flash"], model=tiny_model),
        "kwargs": Refusal(
            ["--plugin", "mimo:vision", "--mm-processor-kwargs", '{"max_pixel": 3}'],
            ["max_pixel", "max_pixels"],
        ),
    }
    for name, done in serve_all(model, refusals).items():
        check_refused(done, refusals[name].words)
