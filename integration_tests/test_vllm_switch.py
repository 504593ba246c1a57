# SPDX-License-Identifier: Apache-2.0
"""The switch through the real vLLM: off is stock, on says so everywhere, a fault is one line."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import partial
from importlib import metadata, util
from pathlib import Path

import pytest

from integration_tests.refusal import Refusal, check_refused, serve_all
from integration_tests.side_by_side import start_all
from mimo_plugin import __version__
from mimo_plugin.engines.vllm.version import installed_vllm
from tools.server import engine_environment

pytestmark = pytest.mark.vllm

PROBE = Path(__file__).with_name("engine_probe.py")
START_TIMEOUT_S = 240
ARGUMENT_HOOKS = [
    f"vllm.engine.arg_utils.EngineArgs.{name}"
    for name in ("add_cli_args", "create_engine_config", "from_cli_args")
]


def probe(model, additional_config, **environment):
    """Run ``engine_probe.py``; returns its result and everything it logged."""
    done = subprocess.run(
        [sys.executable, str(PROBE), str(model), json.dumps(additional_config)],
        env=engine_environment(environment),
        capture_output=True,
        text=True,
        timeout=START_TIMEOUT_S,
        check=False,
    )
    log = done.stdout + done.stderr
    assert done.returncode == 0, log[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1]), log


@pytest.fixture(scope="module")
def probes(tiny_model):
    """Engines in a process of their own: results and logs by what of us they load."""
    return start_all(
        {
            "stock": partial(probe, tiny_model, {}, VLLM_PLUGINS=""),
            "off": partial(probe, tiny_model, {}),
            "on": partial(probe, tiny_model, {"mimo": {"features": ["kv"]}}),
        }
    )


@pytest.fixture(scope="module")
def stock(probes):
    """An engine that loads no plugin at all."""
    result, log = probes["stock"]
    assert "mimo-plugin" not in log
    return result


@pytest.fixture(scope="module")
def servers(serve_module, tiny_model):
    """One server that the plugin is on in, one that goes on without it."""
    return start_all(
        {
            "on": partial(
                serve_module,
                tiny_model,
                "--distributed-executor-backend=mp",
                plugin="mimo:kv",
                environment={"VLLM_WORKER_MULTIPROC_METHOD": "spawn"},
            ),
            "lenient": partial(
                serve_module,
                tiny_model,
                f"--additional-config={bad_setting()}",
                environment={"MIMO_STRICT": "0"},
            ),
        }
    )


def bad_setting():
    return json.dumps({"mimo": {"kv": {"swa_share": 1.5}}})


# --- off ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_installed_but_off_is_stock(probes, stock):
    off, log = probes["off"]
    assert "mimo-plugin" not in log
    assert off["wrapped"] == ARGUMENT_HOOKS
    assert stock["wrapped"] == [] and stock["modules"] == []
    assert not [name for name in off["modules"] if name.startswith("mimo_plugin.core")]
    for fact in set(stock) - {"wrapped", "modules"}:
        assert off[fact] == stock[fact], fact
    assert off["classes"] == [] and off["metrics"] == {}


# --- on -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_offline_engine_switched_on(probes, stock):
    on, log = probes["on"]
    assert [tokens for tokens, _ in on["outputs"]] == [tokens for tokens, _ in stock["outputs"]]
    assert on["scheduler_cls"] == "mimo_plugin.engines.vllm.scheduler.make_scheduler"
    assert any(name.startswith("mimo_plugin.engines.vllm.kv") for name in on["classes"])
    assert on["stat_loggers"] == ["MimoStatLogger", *stock["stat_loggers"]]
    assert on["additional_config"]["mimo"]["_engine_label"] == installed_vllm().label
    assert on["metrics"]["mimo:degraded"] == 0
    assert on["metrics"]["mimo:info"] == 1
    prompts = sum(400 + 40 + tail for tail in range(3))
    assert on["metrics"]["mimo:prompt_lookup_tokens_total"] == prompts
    reused = sum(cached for _, cached in on["outputs"])
    assert on["metrics"]["mimo:window_safe_hit_tokens_total"] == reused > 0
    for process in ("API", "EngineCore"):
        assert log.count(f"process={process} | features=kv | contracts ok") == 1


@pytest.mark.slow
def test_server_says_what_is_active_in_each_process(servers):
    server = servers["on"]
    log = server.log_text()
    line = f"mimo-plugin {__version__} | {installed_vllm().label} | process="
    for process in ("API", "EngineCore", "Worker0"):
        assert log.count(f"{line}{process} | features=kv | contracts ok") == 1, process
    assert log.count(line) == 3
    body = {"prompt": "one two three four " * 60, "max_tokens": 4, "temperature": 0}
    first = server.post("/v1/completions", body)
    again = server.post("/v1/completions", body)
    assert first["choices"][0]["text"] == again["choices"][0]["text"]
    assert server.metric("mimo:degraded") == 0
    assert server.metric("mimo:info", version=__version__, features="kv") == 1
    assert server.metric("mimo:window_safe_hit_tokens_total") > 0


# --- asked for, but can't run ---------------------------------------------------------------


@pytest.mark.slow
def test_lenient_server_runs_stock_and_shows_it(servers):
    server = servers["lenient"]
    errors = [line for line in server.log_text().splitlines() if "mimo-plugin is OFF" in line]
    assert len(errors) == 1
    assert "ERROR" in errors[0] and "mimo.kv.swa_share" in errors[0]
    assert server.metric("mimo:degraded") == 1
    assert "process=EngineCore" not in server.log_text()
    assert server.post("/v1/completions", {"prompt": "one two", "max_tokens": 2})["choices"]


def unsupported_version(directory):
    """A search path on which the installed engine claims to be an old release."""
    name = installed_vllm().distribution
    info = directory / f"{name.replace('-', '_')}-0.31.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.31.0\n")
    (info / "top_level.txt").write_text("vllm\n")
    return directory


def missing_symbol(directory):
    """A search path with the installed vLLM in which one method has another name."""
    package = Path(util.find_spec("vllm").submodule_search_locations[0])
    copy = directory / "vllm"
    shutil.copytree(
        package, copy, copy_function=os.symlink, ignore=shutil.ignore_patterns("__pycache__")
    )
    relative = Path("v1/core/kv_cache_manager.py")
    text = (package / relative).read_text()
    assert text.count("def get_computed_blocks(") == 1
    (copy / relative).unlink()
    (copy / relative).write_text(text.replace("def get_computed_blocks(", "def lookup_blocks("))
    return directory


REFUSALS = {
    "feature": Refusal(["--plugin=mimo:kvv"], ("argument --plugin", "did you mean 'kv'?")),
    "value": Refusal([f"--additional-config={bad_setting()}"], ("mimo.kv.swa_share: found 1.5",)),
    "version": Refusal(["--plugin=mimo:kv"], ("found vllm 0.31.0", "allowed:")),
    "symbol": Refusal(["--plugin=mimo:kv"], ("KVCacheManager.get_computed_blocks", "mimo doctor")),
}
SEARCH_PATHS = {"version": unsupported_version, "symbol": missing_symbol}


@pytest.fixture(scope="module")
def refused(tiny_model, tmp_path_factory):
    """How the commands of ``REFUSALS`` ended."""
    refusals = dict(REFUSALS)
    for name, make in SEARCH_PATHS.items():
        path = make(tmp_path_factory.mktemp(name) / "path")
        inherited = os.environ.get("PYTHONPATH", "")
        environment = {"PYTHONPATH": f"{path}{os.pathsep}{inherited}".rstrip(os.pathsep)}
        refusals[name] = replace(refusals[name], environment=environment)
    return serve_all(tiny_model, refusals)


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSALS)
def test_fault_is_one_clear_line_and_no_engine(refused, name):
    check_refused(refused[name], REFUSALS[name].words)


@pytest.mark.slow
def test_offline_fault_is_an_exception_with_the_same_line(tiny_model):
    code = (
        "import sys\n"
        "from vllm import LLM\n"
        "from mimo_plugin.errors import ConfigError\n"
        "try:\n"
        "    LLM(sys.argv[1], additional_config={'mimo': {'kv': {'swa_shar': 'lru'}}})\n"
        "except ConfigError as error:\n"
        "    sys.exit(f'refused: {error}')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tiny_model)],
        env=engine_environment(),
        capture_output=True,
        text=True,
        timeout=START_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 1
    assert "did you mean 'swa_share'?" in done.stderr.strip().splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_the_engine_would_load_us():
    """One distribution, one entry point, in the group that vLLM reads."""
    found = metadata.entry_points(group="vllm.general_plugins", name="mimo")
    assert [entry.value for entry in found] == ["mimo_plugin.entrypoints:register_vllm"]
