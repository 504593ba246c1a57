# SPDX-License-Identifier: Apache-2.0
"""Switching features on for one engine, and saying in each process what is active.

``activate`` runs in the process that builds the ``VllmConfig``. All it does is write into that
configuration: the scheduler factory, the worker class, and the validated ``mimo`` section. vLLM
carries the configuration to its other processes, which resolve those names themselves, so they
need no patch and can't disagree.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from mimo_plugin import __version__
from mimo_plugin.config import DEGRADED_KEY, SECTION, MimoConfig, parse_config, parse_strict
from mimo_plugin.config import section_of as _section_of
from mimo_plugin.contracts import check_vllm
from mimo_plugin.contracts.vllm_media import ENCODER_CACHE
from mimo_plugin.engines.vllm import ec_switch, media_switch
from mimo_plugin.engines.vllm.version import installed_vllm, require_supported
from mimo_plugin.errors import (
    ContractError,
    FeatureUnavailable,
    MimoError,
    VersionError,
    one_line,
    setting_error,
)

LOGGER_NAME = "vllm.mimo_plugin"
"""vLLM configures the loggers under its own name; others' INFO lines are dropped."""

logger = logging.getLogger(LOGGER_NAME)

SCHEDULER_FACTORY = "mimo_plugin.engines.vllm.scheduler.make_scheduler"
WORKER_PREFIX = "mimo_plugin.engines.vllm.worker."

# feature -> module with `why_not(vllm_config) -> str | None`: why the feature doesn't fit; perhaps
# `unused(vllm_config) -> bool`: nothing here asks for it, so leaving it out is no news.
_FIT_MODULES = {
    "kv": "mimo_plugin.engines.vllm.kv.fit",
    "scheduler": "mimo_plugin.engines.vllm.sched.fit",
    "mtp": "mimo_plugin.engines.vllm.mtp.fit",
    "vision": "mimo_plugin.engines.vllm.vision.fit",
    "video": "mimo_plugin.engines.vllm.video.fit",
    "tiers": "mimo_plugin.engines.vllm.tiers.fit",
    "dp_affinity": "mimo_plugin.engines.vllm.dp_affinity.fit",
}
# features that live in the scheduler, or whose counters it hands over
_SCHEDULER_FEATURES = frozenset({"kv", "scheduler", "mtp", "vision", "tiers"})

# (process id, role) that have said what is active; the id makes a forked child start afresh.
_announced: set[tuple[int, str]] = set()


def config_from(vllm_config: Any, *, environ: Mapping[str, str] | None = None) -> MimoConfig | None:
    """The plugin's configuration of this engine, None when it is off.

    Raises:
        ConfigError: the section is invalid.
        FeatureUnavailable: it names a feature that this version does not have.
    """
    section = _section_of(getattr(vllm_config, "additional_config", None))
    return parse_config(section, environ=os.environ if environ is None else environ)


def degraded_reason(vllm_config: Any) -> str | None:
    """Why the plugin, though asked for, was left out of this engine; None when it was not."""
    section = _section_of(getattr(vllm_config, "additional_config", None))
    reason = section.get(DEGRADED_KEY) if isinstance(section, Mapping) else None
    return None if reason is None else str(reason)


def lenient(section: object, environ: Mapping[str, str]) -> bool:
    """Whether a feature that can't run leaves a stock engine instead of stopping start-up."""
    if isinstance(section, Mapping) and isinstance(section.get("_strict"), bool):
        return not section["_strict"]
    return not parse_strict(environ)


def check_section(section: object, environ: Mapping[str, str]) -> None:
    """Refuse a wrong section early, before the model is looked at; lenient leaves it to later.

    Raises:
        ConfigError: unknown key, wrong type, value out of range.
        FeatureUnavailable: a feature that this version does not have was named.
    """
    try:
        parse_config(section, environ=environ)  # type: ignore[arg-type]
    except MimoError:
        if not lenient(section, environ):
            raise


def complete_arguments(engine_args: Any, environ: Mapping[str, str]) -> None:
    """Fill in, before vLLM reads them, the arguments that a feature of ours decides.

    Raises:
        MimoError: a feature that was named can't have what it needs, and start-up is strict.
    """
    section = _section_of(getattr(engine_args, "additional_config", None))
    try:
        config = parse_config(section, environ=environ)
        if config is not None and "mtp" in config.features:
            _mtp_configuration().complete_arguments(engine_args, config)
        if config is not None and "tiers" in config.features:
            _tiers_configuration().complete_arguments(engine_args, config)
    except MimoError:
        if not lenient(section, environ):
            raise


def prepare_parts(engine_args: Any, environ: Mapping[str, str]) -> None:
    """Find the connectors of ours that are named without the section: for media, for embeddings.

    Raises:
        ContractError: this vLLM lacks what one of them relies on.
    """
    media_switch.register_named(environ, first_problem)
    if ec_switch.is_ours(getattr(engine_args, "ec_transfer_config", None)):
        problem = first_problem(ENCODER_CACHE)
        if problem is not None:
            raise ContractError(
                f"ec_connector: found {ec_switch.CONNECTOR!r}, but this vLLM lacks what it relies "
                f"on: {problem}; fix: run `mimo doctor`, or use another connector"
            )
        ec_switch.complete(engine_args)


def activate(vllm_config: Any, *, environ: Mapping[str, str] | None = None) -> MimoConfig | None:
    """Switch on what the ``mimo`` section of ``vllm_config`` asks for.

    Changes ``vllm_config`` in place; leaves it alone when there is no section.

    Returns:
        The active configuration; None when the plugin is off, fits nothing, or was given up.

    Raises:
        MimoError: something asked for can't run, and start-up is strict.
    """
    environ = os.environ if environ is None else environ
    section = _section_of(getattr(vllm_config, "additional_config", None))
    if section is None:
        return None
    try:
        config = _activate(vllm_config, environ)
    except Exception as error:
        problem = _as_mimo_error(error)
        if not lenient(section, environ):
            if problem is error:
                raise
            raise problem from error
        logger.error("mimo-plugin is OFF for this engine (MIMO_STRICT=0): %s", problem)
        _give_up(vllm_config, str(problem))
        return None
    return config


def _activate(vllm_config: Any, environ: Mapping[str, str]) -> MimoConfig | None:
    config = config_from(vllm_config, environ=environ)
    if config is None:
        return None
    engine = require_supported()
    wanted = config.features
    if "vision" in wanted:
        wanted += media_switch.contracts_of(config.vision.decode)
    problems = _contract_problems(wanted)
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise ContractError(
            f"{engine.label} lacks what features {', '.join(wanted)} rely on: "
            f"{one_line(problems[0])}{more}; fix: run `mimo doctor`, use an unmodified release"
        )
    features = _fitting(vllm_config, config)
    if not features:
        _give_up(vllm_config, "no feature fits this model")
        return None
    config = replace(
        config,
        features=features,
        plugin_version=__version__,
        engine_label=engine.label,
        contracts="ok",
    )
    # Everything that can fail comes before the first change of the configuration.
    worker_cls = _worker_path(vllm_config)
    if _SCHEDULER_FEATURES.intersection(features):
        user_cls = _user_scheduler_path(vllm_config)
        _require_module(SCHEDULER_FACTORY.rpartition(".")[0])
        config = replace(config, user_scheduler_cls=user_cls or config.user_scheduler_cls)
        vllm_config.scheduler_config.scheduler_cls = SCHEDULER_FACTORY
    if worker_cls is not None:
        vllm_config.parallel_config.worker_cls = worker_cls
    if "mtp" in features:
        _mtp_configuration().configure(vllm_config)
    if "vision" in features:
        _vision_configuration().configure(vllm_config, config)
        media_switch.switch_on(vllm_config, config.vision, environ, first_problem)
    if "video" in features:
        _video_configuration().configure(vllm_config, config)
    if "dp_affinity" in features:
        _dp_affinity_hook().install()
    _write_section(vllm_config, config.to_dict())
    _install_metrics()
    log_active("API", config)
    return config


def _give_up(vllm_config: Any, reason: str) -> None:
    """Leave the engine stock; the other processes and the metrics see that it was asked for."""
    _write_section(vllm_config, {DEGRADED_KEY: reason})
    try:
        _install_metrics()
    except Exception as error:  # the very fault may be there: a stock engine matters more
        logger.error("mimo-plugin: no metric mimo:degraded here: %s", one_line(error))


def _as_mimo_error(error: Exception) -> MimoError:
    if isinstance(error, MimoError):
        return error
    return FeatureUnavailable(
        f"the plugin failed while it was switched on: {type(error).__name__}: {one_line(error)}; "
        "fix: run `mimo doctor`"
    )


@lru_cache(maxsize=8)
def _contract_problems(features: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(check_vllm(features=features))


def first_problem(tag: str) -> str | None:
    """The first broken contract of a feature or part, in one line; None when all hold."""
    return next((one_line(problem) for problem in _contract_problems((tag,))), None)


def _fitting(vllm_config: Any, config: MimoConfig) -> tuple[str, ...]:
    """The features that fit this model; one that was named and doesn't fit is an error."""
    features = []
    for name in config.features:
        fit = importlib.import_module(_FIT_MODULES[name])
        if name not in config.named and hasattr(fit, "unused") and fit.unused(vllm_config):
            continue
        reason = fit.why_not(vllm_config)
        if reason is None:
            features.append(name)
        else:
            leave_out(config, name, reason)
    return tuple(features)


def leave_out(config: MimoConfig, name: str, reason: object) -> None:
    """Say that a feature doesn't fit.

    Raises:
        FeatureUnavailable: the user named it.
    """
    if name in config.named:
        raise FeatureUnavailable(f"feature {name!r} can't run here: {one_line(reason)}")
    logger.warning("mimo-plugin leaves out feature %r: %s", name, one_line(reason))


def _mtp_configuration() -> Any:
    from mimo_plugin.engines.vllm.mtp import configure

    return configure


def _vision_configuration() -> Any:
    from mimo_plugin.engines.vllm.vision import configure

    return configure


def _video_configuration() -> Any:
    from mimo_plugin.engines.vllm.video import configure

    return configure


def _tiers_configuration() -> Any:
    from mimo_plugin.engines.vllm.tiers import configure

    return configure


def _dp_affinity_hook() -> Any:
    from mimo_plugin.engines.vllm.dp_affinity import hook

    return hook


def _require_module(name: str) -> None:
    if importlib.util.find_spec(name) is None:
        raise FeatureUnavailable(f"module {name} is missing; fix: reinstall mimo-plugin")


def _write_section(vllm_config: Any, section: dict[str, Any]) -> None:
    vllm_config.additional_config = {**vllm_config.additional_config, SECTION: section}


def _install_metrics() -> None:
    from mimo_plugin.engines.vllm import metrics

    metrics.install()


def _user_scheduler_path(vllm_config: Any) -> str | None:
    """Dotted path of the scheduler the user chose, None for vLLM's own choice."""
    chosen = vllm_config.scheduler_config.scheduler_cls
    if chosen is None or chosen == SCHEDULER_FACTORY:
        return None
    if isinstance(chosen, str):
        return chosen
    module, name = chosen.__module__, chosen.__qualname__
    if module == "__main__" or "." in name:
        raise setting_error(
            "scheduler_cls",
            chosen,
            "a dotted path, or a class at the top of an importable module",
            "move the class to a module and pass its dotted path",
        )
    return f"{module}.{name}"


def _worker_path(vllm_config: Any) -> str | None:
    """The worker class behind ours, None when there is none that could be named."""
    chosen = vllm_config.parallel_config.worker_cls
    if not isinstance(chosen, str) or chosen == "auto" or chosen.startswith(WORKER_PREFIX):
        return None
    return WORKER_PREFIX + chosen.replace(".", ":")


# --- the other processes --------------------------------------------------------------------


def activate_worker(vllm_config: Any, rank: int) -> MimoConfig | None:
    """Check and announce, in a worker process, what the configuration says.

    Raises:
        VersionError: another mimo-plugin is installed here than where the engine was configured.
        ConfigError: the section was damaged on its way.
    """
    config = config_from(vllm_config)
    if config is None:
        return None
    if config.plugin_version != __version__:
        raise VersionError(
            f"mimo-plugin: found {__version__} in worker {rank} but {config.plugin_version} where "
            "the engine was configured; allowed: the same on all nodes; fix: install one version"
        )
    if "mtp" in config.features:
        _mtp_configuration().prepare_worker(vllm_config)
    if "vision" in config.features:
        _vision_configuration().prepare_worker(vllm_config, rank)
    # With the executor "uni" the worker is an object in the engine core's process, which speaks.
    if getattr(vllm_config.parallel_config, "distributed_executor_backend", None) != "uni":
        log_active(f"Worker{rank}", config)
    return config


def log_active(process: str, config: MimoConfig) -> None:
    """Say once per process and role what is active; in an INFO line.

    Args:
        process: role of this process, e.g. ``EngineCore``.
        config: what this process runs with.
    """
    key = (os.getpid(), process)
    if key in _announced:
        return
    _announced.add(key)
    logger.info(
        "mimo-plugin %s | %s | process=%s | features=%s | contracts %s",
        __version__,
        config.engine_label or installed_vllm().label,
        process,
        ",".join(config.features),
        config.contracts or "not checked",
    )
