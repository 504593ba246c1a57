# SPDX-License-Identifier: Apache-2.0
"""Scripts of the feature ``tiers`` on engines in one process; each prints what it found as JSON.

Usage: ``python tiers_probe.py MODEL SCRIPT FOLDER [OPTIONS_JSON]``; the last line is the result.

Several engines run one after the other in one process, as before and after a restart: nothing of
host memory outlives an engine (``tiers_lab.Engine.close``), so what a new one finds comes from the
store.
"""

import json
import os
import sys
import time
import traceback
from pathlib import Path

from integration_tests.tiers_copies import copies
from integration_tests.tiers_lab import HOT, PROMPTS, SHORT, Engine, after_reset, tokens
from integration_tests.tiers_store_scripts import files, folders, keep_alive, mooncake, redis

FAILED = "failed"
"""Key of what went wrong with a script."""
CHAT = tokens(5, 700)
CHAT_OUTPUT_TOKENS = 300
NEXT_QUESTION = tokens(6, 40)
STREAMS = 8
STREAM_OUTPUT_TOKENS = (200, 40)


def chat(engine):
    """A turn with a long answer, and the next one when the device has forgotten it."""
    first = engine.ask(CHAT, CHAT_OUTPUT_TOKENS)
    if engine.tiered is not None:
        engine.settle()
    engine.forget_device()
    follow = [*CHAT, *first["tokens"], *NEXT_QUESTION]
    second = engine.measured(follow) if engine.tiered is not None else engine.ask(follow)
    return {"first": first, "second": second}


def streams(engine):
    """Chats that all run at the same time, for two turns."""
    history = [tokens(100 + at, 100 + 13 * at) for at in range(STREAMS)]
    rounds = []
    for turn, count in enumerate(STREAM_OUTPUT_TOKENS):
        answers = engine.ask_all(history, count)
        rounds.append(answers)
        history = [
            [*asked, *answer["tokens"], *tokens(200 + STREAMS * turn + at, 60)]
            for at, (asked, answer) in enumerate(zip(history, answers, strict=True))
        ]
    return rounds


def stock(model, folder, options):
    """What vLLM answers with nothing of ours, each prompt without any hit."""
    engine = Engine(model)
    found = {"connector": engine.scheduler.connector is not None}
    for name, prompt in {**PROMPTS, **{f"short{at}": p for at, p in enumerate(SHORT)}}.items():
        engine.forget_device()
        found[name] = engine.ask(prompt)
    found["chat"] = chat(engine)
    engine.forget_device()
    found["streams"] = streams(engine)
    engine.close()
    return found


def hits_from_host(engine):
    """Each prompt with nothing on the device."""
    found = {}
    for name, prompt in PROMPTS.items():
        engine.forget_device()
        found[name] = engine.measured(prompt)
    return found


def host(model, folder, options):
    """Host memory below the device: what is stored, and what each kind of loss costs."""
    features = options.get("features", ["tiers"])
    engine = Engine(model, features)
    found = {"groups": engine.groups, "unit": engine.tiered.unit_tokens}
    found["block_bytes"] = engine.block_bytes()
    found["cold"] = engine.measured(HOT)
    found["chunks"], found["used_bytes"] = engine.host_chunks(), engine.host_bytes_used()
    found["hits"] = hits_from_host(engine)
    engine.forget_device()
    engine.measured(HOT)
    windows = range(1, engine.groups)
    window_keys = {key for group in windows for key in engine.keys(group)}

    found["A lost"] = engine.lose_host(window_keys.__contains__)
    found["A"] = engine.measured(HOT)
    found["A then from host"] = after_reset(engine, HOT)

    found["C lost"] = sum(engine.lose_device(group, range(11)) for group in windows)
    found["C"] = engine.measured(HOT)
    found["C again"] = engine.measured(HOT)

    found["hole lost"] = engine.lose_device(0, [3, 4, 5])
    found["hole"] = engine.measured(HOT)
    found["hole again"] = engine.measured(HOT)

    if "kv" not in features:
        head = set(engine.keys(0)[:3])
        lost = engine.lose_host(head.__contains__), engine.lose_device(0, range(6, 11))
        found["mixed lost"] = list(lost)
        found["mixed"] = engine.measured(HOT)
        found["mixed again"] = engine.measured(HOT)
        found["mixed then from host"] = after_reset(engine, HOT)

    for name, gone in (
        ("B69 no windows", window_keys),
        ("B69 one group", set(engine.keys(3))),
        ("B69 no full", set(engine.keys(0))),
    ):
        engine.lose_host(gone.__contains__)
        found[name] = after_reset(engine, HOT)
    engine.forget_device()
    found["chat"] = chat(engine)
    found["leftovers"] = engine.leftovers()
    engine.close()
    return found


def dense(model, folder, options):
    """A window at every unit, as without a ladder that grows."""
    engine = Engine(model, ["tiers"], {"ladder_min_tokens": 1, "ladder_growth": 1e-9})
    found = {"cold": engine.measured(HOT), "hits": hits_from_host(engine)}
    engine.close()
    return found


def rotation(model, folder, options):
    """B21: host memory of few rows, filled more than once."""
    engine = Engine(model, ["tiers"], {"host_gib": options["host_gib"], "classes": ["prompt_end"]})
    found = {"rows": engine.manager.primary_tier._num_chunks, "groups": engine.groups}
    found["block_bytes"] = engine.block_bytes()
    found["rounds"] = []
    for seed in range(4):
        engine.measured(tokens(70 + seed, 900))
        found["rounds"].append([engine.host_bytes_used(), engine.host_chunks()])
    found["last"] = after_reset(engine, tokens(73, 900))
    found["first"] = after_reset(engine, tokens(70, 900))
    engine.close()
    return found


def pressed(model, folder, options):
    """Streams at the same time in a pool that is too small for them, below it host memory."""
    features = options["features"]
    engine = Engine(model, features, num_gpu_blocks_override=options["blocks"], max_num_seqs=8)
    before = engine.counters()
    found = {"streams": streams(engine)}
    engine.settle()
    moved = engine.counters()
    moved.subtract(before)
    found["moved"] = dict(moved)
    found["leftovers"] = engine.leftovers()
    found["coordinator"] = type(engine.scheduler.kv_cache_manager.coordinator).__module__
    engine.close()
    return found


def mtp(model, folder, options):
    """Drafts by MTP layers, whose hits need one block more: device and host memory agree."""
    limits = {"block_size": 16, "max_model_len": 512, "max_num_batched_tokens": 96}
    prompts = [tokens(400 + length, length) for length in options["lengths"]]
    engine = Engine(model, **limits)
    found = {"stock": [engine.ask(prompt, MTP_OUTPUT_TOKENS) for prompt in prompts]}
    engine.close()
    speculation = {"method": "mtp", "num_speculative_tokens": 1}
    engine = Engine(
        model, ["mtp", "tiers"], {"host_gib": 0.05}, speculative_config=speculation, **limits
    )
    found["lookahead"] = [group.lookahead_blocks for group in engine.tiered.geometry]
    for name in ("cold", "device", "host"):
        if name == "host":
            engine.forget_device()
        found[name] = [engine.measured(prompt, MTP_OUTPUT_TOKENS) for prompt in prompts]
    found["leftovers"] = engine.leftovers()
    engine.close()
    return found


MTP_OUTPUT_TOKENS = 16


def unasked(model, folder, options):
    """Whether each ``additional_config`` leads to a connector."""
    from vllm.engine.arg_utils import EngineArgs

    found = []
    for section in (None, {}, {"features": ["kv", "scheduler"]}):
        more = {} if section is None else {"additional_config": {"mimo": section}}
        config = EngineArgs(model=model, **more).create_engine_config()
        found.append(config.kv_transfer_config is not None)
    return found


def refusals(model, folder, options):
    """What is said, before any engine, of sections ``tiers``, by their names in ``options``."""
    from vllm.engine.arg_utils import EngineArgs

    from mimo_plugin.errors import MimoError

    found = {}
    for name, tiers in options.items():
        section = {"mimo": {"features": ["tiers"], "tiers": tiers}}
        try:
            EngineArgs(model=model, additional_config=section).create_engine_config()
        except MimoError as error:
            found[name] = str(error)
    return found


def several(model, folder, options):
    """Other scripts one after the other in this process: ``options`` by their names."""
    found = {}
    for name, more in options.items():
        part = folder / name.replace(" ", "-")
        part.mkdir()
        started_s = time.monotonic()
        try:
            found[name] = SCRIPTS[more.pop("script", name)](model, part, more)
        except Exception:  # the others go on
            found[name] = {FAILED: traceback.format_exc()}
        print(f"{name}: {time.monotonic() - started_s:.1f} s", file=sys.stderr)
    return found


SCRIPTS = {
    script.__name__: script
    for script in (
        stock,
        host,
        dense,
        rotation,
        files,
        folders,
        redis,
        mooncake,
        keep_alive,
        pressed,
        mtp,
        copies,
        unasked,
        refusals,
        several,
    )
}


def main():
    model, script, folder = sys.argv[1:4]
    options = json.loads(sys.argv[4]) if len(sys.argv) > 4 else {}
    found = SCRIPTS[script](model, Path(folder), options)
    sys.stdout.flush()
    print(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
