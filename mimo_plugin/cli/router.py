# SPDX-License-Identifier: Apache-2.0
"""``mimo router``: one address before several workers."""

from __future__ import annotations

import argparse
import asyncio
import logging
from typing import Any

from mimo_plugin.errors import FeatureUnavailable

_EXAMPLE = """\
A worker is URL[,key=value…] with the keys
  role=both|prefill|decode   what it does (default: both)
  events=tcp://HOST:PORT     where it publishes KV events (default: what the worker says)
  replay=tcp://HOST:PORT     where lost events are asked for (default: what the worker says)
  ranks=N                    data-parallel ranks (default: what the worker says)
  engine=vllm|sglang         (default: found out)

example:
  vllm serve MODEL --port 8001 --kv-events-config '{"enable_kv_cache_events": true,
    "publisher": "zmq", "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558"}'
  mimo router --model MODEL --worker http://127.0.0.1:8001 --worker http://127.0.0.1:8002

A file for --workers-file: {"workers": [{"url": "http://127.0.0.1:8001", "role": "both"}]}, or the
same in YAML. Keys may be given as @FILE."""


def add_parser(subparsers: Any) -> None:
    """Add the ``router`` command to the parser of ``mimo``."""
    parser = subparsers.add_parser(
        "router",
        help="send requests to the worker that has most of their prompt (extra: router)",
        description="Forwards the OpenAI API to several workers that serve one model. Listens on "
        "this machine alone unless --host says otherwise.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", required=True, metavar="DIR", help="directory with config.json and tokenizer")
    add("--worker", action="append", default=[], metavar="URL[,…]", help="can be repeated")
    add("--workers-file", metavar="FILE", help="more workers, in JSON or YAML")
    add("--host", default="127.0.0.1", help="default: %(default)s; others need --admin-key")
    add("--port", type=int, default=8080, help="default: %(default)s")
    add("--state", default="memory", help="memory, or redis://HOST:PORT (default: %(default)s)")
    add("--tokenizer", default="local", help="local, render or none (default: %(default)s)")
    add("--chat-template", metavar="FILE", help="the workers' own (default: the model's)")
    add("--trust-remote-code", action="store_true", help="of the tokenizer, as with the engine")
    add("--admin-key", metavar="KEY", help="for /workers and the like (default: this machine)")
    add("--worker-key", metavar="KEY", help="the workers' --api-key, for the router's questions")
    add("--max-body-mib", type=float, default=32, metavar="N", help="default: %(default)s")
    add("--max-buffered-mib", type=float, default=2048, metavar="N", help="of all bodies at once")
    for name, default, text in (
        ("max-header-bytes", 16384, "of one header line"),
        ("max-headers", 128, "of a request"),
        ("max-connections", 4096, "at once"),
        ("max-in-flight", 2048, "requests at once"),
        ("retries", 2, "of a request that no worker began to answer"),
    ):
        add(f"--{name}", type=int, default=default, metavar="N", help=f"{text} (%(default)s)")
    for name, seconds, text in (
        ("header-timeout", 10.0, "for a request's header to come"),
        ("body-timeout", 60.0, "for its body to come"),
        ("connect-timeout", 5.0, "to a worker"),
        ("read-timeout", 600.0, "longest silence of a worker"),
        ("health-interval", 2.0, "between two looks at a worker"),
        ("grace", 30.0, "for answers to end after SIGTERM"),
    ):
        add(f"--{name}", type=float, default=seconds, metavar="S", help=f"{text} (%(default)g)")
    add("--queue-weight", type=float, default=2.0, metavar="W", help="of the queue (%(default)g)")
    add("--tokens-per-s", type=float, metavar="N", help="a worker's prefill (default: measured)")
    add("--hash-block-tokens", type=int, metavar="N", help="default: what the workers say")
    add("--log-level", default="info", help="debug, info, warning, error (%(default)s)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM."""
    try:
        from mimo_plugin.router.app import App, serve
    except ModuleNotFoundError as error:
        raise FeatureUnavailable(
            f"mimo router: found no module {error.name!r}; allowed: an installation with the extra "
            "router; fix: pip install 'mimo-plugin[router]'"
        ) from None
    from mimo_plugin.router.model import read_model

    settings = settings_of(args)
    logging.basicConfig(
        level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(message)s"
    )
    model = read_model(settings.model)

    def ready(app: App) -> None:
        print(app.line(), flush=True)

    try:
        import uvloop
    except ImportError:
        asyncio.run(serve(settings, model, ready))
    else:
        uvloop.run(serve(settings, model, ready))
    return 0


def settings_of(args: argparse.Namespace) -> Any:
    """The settings that the options stand for.

    Raises:
        ConfigError: one of them is wrong.
    """
    from mimo_plugin.router.settings import Settings, all_workers, bytes_of, read_key

    return Settings(
        model=args.model,
        workers=all_workers(args.worker, args.workers_file),
        host=args.host,
        port=args.port,
        state=args.state,
        tokenizer=args.tokenizer,
        chat_template=args.chat_template,
        trust_remote_code=args.trust_remote_code,
        admin_key=read_key("--admin-key", args.admin_key),
        worker_key=read_key("--worker-key", args.worker_key),
        max_body_bytes=bytes_of("max_body_bytes", args.max_body_mib),
        max_buffered_bytes=bytes_of("max_buffered_bytes", args.max_buffered_mib),
        max_header_bytes=args.max_header_bytes,
        max_headers=args.max_headers,
        max_connections=args.max_connections,
        max_in_flight=args.max_in_flight,
        header_timeout_s=args.header_timeout,
        body_timeout_s=args.body_timeout,
        connect_timeout_s=args.connect_timeout,
        read_timeout_s=args.read_timeout,
        retries=args.retries,
        health_interval_s=args.health_interval,
        grace_s=args.grace,
        queue_weight=args.queue_weight,
        tokens_per_s=args.tokens_per_s,
        hash_block_tokens=args.hash_block_tokens,
        log_level=args.log_level,
    )
