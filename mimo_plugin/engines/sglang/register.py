# SPDX-License-Identifier: Apache-2.0
"""Switching features on for one SGLang engine, and saying in each process what is active.

``activate`` runs where the server's arguments are resolved, once, in the process that starts the
others. It writes its decisions into the ``ServerArgs`` record: the radix backend, as a resolution
that names its source, and the validated section, as bookkeeping that the record carries through
pickling. Every process gets the record and passes ``publish`` with it; ``enter_process`` there
prepares what that process needs.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from mimo_plugin import __version__
from mimo_plugin.config import DEGRADED_KEY, MimoConfig, parse_config, parse_strict
from mimo_plugin.contracts import check_sglang
from mimo_plugin.engines.sglang.section import Section
from mimo_plugin.engines.sglang.version import installed_sglang, require_supported
from mimo_plugin.errors import (
    ContractError,
    FeatureUnavailable,
    MimoError,
    VersionError,
    one_line,
    setting_error,
)

ENGINE = "sglang"
LOGGER_NAME = "sglang.mimo_plugin"
CONFIG_ENV = "MIMO_CONFIG"
BACKEND = "mimo"
"""Name of the radix backend."""

POLICY, STOCK_POLICY = "mimo-affinity", "fcfs"
"""Name of the schedule policy, and of the one that SGLang takes by itself."""

STORAGE_FIELDS = ("hicache_storage_backend", "hicache_storage_backend_extra_config")
"""SGLang's arguments for a store below host memory, which the feature ``tiers`` decides."""

RECORD_ATTRIBUTE = "_mimo_plugin"
"""Where a ``ServerArgs`` record carries the section; names with ``_`` are bookkeeping there."""

SCHEDULER_ROLE = "scheduler"

logger = logging.getLogger(LOGGER_NAME)

# feature -> module with `why_not(cfg, model_config) -> str | None`: why the feature doesn't fit,
# and `require(cfg, model_config, config)`, which raises ConfigError for an option of the user's
# that contradicts the feature; some have `unused(cfg, model_config)`: leave it out silently where
# it wasn't named, and `why_not_settings(cfg, model_config, config)`
_FIT_MODULES = {
    "kv": "mimo_plugin.engines.sglang.kv.fit",
    "scheduler": "mimo_plugin.engines.sglang.sched.fit",
    "tiers": "mimo_plugin.engines.sglang.storage.fit",
    "vision": "mimo_plugin.engines.sglang.vision.fit",
}

# (process id, role) that have said what is active; the id makes a forked child start afresh.
_announced: set[tuple[int, str]] = set()


def section_from_environment(environ: Mapping[str, str]) -> dict[str, Any] | None:
    """The section in ``MIMO_CONFIG``: a JSON object, or the path of a file with one.

    Raises:
        ConfigError: it is neither.
    """
    value = environ.get(CONFIG_ENV, "").strip()
    if not value:
        return None
    allowed = 'a JSON object such as {"features": ["kv"]}, or the path of a file with one'
    text = value
    if not value.startswith(("{", "[", '"')):
        try:
            text = Path(value).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise setting_error(
                CONFIG_ENV, value, allowed, f"the file can't be read: {error}"
            ) from None
    try:
        section = json.loads(text)
    except ValueError as error:
        raise setting_error(CONFIG_ENV, value, allowed, f"not valid JSON: {error}") from None
    if not isinstance(section, dict):
        raise setting_error(CONFIG_ENV, section, allowed, "write it as a JSON object")
    return section


def section_of(server_args: Any, environ: Mapping[str, str]) -> dict[str, Any] | None:
    """What this engine was asked for: by ``--plugin``, ``MIMO_CONFIG``, or by the names of the
    radix backend and the schedule policy.

    Raises:
        ConfigError: ``MIMO_CONFIG`` can't be read.
    """
    section: dict[str, Any] | None = getattr(server_args, RECORD_ATTRIBUTE, None)
    if section is not None:
        return section
    section = section_from_environment(environ)
    if section is None:
        chosen = {
            "kv": getattr(server_args, "radix_cache_backend", None) == BACKEND,
            "scheduler": getattr(server_args, "schedule_policy", None) == POLICY,
        }
        names = [name for name, is_chosen in chosen.items() if is_chosen]
        section = {"features": names} if names else None
    return section


def degraded_reason(server_args: Any) -> str | None:
    """Why the plugin, though asked for, was left out of this engine; None when it was not."""
    section = getattr(server_args, RECORD_ATTRIBUTE, None)
    reason = section.get(DEGRADED_KEY) if isinstance(section, Mapping) else None
    return None if reason is None else str(reason)


def parse(section: Mapping[str, Any] | None, environ: Mapping[str, str]) -> MimoConfig | None:
    """``parse_config`` with SGLang's features."""
    return parse_config(section, environ=environ, engine=ENGINE)


def decide_early(server_args: Any, environ: Mapping[str, str]) -> None:
    """Check the section, and decide what SGLang's own checks and choices depend on.

    Runs before SGLang resolves anything. What the user has set is left, for ``activate`` to refuse.

    Raises:
        ConfigError: a setting is wrong.
        FeatureUnavailable: a feature was named that there is not.
    """
    config = parse(section_of(server_args, environ), environ)
    if config is not None and "tiers" in config.features:
        from mimo_plugin.engines.sglang.storage.arguments import backend_arguments

        for name, value in backend_arguments(config.tiers).items():
            if getattr(server_args, name) is None:
                _resolve(server_args, **{name: value})


def activate(server_args: Any, environ: Mapping[str, str]) -> MimoConfig | None:
    """Switch on what ``server_args``, just resolved, asks for.

    Returns:
        The active configuration; None when the plugin is off, or was given up.

    Raises:
        MimoError: something asked for can't run, and start-up is strict.
    """
    try:
        section = section_of(server_args, environ)
        if section is None:
            return None
        return _activate(server_args, section, environ)
    except Exception as error:
        problem = _as_mimo_error(error)
        if parse_strict(environ):
            if problem is error:
                raise
            raise problem from error
        give_up(server_args, str(problem))
        return None


def give_up(server_args: Any, reason: str) -> None:
    """Leave the engine stock (``MIMO_STRICT=0``), and say so in the log and in the record."""
    logger.error("mimo-plugin is OFF for this engine (MIMO_STRICT=0): %s", reason)
    view = resolved(server_args)
    if view.radix_cache_backend == BACKEND:
        _resolve(server_args, radix_cache_backend=None)
    if view.schedule_policy == POLICY:
        _resolve(server_args, schedule_policy=STOCK_POLICY)
    given = {name: getattr(server_args, name, None) for name in STORAGE_FIELDS}
    if any(getattr(view, name, None) != value for name, value in given.items()):
        _resolve(server_args, **given)
    setattr(server_args, RECORD_ATTRIBUTE, Section({DEGRADED_KEY: reason}))


def _activate(
    server_args: Any, section: Mapping[str, Any], environ: Mapping[str, str]
) -> MimoConfig | None:
    config = parse(section, environ)
    if config is None:
        return None
    engine = require_supported()
    problems = _contract_problems(config.features)
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise ContractError(
            f"{engine.label} lacks what features {', '.join(config.features)} rely on: "
            f"{one_line(problems[0])}{more}; fix: run `mimo doctor`, use an unmodified release"
        )
    features = _fitting(server_args, config)
    if not features:
        reason = "no feature fits this model"
        setattr(server_args, RECORD_ATTRIBUTE, Section({DEGRADED_KEY: reason}))
        return None
    config = replace(
        config,
        features=features,
        plugin_version=__version__,
        engine_label=engine.label,
        contracts="ok",
    )
    if "kv" in features:
        _resolve(server_args, radix_cache_backend=BACKEND)
    if "scheduler" in features:
        _resolve(server_args, schedule_policy=POLICY)
    setattr(server_args, RECORD_ATTRIBUTE, Section(config.to_dict()))
    return config


def _as_mimo_error(error: Exception) -> MimoError:
    if isinstance(error, MimoError):
        return error
    return FeatureUnavailable(
        f"the plugin failed while it was switched on: {type(error).__name__}: {one_line(error)}; "
        "fix: run `mimo doctor`"
    )


@lru_cache(maxsize=8)
def _contract_problems(features: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(check_sglang(features=features))


def _fitting(server_args: Any, config: MimoConfig) -> tuple[str, ...]:
    """The features that fit this model; one that was named and doesn't fit is an error."""
    from sglang.srt.arg_groups.model_override_base import model_config_of

    cfg, model_config = resolved(server_args), model_config_of(server_args)
    features = []
    for name in config.features:
        fit: Any = importlib.import_module(_FIT_MODULES[name])
        silently = name not in config.named and hasattr(fit, "unused")
        if silently and fit.unused(cfg, model_config):
            continue
        fit.require(cfg, model_config, config)
        reason = fit.why_not(cfg, model_config)
        if reason is None and hasattr(fit, "why_not_settings"):
            reason = fit.why_not_settings(cfg, model_config, config)
        if reason is None:
            features.append(name)
        elif name in config.named:
            raise FeatureUnavailable(f"feature {name!r} can't run here: {one_line(reason)}")
        else:
            logger.warning("mimo-plugin leaves out feature %r: %s", name, one_line(reason))
    return tuple(features)


def resolved(server_args: Any) -> Any:
    """The resolved values of a record."""
    from sglang.srt.arg_groups.model_override_base import resolving_view

    return resolving_view(server_args)


def _resolve(server_args: Any, **fields: Any) -> None:
    """Decide fields of the record; the user's input in it stays as it is."""
    from sglang.srt.arg_groups.overrides import declare_resolution

    declare_resolution(server_args, "mimo-plugin", **fields)


# --- every process --------------------------------------------------------------------------


def enter_process(server_args: Any, role: str) -> MimoConfig | None:
    """Prepare this process, which has just published ``server_args``, for its role.

    Raises:
        VersionError: another mimo-plugin is installed here than where the engine was configured.
        ConfigError: the section was damaged on its way.
        FeatureUnavailable: the arguments were resolved without the plugin.
    """
    section = getattr(server_args, RECORD_ATTRIBUTE, None)
    if section is None and section_of(server_args, os.environ) is not None:
        _resolved_without_us(role)
        return None
    config = parse(section, os.environ)
    if config is None:
        if role == SCHEDULER_ROLE and degraded_reason(server_args) is not None:
            from mimo_plugin.engines.sglang.degraded import say_degraded

            say_degraded()
        return None
    if role == SCHEDULER_ROLE and "kv" in config.features:
        from mimo_plugin.engines.sglang.kv.backend import register_backend

        register_backend()
    if role == SCHEDULER_ROLE and "tiers" in config.features:
        from mimo_plugin.engines.sglang.storage.install import install_tiers

        install_tiers(config)
    if role == SCHEDULER_ROLE and "scheduler" in config.features:
        from mimo_plugin.engines.sglang.sched.install import install_policy

        install_policy(server_args, config)
    if "vision" in config.features:
        from mimo_plugin.engines.sglang.vision import install as vision

        if role in vision.ROLES:
            vision.install_vision(server_args, config)
    if config.plugin_version != __version__:
        # Always fatal: what the record says was decided by other code than this.
        raise VersionError(
            f"mimo-plugin: found {__version__} in process {role!r} but {config.plugin_version} "
            "where the engine was configured; allowed: the same on all nodes; fix: install one "
            "version"
        )
    if role != SCHEDULER_ROLE:  # its log is set up later: it speaks when its cache is built
        log_active(role, config)
    return config


def _resolved_without_us(role: str) -> None:
    """What was asked for was not switched on: the record was resolved before plugins were loaded.

    Raises:
        FeatureUnavailable: start-up is strict.
    """
    reason = (
        f"process {role!r} has arguments that were resolved before the plugin was loaded; needed: "
        "plugins first; fix: call sglang.srt.plugins.load_plugins() before ServerArgs is resolved, "
        "or start with `sglang serve` or sglang.Engine"
    )
    if parse_strict(os.environ):
        raise FeatureUnavailable(reason)
    logger.error("mimo-plugin is OFF for this engine (MIMO_STRICT=0): %s", reason)


def log_active(role: str, config: MimoConfig) -> None:
    """Say once per process and role what is active; in an INFO line.

    Args:
        role: role of this process, e.g. ``scheduler``.
        config: what this process runs with.
    """
    key = (os.getpid(), role)
    if key in _announced:
        return
    _announced.add(key)
    logger.info(
        "mimo-plugin %s | %s | process=%s | features=%s | contracts %s",
        __version__,
        config.engine_label or installed_sglang().label,
        role,
        ",".join(config.features),
        config.contracts or "not checked",
    )
