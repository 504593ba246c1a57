# SPDX-License-Identifier: Apache-2.0
"""What the router is told: its options, and the workers that it starts with.

Every value is checked here, before anything is opened; a bad one is a
:class:`~mimo_plugin.errors.ConfigError` of one line.
"""

from __future__ import annotations

import ipaddress
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from mimo_plugin.errors import ConfigError, nearest, one_line, setting_error

ENGINES = ("vllm", "sglang")
ROLES = ("both", "prefill", "decode")
TOKENIZERS = ("local", "render", "none")
LOG_LEVELS = ("debug", "info", "warning", "error")
MAX_RANKS = 1024
_EVENT_SCHEMES = ("tcp://", "ipc://")


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """One worker, as it was named.

    Attributes:
        url: ``http://host:port``, without a slash at the end; its name everywhere.
        role: one of ``ROLES``: what is asked of it.
        events: ZMQ address that rank 0 publishes KV events at; the others follow, one port each.
            None: what the worker itself says.
        replay: the same for lost events.
        ranks: data-parallel ranks that are targets of their own; None: what the worker says.
        engine: ``vllm`` or ``sglang``; None: found out.
    """

    url: str
    role: str = "both"
    events: str | None = None
    replay: str | None = None
    ranks: int | None = None
    engine: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Options of ``mimo router``.

    Attributes:
        model: directory with the model's ``config.json`` and tokenizer.
        workers: known at the start; more can be added at run time.
        host, port: where it listens; port 0 takes a free one.
        state: ``memory`` or ``redis://…``.
        tokenizer: ``local`` (here), ``render`` (a worker's render endpoint), ``none`` (load alone).
        chat_template: file with the workers' chat template; None: the model's.
        trust_remote_code: of the tokenizer.
        admin_key: asked for by what changes or tells things; None: only this machine may.
        worker_key: sent to workers with the router's own questions (their ``--api-key``).
        max_body_bytes: of a request.
        max_buffered_bytes: of all bodies that are held at once.
        max_header_bytes: of one header line.
        max_headers: of a request.
        max_connections, max_in_flight: at once.
        header_timeout_s, body_timeout_s: for a request's header and body to come in whole.
        connect_timeout_s: to a worker.
        read_timeout_s: longest silence of a worker within an answer.
        retries: of a request that no worker has begun to answer.
        health_interval_s: between two looks at a worker.
        grace_s: for streams to end after SIGTERM.
        queue_weight: of the queue, in the cost (:mod:`mimo_plugin.core.routing`).
        tokens_per_s: equivalent tokens that a worker prefills; None: measured as it goes.
        hash_block_tokens: of a prompt's hashes; None: what the workers say.
        log_level: one of ``LOG_LEVELS``.
    """

    model: str
    workers: tuple[WorkerSpec, ...] = ()
    host: str = "127.0.0.1"
    port: int = 8080
    state: str = "memory"
    tokenizer: str = "local"
    chat_template: str | None = None
    trust_remote_code: bool = False
    admin_key: str | None = None
    worker_key: str | None = None
    max_body_bytes: int = 32 << 20
    max_buffered_bytes: int = 2 << 30
    max_header_bytes: int = 16 << 10
    max_headers: int = 128
    max_connections: int = 4096
    max_in_flight: int = 2048
    header_timeout_s: float = 10.0
    body_timeout_s: float = 60.0
    connect_timeout_s: float = 5.0
    read_timeout_s: float = 600.0
    retries: int = 2
    health_interval_s: float = 2.0
    grace_s: float = 30.0
    queue_weight: float = 2.0
    tokens_per_s: float | None = None
    hash_block_tokens: int | None = None
    log_level: str = "info"

    def __post_init__(self) -> None:
        for name, (low, high) in _BOUNDS.items():
            check_number(option(name), getattr(self, name), low, high)
        check_choice("--tokenizer", self.tokenizer, TOKENIZERS)
        check_choice("--log-level", self.log_level, LOG_LEVELS)
        if self.state != "memory" and not self.state.startswith(
            ("redis://", "rediss://", "unix://")
        ):
            raise setting_error(
                "--state",
                _without_password(self.state),
                "memory, or an address redis://, rediss:// or unix://",
                "give the address of a Redis server",
            )
        seen: set[str] = set()
        for worker in self.workers:
            if worker.url in seen:
                raise setting_error(
                    "--worker", worker.url, "each address once", "name each worker one time"
                )
            seen.add(worker.url)
        if not self.is_local and self.admin_key is None:
            raise setting_error(
                "--host",
                self.host,
                "an address of this machine alone (127.0.0.1, ::1), or any with --admin-key",
                "set --admin-key: from elsewhere anybody could add and remove workers",
            )

    @property
    def is_local(self) -> bool:
        """It listens where only this machine reaches it."""
        return is_loopback(self.host)


_BOUNDS: Mapping[str, tuple[float, float]] = {
    "port": (0, 65535),
    "max_body_bytes": (1024, 1 << 31),
    "max_buffered_bytes": (1024, 1 << 40),
    "max_header_bytes": (256, 1 << 20),
    "max_headers": (8, 4096),
    "max_connections": (1, 1 << 20),
    "max_in_flight": (1, 1 << 20),
    "header_timeout_s": (0.05, 600),
    "body_timeout_s": (0.05, 3600),
    "connect_timeout_s": (0.05, 600),
    "read_timeout_s": (0.05, 86_400),
    "retries": (0, 16),
    "health_interval_s": (0.05, 600),
    "grace_s": (0, 3600),
    "queue_weight": (0, 1000),
    "tokens_per_s": (1, 1e9),
    "hash_block_tokens": (1, 65_536),
}


_MIB_OPTIONS = {
    "max_body_bytes": "--max-body-mib",
    "max_buffered_bytes": "--max-buffered-mib",
}


def option(field: str) -> str:
    """The option that sets a field."""
    name = _MIB_OPTIONS.get(field, "--" + field.replace("_", "-"))
    return name.removesuffix("-s") if field.endswith("_s") and field != "tokens_per_s" else name


def is_loopback(host: str) -> bool:
    """Whether a name or address is of this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]").partition("%")[0]).is_loopback
    except ValueError:
        return False


def check_number(setting: str, value: float | None, low: float, high: float) -> None:
    """Refuse a number out of bounds; None is no number and no fault."""
    if value is None or (math.isfinite(value) and low <= value <= high):
        return
    if setting in _MIB_OPTIONS.values():
        value, low, high = value / 2**20, low / 2**20, high / 2**20
    raise setting_error(setting, value, f"{low:g} to {high:g}", "choose a value in that range")


def bytes_of(field: str, mib: float) -> int:
    """Bytes of an option in MiB.

    Raises:
        ConfigError: it is out of bounds.
    """
    check_number(_MIB_OPTIONS[field], mib * 2**20, *_BOUNDS[field])
    return int(mib * 2**20)


def check_choice(setting: str, value: str, allowed: Sequence[str]) -> None:
    """Refuse a word that is none of the known ones."""
    if value not in allowed:
        close = nearest(value, allowed)
        raise setting_error(
            setting, value, ", ".join(allowed), f"use {close or allowed[0]}, or another of these"
        )


# Workers


def worker_url(text: str, setting: str = "--worker") -> str:
    """The address of a worker, in the one form that is its name."""
    fix = "write http://HOST:PORT"
    try:
        parts = urlsplit(text.strip())
        host, port = parts.hostname, parts.port
    except ValueError:
        raise setting_error(setting, text, "an address http://HOST:PORT", fix) from None
    plain = not (parts.query or parts.fragment or parts.username or parts.password)
    if parts.scheme not in ("http", "https") or not host or not plain:
        raise setting_error(
            setting, _without_password(text), "an address http://HOST:PORT without a user", fix
        )
    if any(ord(char) <= 32 or ord(char) == 127 for char in parts.path + host):
        raise setting_error(setting, text, "an address without spaces", fix)
    if port is None:
        port = 443 if parts.scheme == "https" else 80
    shown = f"[{host}]" if ":" in host else host
    return f"{parts.scheme}://{shown}:{port}{parts.path.rstrip('/')}"


def parse_worker(text: str) -> WorkerSpec:
    """``URL[,key=value…]``, as ``--worker`` takes it."""
    url, *pairs = text.split(",")
    values: dict[str, Any] = {"url": url}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not value:
            raise setting_error(
                "--worker", pair, "key=value after the address", f"write {key.strip()}=VALUE"
            )
        if key.strip() in values:
            raise setting_error("--worker", pair, "each key once", "remove one of them")
        values[key.strip()] = value.strip()
    return worker_of(values, "--worker")


def worker_of(values: Mapping[str, Any], setting: str) -> WorkerSpec:
    """A worker from a mapping: an option, a file's entry or a request's body.

    Args:
        values: ``url`` and any other field of :class:`WorkerSpec`.
        setting: what to call it in errors.
    """
    known = [field.name for field in fields(WorkerSpec)]
    for key in values:
        if key not in known:
            close = nearest(str(key), known)
            fix = f"use {close}" if close else "remove it"
            raise setting_error(f"{setting}: key", key, ", ".join(known), fix)
    url = values.get("url")
    if not isinstance(url, str):
        raise setting_error(f"{setting}: url", url, "an address http://HOST:PORT", "name it")
    role, engine = values.get("role", "both"), values.get("engine")
    if not isinstance(role, str) or role not in ROLES:
        raise setting_error(f"{setting}: role", role, ", ".join(ROLES), "use one of these")
    if engine is not None and engine not in ENGINES:
        raise setting_error(
            f"{setting}: engine", engine, ", ".join(ENGINES), "use one of these, or leave it out"
        )
    for key in ("events", "replay"):
        value = values.get(key)
        if value is None:
            continue
        if not isinstance(value, str) or not value.startswith(_EVENT_SCHEMES):
            raise setting_error(
                f"{setting}: {key}", value, "an address tcp://HOST:PORT or ipc://PATH", "write one"
            )
        if value.startswith("tcp://") and not _has_port(value):
            raise setting_error(
                f"{setting}: {key}", value, "tcp://HOST:PORT with the worker's host", "name both"
            )
    return WorkerSpec(
        worker_url(url, setting),
        role,
        values.get("events"),
        values.get("replay"),
        _ranks(values.get("ranks"), setting),
        engine,
    )


def settings_text(spec: WorkerSpec) -> dict[str, str]:
    """A worker's settings but its address, as texts; :func:`worker_of` takes them."""
    values = {"role": spec.role, "events": spec.events, "replay": spec.replay}
    values |= {"ranks": None if spec.ranks is None else str(spec.ranks), "engine": spec.engine}
    return {key: value for key, value in values.items() if value is not None}


def _ranks(value: Any, setting: str) -> int | None:
    if value is None:
        return None
    try:
        ranks = int(value) if not isinstance(value, (bool, float)) else -1
    except (TypeError, ValueError):
        ranks = -1
    if not 1 <= ranks <= MAX_RANKS:
        raise setting_error(
            f"{setting}: ranks", value, f"1 to {MAX_RANKS}", "give the worker's data-parallel size"
        )
    return ranks


def _has_port(address: str) -> bool:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return bool(host) and host != "*" and port.isdigit() and 0 < int(port) < 65536


def rank_address(address: str, rank: int) -> str:
    """Where a data-parallel rank publishes, given where rank 0 does: engines count ports up."""
    if not rank or not address.startswith("tcp://"):
        return address if not rank else f"{address}_dp{rank}"
    host, _, port = address.rpartition(":")
    return f"{host}:{int(port) + rank}"


def read_workers(path: str) -> tuple[WorkerSpec, ...]:
    """Workers of a file: a list, or an object with a list ``workers``, in JSON or YAML.

    Raises:
        ConfigError: it can't be read, or an entry is wrong.
    """
    file = Path(path).expanduser()
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise setting_error(
            "--workers-file", path, "a readable JSON or YAML file", one_line(error)
        ) from None
    data = _parsed(text, path)
    entries = data.get("workers") if isinstance(data, dict) else data
    if not isinstance(entries, list):
        raise setting_error(
            "--workers-file", path, "a list of workers", "see `mimo router --help` for an example"
        )
    found = []
    for number, entry in enumerate(entries):
        where = f"--workers-file: workers[{number}]"
        if isinstance(entry, str):
            entry = {"url": entry}
        if not isinstance(entry, dict):
            raise setting_error(where, entry, "an address, or an object with url", "write one")
        found.append(worker_of(entry, where))
    return tuple(found)


def _parsed(text: str, path: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        if path.endswith(".json"):
            raise setting_error(
                "--workers-file", path, "valid JSON", one_line(f"repair it: {error}")
            ) from None
    try:
        import yaml  # type: ignore[import-untyped]
    except ImportError:
        raise setting_error(
            "--workers-file", path, "JSON, where PyYAML is not installed", "install PyYAML"
        ) from None
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise setting_error(
            "--workers-file", path, "valid YAML", one_line(f"repair it: {error}")
        ) from None


def read_key(setting: str, value: str | None) -> str | None:
    """A key, or what is in the file that ``@PATH`` names: a command line is seen by everybody.

    Raises:
        ConfigError: the file can't be read, or the key is empty or not plain ASCII.
    """
    if value is None:
        return None
    key = value
    if value.startswith("@"):
        try:
            key = Path(value[1:]).expanduser().read_text(encoding="utf-8").strip()
        except (OSError, ValueError) as error:
            raise setting_error(
                setting, value, "@ and a file that can be read", one_line(error)
            ) from None
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(
            f"{setting}: found a key of {len(key)} characters; allowed: printable ASCII without "
            "spaces; fix: choose another key"
        )
    return key


def _without_password(text: str) -> str:
    """An address that can be shown."""
    head, at, tail = text.rpartition("@")
    if not at:
        return text
    scheme, slashes, _ = head.partition("://")
    return f"{scheme}{slashes}…@{tail}" if slashes else f"…@{tail}"


def shown_state(state: str) -> str:
    """Where state is kept, without a password."""
    return _without_password(state)


def all_workers(named: Iterable[str], file: str | None) -> tuple[WorkerSpec, ...]:
    """Workers of the options ``--worker`` and ``--workers-file`` together."""
    return (*map(parse_worker, named), *(read_workers(file) if file else ()))
