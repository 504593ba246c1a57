# SPDX-License-Identifier: Apache-2.0
"""Both processors, upstream's and ours, on one checkpoint: what they hand to the model.

No engine runs: configurations are made as an engine makes them, and asked for their processor.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from mimo_plugin.core.pixels import PixelError
from tests.vision.conftest import movie, picture
from tools import tiny_omni

pytestmark = pytest.mark.vllm

IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
VIDEO = "<|vision_start|><|video_pad|><|vision_end|>"
STOCK = {
    "mean_std": "stock",
    "timestamps": "stock",
    "outer_tokens": "stock",
    "processor_kwargs": "stock",
    "backend": "reference",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_omni.make(tmp_path_factory.mktemp("tiny-omni"))


@pytest.fixture(scope="module")
def config_of(model):
    """The configuration of an engine; ``settings`` None is an engine without the plugin."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.plugins import load_general_plugins

    load_general_plugins()

    def make(settings: dict[str, Any] | None) -> Any:
        mimo = {} if settings is None else {"mimo": {"vision": settings}}
        args = EngineArgs(
            model=str(model), dtype="float32", max_model_len=4096, additional_config=mimo
        )
        return args.create_engine_config()

    return make


@pytest.fixture(scope="module")
def processors(config_of):
    from vllm.multimodal import MULTIMODAL_REGISTRY

    found = {}
    for name, settings in (("none", None), ("stock", STOCK), ("fixed", {})):
        found[name] = MULTIMODAL_REGISTRY.create_processor(config_of(settings).model_config)
    return found


def run(processor, text, data, **kwargs):
    items = processor.info.parse_mm_data(data)
    return processor(text, items, hf_processor_mm_kwargs=kwargs)


def rows_of(processor, out, kind):
    """Patch rows that the model makes of what ours hands over."""
    from mimo_plugin.engines.vllm.vision.packing import unpack

    items = [item.get_data() for item in out["mm_kwargs"][kind]]
    return unpack(
        torch.cat([item[f"{kind}_pixels"] for item in items]),
        torch.stack([item[f"{kind}_sizes"] for item in items]),
        processor.setup.spec,
        dtype=torch.float32,
        backend="reference",
        once=False,
    )


def images(*sizes):
    return [Image.fromarray(picture(*size, seed)) for seed, size in enumerate(sizes)]


def test_the_plugin_s_class_is_another_engine_s_no_matter(processors, config_of):
    names = {name: type(processor).__name__ for name, processor in processors.items()}
    assert names["none"] == "MiMoV2OmniMultiModalProcessor"
    assert names["stock"] == names["fixed"] == "MimoOmniProcessor"
    assert config_of(None).model_config.hf_config.architectures == ["MiMoV2OmniForCausalLM"]


@pytest.mark.parametrize(
    "sizes",
    [[(300, 400)], [(200, 200), (37, 640), (1500, 1300)], [(32, 32)], [(513, 511), (20, 31)]],
    ids=str,
)
def test_images_are_upstream_s_to_the_last_bit(processors, sizes):
    text = IMAGE * len(sizes)
    theirs = run(processors["none"], text, {"image": images(*sizes)})
    ours = run(processors["stock"], text, {"image": images(*sizes)})
    assert ours["prompt_token_ids"] == theirs["prompt_token_ids"]
    assert ours["mm_placeholders"] == theirs["mm_placeholders"]
    expected = torch.cat([item.get_data()["pixel_values"] for item in theirs["mm_kwargs"]["image"]])
    assert torch.equal(rows_of(processors["stock"], ours, "image"), expected)


@pytest.mark.parametrize("frames", [1, 2, 5, 32])
def test_videos_are_upstream_s_to_the_last_bit(processors, frames):
    data = {"video": [movie(frames, 96, 130)]}
    theirs = run(processors["none"], VIDEO, data)
    ours = run(processors["stock"], VIDEO, data)
    assert ours["prompt_token_ids"] == theirs["prompt_token_ids"]
    (item,) = theirs["mm_kwargs"]["video"]
    expected = item.get_data()["pixel_values_videos"]
    assert torch.equal(rows_of(processors["stock"], ours, "video"), expected)


def test_pixels_travel_as_bytes(processors):
    out = run(processors["fixed"], IMAGE + VIDEO, {"image": images((90, 80)), "video": [
        movie(3, 64, 96)]})  # fmt: skip
    (image,), (video,) = out["mm_kwargs"]["image"], out["mm_kwargs"]["video"]
    for item, kind, size in ((image, "image", 90 * 80 * 3), (video, "video", 3 * 64 * 96 * 3)):
        pixels = item.get_data()[f"{kind}_pixels"]
        assert pixels.dtype == torch.uint8 and pixels.numel() == size
        assert not any(
            value.is_floating_point() and value.numel() > 8
            for value in item.get_data().values()
            if isinstance(value, torch.Tensor)
        )


def decoded(processor, out):
    return processor.info.get_tokenizer().decode(out["prompt_token_ids"])


def test_a_frame_at_400_s_is_labelled_so(processors):
    """Metadata as vLLM's own loaders give it, and the exact times of a loader that knows them."""
    frames = movie(4, 64, 64)
    given = {"frames_indices": [0, 6000, 12000, 12030], "fps": 30.0}
    exact = {**given, "times_s": [0.0, 100.0, 3599.9, 3600.0]}
    for metadata, label in ((given, "06:40"), (exact, "59:59")):
        data = {"video": [(frames, metadata)]}
        fixed = decoded(processors["fixed"], run(processors["fixed"], VIDEO, data))
        stock = decoded(processors["stock"], run(processors["stock"], VIDEO, data))
        none = decoded(processors["none"], run(processors["none"], VIDEO, data))
        assert label in fixed and fixed.startswith("<|video_start|>00:00<|vision_start|>")
        assert label not in none and stock == none


def test_outer_tokens_go_and_a_bare_placeholder_is_served(processors):
    data = {"video": [movie(2, 64, 64)]}
    wrapped = decoded(processors["fixed"], run(processors["fixed"], f"a {VIDEO} b", data))
    bare = decoded(processors["fixed"], run(processors["fixed"], "a <|video_pad|> b", data))
    assert wrapped == bare
    assert wrapped.startswith("a <|video_start|>") and wrapped.endswith("<|video_end|> b")


def test_outer_tokens_are_decided_here_on_a_patched_engine_too(processors, monkeypatch):
    """The patch of ``patches/vllm`` takes them out in upstream's class."""
    data = {"video": [movie(2, 64, 64)]}

    def texts():
        return [decoded(processors[n], run(processors[n], VIDEO, data)) for n in ("stock", "fixed")]

    plain = texts()
    pad = processors["none"].info.get_tokenizer().get_vocab()["<|video_pad|>"]
    upstream = type(processors["none"])
    monkeypatch.setattr(
        upstream, "_postprocess_prompt", lambda self, prompt: [t for t in prompt if t == pad]
    )
    bare = decoded(processors["none"], run(processors["none"], VIDEO, data))
    assert bare.startswith("<|video_start|>")
    assert texts() == plain
    assert plain[0].startswith("<|vision_start|><|video_start|>")


def test_two_videos_and_an_image_each_get_their_own_place(processors):
    data = {
        "video": [(movie(2, 64, 64), {"times_s": [7, 8]}), (movie(2, 96, 96), {"times_s": [9, 9]})],
        "image": images((64, 64)),
    }
    text = decoded(processors["fixed"], run(processors["fixed"], f"{VIDEO}{IMAGE}{VIDEO}", data))
    assert [text.index(label) for label in ("00:07", "<|image_pad|>", "00:09")] == sorted(
        text.index(label) for label in ("00:07", "<|image_pad|>", "00:09")
    )
    assert text.count("<|video_start|>") == text.count("<|video_end|>") == 2


def test_kwargs_change_the_number_of_tokens(processors):
    def tokens(name, **kwargs):
        out = run(processors[name], IMAGE, {"image": images((512, 512))}, **kwargs)
        return len(out["prompt_token_ids"]) - 2

    assert tokens("fixed", max_pixels=128 * 128) == 16
    assert tokens("fixed") == tokens("stock", max_pixels=128 * 128) == 256


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"image": [Image.new("RGB", (5000, 1))]}, "1x5000"),
        ({"video": [np.zeros((0, 64, 64, 3), np.uint8)]}, "0 frames"),
        ({"video": [(movie(2, 64, 64), {"times_s": [1.0]})]}, "times_s"),
    ],
)
def test_what_can_not_be_served_is_said_in_one_line(processors, data, words):
    """Upstream wraps errors of a processor in a line that prints the whole medium."""
    text = IMAGE if "image" in data else VIDEO
    with pytest.raises(PixelError, match=words) as caught:
        run(processors["fixed"], text, data)
    assert len(str(caught.value)) < 200


def test_the_profile_run_has_its_inputs(processors):
    out = processors["fixed"].get_dummy_mm_inputs({"image": 2, "video": 1})
    assert len(out["mm_kwargs"]["image"]) == 2
    assert len(out["mm_kwargs"]["video"]) == 1


def test_frames_times_and_settings_are_in_the_key(processors):
    """An item's key covers what changes its embedding or its tokens."""
    frames = movie(2, 64, 64)

    def key(metadata, **kwargs):
        data = {"video": [(frames, metadata)]}
        return run(processors["fixed"], VIDEO, data, **kwargs)["mm_hashes"]["video"][0]

    keys = {
        key({"times_s": [0.0, 1.0]}),
        key({"times_s": [0.0, 2.0]}),
        key({"times_s": [0.0, 1.0]}, max_pixels=10_000),
    }
    assert len(keys) == 3
