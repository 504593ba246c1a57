# SPDX-License-Identifier: Apache-2.0
"""The router's page says what the router has: options, defaults, metrics, reasons, headers."""

from __future__ import annotations

import re
from typing import Any

from mimo_plugin.core.residency import BYTES_PER_BLOCK
from mimo_plugin.router.settings import WorkerSpec, parse_worker
from tests.test_docs import ROOT, page, subparsers, table

PAGE = page("how-it-works-router.md")
ROUTER = ROOT / "mimo_plugin" / "router"


def options() -> dict[str, Any]:
    return {
        option: action
        for action in subparsers()["router"]._actions
        for option in action.option_strings
        if option.startswith("--") and option != "--help"
    }


def test_the_table_has_all_options_and_their_defaults() -> None:
    known, listed = options(), []
    for names, defaults, _ in table(PAGE, "options"):
        names = re.findall(r"--[\w-]+", names)
        listed += names
        stated = [word.strip().strip("`") for word in defaults.split(",")]
        for name, value in zip(
            names, stated * (len(names) if len(stated) == 1 else 1), strict=True
        ):
            default = known[name].default
            if isinstance(default, bool) or default in (None, []):
                assert value in ("", "off", "measured", "as workers say", "the model's"), name
            else:
                assert value == (f"{default:g}" if isinstance(default, float) else str(default)), (
                    name
                )
    assert sorted(listed) == sorted(known)


def test_options_in_the_text_exist() -> None:
    ours = set(options())
    others = {
        "--enable-prompt-tokens-details",
        "--kv-events-config",
        "--enable-scale-out",
        "--traces",
    }
    for block in re.findall(r"^mimo router.*$", PAGE, re.MULTILINE):
        assert set(re.findall(r"--[\w-]+", block)) <= ours, block
    assert set(re.findall(r"`(--[\w-]+)", PAGE)) <= ours | others


def test_workers_keys_are_those_that_are_read() -> None:
    (row,) = [row for row in table(PAGE, "options") if row[0] == "`--worker`"]
    keys = re.findall(r"`(\w+)`", row[2])
    assert sorted(keys) == sorted(name for name in WorkerSpec.__dataclass_fields__ if name != "url")
    assert parse_worker("http://10.0.0.3:8001,role=prefill").role == "prefill"


def metric_names() -> set[str]:
    """Of the counters, and of the gauges that an app yields; read from the source's literals."""
    text = (ROUTER / "metrics.py").read_text()
    found = {
        f"mimo_router:{name}" + ("_total" if kind == "counter" else "")
        for kind, name in re.findall(r'self\._(counter|histogram)\(\s*"(\w+)"', text)
    }
    found.add("mimo_router:cpu_seconds_total")
    for file in sorted(ROUTER.glob("*.py")):
        for name in re.findall(r'yield \(\s*"(\w+)",', file.read_text()):
            found.add(f"mimo_router:{name}")
    keys = re.search(r"for key in \(([^)]*)\):\s*yield", (ROUTER / "app.py").read_text())
    assert keys
    return found | {f"mimo_router:events_{key}" for key in re.findall(r'"(\w+)"', keys[1])}


def test_metrics_exist() -> None:
    known = metric_names()
    assert "mimo_router:requests_total" in known and "mimo_router:in_flight" in known
    for name in re.findall(r"\bmimo_router:\w+", PAGE):
        assert name in known, name


def test_answers_headers_and_reasons() -> None:
    source = (ROUTER / "proxy.py").read_text()
    for header in re.findall(r"`(X-Mimo-[\w-]+)`", PAGE):
        assert f'"{header}"' in source, header
    targets = (ROOT / "mimo_plugin" / "core" / "targets.py").read_text()
    stated = re.search(r"`X-Mimo-Reason` \(([^)]*)\)", PAGE)
    assert stated
    for reason in re.findall(r"`(\w+)`", stated[1]):
        assert f"``{reason}``" in targets, reason


def test_routes_of_the_text_are_served() -> None:
    source = (ROUTER / "app.py").read_text()
    for method, path in re.findall(r"curl -X (\w+) '?localhost:8080(/[\w/]+)", PAGE):
        assert f'("{method}", "{path}")' in source, (method, path)
    for path in re.findall(r"`GET (/\w+)`", PAGE):
        assert f'("GET", "{path}")' in source, path


def test_numbers_that_are_quoted() -> None:
    routing = (ROOT / "mimo_plugin" / "core" / "routing.py").read_text()
    assert "spread: float = 1.25" in routing and "1.25 times its share" in PAGE
    assert "encode_s: float = 0.2" in routing and "0.2 s for each image" in PAGE
    assert f"{BYTES_PER_BLOCK:,}" in PAGE
