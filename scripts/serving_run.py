"""Serves a model over HTTP with the cache: one engine, several, or a prefill and a decode engine.

    scripts/serve [--model DIR] [--port PORT] [--engines N | --pair] [--policy POLICY] [--store URL] [--no-cache]
                  [-- VLLM_OPTION ...]

One engine answers on the port itself. Before several stands `vllm-router`, by default with its own policy; `kv_aware`
sends a prompt to the engine that holds most of it, and is told by the engines' KV events what each tier holds. With
`--pair` one engine computes prompts and another goes on from them; the router hands their parameters over.

Ctrl-C ends all of them; if one dies, so do the others. What they print goes to out/serve/NAME.log.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from engine_job import stop
from engine_process import EngineError
from prepare_model import ModelError, default_cache, prepare_model
from redis_server import HOST, free_port
from serving_process import HttpProcess
from serving_servers import Role, Router, Server, cores_of, hicache

FOLDER = Path(__file__).resolve().parent.parent / "out" / "serve"
KV_AWARE = "kv_aware"
POLICIES = (
    "random",
    "round_robin",
    "cache_aware",
    KV_AWARE,
    "power_of_two",
    "consistent_hash",
    "sticky_least_loaded",
)
BLOCK_TOKENS = 128
"""vLLM's on a CPU, and that of the events."""
_POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class Settings:
    """What is to be served, see the module.

    Attributes:
        model: its directory.
        port: of what is asked: the engine, or the router.
        store: URL of the store; `None` for no cache beside vLLM's own.
        options: further ones of vLLM, for every engine.
    """

    model: Path
    port: int
    num_engines: int = 1
    pair: bool = False
    policy: str | None = None
    store: str | None = "none"
    options: tuple[str, ...] = ()


def read_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line: see the module."""
    parser = argparse.ArgumentParser(
        prog="scripts/serve", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, metavar="DIR", help="model directory (default: SmolLM2, as prepared)")
    parser.add_argument("--port", type=int, default=8000, help="to ask (default: 8000)")
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument("--engines", type=int, default=1, metavar="N", help="engines that do the same (default: 1)")
    shape.add_argument("--pair", action="store_true", help="one engine for prefill, one for decode")
    parser.add_argument("--policy", choices=POLICIES, help="the router's (default: its own)")
    parser.add_argument("--store", metavar="URL", help="a store behind host memory (default: none)")
    parser.add_argument("--no-cache", action="store_true", help="vLLM without the connector")
    parser.add_argument("options", nargs="*", metavar="VLLM_OPTION", help="for every engine, after --")
    args = parser.parse_args(arguments)
    for problem in problems(args):
        parser.error(problem)
    return args


def problems(args: argparse.Namespace) -> list[str]:
    """Arguments that contradict each other, a sentence each."""
    found = []
    if args.engines < 1:
        found.append(f"--engines {args.engines} serves nothing: give at least 1")
    if args.no_cache and (args.pair or args.store):
        found.append("--no-cache leaves nothing for --pair or --store to work with: leave one of them out")
    if args.policy and not args.pair and args.engines < 2:
        found.append(f"--policy {args.policy} has one engine to choose from: give --engines N, or leave it out")
    if args.policy == KV_AWARE and args.pair:
        found.append("--policy kv_aware has one engine of each kind to choose from: leave --pair or --policy out")
    return found


def settings_of(args: argparse.Namespace) -> Settings:
    """Of the command line. Raises ModelError."""
    model = args.model.resolve() if args.model else prepare_model(default_cache())
    store = None if args.no_cache else args.store or "none"
    return Settings(model, args.port, args.engines, args.pair, args.policy, store, tuple(args.options))


def engines_of(settings: Settings, folder: Path) -> list[Server]:
    """The engines, not started."""
    roles: list[tuple[str, Role]] = [("engine", "kv_both")]
    if settings.pair:
        roles = [("prefill", "kv_producer"), ("decode", "kv_consumer")]
    elif settings.num_engines > 1:
        roles = [(f"engine-{number}", "kv_both") for number in range(settings.num_engines)]
    return [
        Server(
            settings.model,
            folder,
            name,
            transfer=None if settings.store is None else hicache(role, store=settings.store),
            options=[*events_of(settings), *settings.options],
            port=0 if len(roles) > 1 else settings.port,
            core=core,
        )
        for (name, role), core in zip(roles, cores_of(len(roles)), strict=True)
    ]


def events_of(settings: Settings) -> list[str]:
    """Options with which an engine publishes its KV events, each on a port of its own, where somebody listens."""
    if settings.policy != KV_AWARE:
        return []
    endpoint = f"tcp://{HOST}:{free_port()}"
    events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint}
    return ["--kv-events-config", json.dumps(events)]


def router_of(settings: Settings, engines: Sequence[Server], folder: Path) -> Router | None:
    """The router before the engines, not started; none before one engine."""
    urls = [engine.url for engine in engines]
    options = ["--policy", settings.policy] if settings.policy else []
    if settings.pair:
        return Router(folder, prefill=urls[:1], decode=urls[1:], options=options, port=settings.port)
    if len(urls) < 2:
        return None
    if settings.policy == KV_AWARE:
        options += ["--kv-event-block-size", str(BLOCK_TOKENS), "--kv-event-model", engines[0].model]
        options += [f"--kv-event-source={engine.url}={endpoint_of(engine)}" for engine in engines]
    return Router(folder, workers=urls, options=options, port=settings.port)


def endpoint_of(engine: Server) -> str:
    """Where an engine that was started for it publishes its events."""
    events = json.loads(engine.command[engine.command.index("--kv-events-config") + 1])
    return str(events["endpoint"])


def line_of(process: HttpProcess, name: str) -> str:
    """What runs where."""
    return f"{name:<12}{process.url:<26}pid {process.pid:<9}log {process.log}"


def question(url: str, model: str) -> str:
    """How to ask it."""
    body = {"model": model, "messages": [{"role": "user", "content": "What is a cache?"}], "max_tokens": 64}
    header = "-H 'Content-Type: application/json'"
    return f"curl {url}/v1/chat/completions {header} -d {shlex.quote(json.dumps(body))}"


def serve(settings: Settings, folder: Path) -> None:
    """Start all, say so, and wait until one of them dies. Raises EngineError then, or if one does not start."""
    engines = engines_of(settings, folder)
    router = router_of(settings, engines, folder)
    with contextlib.ExitStack() as stack:
        running: list[HttpProcess] = [stack.enter_context(engine) for engine in engines]
        for engine in engines:
            engine.wait_healthy()
            print(line_of(engine, engine.name), flush=True)
        if router is not None:
            running.append(stack.enter_context(router))
            router.wait_healthy()
            print(line_of(router, router.name), flush=True)
        print(f"ask it:\n  {question(running[-1].url, engines[0].model)}", flush=True)
        while all(process.is_running() for process in running):
            time.sleep(_POLL_S)
        dead = next(process for process in running if not process.is_running())
        raise EngineError(f"the server of {dead.url} has ended, and so the others are ended too. {dead.last_lines()}")


def main() -> int:
    """Until Ctrl-C."""
    args = read_arguments()
    signal.signal(signal.SIGTERM, stop)
    shutil.rmtree(FOLDER, ignore_errors=True)
    try:
        serve(settings_of(args), FOLDER)
    except KeyboardInterrupt:
        print("scripts/serve: stopped", file=sys.stderr)
        return 130
    except (EngineError, ModelError) as error:
        print(f"scripts/serve: {error}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
