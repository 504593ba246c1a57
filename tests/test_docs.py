# SPDX-License-Identifier: Apache-2.0
"""The documentation says what the code says: names, defaults, links, paths, examples."""

import argparse
import ast
import json
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import asdict, fields
from pathlib import Path

import pytest

from mimo_plugin import __version__
from mimo_plugin.cli import main as cli
from mimo_plugin.cli._environment import KNOWN_VARIABLES
from mimo_plugin.cli.patches import ACTIONS
from mimo_plugin.config import (
    CHECKPOINT_CLASSES,
    DpAffinityConfig,
    KvConfig,
    MtpConfig,
    SchedulerConfig,
    TiersConfig,
    VideoConfig,
    VisionConfig,
    parse_config,
    parse_plugin_option,
)
from mimo_plugin.core.affinity import MAX_RATE, MODES
from mimo_plugin.core.candidates import AGEING
from mimo_plugin.core.draft import HYSTERESIS, PROBE_STEPS, UNIFORM_MARGIN
from mimo_plugin.core.geometry import read_geometry
from mimo_plugin.core.pools import plan_pool
from mimo_plugin.core.retention import CLASSES
from mimo_plugin.core.window import GroupGeometry
from mimo_plugin.engines.vllm.version import SUPPORTED_MINORS, SUPPORTED_TEXT
from mimo_plugin.errors import ConfigError
from mimo_plugin.features import FEATURES, available
from mimo_plugin.metrics import (
    ADMISSION_REASONS,
    BLOCK_KINDS,
    CLASS_LABELS,
    DEFERRAL_REASONS,
    MAX_OBSERVATIONS,
    METRICS,
    OUTPUT_BINS,
    TRIM_REASONS,
    WASTE_REASONS,
)
from tests.published_models import MIMO_V2_5, MIMO_V2_5_PRO, MIMO_V2_FLASH
from tools.tiers import TIERS

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
WRITTEN = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(DOCS.glob("*.md")),
]
PAGES = [*WRITTEN, ROOT / "patches" / "README.md"]
FIGURES = ("run", "retention", "sglang_retention", "scheduler", "mtp")
SECTIONS = {
    "kv": KvConfig,
    "scheduler": SchedulerConfig,
    "mtp": MtpConfig,
    "vision": VisionConfig,
    "video": VideoConfig,
    "dp_affinity": DpAffinityConfig,
}
#: and those that are not on unless named
ALL_SECTIONS = {**SECTIONS, "tiers": TiersConfig}
#: read as text: importing them needs the engine
ACCOUNTING = ROOT / "mimo_plugin" / "engines" / "vllm" / "kv" / "accounting.py"
QUEUE = ROOT / "mimo_plugin" / "engines" / "vllm" / "sched" / "queue.py"


def page(name):
    return (DOCS / name).read_text()


def prose(text):
    """``text`` without fenced code."""
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def fenced(text, language):
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def table(text, name):
    """Rows of the table between ``<!-- table:name -->`` and ``<!-- /table -->``."""
    found = re.search(rf"<!-- table:{name} -->\n(.*?)<!-- /table -->", text, re.DOTALL)
    assert found, f"no table {name!r}"
    lines = found[1].strip().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert all(len(row) == len(rows[0]) for row in rows), f"table {name!r} is ragged"
    return rows[2:]


def first_column(text, name):
    return [row[0].strip("`") for row in table(text, name)]


def anchors(text):
    found = set()
    for title in re.findall(r"^#+ (.*)$", prose(text), re.MULTILINE):
        plain = re.sub(r"[^\w\- ]", "", title.lower())
        found.add(plain.replace(" ", "-"))
    return found


# --- names and values -----------------------------------------------------------------------


def test_features_of_the_readme_are_the_table():
    engines = {"vllm": "vLLM", "sglang": "SGLang"}
    rows = table((ROOT / "README.md").read_text(), "features")
    assert [row[0].strip("`") for row in rows] == list(FEATURES)
    for row, feature in zip(rows, FEATURES.values(), strict=True):
        names = ", ".join(engines[name] for name in feature.engines) or "–"
        assert row[1:4] == [feature.title, names, feature.status], feature.name
        if feature.status == "available":
            link = re.fullmatch(r"\[.+\]\((docs/.+\.md)\)", row[4])
            assert link and (ROOT / link[1]).is_file(), feature.name
            assert (ROOT / row[5].strip("`")).exists(), feature.name
        else:
            assert row[4:] == ["–", "–"], feature.name


def test_planned_features_are_said_to_be_planned():
    rows = re.findall(r"^\|.*\|$", page("report-mapping.md"), re.MULTILINE)[2:]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    for _, what, status, _ in cells:
        named = re.match(r"`(\w+)`", what)
        if named and named[1] in FEATURES:
            assert status.split()[0] == FEATURES[named[1]].status, what
        else:
            command = re.match(r"command `mimo (\w+)`", what)
            there = command is not None and command[1] in cli.COMMANDS
            assert status.split()[0] == ("available" if there else "planned"), what


@pytest.mark.parametrize("section", ALL_SECTIONS)
def test_options_are_those_of_the_code(section):
    rows, defaults = table(page("options.md"), section), jsonable(ALL_SECTIONS[section]())
    assert [row[0].strip("`") for row in rows] == list(defaults)
    for row, (name, default) in zip(rows, defaults.items(), strict=True):
        assert len(row) == 6, f"{name}: {len(row)} columns"
        assert json.loads(row[2].strip("`")) == default, name
        assert all(row), f"{name}: an empty cell"


def jsonable(config):
    return json.loads(json.dumps(asdict(config)))


def test_the_whole_section_shows_every_option_with_its_default():
    (example,) = fenced(page("options.md"), "json")
    shown = json.loads(example)["mimo"]
    assert shown.pop("features") == list(SECTIONS)
    assert {name: list(values) for name, values in shown.items()} == {
        name: [field.name for field in fields(config)] for name, config in SECTIONS.items()
    }
    assert shown == {name: jsonable(config()) for name, config in SECTIONS.items()}


def test_settings_of_the_readme_are_the_defaults():
    readme = (ROOT / "README.md").read_text()
    (example,) = re.findall(r"--additional-config '(\{.*?\})'", readme, re.DOTALL)
    for section, shown in json.loads(example)["mimo"].items():
        defaults = jsonable(SECTIONS[section]())
        assert shown == {name: defaults[name] for name in shown}, section


def test_modes_are_those_of_the_code():
    (row,) = [row for row in table(page("options.md"), "scheduler") if row[0] == "`mode`"]
    assert re.findall(r'`"([\w-]+)"`', row[3]) == list(MODES)
    works = page("how-it-works-scheduler.md").partition("### Modes")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `([\w-]+)` \|", works, re.MULTILINE) == ["mode", *MODES]


@pytest.mark.parametrize(
    ("section", "name", "bound", "inside"),
    [
        (section, name, bound, inside)
        for section, options in {
            "kv": {
                "swa_share": ((0, False), (1, False)),
                "ladder_growth": ((0, False), (1, True)),
                "draft_share": ((0, True), (1, True)),
            },
            "scheduler": {
                "age_credit": ((0, True),),
                "long_tokens": ((1, True),),
                "long_growth": ((0, True), (1, True)),
                "hit_weight": ((0, True),),
                "max_wait_s": ((0, False),),
                "lane_share": ((0, False), (1, False)),
                "scan_requests": ((1, True),),
            },
            "mtp": {"layers": ((1, True),), "warn_after_drafts": ((0, True),)},
        }.items()
        for name, pairs in options.items()
        for bound, inside in pairs
    ],
)
def test_stated_bounds_hold(section, name, bound, inside):
    (row,) = [row for row in table(page("options.md"), section) if row[0] == f"`{name}`"]
    least = {(0, True): "≥ 0", (0, False): "> 0", (1, True): "≥ 1"}
    most = {(1, True): "≤ 1", (1, False): "< 1"}
    signs = [sides.get((bound, inside)) for sides in (least, most)]
    assert any(sign and sign in row[3] for sign in signs)
    settings = {section: {name: bound}}
    if inside:
        assert parse_config(settings, environ={})
    else:
        with pytest.raises(ConfigError):
            parse_config(settings, environ={})


@pytest.mark.parametrize("section", ALL_SECTIONS)
def test_an_option_that_nothing_reads_is_said_to_have_no_effect(section):
    apart = {"config.py", "settings.py"}
    sources = [
        path.read_text() for path in (ROOT / "mimo_plugin").rglob("*.py") if path.name not in apart
    ]
    for name, *_, what, _when in table(page("options.md"), section):
        read = any(re.search(rf"\.{name.strip('`')}\b", source) for source in sources)
        assert ("No effect in this version" in what) != read, name


def test_metrics_are_those_of_the_code():
    rows = {row[0].strip("`"): row for row in table(page("metrics.md"), "metrics")}
    assert set(rows) == {f"mimo:{spec.name}" for spec in METRICS}
    for spec in METRICS:
        _, kind, labels, meaning = rows[f"mimo:{spec.name}"]
        assert kind == spec.kind, spec.name
        assert re.findall(r"`(\w+)`", labels) == list(spec.labels), spec.name
        assert meaning, spec.name


def test_every_series_that_is_mentioned_exists():
    series = set()
    for spec in METRICS:
        suffixes = {"counter": ("", "_total"), "gauge": ("",)}
        for suffix in suffixes.get(spec.kind, ("", "_bucket", "_sum", "_count")):
            series.add(f"mimo:{spec.name}{suffix}")
    for path in WRITTEN:
        text = path.read_text()
        mentioned = set(re.findall(r"\bmimo:[a-z][a-z_]+\b", text))
        options = {name for name in mentioned if name.partition(":")[2] in FEATURES}
        assert mentioned - options <= series, path.name


def test_queries_count_with_the_names_that_are_exported():
    counters = {f"mimo:{spec.name}" for spec in METRICS if spec.kind == "counter"}
    for query in fenced(page("metrics.md"), "promql"):
        assert not counters & set(re.findall(r"\bmimo:[a-z_]+\b", query)), query


def test_reasons_kinds_and_classes():
    metrics, works = page("metrics.md"), page("how-it-works-kv.md")
    assert sorted(first_column(metrics, "reasons")) == sorted(TRIM_REASONS)
    assert first_column(works, "classes") == list(CLASSES)
    assert set(CLASSES) == set(CHECKPOINT_CLASSES)
    assert first_column(metrics, "admissions") == list(ADMISSION_REASONS)
    assert first_column(metrics, "deferrals") == list(DEFERRAL_REASONS)
    assert first_column(metrics, "waste") == list(WASTE_REASONS)
    for name in (*CLASS_LABELS, *BLOCK_KINDS, *OUTPUT_BINS):
        assert f"`{name}`" in metrics, name
    assert set(first_column(works, "ranks")) == set(AGEING)


def test_reasons_are_tried_in_the_stated_order():
    (tried,) = [
        node
        for node in ast.walk(ast.parse(ACCOUNTING.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name == "trim_reason"
    ]
    last_return = {
        node.value.id.lower(): node.lineno
        for node in sorted(
            (n for n in ast.walk(tried) if isinstance(n, ast.Return)), key=lambda n: n.lineno
        )
        if isinstance(node.value, ast.Name)
    }
    assert first_column(page("metrics.md"), "reasons") == sorted(last_return, key=last_return.get)


def test_ranks_age_in_the_stated_order():
    speed = {"slowest": 0, "faster": 1, "fastest": 2}
    rows = table(page("how-it-works-kv.md"), "ranks")
    stated = {row[0].strip("`"): speed[row[2]] for row in rows}
    levels = sorted(set(AGEING.values()))
    assert {rank: levels.index(weight) for rank, weight in AGEING.items()} == stated
    weights = {row[0].strip("`"): row[3].partition("^") for row in rows}
    assert {r: int(base) ** int(power or 1) for r, (base, _, power) in weights.items()} == AGEING


def test_numbers_that_are_quoted_from_the_code():
    assert f"{MAX_OBSERVATIONS:,} per series" in page("limits.md")
    (trimmed,) = re.findall(r"^TRIMMED_WARNING = (\d+)$", ACCOUNTING.read_text(), re.MULTILINE)
    assert f"When {trimmed} requests in a row" in page("metrics.md")
    (hits,) = [spec for spec in METRICS if spec.name == "hit_length_tokens"]
    assert (hits.buckets[1], hits.buckets[-1]) == (64, 2**20)
    (passes,) = re.findall(r"^PASSES_PER_RECHECK = (\d+)$", QUEUE.read_text(), re.MULTILINE)
    works, limits = page("how-it-works-scheduler.md"), page("limits.md")
    assert f"every {passes}th scheduling pass" in works and f"every {passes} steps" in limits
    assert f"at most {MAX_RATE:g}\n" in works and f"at most {MAX_RATE:g} times as fast" in limits
    drafts = page("how-it-works-mtp.md")
    assert f"must gain more than {UNIFORM_MARGIN:.0%}".replace("%", " %") in drafts
    assert f"for a gain of more than {HYSTERESIS:.0%}".replace("%", " %") in drafts
    assert f"One step in {PROBE_STEPS} runs" in drafts
    compatibility, pyproject = page("compatibility.md"), (ROOT / "pyproject.toml").read_text()
    assert f"`{SUPPORTED_TEXT}`" in compatibility
    for major, minor in SUPPORTED_MINORS:
        assert f"vLLM {major}.{minor}.0" in compatibility
    minimum = re.search(r'^requires-python = ">=([\d.]+)"$', pyproject, re.MULTILINE)
    assert minimum and f"Python {minimum[1]} or newer" in compatibility
    assert f"## {__version__}" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize(
    ("model", "configs"),
    [("MiMo-V2-Flash, V2.5", (MIMO_V2_FLASH, MIMO_V2_5)), ("MiMo-V2.5-Pro", (MIMO_V2_5_PRO,))],
)
def test_cost_of_draft_layers(model, configs):
    """As the pool is planned; with drafts each SWA group keeps one block more at a checkpoint."""
    works, rows, name = page("how-it-works-mtp.md"), {}, ""
    for row in table(works, "draft-kv"):
        name = row[0] or name
        rows.setdefault(name, []).append(row[1:])
    for config in configs:
        geometry, expected = read_geometry(config), []
        for drafts in (0, 1, 3):
            plan = plan_pool(geometry.with_draft_layers(drafts))
            swa, width = plan.of_kind("swa"), max(group.layers for group in plan.groups)
            layers, ahead = sum(group.layers for group in swa), len(swa) if drafts else 0
            unfilled = f"{(len(swa) * width - layers) / layers:.1%}".replace("%", " %")
            blocks = sum(GroupGeometry(g.block_tokens, g.window_tokens).window_blocks for g in swa)
            expected.append([drafts, len(swa), unfilled, blocks, ahead, blocks + ahead])
            if drafts != 1:
                stated = f"{(blocks + ahead) * plan.block_bytes / 2**20:.1f} MiB"
                assert stated in works
        assert rows[model] == [list(map(str, values)) for values in expected]
        # a group with the draft layers alone: one window and one block ahead
        apart = expected[0][-1] + GroupGeometry(16, geometry.window_tokens).window_blocks + 1
        assert f"{apart} blocks instead of {expected[-1][-1]}" in works or (
            f"{apart} instead of {expected[-1][-1]}" in works
        )


def subparsers():
    (action,) = [
        action
        for action in cli.build_parser()._actions
        if isinstance(action, argparse._SubParsersAction)
    ]
    return action.choices


def test_commands_and_their_options():
    parts = re.split(r"^## `mimo (\w+)`$", page("cli.md"), flags=re.MULTILINE)
    sections = dict(zip(parts[1::2], parts[2::2], strict=True))
    choices = subparsers()
    assert set(sections) == set(cli.COMMANDS) == set(choices)
    for command, text in sections.items():
        listed = re.findall(r"^\| `(--[\w-]+)` \|", text, re.MULTILINE)
        known = {
            option
            for action in choices[command]._actions
            for option in action.option_strings
            if option.startswith("--") and option != "--help"
        }
        assert sorted(listed) == sorted(known), command
    actions = re.findall(r"^\| `(\w+)` \|", sections["patches"], re.MULTILINE)
    assert actions == list(ACTIONS)


def test_every_command_that_is_mentioned_exists():
    for path in WRITTEN:
        for command in re.findall(r"(?:`|^)mimo (\w+)", path.read_text(), re.MULTILINE):
            assert command in cli.COMMANDS, f"{path.name}: mimo {command}"


def test_variables():
    assert first_column(page("options.md"), "variables") == list(KNOWN_VARIABLES)


def test_checks_of_the_doctor():
    checks = set()
    modules = ("_command_check", "_environment", "_plugins", "_tiers_check", "doctor")
    for name in modules:
        tree = ast.parse((ROOT / "mimo_plugin" / "cli" / f"{name}.py").read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "check":
                checks.add(ast.literal_eval(node.value))
            if (
                isinstance(node, ast.Call)
                and ast.unparse(node.func) in ("ok", "note", "problem")
                and isinstance(node.args[0], ast.Constant)
            ):
                checks.add(node.args[0].value)
    assert set(first_column(page("loading.md"), "checks")) == checks


def test_every_patch_is_listed():
    text = page("patches.md")
    for series in (ROOT / "patches").glob("*/series"):
        for line in series.read_text().splitlines():
            name = line.partition("#")[0].strip()
            assert not name or f"`{name}`" in text, name
    for name in re.findall(r"`([\w.-]+\.patch)`", text):
        assert list((ROOT / "patches").glob(f"*/{name}")), name


# --- links, paths, examples -----------------------------------------------------------------


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_resolve(path):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(path.read_text())):
        if re.match(r"[a-z]+:", target):
            assert target.startswith("https://"), target
            continue
        name, _, anchor = target.partition("#")
        file = (path.parent / name).resolve() if name else path
        assert file.exists(), target
        if anchor:
            assert anchor in anchors(file.read_text()), target


def test_every_page_is_in_the_index():
    linked = set(re.findall(r"\]\((\w[\w-]*\.md)\)", page("index.md")))
    assert linked == {path.name for path in DOCS.glob("*.md")} - {"index.md"}
    readme = (ROOT / "README.md").read_text()
    for path in DOCS.glob("*.md"):
        assert f"docs/{path.name}" in readme, path.name


@pytest.mark.parametrize("path", WRITTEN, ids=lambda path: str(path.relative_to(ROOT)))
def test_paths_exist(path):
    top = "mimo_plugin|tests|integration_tests|benchmarks|tools|patches|docs|.ci"
    for name in re.findall(rf"`((?:{top})/[\w./-]*)`", path.read_text()):
        assert (ROOT / name).exists(), name


def test_modules_that_are_named_exist():
    for path in WRITTEN:
        for dotted in re.findall(r"\bmimo_plugin(?:\.\w+)+", path.read_text()):
            parts = dotted.split(".")
            files = [ROOT.joinpath(*parts[:end]) for end in range(len(parts), 1, -1)]
            assert any(f.with_suffix(".py").is_file() or f.is_dir() for f in files), dotted


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([\w-]+):(?!=)", makefile, re.MULTILINE))
    for path in WRITTEN:
        for target in re.findall(r"(?:`|^)make ([\w-]+)", path.read_text(), re.MULTILINE):
            assert target in targets, f"{path.name}: make {target}"


def test_tiers_are_those_of_the_tools():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)
    assert rows == ["lint", *(tier.name for tier in TIERS)]


def json_examples():
    for path in WRITTEN:
        text = path.read_text()
        for block in fenced(text, "json"):
            yield path.name, json.loads(block)
        for block in re.findall(r"--additional-config '(\{.*?\})'", text, re.DOTALL):
            yield path.name, json.loads(block)
        for block in re.findall(r"additional_config=(\{.*?\})\)", text):
            yield path.name, ast.literal_eval(block)


def test_examples_are_accepted():
    examples = list(json_examples())
    assert len(examples) >= 4
    for name, example in examples:
        assert set(example) == {"mimo"}, name
        assert parse_config(example["mimo"], environ={}), name
    for path in WRITTEN:
        for option in re.findall(r"--plugin (mimo(?::\w+(?:,\w+)*)?)", path.read_text()):
            names = set(filter(None, option.partition(":")[2].split(",")))
            parse_plugin_option(option, "vllm" if names <= set(available("vllm")) else "sglang")


def test_the_error_that_is_shown_is_the_real_one():
    with pytest.raises(ConfigError) as caught:
        parse_config({"kv": {"swa_share": 1.5}}, environ={})
    assert f"mimo-plugin: error: {caught.value}\n" in page("options.md")


def test_pictures_are_whole_used_and_described():
    used = set()
    for path in WRITTEN:
        for alt, target in re.findall(r"!\[([^\]]*)\]\(([^)]+\.svg)\)", path.read_text()):
            assert len(alt) > 20, target
            used.add((path.parent / target).resolve())
    pictures = set((DOCS / "img").glob("*.svg"))
    assert used == pictures and pictures
    space = "{http://www.w3.org/2000/svg}"
    for picture in pictures:
        tree = ElementTree.parse(picture).getroot()
        assert tree.tag == f"{space}svg" and tree.get("viewBox")
        assert tree.findtext(f"{space}title") and tree.findtext(f"{space}desc"), picture.name


def test_figures_have_their_places_and_commands():
    text = (ROOT / "README.md").read_text()
    for name in FIGURES:
        assert re.search(rf"<!-- figures:{name} -->\n.*?<!-- /figures -->", text, re.DOTALL), name
    for line in ("make run", "make test", "vllm serve MODEL --plugin mimo", "mimo doctor"):
        assert line in text


@pytest.mark.vllm
@pytest.mark.parametrize(("column", "plugin"), [(2, False), (3, True)], ids=["stock", "plugin"])
def test_the_chat_of_the_guide(column, plugin):
    from mimo_plugin.engines.vllm.kv.settings import KvSettings
    from tests.kv.harness import KvHarness, full, swa

    start = 1
    settings = KvSettings(message_start_token_ids=frozenset({start})) if plugin else None
    kv = KvHarness((full(32), swa(16, 128), swa(16, 128)), 3000, plugin=settings)

    def message(first, count):
        return [start, *range(first, first + count - 1)]

    system, answers = message(1000, 1000), (range(30_000, 30_300), range(31_000, 31_250))
    turn1 = system + message(2000, 200)
    turn2 = [*turn1, *answers[0], *message(4000, 200)]
    turn3 = [*turn2, *answers[1], *message(5000, 200)]
    other = system + message(6000, 200)
    chat = ((turn1, answers[0]), (turn2, answers[1]), (turn3, ()), (other, ()))
    played = [(len(prompt), kv.run(prompt, answer)) for prompt, answer in chat]
    rows = table(page("how-it-works-kv.md"), "chat")
    assert played == [(int(row[1]), int(row[column])) for row in rows]
