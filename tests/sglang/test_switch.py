# SPDX-License-Identifier: Apache-2.0
"""The switch on SGLang, with stand-ins for its modules: off is stock, a wrong setting ends it."""

from __future__ import annotations

import argparse
import json
import logging
import pickle
import sys
import types
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from mimo_plugin import __version__, entrypoints
from mimo_plugin.config import DEGRADED_KEY
from mimo_plugin.engines.sglang import degraded, register, switch, version
from mimo_plugin.engines.sglang.section import Section
from mimo_plugin.errors import (
    ConfigError,
    ContractError,
    FeatureUnavailable,
    MimoError,
    VersionError,
)

RESOLVED: dict[str, Any] = {}


class Record:
    """A stand-in for ``ServerArgs``: input fields, decisions beside them, bookkeeping."""

    hicache_storage_backend: str | None = None
    hicache_storage_backend_extra_config: str | None = None

    def __init__(
        self, radix_cache_backend: str | None = None, schedule_policy: str = "fcfs"
    ) -> None:
        self.radix_cache_backend = radix_cache_backend
        self.schedule_policy = schedule_policy
        self.decided: dict[str, Any] = {}

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--radix-cache-backend", default=None)
        parser.add_argument("--schedule-policy", default="fcfs", choices=["fcfs", "lpm"])

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Record:
        return cls(args.radix_cache_backend, args.schedule_policy)

    def resolve_once(self) -> None:
        self._resolution_finished = True


class HookType(Enum):
    AFTER = "after"


class Hooks:
    """A stand-in for SGLang's hook registry."""

    def __init__(self) -> None:
        self.found: list[tuple[str, Any, HookType]] = []
        self._patched: set[str] = set()
        self.works = True

    def apply_hooks(self) -> None:
        if self.works:
            self._patched.update(target for target, *_ in self.found)

    def register(self, target: str, hook: Any, hook_type: HookType) -> None:
        self.found.append((target, hook, hook_type))


class Engine:
    """What the tests see of the stand-in engine."""

    def __init__(self, record: type[Record], hooks: Hooks) -> None:
        self.record = record
        self.hooks = hooks
        self.model = types.SimpleNamespace(
            is_hybrid_swa=True,
            is_multimodal=False,
            full_attention_layer_ids=[0],
            vocab_size=1000,
            hf_config=types.SimpleNamespace(architectures=["MiMoV2FlashForCausalLM"]),
        )
        self.options: dict[str, Any] = {
            "language_model_only": False,
            "language_only": False,
            "disable_radix_cache": False,
            "disaggregation_mode": "null",
        }

    def parsed(self, *argv: str) -> Any:
        parser = argparse.ArgumentParser()
        self.record.add_cli_args(parser)
        return self.record.from_cli_args(parser.parse_args(argv))


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """SGLang's modules as far as the switch touches them, healthy."""
    record = type("ServerArgs", (Record,), dict(Record.__dict__))
    made = Engine(record, Hooks())

    def view(server_args: Any) -> Any:
        names = ("radix_cache_backend", "schedule_policy", *register.STORAGE_FIELDS)
        given = {name: getattr(server_args, name) for name in names}
        return types.SimpleNamespace(**{**given, **made.options, **server_args.decided})

    def decide(server_args: Any, source: str, **fields: Any) -> None:
        assert source == "mimo-plugin"
        server_args.decided.update(fields)

    contents: dict[str, dict[str, Any]] = {
        "sglang": {},
        "sglang.srt": {},
        "sglang.srt.plugins": {},
        "sglang.srt.plugins.hook_registry": {"HookRegistry": made.hooks, "HookType": HookType},
        "sglang.srt.server_args": {"ServerArgs": record},
        "sglang.srt.arg_groups": {},
        "sglang.srt.arg_groups.overrides": {"declare_resolution": decide},
        "sglang.srt.arg_groups.model_override_base": {
            "resolving_view": view,
            "model_config_of": lambda server_args: made.model,
        },
    }
    for name, values in contents.items():
        module = types.ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(
        register, "require_supported", lambda: version.InstalledSglang("0.5.23", "sglang")
    )
    monkeypatch.setattr(register, "_contract_problems", lambda features: ())
    monkeypatch.setattr(register, "_announced", set())
    monkeypatch.setattr(switch, "runs_as_command", lambda: False)
    for variable in ("MIMO_CONFIG", "MIMO_STRICT"):
        monkeypatch.delenv(variable, raising=False)
    entrypoints.register_sglang()
    made.hooks.apply_hooks()  # as SGLang does when all plugins are loaded
    yield made


def section(server_args: Any) -> Any:
    return getattr(server_args, register.RECORD_ATTRIBUTE, None)


def refused(run: Callable[[], object], kind: type[BaseException] = MimoError) -> str:
    with pytest.raises(kind) as caught:
        run()
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- off is stock ---------------------------------------------------------------------------


def test_not_asked_for_changes_nothing(engine: Engine) -> None:
    server_args = engine.parsed("--radix-cache-backend", "other")
    server_args.resolve_once()
    assert vars(server_args) == {
        "radix_cache_backend": "other",
        "schedule_policy": "fcfs",
        "decided": {},
        "_resolution_finished": True,
    }
    ((target, hook, kind),) = engine.hooks.found
    assert (target, kind) == ("sglang.srt.runtime_context.publish", HookType.AFTER)
    assert hook("context", server_args, role="scheduler") is None
    assert vars(server_args)["decided"] == {}


def test_registering_twice_wraps_once(engine: Engine) -> None:
    names = ("add_cli_args", "from_cli_args", "resolve_once")
    first = {name: engine.record.__dict__[name] for name in names}
    entrypoints.register_sglang()
    assert {name: engine.record.__dict__[name] for name in names} == first
    assert isinstance(first["add_cli_args"], staticmethod)
    assert isinstance(first["from_cli_args"], classmethod)
    assert len(engine.hooks.found) == 1


def test_an_option_of_that_name_is_left_alone(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--plugin", default="theirs")
    engine.record.add_cli_args(parser)
    server_args = engine.record.from_cli_args(parser.parse_args([]))
    assert section(server_args) is None
    assert "MIMO_CONFIG" in caplog.text


# --- asked for ------------------------------------------------------------------------------


KV = {"radix_cache_backend": "mimo"}
SCHEDULER = {"schedule_policy": "mimo-affinity"}


@pytest.mark.parametrize(
    ("how", "features", "decided"),
    [
        ("option", ("kv", "scheduler"), {**KV, **SCHEDULER}),
        ("named", ("kv",), KV),
        ("environment", ("kv",), KV),
        ("file", ("kv",), KV),
        ("backend", ("kv",), KV),
        ("policy", ("scheduler",), SCHEDULER),
        ("both", ("kv", "scheduler"), {**KV, **SCHEDULER}),
    ],
)
def test_every_way_to_ask(
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    how: str,
    features: tuple[str, ...],
    decided: dict[str, str],
) -> None:
    backend, policy = ("--radix-cache-backend", "mimo"), ("--schedule-policy", "mimo-affinity")
    argv = {
        "option": ("--plugin", "mimo"),
        "named": ("--plugin", "mimo:kv"),
        "backend": backend,
        "policy": policy,
        "both": (*backend, *policy),
    }.get(how, ())
    if how == "environment":
        monkeypatch.setenv("MIMO_CONFIG", '{"kv": {"ladder_growth": 0.5}}')
    elif how == "file":
        path = tmp_path / "mimo.json"
        path.write_text('{"features": ["kv"]}', encoding="utf-8")
        monkeypatch.setenv("MIMO_CONFIG", str(path))
    server_args = engine.parsed(*argv)
    given = server_args.radix_cache_backend, server_args.schedule_policy
    server_args.resolve_once()
    assert server_args.decided == decided
    assert (server_args.radix_cache_backend, server_args.schedule_policy) == given
    # What travels to the other processes is complete, and means the same there.
    carried = json.loads(json.dumps(section(server_args)))
    config = register.parse(carried, {"MIMO_CONFIG": "ignored"})
    assert config is not None
    assert config.features == features
    assert config.plugin_version == __version__
    assert config.kv.ladder_growth == (0.5 if how == "environment" else 0.25)
    assert config.named == (() if how == "option" else features)


def test_the_policy_is_a_choice_only_once(engine: Engine) -> None:
    parser = argparse.ArgumentParser()
    engine.record.add_cli_args(parser)
    (action,) = (a for a in parser._actions if a.dest == "schedule_policy")
    assert action.choices == ["fcfs", "lpm", "mimo-affinity"]


@pytest.mark.parametrize(
    ("argv", "option", "words"),
    [
        (("--schedule-policy", "lpm"), {}, "--schedule-policy: found 'lpm'"),
        ((), {"disaggregation_mode": "decode"}, "prefills nothing"),
        ((), {"dllm_algorithm": "x"}, "queue of its own"),
        ((), {"disable_radix_cache": True}, "no request has a hit"),
    ],
)
def test_where_the_scheduler_does_not_fit(
    engine: Engine, argv: tuple[str, ...], option: dict[str, Any], words: str
) -> None:
    engine.options.update(option)
    server_args = engine.parsed("--plugin", "mimo:scheduler", *argv)
    assert words in refused(server_args.resolve_once)
    assert server_args.decided == {}


def test_settings_beside_the_option(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIMO_CONFIG", '{"kv": {"classes": ["turn_end"]}}')
    server_args = engine.parsed("--plugin", "mimo:kv")
    server_args.resolve_once()
    assert section(server_args)["kv"]["classes"] == ["turn_end"]


def test_resolving_again_changes_nothing(engine: Engine) -> None:
    server_args = engine.parsed("--plugin", "mimo")
    server_args.resolve_once()
    before = pickle.dumps((section(server_args), server_args.decided))
    server_args.resolve_once()
    assert pickle.dumps((section(server_args), server_args.decided)) == before


def test_each_role_is_announced_once(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    server_args = engine.parsed("--plugin", "mimo:kv")
    server_args.resolve_once()
    hook = engine.hooks.found[0][1]
    with caplog.at_level(logging.INFO, logger=register.LOGGER_NAME):
        for _ in range(2):
            hook("context", server_args, role="detokenizer")
    (record,) = caplog.records
    assert record.getMessage() == (
        f"mimo-plugin {__version__} | sglang 0.5.23 | process=detokenizer | features=kv"
        " | contracts ok"
    )


# --- refused --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("mimo:kvv", "did you mean 'kv'?"),
        ("mimo:mtp", "not in this version for SGLang"),
        ("mimo:replay", "not in this version;"),
        ("other", "use --plugin mimo"),
    ],
)
def test_a_wrong_option_ends_the_parser(
    engine: Engine, capsys: pytest.CaptureFixture[str], option: str, words: str
) -> None:
    with pytest.raises(SystemExit):
        engine.parsed("--plugin", option)
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("{", "not valid JSON"),
        ("[]", "write it as a JSON object"),
        ("/no/such/file", "can't be read"),
        ('{"kv": {"swa_shar": 0.4}}', "did you mean 'swa_share'?"),
        ('{"features": ["mtp"]}', "for SGLang"),
        ('{"kv": {"swa_share": 0.4}}', "--swa-full-tokens-ratio"),
        ('{"kv": {"memoise": false}}', "mimo.kv.memoise"),
        ('{"scheduler": {"protect_hits": false}}', "mimo.scheduler.protect_hits"),
        ('{"kv": {"message_start_token_ids": [1000]}}', "from 0 to 999"),
    ],
)
def test_wrong_settings_are_refused(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, value: str, words: str
) -> None:
    monkeypatch.setenv("MIMO_CONFIG", value)
    server_args = engine.parsed()
    assert words in refused(server_args.resolve_once)
    assert server_args.decided == {}


def test_a_refused_record_is_not_taken_for_resolved(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    server_args = engine.parsed("--plugin", "mimo:kv", "--radix-cache-backend", "other")
    refused(server_args.resolve_once, ConfigError)
    assert server_args._resolution_failed
    assert not server_args._resolution_finished


@pytest.mark.parametrize("option", ["mimo", "mimo:kv"])
def test_a_radix_backend_of_the_users_is_refused_with_the_fix(engine: Engine, option: str) -> None:
    server_args = engine.parsed("--plugin", option, "--radix-cache-backend", "other")
    line = refused(server_args.resolve_once, ConfigError)
    assert "'other'" in line and "fix: drop it" in line


@pytest.mark.parametrize(
    "change",
    [
        {"disable_radix_cache": True},
        {"enable_lmcache": True},
        {"enable_flexkv": True},
        {"enable_unified_cache_external_linker": True},
        {"enable_kv_cache_sharding": True},
        {"enable_session_radix_cache": True},
    ],
)
def test_what_does_not_fit(
    engine: Engine, caplog: pytest.LogCaptureFixture, change: dict[str, bool]
) -> None:
    engine.options.update(change)
    refused(engine.parsed("--plugin", "mimo:kv").resolve_once, FeatureUnavailable)
    # Not named: it is left out with a warning, and nothing is switched on.
    server_args = engine.parsed("--plugin", "mimo")
    server_args.resolve_once()
    assert "leaves out feature 'kv'" in caplog.text
    if "disable_radix_cache" in change:
        assert server_args.decided == {}
        assert register.degraded_reason(server_args) == "no feature fits this model"
    else:
        assert server_args.decided == SCHEDULER


def test_other_models_are_left_alone(engine: Engine) -> None:
    engine.model.is_hybrid_swa = False
    line = refused(engine.parsed("--plugin", "mimo:kv").resolve_once, FeatureUnavailable)
    assert "without a pool for sliding-window layers" in line
    engine.model.is_hybrid_swa, engine.model.full_attention_layer_ids = True, []
    refused(engine.parsed("--plugin", "mimo:kv").resolve_once, FeatureUnavailable)


def test_version_and_contracts_are_checked(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(register, "_contract_problems", lambda features: ("a", "b"))
    refused(engine.parsed("--plugin", "mimo").resolve_once, ContractError)

    def too_old() -> None:
        raise VersionError("SGLang: found 0.5.1; allowed: 0.5.23; fix: upgrade")

    monkeypatch.setattr(register, "require_supported", too_old)
    refused(engine.parsed("--plugin", "mimo").resolve_once, VersionError)


def test_the_command_ends_with_one_line(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(switch, "runs_as_command", lambda: True)
    server_args = engine.parsed("--plugin", "mimo:kv", "--radix-cache-backend", "other")
    line = refused(server_args.resolve_once, SystemExit)
    assert line.startswith("mimo-plugin: error: --radix-cache-backend")


def test_another_version_in_another_process_ends_it(engine: Engine) -> None:
    server_args = engine.parsed("--plugin", "mimo:kv")
    server_args.resolve_once()
    section(server_args)["_plugin_version"] = "0.0.1"
    line = refused(
        lambda: engine.hooks.found[0][1]("context", server_args, role="detokenizer"), SystemExit
    )
    assert "0.0.1" in line


# --- lenient --------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["settings", "backend", "fit", "bug", "names"])
def test_lenient_leaves_a_stock_engine(
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    fault: str,
) -> None:
    monkeypatch.setenv("MIMO_STRICT", "0")
    argv = ["--plugin", "mimo:kv"]
    if fault == "settings":
        monkeypatch.setenv("MIMO_CONFIG", '{"kv": {"swa_share": 0.4}}')
    elif fault == "backend":
        argv += ["--radix-cache-backend", "other"]
    elif fault == "fit":
        engine.options["disable_radix_cache"] = True
    else:
        monkeypatch.setattr(register, "_fitting", lambda *_: 1 / 0)
    if fault == "names":
        argv = ["--radix-cache-backend", "mimo", "--schedule-policy", "mimo-affinity"]
    server_args = engine.parsed(*argv)
    server_args.resolve_once()
    stock = {"radix_cache_backend": None, "schedule_policy": "fcfs"}
    assert server_args.decided == (stock if fault == "names" else {})
    assert set(section(server_args)) == {DEGRADED_KEY}
    errors = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert len(errors) == 1 and "is OFF for this engine" in errors[0]
    said: list[None] = []
    monkeypatch.setattr(degraded, "say_degraded", lambda: said.append(None))
    for role in ("tokenizer", "scheduler"):
        assert engine.hooks.found[0][1]("context", server_args, role=role) is None
    assert len(said) == 1, "the metric is set where SGLang's own are"


# --- every process --------------------------------------------------------------------------


def test_a_record_brings_the_plugin_to_a_process_that_loads_none(engine: Engine) -> None:
    """B85: SGLang's encoder ranks and further tokenizers never load plugins."""
    server_args = engine.parsed("--plugin", "mimo:kv")
    server_args.resolve_once()
    carried = pickle.dumps(section(server_args))
    for name in ("add_cli_args", "from_cli_args", "resolve_once"):  # another process: as it came
        current = engine.record.__dict__[name]
        stock = getattr(current, "__func__", current).__wrapped__
        kind = type(current) if isinstance(current, (staticmethod, classmethod)) else None
        setattr(engine.record, name, kind(stock) if kind else stock)
    engine.hooks.found.clear()
    engine.hooks._patched.clear()
    restored = pickle.loads(carried)
    assert dict(restored) == dict(section(server_args)) and type(restored) is Section
    assert [target for target, *_ in engine.hooks.found] == [switch.PUBLISH]
    assert switch.PUBLISH in engine.hooks._patched
    assert pickle.loads(carried) == restored
    assert len(engine.hooks.found) == 1


def test_a_hook_that_was_not_applied_ends_it(engine: Engine) -> None:
    """B85: SGLang logs that and goes on; no process would be prepared."""
    engine.hooks.works = False
    server_args = engine.parsed("--plugin", "mimo:kv")
    server_args.resolve_once()
    carried = pickle.dumps(section(server_args))
    engine.hooks._patched.clear()
    assert "did not apply the plugin's hook" in refused(lambda: pickle.loads(carried))
    again = engine.parsed("--plugin", "mimo:kv")
    assert "did not apply the plugin's hook" in refused(again.resolve_once)
    engine.parsed().resolve_once()  # nobody asked


@pytest.mark.parametrize("strict", ["1", "0"])
@pytest.mark.parametrize("asked", ["environment", "backend"])
def test_arguments_that_were_resolved_before_plugins_were_loaded(
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    asked: str,
    strict: str,
) -> None:
    """B85: a program of the user's that builds and resolves ``ServerArgs`` first."""
    argv = ("--radix-cache-backend", "mimo") if asked == "backend" else ()
    server_args = engine.parsed(*argv)
    engine.record.resolve_once.__wrapped__(server_args)
    if asked == "environment":
        monkeypatch.setenv("MIMO_CONFIG", '{"features": ["kv"]}')
    monkeypatch.setenv("MIMO_STRICT", strict)
    hook = engine.hooks.found[0][1]

    def enter() -> None:
        hook("context", server_args, role="tokenizer")

    if strict == "1":
        assert "resolved before the plugin was loaded" in refused(enter, SystemExit)
    else:
        enter()
        assert "is OFF for this engine" in caplog.text


# --- an SGLang that the plugin can't attach to ----------------------------------------------


@pytest.mark.parametrize(
    ("argv", "variable", "asked"),
    [
        ([], None, False),
        (["--plugin", "other"], None, False),
        (["--plugin", "mimo:kv"], None, True),
        (["--plugin=mimo"], None, True),
        (["--radix-cache-backend", "mimo"], None, True),
        (["--schedule-policy=mimo-affinity"], None, True),
        ([], "{}", True),
    ],
)
def test_an_engine_it_cannot_attach_to_ends_only_for_those_who_ask(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    argv: list[str],
    variable: str | None,
    asked: bool,
) -> None:
    def broken() -> None:
        raise ImportError("no module\nnamed gone")

    monkeypatch.setattr(switch, "install", broken)
    monkeypatch.setattr(sys, "argv", ["sglang", "serve", *argv])
    monkeypatch.delenv("MIMO_STRICT", raising=False)
    monkeypatch.delenv("MIMO_CONFIG", raising=False)
    if variable is not None:
        monkeypatch.setenv("MIMO_CONFIG", variable)
    if asked:
        assert "no module named gone" in refused(entrypoints.register_sglang, SystemExit)
        monkeypatch.setenv("MIMO_STRICT", "0")
    entrypoints.register_sglang()
    assert [r.levelno for r in caplog.records] == [logging.ERROR if asked else logging.WARNING]
