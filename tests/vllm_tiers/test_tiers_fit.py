# SPDX-License-Identifier: Apache-2.0
"""From the section to vLLM's argument, and what stops start-up before the model is loaded."""

from types import SimpleNamespace as Fake

import pytest

from mimo_plugin.config import parse_config
from mimo_plugin.engines.vllm.tiers import fit
from mimo_plugin.engines.vllm.tiers.configure import (
    complete_arguments,
    settings_from,
    transfer_config,
)
from mimo_plugin.errors import ConfigError
from mimo_plugin.tiers.file_store import StoreError
from mimo_plugin.tiers.shared_memory import memory_limit_bytes, why_no_room
from tests.published_models import MIMO_V2_FLASH


def tiers_of(settings):
    return parse_config({"tiers": settings}, environ={}, engine="vllm").tiers


@pytest.fixture
def settings(tmp_path):
    return {"host_gib": 0.001, "path": str(tmp_path / "kv"), "capacity_gib": 1}


@pytest.fixture
def config(settings):
    """What ``fit`` reads of vLLM's configuration, of a model and settings that fit."""
    written = transfer_config(tiers_of(settings))
    return Fake(
        kv_transfer_config=Fake(
            kv_connector=written["kv_connector"],
            kv_connector_extra_config=written["kv_connector_extra_config"],
        ),
        cache_config=Fake(enable_prefix_caching=True, prefix_match_unit=None),
        scheduler_config=Fake(disable_hybrid_kv_cache_manager=False),
        model_config=Fake(hf_text_config=Fake(to_dict=lambda: MIMO_V2_FLASH)),
        parallel_config=Fake(
            decode_context_parallel_size=1,
            pipeline_parallel_size=1,
            prefill_context_parallel_size=1,
            data_parallel_size_local=1,
            nnodes_within_dp=1,
        ),
    )


def extra(config):
    return config.kv_transfer_config.kv_connector_extra_config


def test_what_the_engine_is_told(settings):
    written = transfer_config(tiers_of({**settings, "outputs": False, "classes": ["ladder"]}))
    told = written.pop("kv_connector_extra_config")
    assert written == {
        "kv_connector": "MimoTieredConnector",
        "kv_connector_module_path": "mimo_plugin.engines.vllm.tiers.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
    }
    assert told["cpu_bytes_to_use"] == int(0.001 * 2**30)
    assert told["offload_prompt_only"] is True
    (tier,) = told["secondary_tiers"]
    store = {"path": settings["path"], "capacity_gib": 1.0}
    assert tier == {
        "type": "StoreTier",
        "module_path": "mimo_plugin.engines.vllm.tiers.store_tier",
        "settings": store,
    }
    assert told["mimo_tiers"] == {
        **store,
        "host_gib": 0.001,
        "outputs": False,
        "classes": ["ladder"],
    }


def test_without_a_place_there_is_host_memory_alone():
    told = transfer_config(tiers_of({"host_gib": 2}))["kv_connector_extra_config"]
    assert told["secondary_tiers"] == []
    assert told["cpu_bytes_to_use"] == 2 << 30


def test_settings_come_back_as_they_were(settings):
    given = tiers_of(
        {**settings, "ladder_growth": 0.25, "ladder_min_tokens": 64, "touch_interval_s": 5}
    )
    assert settings_from(transfer_config(given)["kv_connector_extra_config"]) == given


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"host_gib": None}, ("mimo.tiers.host_gib: found None", "GiB of host memory")),
        ({"prefetch_tokens": 32}, ("mimo.tiers.prefetch_tokens", "no value on vLLM")),
        ({"host_swa_share": 0.5}, ("mimo.tiers.host_swa_share", "no value on vLLM")),
    ],
)
def test_settings_that_are_refused(settings, change, words):
    with pytest.raises(ConfigError) as caught:
        transfer_config(tiers_of({**settings, **change}))
    assert all(word in str(caught.value) for word in words), caught.value


def test_the_feature_writes_the_argument(settings):
    parsed = parse_config({"tiers": settings}, environ={}, engine="vllm")
    arguments = Fake(kv_transfer_config=None)
    complete_arguments(arguments, parsed)
    written = arguments.kv_transfer_config
    assert written.kv_connector == "MimoTieredConnector"
    assert settings_from(written.kv_connector_extra_config) == parsed.tiers
    complete_arguments(arguments, parsed)
    assert arguments.kv_transfer_config is written


@pytest.mark.parametrize("given", [{"kv_connector": "X"}, Fake(kv_connector="X")])
def test_another_connector_is_refused(settings, given):
    parsed = parse_config({"tiers": settings}, environ={}, engine="vllm")
    with pytest.raises(ConfigError, match=r"--kv-transfer-config: found 'kv_connector X'.*drop it"):
        complete_arguments(Fake(kv_transfer_config=given), parsed)


def test_it_fits_and_the_store_is_ready(config, settings, tmp_path):
    assert fit.why_not(config) is None
    assert (tmp_path / "kv" / "00").is_dir()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: setattr(c, "kv_transfer_config", None), "the KV connector is None"),
        (lambda c: setattr(c.kv_transfer_config, "kv_connector", "X"), "connector is X"),
        (lambda c: extra(c).update(block_size=64), "chunks are single blocks"),
        (lambda c: extra(c).update(blocks_per_chunk=1), "chunks are single blocks"),
        (lambda c: extra(c).update(canonical_layout=True), "canonical_layout"),
        (lambda c: extra(c).update(sync_load_budget_bytes=1), "sync_load_budget_bytes"),
        (lambda c: setattr(c.cache_config, "enable_prefix_caching", False), "nothing to retain"),
        (
            lambda c: setattr(c.scheduler_config, "disable_hybrid_kv_cache_manager", True),
            "hybrid KV cache manager is switched off",
        ),
        (
            lambda c: setattr(
                c.model_config.hf_text_config,
                "to_dict",
                lambda: (
                    MIMO_V2_FLASH
                    | {"hybrid_layer_pattern": [0] * MIMO_V2_FLASH["num_hidden_layers"]}
                ),
            ),
            "leave tiers out",
        ),
        (lambda c: setattr(c.parallel_config, "pipeline_parallel_size", 2), "pipeline parallel"),
        (
            lambda c: setattr(c.parallel_config, "prefill_context_parallel_size", 2),
            "prefill context parallel",
        ),
        (
            lambda c: setattr(c.parallel_config, "decode_context_parallel_size", 2),
            "decode context parallel",
        ),
        (lambda c: setattr(c.parallel_config, "nnodes_within_dp", 2), "several nodes"),
        (lambda c: extra(c).update(cpu_bytes_to_use=1 << 60), "does not fit into /dev/shm"),
    ],
)
def test_what_does_not_fit(config, change, words):
    change(config)
    reason = fit.why_not(config)
    assert words in reason
    assert "\n" not in reason


def test_engines_of_one_machine_need_room_each(config):
    import shutil

    extra(config)["cpu_bytes_to_use"] = int(shutil.disk_usage("/dev/shm").free * 0.6)
    assert fit.why_not(config) is None
    config.parallel_config.data_parallel_size_local = 2
    assert "does not fit into /dev/shm" in fit.why_not(config)


def test_a_bad_place_stops_it(config, settings, tmp_path):
    (tmp_path / "kv").write_text("a file")
    with pytest.raises(StoreError, match="kv"):
        fit.why_not(config)


def test_a_store_without_a_size_stops_it(config):
    del extra(config)["secondary_tiers"][0]["settings"]["capacity_gib"]
    with pytest.raises(ConfigError, match=r"mimo\.tiers\.capacity_gib: found None"):
        fit.why_not(config)


def test_a_wrong_setting_of_a_connector_given_by_hand_stops_it(config):
    extra(config)["mimo_tiers"]["ladder_grwth"] = 0.5
    with pytest.raises(ConfigError, match="did you mean 'ladder_growth'"):
        fit.why_not(config)


def test_room_in_shared_memory(tmp_path):
    import shutil

    free = shutil.disk_usage(tmp_path).free
    assert why_no_room(free // 2, shm=tmp_path) is None
    reason = why_no_room(2 * free, shm=tmp_path)
    assert "--shm-size" in reason and "lower host_gib" in reason
    assert "can't be used" in why_no_room(1, shm=tmp_path / "none")


@pytest.mark.parametrize(
    ("text", "limit"), [("1048576\n", 1 << 20), ("max\n", None), ("", None), (None, None)]
)
def test_the_memory_of_a_container(tmp_path, text, limit):
    first, second = tmp_path / "memory.max", tmp_path / "limit"
    if text is not None:
        first.write_text(text)
    assert memory_limit_bytes((first, second)) == limit
    second.write_text("77")
    assert memory_limit_bytes((first, second)) == (77 if text is None else limit)
