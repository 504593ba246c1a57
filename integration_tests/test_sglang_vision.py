# SPDX-License-Identifier: Apache-2.0
"""The vision feature on SGLang's own classes: its processor, its encoder's preprocessing, its
receiver. No model runs, and no server.

SGLang's environment has no numba, so rows are made by the kernel's reference, whose equality with
the other backends is tested in ``tests/kernels``.
"""

from __future__ import annotations

import asyncio
import json
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from mimo_plugin.config_vision import VisionConfig
from mimo_plugin.core.item_routing import assign, item_key
from mimo_plugin.core.pixels import PixelError
from mimo_plugin.engines.sglang.vision import routing
from mimo_plugin.engines.sglang.vision.rule import make_rule

pytest.importorskip("sglang")

from sglang.srt.disaggregation.encoder import receiver as upstream
from sglang.srt.disaggregation.encoder.preprocessor import EncoderPreprocessor
from sglang.srt.managers.mm_utils import hash_feature
from sglang.srt.managers.schedule_batch import Modality
from sglang.srt.models.mimo_v2 import MiMoV2ForCausalLM
from sglang.srt.multimodal.encoder_preprocessing import (
    EncoderMediaProcessorConfig,
    resolve_encoder_media_processor_config,
)
from sglang.srt.multimodal.processors import mimo_v2
from sglang.srt.multimodal.processors.mimo_v2 import ImageInput, MiMoProcessor, VideoInput

from mimo_plugin.engines.sglang.vision import encoder, install
from mimo_plugin.engines.sglang.vision.processor import RowsProcessor

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

PATCH = 16
CONFIG = SimpleNamespace(
    vision_config={"patch_size": PATCH, "spatial_merge_size": 2, "temporal_patch_size": 2},
    audio_config={"sampling_rate": 24000},
    processor_config={
        "image_min_pixels": 8192,
        "image_max_pixels": 256 * 256,
        "video_min_pixels": 8192,
        "video_max_pixels": 128 * 128,
        "video_total_max_pixels": 4 * 128 * 128,
        "use_video_timestamps": True,
    },
)
SIZES = [(256, 192), (64, 640), (33, 47), (500, 333), (9, 200), (1024, 700), (96, 128)]
REFERENCE = VisionConfig(backend="reference")
STOCK = (
    tuple(mimo_v2._QWEN2VL_PIXEL_MEAN.flatten().tolist()),
    tuple(mimo_v2._QWEN2VL_PIXEL_STD.flatten().tolist()),
)


def picture(width: int, height: int, seed: int, mode: str = "RGB") -> Image.Image:
    """A smooth picture with noise on it."""
    rng = np.random.default_rng(seed)
    waves = (
        np.sin(np.linspace(0, 9, width))[None, :, None]
        * np.cos(np.linspace(0, 7, height))[:, None, None]
    )
    values = 127 + 90 * waves * np.array([1, 0.7, -0.8]) + rng.normal(0, 20, (height, width, 3))
    image = Image.fromarray(np.clip(values, 0, 255).astype(np.uint8))
    return image if mode == "RGB" else image.convert(mode)


def video(frames: int, width: int, height: int, seed: int) -> Any:
    """Frames and times as SGLang decodes them."""
    pictures = [np.asarray(picture(width, height, seed + i)) for i in range(frames)]
    values = torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2).float()
    return VideoInput(video=(values, torch.arange(frames, dtype=torch.float32) / 2))


@pytest.fixture
def stock():
    return MiMoProcessor.from_hf_config(CONFIG)


def ours(dtype: torch.dtype = torch.float32, settings: VisionConfig = REFERENCE, **preprocessor):
    """A processor with a rule of its own."""

    class Ours(RowsProcessor):
        rule = make_rule(settings, preprocessor, STOCK, dtype)

    return Ours.from_hf_config(CONFIG)


# ------------------------------------------------------------------------------------- rows


def levels(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference, in levels of eight bits."""
    std = torch.tensor(STOCK[1]).repeat_interleave(2 * PATCH * PATCH)
    return float(((found.float() - expected.float()).abs() * std).max())


def test_images_of_a_batch_have_sglangs_rows(stock) -> None:
    images = [picture(*size, seed) for seed, size in enumerate(SIZES)]
    expected = stock.preprocess_for_encoder(images, Modality.IMAGE)
    found = ours().preprocess_for_encoder(images, Modality.IMAGE)
    assert set(found) == set(expected)
    assert torch.equal(found["image_grid_thw"], expected["image_grid_thw"])
    assert found["image_grid_thw"].dtype == expected["image_grid_thw"].dtype
    assert found["pixel_values"].shape == expected["pixel_values"].shape
    assert levels(found["pixel_values"], expected["pixel_values"]) < 1e-3


def test_without_a_resize_they_are_the_same_bits_in_the_towers_dtype(stock) -> None:
    images = [picture(256, 192, 1), picture(96, 128, 2)]
    expected = stock.preprocess_for_encoder(images, Modality.IMAGE)["pixel_values"]
    found = ours(torch.bfloat16).preprocess_for_encoder(images, Modality.IMAGE)["pixel_values"]
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, expected.to(torch.bfloat16))


def test_with_a_resize_few_values_differ_and_by_one_step(stock) -> None:
    images = [picture(*size, seed) for seed, size in enumerate(SIZES)]
    expected = stock.preprocess_for_encoder(images, Modality.IMAGE)["pixel_values"]
    found = ours(torch.bfloat16).preprocess_for_encoder(images, Modality.IMAGE)["pixel_values"]
    steps = (found.view(torch.int16) - expected.to(torch.bfloat16).view(torch.int16)).abs()
    assert steps.max() <= 1
    assert (steps > 0).float().mean() < 1e-3


@pytest.mark.parametrize("mode", ["RGBA", "L", "P", "CMYK"])
def test_pictures_of_other_modes(stock, mode: str) -> None:
    image = picture(120, 90, 4, mode)
    expected = stock.preprocess_for_encoder(image, Modality.IMAGE)["pixel_values"]
    found = ours().preprocess_for_encoder(image, Modality.IMAGE)["pixel_values"]
    assert levels(found, expected) < 1e-3


@pytest.mark.parametrize("frames", [1, 4, 5])
def test_videos_have_sglangs_rows_and_times(stock, frames: int) -> None:
    clip = video(frames, 200, 150, seed=frames)
    rows, grid, times, meta = stock.process_video(clip)
    found, found_grid, found_times, found_meta = ours().process_video(clip)
    assert torch.equal(found_grid, grid) and torch.equal(found_times, times)
    assert found_meta == meta
    assert levels(found, rows) < 1e-3


def test_the_path_without_an_encoder(stock) -> None:
    """A server that does all makes rows picture by picture, from a tensor too."""
    image = picture(333, 222, 7)
    tensor = torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1)
    mine = ours()
    expected, grid = stock._flatten_visual_inputs(stock.process_image(ImageInput(image)), "image")
    for given in (image, tensor, tensor.float()):
        rows, found = mine._flatten_visual_inputs(mine.process_image(ImageInput(given)), "image")
        assert torch.equal(found, grid)
        assert levels(rows, expected) < 1e-3
    with pytest.raises(PixelError, match="whole values"):
        mine.process_image(ImageInput(tensor.float() + 0.5))


def test_the_checkpoint_decides_mean_and_deviation(stock) -> None:
    """SGLang has CLIP's built in, whatever the checkpoint says."""
    image = picture(96, 128, 3)
    other = {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.2, 0.25, 0.3]}
    expected = stock.preprocess_for_encoder(image, Modality.IMAGE)["pixel_values"]
    raw = expected.reshape(-1, 3, 2 * PATCH * PATCH) * torch.tensor(STOCK[1])[:, None]
    raw = raw + torch.tensor(STOCK[0])[:, None]
    wanted = (raw - 255 * torch.tensor(other["image_mean"])[:, None]) / (
        255 * torch.tensor(other["image_std"])[:, None]
    )
    found = ours(**other).preprocess_for_encoder(image, Modality.IMAGE)["pixel_values"]
    assert torch.allclose(found, wanted.reshape(expected.shape), atol=1e-4)
    as_stock = ours(settings=replace(REFERENCE, mean_std="stock"), **other)
    found = as_stock.preprocess_for_encoder(image, Modality.IMAGE)["pixel_values"]
    assert levels(found, expected) < 1e-3


def test_rows_can_be_hashed_as_features() -> None:
    """SGLang keys its caches by them."""
    mine = ours(torch.bfloat16)
    first, again, other = (
        mine.preprocess_for_encoder(picture(96, 128, seed), Modality.IMAGE)["pixel_values"]
        for seed in (1, 1, 2)
    )
    assert hash_feature(first) == hash_feature(again) != hash_feature(other)


def test_a_process_without_a_rule_says_so() -> None:
    with pytest.raises(PixelError, match="no pixel rule in this process"):
        RowsProcessor.from_hf_config(CONFIG)


# ------------------------------------------------------------------------ off the event loop


class Model(MiMoV2ForCausalLM):
    """MiMo's class with its preprocessing hook, and nothing to compute with."""

    def __init__(self) -> None:
        torch.nn.Module.__init__(self)
        self.config = CONFIG
        self._encoder_processor = None


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch):
    """What the plugin changes in a process, undone afterwards."""
    for owner, name in (
        (mimo_v2, "MiMoProcessor"),
        (RowsProcessor, "rule"),
        (EncoderPreprocessor, "_process_video_items"),
        (upstream.MMReceiverBase, "_send_encode_request"),
        (upstream.MMReceiverBase, "recv_mm_data"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    monkeypatch.setattr(MiMoV2ForCausalLM, "encoder_media_processor_config", None, raising=False)
    install.use(make_rule(REFERENCE, {}, STOCK, torch.bfloat16))


def preprocessor(model: Model) -> EncoderPreprocessor:
    """SGLang's, as a server has it after its start."""
    made = object.__new__(EncoderPreprocessor)
    made.__dict__.update(
        model_type="mimo_v2",
        image_processor=None,
        video_processor=None,
        vision_config={},
        use_image_processor_gpu=False,
        encoder_media_processor_config=resolve_encoder_media_processor_config(model),
        _model_preprocessor=model.preprocess_mm_for_encoder,
        preproc_executor=ThreadPoolExecutor(2, thread_name_prefix="preproc"),
        io_executor=ThreadPoolExecutor(2, thread_name_prefix="io"),
    )
    return made


def threads_of(monkeypatch: pytest.MonkeyPatch, cls: Any) -> list[str]:
    """Names of the threads in which ``cls`` preprocesses, as it is called."""
    seen: list[str] = []
    wrapped = cls.preprocess_for_encoder

    def preprocess_for_encoder(self: Any, mm_data: Any, modality: Any) -> Any:
        seen.append(threading.current_thread().name)
        if modality == Modality.VIDEO:
            return {"taken": list(mm_data)}
        return wrapped(self, mm_data, modality)

    monkeypatch.setattr(cls, "preprocess_for_encoder", preprocess_for_encoder)
    return seen


def images_of(made: EncoderPreprocessor, count: int) -> Any:
    """What the encoder makes of images that it has downloaded."""
    pictures = [picture(96, 128, seed) for seed in range(count)]
    made._load_single_item = lambda data, modality: pictures[data]
    return asyncio.run(made._process_image_items(list(range(count)), made._model_preprocessor))


def test_stock_preprocesses_on_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault: while it does, the encoder answers nobody."""
    seen = threads_of(monkeypatch, MiMoProcessor)
    images_of(preprocessor(Model()), 2)
    assert seen == ["MainThread"]


def test_images_are_prepared_in_threads_and_in_one_pass(
    monkeypatch: pytest.MonkeyPatch, installed
) -> None:
    seen = threads_of(monkeypatch, RowsProcessor)
    passes: list[int] = []
    rows = RowsProcessor.rows
    monkeypatch.setattr(
        RowsProcessor, "rows", lambda self, many: (passes.append(len(many)), rows(self, many))[1]
    )
    found = images_of(preprocessor(Model()), 5)
    assert len(seen) == 1 and seen[0].startswith("preproc")
    assert passes == [5]
    assert found["pixel_values"].dtype == torch.bfloat16
    assert found["image_grid_thw"].shape == (5, 3)


def test_videos_are_prepared_in_threads_and_load_themselves(
    monkeypatch: pytest.MonkeyPatch, installed
) -> None:
    """MiMo's hook wants what the request named, not a decoder that SGLang has opened."""
    seen = threads_of(monkeypatch, RowsProcessor)
    made = preprocessor(Model())
    made._load_single_item = lambda *_: pytest.fail("loaded before the hook")
    found = asyncio.run(made._process_video_items(["a.mp4"], made._model_preprocessor))
    assert found == {"taken": ["a.mp4"]}
    assert len(seen) == 1 and seen[0].startswith("preproc")


def test_other_models_are_left_alone(installed) -> None:
    assert resolve_encoder_media_processor_config(object()) == EncoderMediaProcessorConfig()
    assert encoder.EncoderPreprocessor._process_video_items.mimo_plugin_wrapper


# -------------------------------------------------------------------------------- routing


ENCODERS = [f"http://encoder-{i}" for i in range(4)]


class Receiver(upstream.MMReceiverHTTP):
    """SGLang's receiver without sockets; what it would send is kept."""

    def __init__(self, urls: list[str]) -> None:
        self.encode_urls = urls
        self.host = "127.0.0.1"

    def _run_encode_in_thread(self, *args: Any) -> None:
        self.sent.append(args)


def request(**media: Any) -> SimpleNamespace:
    """A request as the HTTP server hands it on."""
    fields = {"image_data": None, "video_data": None, "audio_data": None}
    return SimpleNamespace(rid="r", mm_content_hashes=None, **(fields | media))


def dispatched(receiver: Receiver, wanted: Any) -> list[tuple[str, str]]:
    """Encoder of each item, in the order in which SGLang numbers the parts."""
    receiver.sent = []
    receiver._send_encode_request(wanted)
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and thread.daemon:
            thread.join(1)
    (_, items, _, counts, urls, *_) = receiver.sent[0]
    assert (wanted.encoder_urls, wanted.num_items_assigned) == (urls, counts)
    order = []
    for modality, assigned in counts.items():
        of_kind = iter([item["url"] for item in items if item["modality"] == modality])
        for url, count in zip(urls, assigned, strict=True):
            order += [(url, next(of_kind)) for _ in range(count)]
        assert next(of_kind, None) is None, "an item without an encoder"
    return order


def test_stock_sends_an_item_elsewhere_each_time() -> None:
    random.seed(0)
    receiver = Receiver(ENCODERS)
    seen = {dispatched(receiver, request(image_data=["data:a"]))[0][0] for _ in range(20)}
    assert len(seen) > 1


def test_an_item_goes_to_its_encoder_in_every_turn(installed) -> None:
    receiver = Receiver(ENCODERS)
    chat = [f"data:image/png;base64,{i}" for i in range(6)]
    last: dict[str, str] = {}
    for length in range(1, len(chat) + 1):
        order = dispatched(receiver, request(image_data=chat[:length]))
        assert [item for _, item in order] == chat[:length]
        keys = [item_key(url.encode()) for url in chat[:length]]
        assert [url for url, _ in order] == [ENCODERS[i] for i in assign(keys, ENCODERS)]
        last.update({item: url for url, item in order})
    assert len(set(last.values())) > 1


def found_again(encoders: int, ours: bool) -> tuple[float, float]:
    """Of images that come back in a chat: the share that meets an encoder which has seen it, and
    the share in a part that this encoder has seen, which is what it keeps embeddings by."""
    urls = [f"http://encoder-{i}" for i in range(encoders)]
    receiver, rng = Receiver(urls), random.Random(0)
    random.seed(0)
    back = seen = kept = 0
    for chat in range(200):
        images = [f"data:image/png;base64,{chat}/{i}" for i in range(rng.randint(1, 12))]
        known: set[tuple[str, tuple[str, ...]]] = set()
        for turn in range(1, len(images) + 1):
            shown = images[:turn]
            view = routing.routed(receiver, request(image_data=shown)) if ours else receiver
            items = [{"modality": Modality.IMAGE, "url": url} for url in shown]
            counts = view._assign_items_by_modality(items, len(view.encode_urls))[Modality.IMAGE]
            rest = iter(shown)
            parts = [
                (url, tuple(next(rest) for _ in range(count)))
                for url, count in zip(view.encode_urls, counts, strict=True)
            ]
            for url, part in parts:
                old = [image for image in part if image in images[: turn - 1]]
                back += len(old)
                seen += sum(any(u == url and i in p for u, p in known) for i in old)
                kept += len(old) * ((url, part) in known)
            known.update(parts)
    return seen / back, kept / back


@pytest.mark.parametrize(
    ("encoders", "stock", "mine"),
    [(2, (0.9, 0.4), 1.0), (4, (0.75, 0.5), 0.97), (8, (0.5, 0.5), 0.95)],
)
def test_what_comes_back_is_found_again(
    installed, encoders: int, stock: tuple[float, float], mine: float
) -> None:
    theirs, ours = found_again(encoders, ours=False), found_again(encoders, ours=True)
    print(f"{encoders} encoders, known and kept: {theirs} in stock, {ours}")
    assert theirs[0] < stock[0] and theirs[1] < stock[1]
    assert min(ours) >= mine


def test_kinds_are_numbered_as_sglang_does(installed) -> None:
    """Parts are put together by number: images, then videos, each in the order of the request."""
    order = dispatched(
        Receiver(ENCODERS), request(image_data=["a", "b", "c"], video_data=["v", "w"])
    )
    assert [item for _, item in order] == ["a", "b", "c", "v", "w"]


@pytest.fixture
def listeners():
    """Addresses of four encoders, and what is posted to them: (address, path, body)."""
    posted: list[tuple[str, str, dict[str, Any]]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            posted.append((f"http://127.0.0.1:{self.server.server_port}", self.path, body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None: ...

    servers = [ThreadingHTTPServer(("127.0.0.1", 0), Handler) for _ in ENCODERS]
    for server in servers:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    yield [f"http://127.0.0.1:{server.server_port}" for server in servers], posted
    for server in servers:
        server.shutdown()
        server.server_close()


def test_parts_that_are_sent(installed, listeners) -> None:
    """SGLang posts each item once, in a part of its own whose number says where it belongs."""
    urls, posted = listeners
    wanted = request(image_data=["a", "b", "a"], audio_data=["s"])
    receiver = Receiver(urls)
    view = routing.routed(receiver, wanted)
    assert view is not receiver and receiver.encode_urls == urls
    items = view._extract_url_data(wanted)
    error = asyncio.run(view.encode("r", items, 1, "encode", encode_urls=list(view.encode_urls)))
    assert error is None
    parts = sorted((body["part_idx"], body["mm_items"], url) for url, _, body in posted)
    assert [content for _, content, _ in parts] == [["a"], ["b"], ["a"], ["s"]]
    assert [number for number, _, _ in parts] == [0, 1, 2, 3]
    assert {body["num_parts"] for _, _, body in posted} == {4}
    assert len({body["req_id"] for _, _, body in posted}) == 4
    expected = assign([item_key(item.encode()) for item in "abas"], urls)
    assert [url for _, _, url in parts] == [urls[i] for i in expected]
    counts = view._assign_items_by_modality()
    assert upstream.calculate_modality_num_parts(list(counts), counts)[0] == 4


def test_one_encoder_or_no_item_is_stock(installed) -> None:
    alone = Receiver(ENCODERS[:1])
    assert routing.routed(alone, request(image_data=["a"])) is alone
    several = Receiver(ENCODERS)
    assert routing.routed(several, request()) is several
    grpc = object.__new__(upstream.MMReceiverGrpc)
    grpc.encode_urls = ENCODERS
    assert routing.routed(grpc, request(image_data=["a"])) is grpc


def test_a_hash_that_the_client_names_counts(installed) -> None:
    receiver = Receiver(ENCODERS)
    named = [
        dispatched(receiver, request(image_data=[{"url": url, "content_hash": "ab" * 32}]))[0][0]
        for url in ("http://a/1", "http://b/2", "http://c/3")
    ]
    assert len(set(named)) == 1
