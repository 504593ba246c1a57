# SPDX-License-Identifier: Apache-2.0
"""The plan of a call, the bytes it moves, and weights for stills that are written once."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from mimo_plugin.core.pixels import Item, PixelError, PixelSpec, patch_rows_of, target_size
from mimo_plugin.kernels.preprocess import plan as plans
from mimo_plugin.kernels.preprocess import reference
from mimo_plugin.kernels.preprocess.fold import fold_patch_embed
from mimo_plugin.kernels.preprocess.plan import ALIGN_BYTES, COLUMNS, make_plan
from mimo_plugin.kernels.preprocess.taps import FRACTION_BITS, bicubic_taps, bilinear_taps
from mimo_plugin.kernels.preprocess.traffic import SECTOR_BYTES, bytes_touched
from tests.kernels.pictures import batches, mixed, pixels, spec_of

BYTES_RATIO_BOUND = 1.2


def planned(spec: PixelSpec, items, **options):
    return make_plan(sum(item.source_bytes for item in items), items, spec, **options)


@given(batches(most=6))
def test_items_lie_one_behind_the_other(batch):
    spec, items = batch
    plan = planned(spec, items)
    rows = [patch_rows_of(spec, item) for item in items]
    assert plan.rows == sum(rows) == plan.blocks * spec.merge_size**2
    assert plan.table[:, COLUMNS.row].tolist() == [sum(rows[:i]) for i in range(len(rows))]
    sizes = [item.source_bytes for item in items]
    assert plan.table[:, COLUMNS.source].tolist() == [sum(sizes[:i]) for i in range(len(sizes))]
    assert plan.launches <= 2
    assert not (plan.table[:, COLUMNS.middle] % ALIGN_BYTES).any()
    assert not (plan.table[:, COLUMNS.middle_stride] % ALIGN_BYTES).any()
    for line, item in zip(plan.table, items, strict=True):
        resized = {
            axis
            for axis, source, target in (
                (COLUMNS.down, item.height, item.target_height),
                (COLUMNS.across, item.width, item.target_width),
            )
            if source != target
        }
        if spec.resample == "bicubic":
            assert {line[COLUMNS.last], line[COLUMNS.early]} - {0} == resized
            assert bool(line[COLUMNS.early]) == (len(resized) == 2)


def test_equal_axes_share_their_taps():
    spec = spec_of("bicubic")
    one = planned(spec, [Item(1, 50, 70, 32, 64)])
    many = planned(spec, [Item(1, 50, 70, 32, 64)] * 9)
    assert many.weights.size == one.weights.size
    assert planned(spec, [Item(1, 32, 64, 32, 64)]).weights.size == 1


def test_bicubic_weights_sum_to_one_and_stay_in_32_bits():
    for source, target in ((1, 32), (7, 96), (4096, 2880), (3000, 32)):
        taps = bicubic_taps(source, target)
        sums = taps.weights.astype(np.int64).sum(axis=1) / 2**FRACTION_BITS
        assert abs(sums - 1).max() < 1e-4
        assert (np.abs(taps.weights).astype(np.int64).sum(axis=1) * 255).max() < 2**31
        assert taps.first.min() == 0 and (taps.first < source).all()


@pytest.mark.parametrize(
    ("items", "options", "said"),
    [
        ([], {}, "no image and no video was given"),
        ([Item(0, 32, 32, 32, 32)], {}, "video of 0 frames"),
        ([Item(1, 32, 0, 32, 32)], {}, "image of 32x0 pixels"),
        ([Item(1, 32, 32, 32, 40)], {}, "target of 32x40"),
        ([Item(2, 32, 32, 32, 32)], {"once": True}, "once=True with a video of 2 frames"),
        ([Item(1, 40000, 40000, 32, 32)], {}, "a frame may have at most 2147483647 bytes"),
        ([Item(1, 20, 2**21, 32, 2**20)] * 0 + [Item(1, 2**20, 20, 32, 2**10)], {}, "between"),
    ],
)
def test_what_can_not_be_planned(items, options, said, monkeypatch):
    if said == "between":
        monkeypatch.setattr(plans, "MAX_FRAME_BYTES", 2**20 * 20 * 3)
        monkeypatch.setattr(plans, "columns_first", lambda *sizes: False)
    with pytest.raises(PixelError, match=said) as error:
        planned(spec_of("bicubic"), items, **options)
    assert "\n" not in str(error.value)


def test_pixels_and_items_must_fit_together():
    item = Item(1, 32, 32, 32, 32)
    with pytest.raises(PixelError, match="found 3000 bytes, the 1 items have 3072"):
        make_plan(3000, [item], spec_of("bilinear"))


# --- bytes ----------------------------------------------------------------------------------


def counted_sectors(spec: PixelSpec, item: Item) -> tuple[int, int]:
    """Sectors that the blocks of a bilinear still read, and its pixels, one by one."""
    factor = spec.factor
    reads = []
    for source, target in ((item.height, item.target_height), (item.width, item.target_width)):
        if (item.height, item.width) == (item.target_height, item.target_width):
            reads.append([{i} for i in range(target)])
            continue
        first = bilinear_taps(source, target).first
        reads.append([{int(f), min(int(f) + 1, source - 1)} for f in first])
    total, all_pixels = 0, set()
    for top in range(0, item.target_height, factor):
        ys = set().union(*reads[0][top : top + factor])
        for left in range(0, item.target_width, factor):
            xs = set().union(*reads[1][left : left + factor])
            for y in ys:
                places = {(y * item.width + x) * 3 + c for x in xs for c in range(3)}
                all_pixels |= places
                total += len({place // SECTOR_BYTES for place in places})
    return total, len(all_pixels)


@pytest.mark.parametrize(
    "item",
    [
        Item(1, 90, 131, 64, 96),
        Item(1, 20, 11, 32, 64),
        Item(1, 64, 96, 64, 96),
        Item(1, 300, 400, 32, 32),
    ],
)
def test_bytes_are_those_that_the_programs_ask_for(item):
    spec = spec_of("bilinear")
    found = bytes_touched(planned(spec, [item]), 2)
    sectors, needed = counted_sectors(spec, item)
    assert found.pixels == sectors * SECTOR_BYTES
    rows = patch_rows_of(spec, item) * spec.row_values() * 2
    assert (found.rows, found.middle, found.minimum) == (rows, 0, needed + rows)
    assert found.total == found.pixels + found.tables + rows
    assert 0 < found.tables < 0.1 * found.total


@pytest.mark.parametrize("resample", ["bilinear", "bicubic"])
@settings(max_examples=40)
@given(batches(most=3, largest=90))
def test_no_batch_moves_less_than_it_must(resample, batch):
    spec, items = batch
    found = bytes_touched(planned(spec, items), 2)
    assert found.pixels + found.middle >= found.minimum - found.rows
    assert found.ratio >= 1


def test_the_buffer_between_two_passes_is_written_and_read():
    spec = spec_of("bicubic")
    item = Item(1, 100, 150, 64, 96)
    plan = planned(spec, [item])
    assert plan.launches == 2
    found = bytes_touched(plan, 2)
    assert found.middle >= 2 * 100 * 96 * 3
    assert bytes_touched(planned(spec, [Item(1, 64, 150, 64, 96)]), 2).middle == 0


@pytest.mark.parametrize("value_bytes", [2, 4])
@pytest.mark.parametrize("once", [False, True])
def test_a_large_image_moves_at_most_a_fifth_more_than_it_must(once, value_bytes):
    spec = spec_of("bilinear", max_pixels=2880 * 2880)
    item = Item(1, 4096, 4096, *target_size(spec, 4096, 4096))
    assert item[3:] == (2880, 2880)
    found = bytes_touched(planned(spec, [item], once=once), value_bytes)
    assert 1 < found.ratio <= BYTES_RATIO_BOUND


def test_launches_do_not_grow_with_the_batch():
    for resample, most in (("bilinear", 1), ("bicubic", 2)):
        spec = spec_of(resample)
        assert planned(spec, mixed(spec)).launches == most
        assert planned(spec, mixed(spec) * 50).launches == most
    unresized = [Item(1, 64, 64, 64, 64), Item(2, 32, 50, 32, 64)]
    assert planned(spec_of("bicubic"), unresized).launches == 1


# --- folded weights ------------------------------------------------------------------------


@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_folded_weights_embed_stills_alike(depth, linear):
    spec = spec_of("bilinear", patch=8, merge=2, depth=depth)
    items = mixed(spec, stills_only=True)
    packed = pixels(items)
    twice = reference.patch_rows(packed, items, spec, dtype=torch.float32)
    once = reference.patch_rows(packed, items, spec, dtype=torch.float32, once=True)
    torch.manual_seed(0)
    weight = torch.randn(24, 3, depth, 8, 8) / math.sqrt(spec.row_values())
    conv = torch.nn.functional.conv3d(twice.view(-1, 3, depth, 8, 8), weight, stride=(depth, 8, 8))
    given_weight = weight.flatten(1) if linear else weight
    folded = fold_patch_embed(given_weight, spec)
    assert folded.shape == ((24, 3 * 64) if linear else (24, 3, 1, 8, 8))
    assert torch.allclose(once @ folded.flatten(1).T, conv.view(-1, 24), atol=2e-6, rtol=1e-5)
    if depth > 1:
        assert not torch.allclose(once @ weight[:, :, 0].flatten(1).T, conv.view(-1, 24), atol=0.1)


def test_folding_keeps_the_type_and_adds_in_float32():
    spec = spec_of("bilinear", patch=8, depth=3)
    weight = torch.full((1, 3, 3, 8, 8), 1.0, dtype=torch.bfloat16)
    weight[:, :, 1:] = 2.0**-8  # lost, one by one, when added to 1 in bfloat16
    folded = fold_patch_embed(weight, spec)
    assert folded.dtype == torch.bfloat16
    assert folded.float().unique().tolist() == [1.0 + 2.0**-7]


@pytest.mark.parametrize("shape", [(4, 3, 3, 8, 8), (4, 3 * 64), (4, 1, 2, 8, 8)])
def test_other_weights_are_not_folded(shape):
    with pytest.raises(ValueError, match="patch embedding weight: found shape"):
        fold_patch_embed(torch.zeros(shape), spec_of("bilinear", patch=8, depth=2))
