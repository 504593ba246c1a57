# SPDX-License-Identifier: Apache-2.0
"""Scripts that the real-server tests of the KV feature run on a stock server and on ours."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from integration_tests.kv_client import Answer, Client, message


def words(seed, count):
    rng = random.Random(seed)
    return " ".join(
        "".join(rng.choice("bdfgklmnprst") + rng.choice("aeiou") for _ in range(2))
        for _ in range(count)
    )


def chat_users(client):
    system = {"role": "system", "content": words(1, 400)}
    return [
        client.chat([system, {"role": "user", "content": words(user, 20 + 9 * user)}], 24)[0]
        for user in range(2, 6)
    ]


def token_users(client):
    rng = random.Random(11)
    system = message(rng, 777)
    return [client.complete([*system, *message(rng, 60 + 7 * user)], 24) for user in range(4)]


def growing_chat(client):
    rng = random.Random(12)
    history = message(rng, 300)
    answers = []
    for turn in range(5):
        history = [*history, *message(rng, 40 + 13 * turn)]
        answers.append(client.complete(history, 90 + 17 * turn))
        history = answers[-1].tokens
    return answers


def spoken_chat(client):
    messages = [{"role": "system", "content": words(21, 150)}]
    answers = []
    for turn in range(4):
        messages.append({"role": "user", "content": words(30 + turn, 30)})
        answer, text = client.chat(messages, 100)
        messages.append({"role": "assistant", "content": text})
        answers.append(answer)
    return answers


def branches(client):
    """A chat, then: the last question again, forks at each earlier message, the forks again."""
    rng = random.Random(13)
    history, starts, answers = message(rng, 320), [], []
    for turn in range(5):
        starts.append(len(history))
        history = [*history, *message(rng, 70 + 11 * turn)]
        answers.append(client.complete(history, 64))
        history = answers[-1].tokens
    last_question = answers[-1].prompt
    answers.append(client.complete(last_question, 64))
    for again in range(2):
        for start in starts:
            edited = [*history[:start], *message(random.Random(100 * again + start), 50)]
            answers.append(client.complete(edited, 16))
    return answers


def edits(client):
    """A long prompt whose end is edited, then one edited in its middle, twice at one place."""
    rng = random.Random(14)
    prompt = [*message(rng, 260), *message(rng, 640)]
    answers = [client.complete(prompt, 16)]
    answers.append(client.complete([*prompt[:-5], *message(rng, 5)], 16))
    for edit in range(3):
        changed = [*prompt[:600], *message(random.Random(edit), 90)]
        answers.append(client.complete(changed, 16))
    return answers


def pressed_chats(client: Client, chats: int = 10, turns: int = 4) -> list[Answer]:
    """Chats on three system prompts that grow at the same time; answers by chat, then turn."""
    rng = random.Random(17)
    systems = [message(rng, count) for count in (220, 260, 300)]

    def talk(number: int) -> list[Answer]:
        own = random.Random(1000 + number)
        history, answers = list(systems[number % len(systems)]), []
        for _ in range(turns):
            prompt = [*history, *message(own, own.randrange(20, 90))]
            answers.append(client.complete(prompt, own.randrange(10, 50)))
            history = answers[-1].tokens
            if own.random() < 0.2:
                answers.append(client.complete(prompt, 10))
        return answers

    with ThreadPoolExecutor(4) as pool:
        return [answer for answers in pool.map(talk, range(chats)) for answer in answers]


def long_answers(client: Client) -> list[Sequence[int]]:
    """Outputs of short prompts whose answers together need far more than a tight pool.

    All come in one request, so that they run together however slow the machine is.

    Preempted, they are computed in other batches, which moves logits by up to 1e-5 or so. With this
    seed no token of the 3000 is chosen by less than 2.6e-4 (with 18 one was by 1.7e-5).
    """
    rng = random.Random(118)
    return client.in_one_request([message(rng, 40 + 9 * at) for at in range(10)], 300)


def disconnects(client: Client) -> list[Answer]:
    """Streams that a client leaves after a few tokens, then the same prompts in full."""
    rng = random.Random(19)
    system = message(rng, 250)
    prompts = [[*system, *message(rng, 120 + 10 * at)] for at in range(4)]
    body = {"max_tokens": 400, "temperature": 0, "ignore_eos": True}

    def leave(prompt: list[int]) -> None:
        stream = client.server.stream("/v1/completions", {**body, "prompt": prompt})
        with contextlib.closing(stream):
            for _, _chunk in zip(range(5), stream, strict=False):
                pass

    with ThreadPoolExecutor(len(prompts)) as pool:
        list(pool.map(leave, prompts))
    client.idle()
    return [client.complete(prompt, 24) for prompt in prompts]
