# SPDX-License-Identifier: Apache-2.0
"""What ``mimo flags`` and ``mimo doctor`` rely on in SGLang's drafts for MiMo, without a model.

SGLang refuses drafts on a machine without a GPU, so they are not run here.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("sglang")

from sglang.srt.model_loader.loader import DefaultModelLoader

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

NAMES = ("enorm.weight", "self_attn.q_proj.weight")


def checkpoint(layers: int):
    """Weights of a checkpoint; those of each MTP layer hold its number."""
    yield "model.norm.weight", torch.full((1,), -1.0)
    for layer in range(layers):
        for name in NAMES:
            yield f"model.mtp.layers.{layer}.{name}", torch.full((1,), float(layer))


def loaded(layers: int, step: int) -> dict[str, float]:
    """MTP weights that the module of a draft step gets."""
    weights = DefaultModelLoader._filter_mtp_weights(checkpoint(layers), "", step)
    return {name: float(value) for name, value in weights if ".mtp." in name}


@pytest.mark.parametrize("step", [0, 1, 2])
def test_each_draft_step_has_the_weights_of_its_layer(step: int) -> None:
    """B31: all layers once mapped to one set of parameters, and the last one won."""
    assert loaded(3, step) == {f"model.mtp.layers.0.{name}": float(step) for name in NAMES}


def test_a_step_without_a_layer_has_no_weights() -> None:
    """Why more steps than layers are a problem, and not only slow."""
    assert loaded(3, 3) == {}
