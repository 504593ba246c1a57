# SPDX-License-Identifier: Apache-2.0
"""Reports of users about MTP, as far as they need no model (the others: integration tests)."""

from types import SimpleNamespace

import pytest

from mimo_plugin.core.geometry import read_geometry
from mimo_plugin.core.pools import plan_pool
from mimo_plugin.engines.vllm.kv.settings import KvSettings
from mimo_plugin.engines.vllm.mtp.configure import prepare_scheduler
from mimo_plugin.engines.vllm.mtp.lengths import MtpSettings
from tests.mtp.harness import BASES, HYBRID, Engine
from tests.published_models import MIMO_V2_FLASH, REPORT_10F_60S

UNIT = HYBRID.full_block_tokens
SHARED = list(range(1, 3 * UNIT + 1))


def cached_tokens(engine, prompt, output_tokens=1):
    engine.submit(prompt, output_tokens)
    (new,) = engine.step().scheduled_new_reqs
    engine.run()
    return new.num_computed_tokens


@pytest.mark.parametrize("kv", [None, KvSettings(ladder_min_tokens=UNIT)], ids=["stock", "kv"])
@pytest.mark.parametrize("base", BASES)
def test_b34_rows_that_depend_on_the_next_token_are_not_reused(base, kv):
    """A and B part right after a block: B computes that block's draft rows itself."""
    engine = Engine(MtpSettings(), base=base, geometry=HYBRID, kv=kv)
    ending = list(range(700, 700 + 2 * UNIT))
    cached_tokens(engine, [*SHARED, *ending])
    hit = cached_tokens(engine, [*SHARED, *reversed(ending)])
    # Stock keeps no window there, so it may find less.
    assert hit == len(SHARED) - UNIT if kv else hit <= len(SHARED) - UNIT
    # One that goes on as B did finds B's rows behind the edge, and may use the block.
    assert cached_tokens(engine, [*SHARED, *reversed(ending), 9, 9]) > len(SHARED) - UNIT


def test_b73_every_group_with_a_draft_layer_is_marked():
    """vLLM marks the group of the last layer only."""
    layers = [f"model.layers.{i}.self_attn.attn" for i in range(4)]
    drafts = [f"model.mtp.layers.{i}.self_attn.attn" for i in range(3)]
    groups = [
        SimpleNamespace(layer_names=names, is_eagle_group=False)
        for names in (layers[:1], [layers[1], drafts[0]], [layers[2], drafts[1]], drafts[2:])
    ]
    prepare_scheduler(SimpleNamespace(kv_cache_groups=groups))
    assert [g.is_eagle_group for g in groups] == [False, True, True, True]


@pytest.mark.parametrize("config", [MIMO_V2_FLASH, REPORT_10F_60S])
@pytest.mark.parametrize("tp", [1, 8])
def test_b33_draft_layers_share_the_pool_of_the_target(config, tp):
    """No pool of their own that could be the smaller one: the same block ids fit every group."""
    geometry = read_geometry(config).with_draft_layers(3)
    plan = plan_pool(geometry, block_tokens=16, tp=tp)
    assert sum(group.draft_layers for group in plan.groups) == 3
    assert all(group.payload_bytes <= plan.block_bytes for group in plan.groups)
    # A block of any group holds at least as many tokens as one of the target's own groups does.
    targets = {g.block_tokens for g in plan.groups if g.window_tokens and not g.draft_layers}
    drafts = {g.block_tokens for g in plan.groups if g.draft_layers}
    assert min(drafts) >= min(targets or drafts)
