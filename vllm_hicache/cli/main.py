"""The console command `vllm-hicache`: finds the subcommand, runs it, turns our errors into one sentence.

A subcommand is a module of this package with `add_parser(subparsers)`, which registers a parser whose
default `run` is a function from the parsed arguments to an exit status. Only the module that is asked for
is imported, so that `store ls` does not wait for what `doctor` needs.

Exit status: 0 done, 1 the subcommand's own "no", 2 wrong use or an error that the message explains.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol, TypeAlias, cast

from vllm_hicache import __version__
from vllm_hicache.errors import ConfigError, StoreError

# argparse has no public name for what `add_subparsers` returns.
Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
Run = Callable[[argparse.Namespace], int]

COMMANDS: Mapping[str, str] = MappingProxyType(
    {
        "doctor": "vllm_hicache.cli.doctor",
        "store": "vllm_hicache.cli.store",
        "ranks": "vllm_hicache.cli.ranks",
        "simulate": "vllm_hicache.cli.simulate",
    }
)

EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141


class Command(Protocol):
    """What a subcommand's module offers."""

    def add_parser(self, subparsers: Subparsers) -> None:
        """Register the subcommand's parser, with `set_defaults(run=…)`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line (`sys.argv` by default) and return its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = build_parser(modules_for(arguments, COMMANDS))
    parsed = parser.parse_args(arguments)
    run: Run | None = getattr(parsed, "run", None)
    if run is None:
        parser.print_help(sys.stderr)
        return EXIT_USAGE
    return run_guarded(run, parsed)


def modules_for(arguments: Sequence[str], commands: Mapping[str, str]) -> list[str]:
    """The modules to import for a command line: the one it names first, else all that are installed."""
    named = [commands[word] for word in arguments[:1] if word in commands]
    return [module for module in named or commands.values() if importlib.util.find_spec(module) is not None]


def build_parser(modules: Iterable[str]) -> argparse.ArgumentParser:
    """The parser with the subcommands of these modules."""
    parser = argparse.ArgumentParser(
        prog="vllm-hicache", description="Look at, check and try out a hierarchical KV cache for vLLM."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    subparsers = parser.add_subparsers(title="commands")
    for module in modules:
        command = cast(Command, importlib.import_module(module))
        command.add_parser(subparsers)
    return parser


def run_guarded(run: Run, parsed: argparse.Namespace) -> int:
    """Run a subcommand. What the user can mend is one sentence on stderr; a bug keeps its traceback."""
    try:
        status = run(parsed)
        sys.stdout.flush()
        return status
    except (ConfigError, StoreError) as error:
        sentence = " ".join(str(error).split()) or type(error).__name__
        print(f"vllm-hicache: error: {sentence}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # `vllm-hicache store ls | head`: the reader has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE


if __name__ == "__main__":
    sys.exit(main())
