# SPDX-License-Identifier: Apache-2.0
"""Which backend runs: never another one than was asked for, and `auto` says which."""

from __future__ import annotations

import importlib.util
import logging

import pytest
import torch

from mimo_plugin.core.pixels import Item, PixelError
from mimo_plugin.kernels.preprocess import dispatch, reference
from mimo_plugin.kernels.preprocess.dispatch import BackendError, chosen_backend, patch_rows
from mimo_plugin.kernels.preprocess.taps import byte_values
from tests.kernels.pictures import mixed, pixels, spec_of

SPEC = spec_of("bilinear")
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def without(monkeypatch):
    """Make packages look as if they were not installed."""
    real = importlib.util.find_spec

    def hide(*names: str) -> None:
        dispatch._automatic.cache_clear()
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda n, *a: None if n in names else real(n, *a)
        )

    dispatch._automatic.cache_clear()
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    yield hide
    dispatch._automatic.cache_clear()


@pytest.mark.parametrize("backend", ["auto", "cpu", "reference"])
@pytest.mark.parametrize("once", [False, True])
def test_backends_agree(backend, once):
    items = mixed(SPEC, stills_only=once)
    packed = pixels(items)
    found = patch_rows(packed, items, SPEC, dtype=torch.float32, backend=backend, once=once)
    expected = reference.patch_rows(packed, items, SPEC, dtype=torch.float32, once=once)
    assert (found - expected).abs().max() <= 2e-5
    assert found.device == packed.device


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_rows_of_bytes_are_what_others_normalise(backend):
    """Bit for bit: the table of the normalised rows, looked up in the rows of bytes."""
    spec = spec_of("bicubic")
    items = mixed(spec)
    packed = pixels(items)
    found = patch_rows(packed, items, spec.as_bytes(), dtype=torch.uint8, backend=backend)
    table = torch.from_numpy(byte_values(spec).copy())
    channel = torch.arange(found.shape[1]) // (found.shape[1] // 3)
    expected = patch_rows(packed, items, spec, dtype=torch.float32, backend=backend)
    assert found.dtype == torch.uint8
    assert torch.equal(table[channel, found.long()], expected)


def test_bytes_and_floats_are_not_mixed_up():
    spec, items = spec_of("bicubic"), mixed(spec_of("bicubic"))
    for wrong, dtype in ((spec, torch.uint8), (spec.as_bytes(), torch.float32)):
        with pytest.raises(TypeError, match="dtype of patch rows"):
            patch_rows(pixels(items), items, wrong, dtype=dtype)


def test_auto_takes_the_fastest_that_runs_and_says_so_once(without, caplog):
    without()
    with caplog.at_level(logging.INFO, logger="vllm.mimo_plugin"):
        assert [chosen_backend(CPU), chosen_backend(CPU)] == ["cpu", "cpu"]
        assert chosen_backend(CUDA) == "triton"
    assert caplog.messages == [
        "pixel backend auto: cpu for pixels on cpu",
        "pixel backend auto: triton for pixels on cuda",
    ]


def test_auto_warns_when_only_the_reference_is_left(without, caplog):
    without("numba", "triton")
    assert [chosen_backend(CPU), chosen_backend(CUDA)] == ["reference", "reference"]
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
    assert "found no numba; needed: numba; fix: install it" in caplog.messages[0]
    assert "found no triton" in caplog.messages[1]


@pytest.mark.parametrize(
    ("backend", "device", "hidden", "said"),
    [
        ("cpu", CPU, ["numba"], "cpu: found no numba; needed: numba; fix: install it"),
        ("cpu", CUDA, [], "cpu: found pixels on cuda; needed: in host memory; fix: take triton"),
        ("triton", CPU, [], "triton: found pixels on cpu; needed: on a GPU; fix: take cpu"),
        ("triton", CUDA, ["triton"], "triton: found no triton; needed: triton; fix: install it"),
    ],
)
def test_a_backend_that_was_asked_for_never_gives_way(without, backend, device, hidden, said):
    without(*hidden)
    with pytest.raises(BackendError, match=said) as error:
        chosen_backend(device, backend)
    assert "\n" not in str(error.value)


def test_the_call_itself_does_not_give_way_either(without):
    without("numba")
    item = Item(1, 32, 32, 32, 32)
    with pytest.raises(BackendError, match="found no numba"):
        patch_rows(pixels([item]), [item], SPEC, dtype=torch.float32, backend="cpu")


def test_unknown_names(without):
    with pytest.raises(ValueError, match="found 'cuda'; allowed: auto, triton, cpu, reference"):
        chosen_backend(CPU, "cuda")


@pytest.mark.parametrize(
    "packed",
    [
        torch.zeros(3072, dtype=torch.int8),
        torch.zeros((32, 96), dtype=torch.uint8),
        torch.zeros(6144, dtype=torch.uint8)[::2],
    ],
)
def test_pixels_of_another_kind(packed):
    with pytest.raises(TypeError, match="needed: contiguous torch.uint8 with one dimension"):
        patch_rows(packed, [Item(1, 32, 32, 32, 32)], SPEC, dtype=torch.float32)


def test_types_that_rows_can_not_have():
    item = Item(1, 32, 32, 32, 32)
    with pytest.raises(TypeError, match="found torch.float64; allowed: torch.float32"):
        patch_rows(pixels([item]), [item], SPEC, dtype=torch.float64)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize(
    ("items", "size", "said"),
    [
        ([], 0, "no image and no video"),
        ([Item(0, 32, 32, 32, 32)], 0, "video of 0 frames"),
        ([Item(1, 32, 32, 32, 32)], 3071, "found 3071 bytes, the 1 items have 3072"),
        ([Item(1, 32, 32, 32, 32)], 3073, "found 3073 bytes"),
        ([Item(1, 32, 32, 48, 32)], 3072, "multiples of 32"),
    ],
)
def test_every_backend_refuses_what_can_not_be_served(backend, items, size, said):
    packed = torch.zeros(size, dtype=torch.uint8)
    with pytest.raises(PixelError, match=said):
        patch_rows(packed, items, SPEC, dtype=torch.float32, backend=backend)
    with pytest.raises(PixelError, match="once=True"):
        two = Item(2, 32, 32, 32, 32)
        patch_rows(pixels([two]), [two], SPEC, dtype=torch.float32, backend=backend, once=True)
