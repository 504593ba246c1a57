# SPDX-License-Identifier: Apache-2.0
"""The feature ``tiers`` on SGLang: what it decides, and what it refuses."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mimo_plugin.engines.sglang import register
from mimo_plugin.engines.sglang.storage.arguments import SECTION, open_store
from mimo_plugin.errors import ConfigError, FeatureUnavailable
from mimo_plugin.tiers import open as opening
from mimo_plugin.tiers.file_store import FileStore
from mimo_plugin.tiers.mooncake_client import MooncakeUnavailable
from mimo_plugin.tiers.redis_store import RedisUnavailable
from mimo_plugin.tiers.ring import RingStore
from tests.sglang.test_switch import Engine, engine, refused, section

__all__ = ["engine"]

CLASS = "mimo_plugin.engines.sglang.storage.backend"


@pytest.fixture
def asked(engine: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """Settings that work, and an engine that they fit; written out by ``ask``."""
    engine.options.update(
        enable_hierarchical_cache=True, hicache_mem_layout="page_first", page_size=64, dcp_size=1
    )
    return {"path": str(tmp_path / "kv"), "capacity_gib": 1}


@pytest.fixture
def ask(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Any:
    def resolved(tiers: dict[str, Any], option: str = "mimo:tiers") -> Any:
        monkeypatch.setenv("MIMO_CONFIG", json.dumps({"tiers": tiers}))
        server_args = engine.parsed("--plugin", option)
        server_args.resolve_once()
        return server_args

    return resolved


def extra(server_args: Any) -> Any:
    return json.loads(server_args.decided["hicache_storage_backend_extra_config"])


def test_the_section_becomes_sglangs_arguments(asked: dict[str, Any], ask: Any) -> None:
    server_args = ask({**asked, "name": "a", "verify": False, "prefetch_tokens": 32})
    assert server_args.decided["hicache_storage_backend"] == "dynamic"
    assert extra(server_args) == {
        **{"backend_name": "mimo", "module_path": CLASS, "class_name": "MimoStorage"},
        **{"interface_v1": 1, "prefetch_threshold": 32, "path": asked["path"]},
        **{"store": "file", "capacity_gib": 1.0, "name": "a", "verify": False},
    }
    # What the user wrote is left as it was.
    assert server_args.hicache_storage_backend is None
    assert section(server_args)["tiers"]["name"] == "a"
    assert (Path(asked["path"]) / "00").is_dir()


@pytest.mark.parametrize("capacity", [3, [1, 2]])
def test_several_folders(asked: dict[str, Any], ask: Any, capacity: Any, tmp_path: Path) -> None:
    folders = [str(tmp_path / name) for name in "ab"]
    found = extra(ask({"path": folders, "capacity_gib": capacity}))
    assert found["path"] == folders and found["capacity_gib"] == capacity
    assert all((Path(folder) / "00").is_dir() for folder in folders)
    store = open_store(found)
    assert isinstance(store, RingStore) and list(store.stores) == folders
    gib = [1.5, 1.5] if capacity == 3 else capacity
    sizes = [each._store.capacity_bytes for each in store.stores.values()]  # type: ignore[attr-defined]
    assert sizes == [int(size * (1 << 30)) for size in gib]


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A client library that only notes what it shall connect to."""
    urls: list[str] = []
    client = SimpleNamespace(from_url=lambda url, **options: urls.append(url))
    errors = SimpleNamespace(OutOfMemoryError=MemoryError)
    several = SimpleNamespace(NoBackoff=object, Retry=lambda *arguments: None)
    module = SimpleNamespace(Redis=client, exceptions=errors, retry=several, backoff=several)
    monkeypatch.setitem(sys.modules, "redis", module)
    monkeypatch.setitem(sys.modules, "redis.exceptions", errors)
    return urls


def test_servers(engine: Engine, ask: Any, asked: dict[str, Any], library: list[str]) -> None:
    found = extra(ask({"store": "redis", "path": ["redis://u:p@a", "redis://b:1/2"]}))
    assert (found["store"], found["capacity_gib"]) == ("redis", None)
    store = open_store(found)
    assert isinstance(store, RingStore)
    assert list(store.stores) == ["redis://a:6379/0", "redis://b:1/2"]
    assert library == ["redis://u:p@a", "redis://b:1/2"]
    one = open_store(extra(ask({"store": "redis", "path": "redis://a"})))
    assert isinstance(one, RingStore), "guarded, too"


@pytest.mark.parametrize(
    ("tiers", "words"),
    [
        ({"path": "/data"}, "redis://HOST:PORT/DB"),
        ({"path": ["redis://a", "redis://a:6379/"]}, "each server once"),
        ({"path": "redis://a", "capacity_gib": 1}, "mimo.tiers.capacity_gib"),
        ({"path": ""}, "mimo.tiers.path"),
    ],
)
def test_wrong_servers(
    engine: Engine, ask: Any, asked: dict[str, Any], library: list[str], tiers: Any, words: str
) -> None:
    assert words in refused(lambda: ask({"store": "redis", **tiers}), ConfigError)


def test_servers_without_a_client_library(
    engine: Engine, ask: Any, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)
    line = refused(lambda: ask({"store": "redis", "path": "redis://a"}), RedisUnavailable)
    assert "pip install 'mimo-plugin[tiers]'" in line


def test_a_mooncake_master(engine: Engine, ask: Any, asked: dict[str, Any], probe: Any) -> None:
    wanted = {"store": "mooncake", "path": "mooncake://a?protocol=rdma"}
    found = extra(ask(wanted))
    assert (found["store"], found["path"]) == ("mooncake", wanted["path"])
    assert probe == [("mimo.tiers.path", ("mooncake://a?protocol=rdma",))]


@pytest.fixture
def probe(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Notes which masters are looked for before the start."""
    seen: list[Any] = []
    monkeypatch.setattr(opening, "require_mooncake", lambda *arguments: seen.append(arguments))
    return seen


def test_a_master_that_is_not_there(engine: Engine, ask: Any, asked: dict[str, Any]) -> None:
    line = refused(lambda: ask({"store": "mooncake", "path": "127.0.0.1:1"}), MooncakeUnavailable)
    assert line.startswith("mimo.tiers.path: no ")


def test_one_folder_is_read_and_written_in_place(asked: dict[str, Any], ask: Any) -> None:
    store = open_store(extra(ask({**asked, "verify": False})))
    assert isinstance(store, FileStore) and store.capacity_bytes == 1 << 30


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"path": None}, f"{SECTION}.path: found None"),
        ({"path": ""}, f"{SECTION}.path: found ''"),
        ({"path": ["/a", "/a"]}, "name each once"),
        ({"capacity_gib": "1"}, f"{SECTION}.capacity_gib: found '1'"),
        ({"capacity_gib": None}, f"{SECTION}.capacity_gib: found None"),
        ({"capacity_gib": [1]}, "as path is no list"),
        ({"verify": 1}, f"{SECTION}.verify"),
        ({"store": "disk"}, f"{SECTION}.store"),
        ({"capacity": 1}, "write capacity_gib"),
    ],
)
def test_wrong_settings_by_hand(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    settings = {"interface_v1": 1, "path": str(tmp_path), "capacity_gib": 1}
    assert words in refused(lambda: open_store({**settings, **change}), ConfigError)


def test_it_is_decided_before_sglang_resolves(
    engine: Engine, asked: dict[str, Any], ask: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that what SGLang checks and chooses for a store holds for this one."""
    seen: list[str] = []
    stock = engine.record.resolve_once
    inner = stock.__wrapped__  # type: ignore[attr-defined]

    def resolve_once(self: Any) -> None:
        seen.append(self.decided["hicache_storage_backend"])
        inner(self)

    monkeypatch.setattr(engine.record, "resolve_once", resolve_once)
    from mimo_plugin.engines.sglang import switch

    switch.install()
    ask(asked)
    assert seen == ["dynamic"]


@pytest.mark.parametrize(
    ("name", "value"),
    [("host_gib", 1), ("outputs", False), ("classes", ["ladder"]), ("touch_interval_s", 1)],
)
def test_settings_of_vllm(asked: dict[str, Any], ask: Any, name: str, value: Any) -> None:
    line = refused(lambda: ask({**asked, name: value}), ConfigError)
    assert f"mimo.tiers.{name}" in line and "no value on SGLang" in line


def test_beside_others_and_without_being_named(
    engine: Engine, asked: dict[str, Any], ask: Any
) -> None:
    server_args = ask(asked, "mimo:kv,scheduler,tiers")
    assert section(server_args)["features"] == ["kv", "scheduler", "tiers"]
    # Plain `mimo` does not switch it on; settings that would then have no effect are refused.
    assert "add 'tiers' to it" in refused(lambda: ask(asked, "mimo"), ConfigError)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"path": ""}, "mimo.tiers.path"),
        ({"path": "/proc/nowhere"}, "page store /proc/nowhere"),
        ({"path": ["/tmp/kv", "/tmp/kv/"]}, "mimo.tiers.path"),
        ({"path": ["/proc/nowhere"]}, "page store /proc/nowhere"),
        ({"capacity_gib": [1, 2]}, "mimo.tiers.capacity_gib"),
        ({"capacity_gib": None}, "mimo.tiers.capacity_gib"),
        ({"capacity_gib": 0}, "a number > 0"),
        ({"store": "files"}, "did you mean 'file'?"),
        ({"host_swa_share": 1}, "mimo.tiers.host_swa_share"),
        ({"pth": "/data"}, "did you mean 'path'?"),
    ],
)
def test_wrong_settings(
    asked: dict[str, Any], ask: Any, change: dict[str, Any], words: str
) -> None:
    assert words in refused(lambda: ask({**asked, **change}))


@pytest.mark.parametrize(
    ("option", "kind", "words"),
    [
        ({"enable_hierarchical_cache": False}, FeatureUnavailable, "add --enable-hierarchical"),
        ({"disable_radix_cache": True}, FeatureUnavailable, "drop --disable-radix-cache"),
        ({"enable_lmcache": True}, FeatureUnavailable, "drop --enable-lmcache"),
        ({"enable_flexkv": True}, FeatureUnavailable, "drop --enable-flexkv"),
        ({"enable_kv_cache_sharding": True}, FeatureUnavailable, "drop --enable-kv-cache"),
        ({"dcp_size": 2}, FeatureUnavailable, "--dcp-size"),
        ({"page_size": 1}, ConfigError, "--page-size: found 1"),
        ({"hicache_mem_layout": "layer_first"}, ConfigError, "use --hicache-mem-layout page_first"),
    ],
)
def test_combinations_that_cannot_work(
    engine: Engine,
    asked: dict[str, Any],
    ask: Any,
    option: dict[str, Any],
    kind: type[Exception],
    words: str,
) -> None:
    engine.options.update(option)
    assert words in refused(lambda: ask(asked), kind)


def test_another_radix_backend(
    engine: Engine, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MIMO_CONFIG", json.dumps({"tiers": asked}))
    server_args = engine.parsed("--radix-cache-backend", "other")
    assert "'other' has tiers of its own" in refused(server_args.resolve_once)


def test_a_backend_of_the_users(
    engine: Engine, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MIMO_CONFIG", json.dumps({"tiers": asked}))
    for field, value in (
        ("hicache_storage_backend", "mooncake"),
        ("hicache_storage_backend_extra_config", "{}"),
    ):
        server_args = engine.parsed()
        setattr(server_args, field, value)
        line = refused(server_args.resolve_once, ConfigError)
        assert line.startswith(f"--{field.replace('_', '-')}: found {value!r}")


def test_a_share_needs_two_pools(engine: Engine, asked: dict[str, Any], ask: Any) -> None:
    engine.model.is_hybrid_swa = False
    ask(asked)
    line = refused(lambda: ask({**asked, "host_swa_share": 0.5}), ConfigError)
    assert "without a pool for sliding-window layers" in line


def test_lenient_leaves_the_engine_without_a_store(
    engine: Engine, asked: dict[str, Any], ask: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MIMO_STRICT", "0")
    engine.options["page_size"] = 1
    server_args = ask(asked)
    assert "--page-size" in str(register.degraded_reason(server_args))
    assert {name: server_args.decided[name] for name in register.STORAGE_FIELDS} == {
        name: None for name in register.STORAGE_FIELDS
    }
