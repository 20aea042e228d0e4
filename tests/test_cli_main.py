"""The console command's front: finding subcommands, exit statuses, errors as sentences."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_hicache import __version__
from vllm_hicache.cli import main as front
from vllm_hicache.errors import ConfigError, InvariantError, ObjectMissing, StoreUnavailable

PROBE = """
from vllm_hicache import errors

def add_parser(subparsers):
    parser = subparsers.add_parser("probe")
    parser.add_argument("value")
    parser.set_defaults(run=run)

def run(args):
    print(args.value)
    return 7
"""


@pytest.fixture
def probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table of two commands: one that exists, and one whose module is not there."""
    (tmp_path / "probe_command.py").write_text(PROBE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(front, "COMMANDS", {"probe": "probe_command", "gone": "module_that_is_not_there"})


def raising(error: BaseException) -> front.Run:
    def run(args: argparse.Namespace) -> int:
        raise error

    return run


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        front.main(["--version"])
    assert capsys.readouterr().out == f"vllm-hicache {__version__}\n"


@pytest.mark.usefixtures("probe")
def test_a_command_gets_its_arguments_and_decides_the_exit_status(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert front.main(["probe", "12"]) == 7
    assert capsys.readouterr().out == "12\n"


@pytest.mark.usefixtures("probe")
def test_a_command_whose_module_is_missing_is_left_out_of_the_help(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit, match="0"):
        front.main(["--help"])
    text = capsys.readouterr().out
    assert "probe" in text
    assert "gone" not in text


@pytest.mark.usefixtures("probe")
def test_without_a_command_the_help_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    assert front.main([]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("usage: vllm-hicache")


@pytest.mark.usefixtures("probe")
@pytest.mark.parametrize("word", ["gone", "never-heard-of"])
def test_a_command_that_is_not_there_is_wrong_use(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        front.main([word])
    assert word in capsys.readouterr().err


def test_only_the_command_asked_for_is_imported() -> None:
    commands = {"one": "argparse", "two": "json"}
    assert front.modules_for(["two", "one"], commands) == ["json"]
    assert front.modules_for(["--help"], commands) == ["argparse", "json"]


@pytest.mark.parametrize("kind", [ConfigError, ObjectMissing, StoreUnavailable])
def test_an_error_the_user_can_mend_is_one_line(kind: type[Exception], capsys: pytest.CaptureFixture[str]) -> None:
    assert front.run_guarded(raising(kind("host_memory is 0:\n  give it 1GiB")), argparse.Namespace()) == 2
    captured = capsys.readouterr()
    assert captured.err == "vllm-hicache: error: host_memory is 0: give it 1GiB\n"
    assert captured.out == ""


def test_an_error_without_a_text_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert front.run_guarded(raising(StoreUnavailable()), argparse.Namespace()) == 2
    assert capsys.readouterr().err == "vllm-hicache: error: StoreUnavailable\n"


def test_a_bug_of_ours_keeps_its_traceback() -> None:
    with pytest.raises(InvariantError, match="3 slots"):
        front.run_guarded(raising(InvariantError("3 slots of 2")), argparse.Namespace())


def test_an_interrupt_has_the_shells_status() -> None:
    assert front.run_guarded(raising(KeyboardInterrupt()), argparse.Namespace()) == 130


def test_a_reader_that_leaves_early_is_not_an_error(tmp_path: Path) -> None:
    script = (
        "import argparse, sys\n"
        "from vllm_hicache.cli.main import run_guarded\n"
        "def run(args):\n"
        "    for _ in range(100_000): print('a line that fills the pipe')\n"
        "    return 0\n"
        "sys.exit(run_guarded(run, argparse.Namespace()))\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 141
