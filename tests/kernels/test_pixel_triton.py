# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels: right in the interpreter, and compiled for an H100/H200 as they should be."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mimo_plugin.core.pixels import Item
from mimo_plugin.kernels.preprocess.plan import make_plan
from tests.kernels.pictures import mixed, pixels, spec_of

pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parents[2]
MIMO_FP32_BOUND, FP16_BOUND = 2e-5, 2.0**-9
SM_90 = 90


@pytest.fixture(scope="module")
def interpreter() -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.interpreted"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    results: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return results


@pytest.fixture(scope="module")
def interpreted(interpreter: dict[str, Any]) -> list[dict[str, Any]]:
    cases: list[dict[str, Any]] = interpreter["cases"]
    return cases


def test_values_are_right_in_the_interpreter(interpreted):
    assert len(interpreted) == 16
    for case in interpreted:
        assert case["written"], case
        if case["name"].startswith("bicubic"):
            assert case["error"] == 0.0, case
        else:
            assert case["error"] <= (FP16_BOUND if "float16" in case["name"] else MIMO_FP32_BOUND)


def test_bits_are_those_of_the_cpu_backend(interpreted):
    assert [case["name"] for case in interpreted if not case["same_as_cpu"]] == []


def test_at_most_two_launches(interpreted):
    for case in interpreted:
        assert case["launches"] == (2 if case["name"].startswith("bicubic") else 1), case


def test_what_lies_beyond_32_bits_is_found(interpreter):
    assert interpreter["far"] == {"bilinear": True, "bicubic": True}


# --- compiled for sm_90 ---------------------------------------------------------------------


def compiled(kernel: Any, constants: dict[str, int], out: str) -> tuple[str, str]:
    """PTX and ptxas's report, for pointers at multiples of 16 bytes as PyTorch gives them."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import get_ptxas
    from triton.compiler import ASTSource, compile

    from mimo_plugin.kernels.preprocess.triton import NUM_WARPS

    weights = "*fp32" if kernel.fn.__name__ == "bilinear" else "*i32"
    types = {
        "packed": "*u8",
        "table": "*i64",
        "owners": "*i32",
        "first": "*i32",
        "weights": weights,
        "values": "*fp32",
        "middle": "*u8",
        "out": out,
    }
    names = kernel.arg_names
    source = ASTSource(
        fn=kernel,
        signature={name: types.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(n),): [["tt.divisibility", 16]] for n in names if n in types},
    )
    options = {"num_warps": NUM_WARPS, "enable_fp_fusion": False}
    ptx = compile(source, target=GPUTarget("cuda", SM_90, 32), options=options).asm["ptx"]
    done = subprocess.run(
        [get_ptxas(SM_90).path, "-v", "--gpu-name=sm_90a", "-", "-o", os.devnull],
        input=ptx,
        capture_output=True,
        text=True,
        timeout=120,
    )
    report = done.stdout + done.stderr
    assert "Used" in report, report
    return ptx, report


def stores(ptx: str) -> Counter[str]:
    return Counter(re.findall(r"\bst\.global(?:\.\w+)*", ptx))


@pytest.mark.parametrize("once", [False, True])
@pytest.mark.parametrize("out", ["*bf16", "*fp16", "*fp32"])
@pytest.mark.parametrize("name", ["bilinear", "bicubic"])
def test_rows_are_stored_16_bytes_at_a_time_and_nothing_spills(name, out, once, tmp_path):
    from mimo_plugin.kernels.preprocess import triton as kernels

    constants = kernels.block_constants(spec_of(name, 16, 2, 2), once=once)
    ptx, report = compiled(getattr(kernels, name), constants, out)
    assert set(stores(ptx)) == {"st.global.v4.b32"}
    assert "0 bytes spill stores, 0 bytes spill loads" in report
    registers = int(re.findall(r"Used (\d+) registers", report)[0])
    assert registers <= 128, "fewer than four blocks of 128 threads fit a multiprocessor"


@pytest.mark.parametrize("name", ["bilinear", "bicubic"])
def test_odd_patch_sizes_store_as_wide_as_a_patch_allows(name):
    """A plane of 14 x 14 two-byte values is a multiple of 8 bytes, not of 16."""
    from mimo_plugin.kernels.preprocess import triton as kernels

    constants = kernels.block_constants(spec_of(name, 14, 2, 2))
    ptx, report = compiled(getattr(kernels, name), constants, "*bf16")
    assert set(stores(ptx)) == {"st.global.v2.b32"}
    assert "0 bytes spill stores, 0 bytes spill loads" in report


@pytest.mark.parametrize(("patch", "width"), [(16, "st.global.v2.b32"), (14, "st.global.b32")])
def test_rows_of_bytes_are_stored_as_wide_as_a_thread_has_them(patch, width):
    """Eight bytes a thread, or the four that a plane of 14 x 14 is a multiple of."""
    from mimo_plugin.kernels.preprocess import triton as kernels

    constants = kernels.block_constants(spec_of("bicubic", patch, 2, 2))
    ptx, report = compiled(kernels.bicubic, constants, "*u8")
    assert set(stores(ptx)) == {width}
    assert "0 bytes spill stores, 0 bytes spill loads" in report


def test_the_early_pass_stores_16_bytes_at_a_time():
    from mimo_plugin.kernels.preprocess import triton as kernels

    spec = spec_of("bicubic")
    items = mixed(spec)
    size = make_plan(pixels(items).numel(), items, spec).tile_bytes
    ptx, report = compiled(kernels.early, {"SIZE": size}, "*bf16")
    assert set(stores(ptx)) == {"st.global.v4.b32"}
    assert "0 bytes spill stores, 0 bytes spill loads" in report


def test_only_what_pytorch_fuses_is_fused():
    """Per value three blends and two steps of the division, 8 values a thread; the loop over
    channels is not unrolled, nor that over frames."""
    from mimo_plugin.kernels.preprocess import triton as kernels

    ptx, _ = compiled(kernels.bilinear, kernels.block_constants(spec_of("bilinear")), "*bf16")
    assert ptx.count("fma.rn.f32") == 5 * 8


def test_the_division_is_rounded_like_a_division():
    """The kernel's three steps, in numpy: float64 holds the products of float32 exactly."""
    random = np.random.default_rng(0)
    divisors = np.concatenate([[58.395, 57.12, 57.375, 68.5005], random.uniform(0.05, 300, 60)])
    values = np.concatenate([random.uniform(-256, 256, 20000), np.arange(-255, 256)])
    values = values.astype(np.float32)
    for divisor in divisors.astype(np.float32):
        inverse = np.float32(1) / divisor
        quotient = values * inverse
        rest = (values - quotient.astype(np.float64) * divisor).astype(np.float32)
        found = (quotient + rest.astype(np.float64) * inverse).astype(np.float32)
        assert np.array_equal(found, values / divisor)


@pytest.mark.gpu
@pytest.mark.parametrize("resample", ["bilinear", "bicubic"])
def test_on_a_gpu_bits_are_those_of_the_cpu_backend(resample):
    import torch

    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    from mimo_plugin.kernels.preprocess import cpu, triton

    spec = spec_of(resample)
    items = [*mixed(spec), Item(1, 900, 1300, 640, 960)]
    packed = pixels(items)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        found = triton.patch_rows(packed.cuda(), items, spec, dtype=dtype)
        assert torch.equal(found.cpu(), cpu.patch_rows(packed, items, spec, dtype=dtype))
