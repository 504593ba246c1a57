# SPDX-License-Identifier: Apache-2.0
"""The model's side: stills that come once, and what reaches upstream's class."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tests.vision.conftest import make_setup, picture

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def embed():
    """Upstream's patch embedding, with the class that the setting ``once`` puts in its place."""
    from vllm.config import VllmConfig, set_current_vllm_config

    from mimo_plugin.engines.vllm.vision.model import OncePatchEmbed

    with set_current_vllm_config(VllmConfig()):
        made = OncePatchEmbed(patch_size=16, temporal_patch_size=2, hidden_size=24)
    made.spec = make_setup().spec
    torch.manual_seed(0)
    torch.nn.init.normal_(made.proj.weight, std=0.05)
    return made


def test_stills_that_come_once_are_embedded_alike(embed):
    rows = torch.rand(9, 3, 1, 256)
    twice = rows.expand(9, 3, 2, 256).reshape(9, -1)
    with torch.no_grad():
        assert torch.allclose(embed(rows.reshape(9, -1)), embed(twice), atol=1e-5)


def test_rows_of_videos_go_through_upstream_s(embed):
    from vllm.model_executor.models.mimo_v2_omni import MiMoVisionPatchEmbed

    rows = torch.rand(5, 3 * 2 * 256)
    with torch.no_grad():
        assert torch.equal(embed(rows), MiMoVisionPatchEmbed.forward(embed, rows))


def test_only_what_upstream_knows_reaches_it(monkeypatch):
    """Packed pixels become its patch rows; everything else passes, in the order it came in."""
    from vllm.model_executor.models.mimo_v2_omni import MiMoV2OmniForCausalLM

    from mimo_plugin.engines.vllm.vision.limits import limits_of
    from mimo_plugin.engines.vllm.vision.model import MimoOmniForCausalLM
    from mimo_plugin.engines.vllm.vision.packing import pack

    seen = {}
    monkeypatch.setattr(
        MiMoV2OmniForCausalLM, "embed_multimodal", lambda self, **kwargs: seen.update(kwargs)
    )
    setup = make_setup(backend="reference")
    model = MimoOmniForCausalLM.__new__(MimoOmniForCausalLM)
    torch.nn.Module.__init__(model)
    model.vision_setup = setup
    object.__setattr__(model, "visual", SimpleNamespace(dtype=torch.bfloat16))
    one = pack(picture(64, 96)[None], setup, limits_of(setup, {}, "image"), torch.bfloat16)
    grid = torch.tensor([one.grid])
    model.embed_multimodal(
        audio_features="sound",
        image_pixels=one.data,
        image_sizes=torch.tensor([one.sizes]),
        image_grid_thw=grid,
        video_patch_times=["times"],
    )
    assert list(seen) == ["audio_features", "pixel_values", "image_grid_thw"]
    assert seen["pixel_values"].dtype == torch.bfloat16
    assert seen["pixel_values"].shape == (int(grid.prod()), 3 * 2 * 256)


def test_the_class_goes_by_upstream_s_name():
    """V1's proposer of drafts knows multi-modal targets by it, and refuses others."""
    from vllm.model_executor.models.mimo_v2_omni import MiMoV2OmniForCausalLM
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    from mimo_plugin.engines.vllm.vision.model import MimoOmniForCausalLM

    made = MimoOmniForCausalLM.__new__(MimoOmniForCausalLM)
    name = SpecDecodeBaseProposer.get_model_name(None, made)
    assert name == MiMoV2OmniForCausalLM.__name__ and type(made) is not MiMoV2OmniForCausalLM
