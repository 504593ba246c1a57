# SPDX-License-Identifier: Apache-2.0
"""From what the engines of the tiers benchmark found to its claims, table and picture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

HOT_TOKENS = 1408
"""Of a prompt of 1500 tokens, in blocks of 128, as much as a hit can have."""

Found = Mapping[str, Any]
"""Results of jobs by name."""


def claims(found: Found, seeds: Mapping[str, list[int]], how: str) -> list[dict[str, Any]]:
    """All claims of this benchmark.

    Args:
        found: results by job.
        seeds: by claim.
        how: the command.
    """
    made = [
        _ladder_bytes(found),
        _ladder_hits(found),
        _prompt_ends(found),
        _keep_alive(found),
        _repairs(found),
        _ring(found),
        _kills(found),
    ]
    return [entry | {"seeds": seeds[entry["id"]], "how": how} for entry in made]


def _entry(
    claim: str, value: float, stock: float | None, bound: float, unit: str
) -> dict[str, Any]:
    return {"id": claim, "value": value, "stock": stock, "bound": bound, "unit": unit}


def stored(result: Mapping[str, Any], part: str) -> int:
    """Bytes that went from the device to host memory."""
    return sum(each["stored_bytes"] for each in result[part])


def _ladder_bytes(found: Found) -> dict[str, Any]:
    ladder, dense, ideal = found["ladder"], found["dense"], found["ideal"]
    parts = {
        part: round(stored(ladder, part) / stored(dense, part), 3)
        for part in ("prompts", "chats")
        if dense[part]
    }
    ideal_part = round(stored(ideal, "prompts") / stored(dense, "prompts"), 3)
    text = "bytes stored, default ladder/vLLM's dense retention; a prompt of 1500 tokens"
    entry = _entry("ladder_bytes_vs_dense", parts["prompts"], 1.0, ideal_part, text)
    first = {name: found[name]["prompts"][0]["stored_bytes"] for name in ("ladder", "dense")}
    return entry | {"chats": parts.get("chats"), "bytes": first}


def hits(result: Mapping[str, Any]) -> list[int]:
    """Of all requests, those of the four prompts first."""
    four = [hit for each in result["prompts"] for hit in each["hits"].values()]
    return four + [hit for each in result["chats"] for hit in each["hits"]]


def equal_part(one: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    """Part of the requests whose hit is at least the other's."""
    pairs = list(zip(hits(one), hits(other), strict=True))
    return sum(a >= b for a, b in pairs) / len(pairs)


def _ladder_hits(found: Found) -> dict[str, Any]:
    text = "part of the requests with the hit of dense retention; four prompts and chats"
    ladder, dense, ideal = found["ladder"], found["dense"], found["ideal"]
    value, stock = (round(equal_part(each, dense), 4) for each in (ladder, ideal))
    lost = 1 - sum(map(min, hits(ladder), hits(dense))) / sum(hits(dense))
    return _entry("ladder_hits_equal_dense", value, stock, 1.0, text) | {
        "requests": len(hits(dense)),
        "four_prompts": [list(each["hits"].values()) for each in ladder["prompts"]],
        "stock_four_prompts": [list(each["hits"].values()) for each in ideal["prompts"]],
        "lost_tokens_part": round(lost, 4),
        "same_answers": answers(ladder) == answers(dense),
    }


def answers(result: Mapping[str, Any]) -> list[Any]:
    """Output tokens of all requests."""
    four = [answer for each in result["prompts"] for answer in each["answers"].values()]
    return four + [answer for each in result["chats"] for answer in each["answers"]]


def _prompt_ends(found: Found) -> dict[str, Any]:
    ours, ideal = (stored(found[name], "prompts") for name in ("prompt_ends", "ideal"))
    dense = stored(found["dense"], "prompts")
    text = "bytes stored, prompt ends alone/full attention and one window; 1500 tokens"
    entry = _entry(
        "prompt_end_bytes_vs_ideal", round(ours / ideal, 4), round(dense / ideal, 3), 1.0, text
    )
    return entry | {"bytes": found["prompt_ends"]["prompts"][0]["stored_bytes"]}


def _keep_alive(found: Found) -> dict[str, Any]:
    parts = {
        name: round(found[f"{name}_restarted"]["hit_tokens"] / HOT_TOKENS, 4)
        for name in ("keepalive", "keepalive_stock")
    }
    text = "part of a hot prompt hit in Mooncake after cold traffic and a restart"
    ours, stock = found["keepalive"], found["keepalive_stock"]
    return _entry("keepalive_fraction", parts["keepalive"], parts["keepalive_stock"], 1.0, text) | {
        f"extra_{name}_per_request": {
            "calls": round(
                ours["calls"][name] / ours["requests"] - stock["calls"][name] / stock["requests"], 3
            ),
            "keys": round(
                ours["keys"][name] / ours["requests"] - stock["keys"][name] / stock["requests"], 2
            ),
        }
        for name in ("exists", "touch")
    }


def excess(result: Mapping[str, Any]) -> int:
    """Bytes by which what moved differs from what was missing, of all repairs."""
    return sum(
        abs(each["moved_bytes"] - each["missing_bytes"]) for each in result["repairs"].values()
    )


def _repairs(found: Found) -> dict[str, Any]:
    ours, stock = found["repairs"], found["repairs_stock"]
    text = "bytes moved in excess of, or short of, what was missing; sum of all repairs"
    return _entry("repair_excess_bytes", excess(ours), excess(stock), 0, text) | {
        "repairs": {
            name: {
                "missing": each["missing_bytes"],
                "moved": each["moved_bytes"],
                "stock_missing": stock["repairs"][name]["missing_bytes"],
                "stock_moved": stock["repairs"][name]["moved_bytes"],
            }
            for name, each in ours["repairs"].items()
        }
    }


def _ring(found: Found) -> dict[str, Any]:
    runs = {name: run for name, run in found.items() if name.startswith("ring_")}
    total = {
        name: sum(run[name] for run in runs.values())
        for name in ("keys", "keys_after", "tokens_before", "tokens_after", "wrong")
    }
    text = "part of the keys that still hit after one of three stores was lost; files and Redis"
    value = round(total["keys_after"] / total["keys"], 3)
    return _entry("ring_lose_one_hit_fraction", value, 0.0, 0.667, text) | {
        "keys": {name: round(run["keys_after"] / run["keys"], 3) for name, run in runs.items()},
        "tokens_fraction": round(total["tokens_after"] / total["tokens_before"], 3),
        "wrong_answers": total["wrong"],
    }


def bad_answers(given: list[Any], wanted: list[Any]) -> int:
    """Answers whose tokens differ, or whose logprobs do by more than 1e-3."""
    return sum(
        a[0] != b[0] or any(abs(x - y) > 1e-3 for x, y in zip(a[1], b[1], strict=True))
        for a, b in zip(given, wanted, strict=True)
    )


def _kills(found: Found) -> dict[str, Any]:
    run = found["kills"]
    bad = bad_answers(run["answers"], found["kills_reference"]["answers"])
    text = f"failed or wrong of {len(run['answers'])} requests, store killed {run['kills']} times"
    return _entry("kill9_failed_requests", bad, None, 0, text) | {
        name: run[name]
        for name in ("failed", "pages_got", "pages_got_after_kills", "pages_put", "calls_failed")
    }


def table(found: Found) -> Iterator[str]:
    """Text: what each configuration stores and hits."""
    yield f"{'':14}{'1500 tokens, MB':>18}{'chats, MB':>12}{'hits of the four prompts':>32}"
    for name in ("ideal", "prompt_ends", "ladder", "dense"):
        if name not in found:
            continue
        each = found[name]
        one = each["prompts"][0]
        chats = f"{stored(each, 'chats') / 1e6:.1f}" if each["chats"] else "-"
        four = "/".join(str(hit) for hit in one["hits"].values())
        yield f"{name:14}{one['stored_bytes'] / 1e6:18.2f}{chats:>12}{four:>32}"
    for name, each in found["repairs"]["repairs"].items():
        stock = found["repairs_stock"]["repairs"][name]
        yield (
            f"{name:36} missing {each['missing_bytes']:>10,} moved {each['moved_bytes']:>10,}"
            f"   stock: {stock['missing_bytes']:>10,} {stock['moved_bytes']:>10,}"
        )


def plot(found: Found, path: Path) -> None:
    """Bars: bytes of a prompt by configuration, and of each repair."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.8))
    names = [name for name in ("ideal", "prompt_ends", "ladder", "dense") if name in found]
    colours = {"ladder": "#d9480f", "prompt_ends": "#f08c00"}
    for x, name in enumerate(names):
        one = found[name]["prompts"][0]
        left.bar(x, one["stored_bytes"] / 1e6, color=colours.get(name, "#9aa5b1"))
        label = "/".join(str(hit) for hit in one["hits"].values())
        left.text(x, one["stored_bytes"] / 1e6, label, ha="center", va="bottom", fontsize=7)
    left.set_xticks(range(len(names)), [name.replace("_", " ") for name in names])
    left.set_ylabel("MB stored of 1500 tokens; hits above")
    repairs, stock = found["repairs"]["repairs"], found["repairs_stock"]["repairs"]
    for offset, (runs, colour, label) in enumerate(
        ((stock, "#9aa5b1", "stock"), (repairs, "#d9480f", "plugin"))
    ):
        for x, each in enumerate(runs.values()):
            label_once = label if x == 0 else None
            at = x + 0.4 * offset
            right.bar(at, each["moved_bytes"] / 1e6, 0.38, color=colour, label=label_once)
            right.plot([at - 0.19, at + 0.19], [each["missing_bytes"] / 1e6] * 2, "k-")
    right.set_xticks(
        [x + 0.2 for x in range(len(repairs))], [name.split(":")[0] for name in repairs]
    )
    right.set_ylabel("MB moved by repairs; line: missing")
    right.legend(frameon=False)
    for axis in (left, right):
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
