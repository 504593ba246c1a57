# SPDX-License-Identifier: Apache-2.0
"""The CPU backend against the reference; threads, types, its compiled code on disk."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mimo_plugin.core.pixels import Item, PixelError
from mimo_plugin.kernels.preprocess import cpu, host, reference
from mimo_plugin.kernels.preprocess.taps import byte_values
from tests.kernels.pictures import batches, mixed, pixels, spec_of

pytest.importorskip("numba")

ROOT = Path(__file__).resolve().parents[2]
MIMO_FP32_BOUND = 2e-5
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def ulps_apart(a, b):
    """Steps from values of a half type to others, through 0 where their signs differ."""
    bits = [x.view(torch.int16).int() for x in (a, b)]
    places = [torch.where(x < 0, -(x & 0x7FFF), x) for x in bits]
    return (places[0] - places[1]).abs()


def compare(spec, items, dtype, *, once=False, threads=None) -> float:
    """Check against the reference; the share of values that differ in a half type."""
    packed = pixels(items)
    found = cpu.patch_rows(packed, items, spec, dtype=dtype, once=once, threads=threads)
    expected = reference.patch_rows(packed, items, spec, dtype=dtype, once=once)
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    if spec.resample == "bicubic":
        assert torch.equal(found, expected)
        return 0.0
    if dtype == torch.float32:
        assert (found - expected).abs().max() <= MIMO_FP32_BOUND
        return 0.0
    apart = (found.float() - expected.float()).abs()
    # Steps are tiny near 0: there the bound of float32 counts.
    assert (apart[ulps_apart(found, expected) > 1] <= MIMO_FP32_BOUND).all()
    return float((found != expected).float().mean())


@settings(max_examples=60)
@given(batches())
def test_any_batch_in_float32(batch):
    compare(*batch, torch.float32)


@pytest.mark.parametrize("once", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("patch", "merge", "depth"), [(16, 2, 2), (14, 2, 2), (8, 1, 3)])
@pytest.mark.parametrize("resample", ["bilinear", "bicubic"])
def test_every_kind_of_item_in_one_call(resample, patch, merge, depth, dtype, once):
    spec = spec_of(resample, patch, merge, depth)
    differing = compare(spec, mixed(spec, stills_only=once), dtype, once=once)
    assert differing <= (1e-3 if dtype == torch.bfloat16 else 3e-3)


def test_large_images_round_to_the_same_bfloat16():
    """Positions in a long line need PyTorch's rounding; bounds of the project's claim."""
    spec = spec_of("bilinear")
    items = [Item(1, 1500, 2100, 1024, 1472), Item(1, 700, 500, 1024, 736)]
    assert compare(spec, items, torch.bfloat16) <= 1e-3
    compare(spec, items, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pixels_that_keep_their_size_are_exact(dtype):
    spec = spec_of("bilinear")
    items = [Item(1, 64, 96, 64, 96), Item(3, 32, 32, 32, 32)]
    packed = pixels(items)
    found = cpu.patch_rows(packed, items, spec, dtype=dtype)
    assert torch.equal(found, reference.patch_rows(packed, items, spec, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("std", [1e-6, 1.0, 1e9], ids=str)
def test_rounding_to_half_types_is_pytorchs(std, dtype):
    """Subnormal, normal and too large values; the resized path rounds by itself."""
    spec = spec_of("bilinear")
    spec = type(spec)("bilinear", (100.3,) * 3, (std,) * 3, 16, 2, 2, 1, 1 << 20)
    items = [Item(1, 37, 41, 32, 64)]
    packed = pixels(items)
    exact = cpu.patch_rows(packed, items, spec, dtype=torch.float32)
    found = cpu.patch_rows(packed, items, spec, dtype=dtype)
    assert torch.equal(found, exact.to(dtype))


@pytest.mark.parametrize("resample", ["bilinear", "bicubic"])
def test_threads_change_nothing(resample, monkeypatch):
    monkeypatch.setattr(host, "_LEAST_VALUES", 1)
    spec = spec_of(resample)
    items = mixed(spec) * 3
    packed = pixels(items)
    results = [
        cpu.patch_rows(packed, items, spec, dtype=torch.float32, threads=n) for n in (1, 2, 5)
    ]
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_no_more_threads_than_are_asked_for(monkeypatch):
    spec = spec_of("bilinear")
    items = [Item(1, 500, 500, 480, 480)]
    asked = []
    monkeypatch.setattr(host, "_pool", lambda threads, process: asked.append(threads) or 1 / 0)
    monkeypatch.setattr(host, "_LEAST_VALUES", 1)
    cpu.patch_rows(pixels(items), items, spec, dtype=torch.float32, threads=1)
    assert not asked
    with pytest.raises(ZeroDivisionError):
        cpu.patch_rows(pixels(items), items, spec, dtype=torch.float32, threads=2)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with pytest.raises(ZeroDivisionError):
            cpu.patch_rows(pixels(items), items, spec, dtype=torch.float32)
    finally:
        torch.set_num_threads(before)
    assert asked == [2, 3]


def test_several_callers_at_once(monkeypatch):
    monkeypatch.setattr(host, "_LEAST_VALUES", 1)
    spec = spec_of("bicubic")
    items = mixed(spec)
    expected = reference.patch_rows(pixels(items), items, spec, dtype=torch.float32)
    wrong = []

    def call() -> None:
        for _ in range(5):
            found = cpu.patch_rows(pixels(items), items, spec, dtype=torch.float32, threads=2)
            wrong.append(not torch.equal(found, expected))

    callers = [threading.Thread(target=call) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert wrong == [False] * 20


@pytest.mark.parametrize(("limit", "parts"), [(0, 14), (12_000, 12)])
def test_a_large_buffer_is_made_in_parts(limit, parts, monkeypatch):
    """Items one after the other, and videos by whole patches."""
    spec = spec_of("bicubic")
    items = [*mixed(spec)[:8], Item(5, 60, 40, 32, 32)]
    expected = cpu.patch_rows(pixels(items), items, spec, dtype=torch.float32)
    monkeypatch.setattr(cpu, "MIDDLE_LIMIT_BYTES", limit)
    sizes = []
    run = cpu.run

    def counted(plan, *rest):
        sizes.append(len(plan.items))
        run(plan, *rest)

    monkeypatch.setattr(cpu, "run", counted)
    assert torch.equal(cpu.patch_rows(pixels(items), items, spec, dtype=torch.float32), expected)
    assert sizes == [1] * parts


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=40)
@given(data=st.data())
def test_a_video_written_frame_by_frame_is_the_video(dtype, data):
    """In any order, in any number: the rows of the whole, to the bit."""
    spec = spec_of(data.draw(st.sampled_from(["bilinear", "bicubic"])))
    sides = [data.draw(st.integers(1, 90)) for _ in range(2)]
    targets = [data.draw(st.integers(1, 2)) * spec.factor for _ in range(2)]
    item = Item(data.draw(st.integers(1, 5)), *sides, *targets)
    frames = pixels([item])
    expected = cpu.patch_rows(frames, [item], spec, dtype=dtype)
    writer = host.FrameRows(spec, item, str(dtype).removeprefix("torch."))
    out = np.zeros(writer.shape, np.uint8)
    for position in data.draw(st.permutations(range(item.frames))):
        writer.write(frames.numpy().reshape(item.frames, *sides, 3)[position], position, out)
    assert torch.equal(torch.from_numpy(out).view(dtype).reshape(expected.shape), expected)


def test_bad_items_are_refused():
    spec = spec_of("bilinear")
    for item, said in (
        (Item(0, 32, 32, 32, 32), "video of 0 frames"),
        (Item(1, 32, 32, 32, 33), "target of 32x33"),
    ):
        with pytest.raises(PixelError, match=said):
            cpu.patch_rows(pixels([item]), [item], spec, dtype=torch.float32)


# --- the process: imports, forks, compiled code on disk -------------------------------------

SCRIPT = """
    import os, sys
    import torch
    from mimo_plugin.core.pixels import Item, PixelSpec
    from mimo_plugin.kernels.preprocess import cpu, dispatch, reference
    assert "numba" not in sys.modules and "llvmlite" not in sys.modules
    spec = PixelSpec("bilinear", (1.0,) * 3, (2.0,) * 3, 8, 2, 2, 1, 1 << 20)
    items = [Item(1, 600, 700, 320, 640)]
    packed = torch.randint(0, 256, (items[0].source_bytes,), dtype=torch.uint8)
    expected = reference.patch_rows(packed, items, spec, dtype=torch.float32).numpy()
    def check():  # in numpy: PyTorch's own threads do not outlive a fork
        found = cpu.patch_rows(packed, items, spec, dtype=torch.float32, threads=2).numpy()
        assert abs(found - expected).max() < 1e-4
    check()
"""


def run(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT) + textwrap.dedent(code)],
        env={**os.environ, **env},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def test_numba_is_imported_late_and_a_forked_child_works():
    done = run(
        """
        child = os.fork()
        if child == 0:
            check()
            os._exit(7)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        """
    )
    assert done.stdout.split() == ["7"]


def test_code_on_disk_that_is_damaged_is_compiled_again(tmp_path):
    run("", NUMBA_CACHE_DIR=str(tmp_path))
    kept = [p for p in tmp_path.rglob("*") if p.suffix in (".nbi", ".nbc")]
    assert kept, "nothing was kept on disk"
    for path in kept:
        path.write_bytes(path.read_bytes()[:40])
    done = run("print('fine')", NUMBA_CACHE_DIR=str(tmp_path))
    assert done.stdout.split() == ["fine"]
    assert "could not be kept on disk" in done.stderr


def test_no_place_for_code_on_disk(monkeypatch, caplog):
    loops = host._loops()

    class Full:
        def enable_caching(self):
            raise RuntimeError("cannot cache function: no locator available")

    monkeypatch.setattr(loops, "ENTRIES", (Full(),))
    host._loops.cache_clear()
    with caplog.at_level("INFO", logger="vllm.mimo_plugin"):
        assert host._loops() is loops
    host._loops.cache_clear()
    assert "compiled anew in each process" in caplog.text


def test_without_numba_the_error_says_what_to_do(monkeypatch):
    host._loops.cache_clear()
    monkeypatch.setitem(sys.modules, "mimo_plugin.kernels.preprocess.loops", None)
    item = Item(1, 32, 32, 32, 32)
    with pytest.raises(ImportError, match="no usable numba.*needed: numba; fix: install it"):
        cpu.patch_rows(pixels([item]), [item], spec_of("bilinear"), dtype=torch.float32)
    host._loops.cache_clear()


def test_tables_are_shared_and_can_not_be_changed():
    table = byte_values(spec_of("bilinear"))
    assert table is byte_values(spec_of("bilinear"))
    with pytest.raises(ValueError):
        table[0, 0] = 1
