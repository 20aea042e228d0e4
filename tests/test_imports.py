"""The package's shape, read from its source: which way imports point, and what each layer may touch.

Every import statement counts: at the top of a module, inside a function, under TYPE_CHECKING. The table is
that of `docs/design.md`, section 2. A new module finds its place in LAYERS before it is merged.
"""

from __future__ import annotations

import ast
import configparser
import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "vllm_hicache"

LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors", "names", "units", "support", "machine", "metrics", "grid", "config", "secrets"),
    (
        "keys",
        "namespace",
        "fingerprint",
        "plan",
        "entries",
        "events",
        "drafts",
        "geometry",
        "inventory",
        "place",
        "ownership",
    ),
    ("index", "consensus", "ranklog", "rank_faults", "checker", "drills", "cost"),
    ("storage",),
    ("stores", "lookup"),
    ("transfer",),
    ("handoff", "context_parallel"),
    ("operations", "tracking", "tree_pages", "exports"),
    ("scheduler", "worker"),
    ("connectors", "cli"),
)
"""Parts of the package, lowest first. A part may import its own layer and those below it."""

STRANGERS = {("index", "storage"), ("storage", "index")}
"""Pairs that meet only further up, although their layers would allow it."""

PURE_PARTS = {"index", "consensus", "checker", "cost", "entries", "geometry", "inventory", "keys", "place", "plan"}
VLLM_MODULES = (f"{PACKAGE}.connectors", f"{PACKAGE}.context_parallel.backend")
# fmt: off
IO_MODULES = {
    "aiofiles", "asyncio", "concurrent", "ctypes", "fcntl", "ftplib", "glob", "http", "httpx", "io",
    "logging.handlers", "mmap", "multiprocessing", "os", "pathlib", "requests", "select", "selectors",
    "shutil", "signal", "socket", "socketserver", "sqlite3", "ssl", "subprocess", "tempfile", "threading",
    "urllib",
}
# fmt: on

Sources = Mapping[str, str]
"""Text of each module by its dotted name; a package's own text is under the package's name."""


def read_sources() -> dict[str, str]:
    """The whole package."""
    sources = {}
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        sources[name] = path.read_text(encoding="utf-8")
    return sources


SOURCES = read_sources()
IS_PACKAGE = {".".join(p.relative_to(ROOT).parent.parts) for p in (ROOT / PACKAGE).rglob("__init__.py")}


def imports(module: str, source: str) -> Iterator[str]:
    """Dotted names that a module imports; of `from a import b` both `a` and `a.b`: `b` may be a module."""
    for node in ast.walk(ast.parse(source, filename=module)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = absolute(module, node)
            yield from (base, *(f"{base}.{alias.name}" for alias in node.names))


def absolute(module: str, node: ast.ImportFrom) -> str:
    """The module that an import statement names, a relative one resolved."""
    if node.level == 0:
        return node.module or ""
    up = node.level - 1 if module in IS_PACKAGE else node.level
    parts = module.split(".")
    return ".".join([*parts[: len(parts) - up], *filter(None, [node.module])])


def part_of(name: str) -> str | None:
    """The part that a dotted name lies in; None outside the package and for the package's root."""
    words = name.split(".")
    if words[0] != PACKAGE or len(words) == 1 or words[1].startswith("__"):
        return None
    return words[1]


def layer_of(part: str) -> int:
    """Height of a part, 0 lowest; above everything for a part that has no place yet."""
    return next((height for height, parts in enumerate(LAYERS) if part in parts), len(LAYERS))


def within(name: str, ancestor: str) -> bool:
    """Is `name` the module `ancestor`, or inside of it?"""
    return name == ancestor or name.startswith(f"{ancestor}.")


def part_edges(sources: Sources) -> Iterator[tuple[str, str, str]]:
    """(module, its part, part it imports), where the two parts differ; names bound in the root count as parts
    only where such a module exists."""
    known = {part_of(module) for module in sources}
    for module, source in sources.items():
        own = part_of(module)
        for name in imports(module, source):
            other = part_of(name)
            if other is not None and other != own and other in known:
                yield module, own or "", other


def upward(sources: Sources) -> list[str]:
    """Imports that point up; the package's root is below every layer."""
    return sorted(
        {
            f"{module} imports {other}"
            for module, own, other in part_edges(sources)
            if layer_of(other) > (layer_of(own) if own else -1)
        }
    )


def foreign(sources: Sources, wanted: set[str], allowed: tuple[str, ...]) -> list[str]:
    """Imports of the modules `wanted` (or of what is in them) outside of the modules `allowed`."""
    return sorted(
        {
            f"{module} imports {name}"
            for module, source in sources.items()
            if not any(within(module, place) for place in allowed)
            for name in imports(module, source)
            if any(within(name, stranger) for stranger in wanted)
        }
    )


def unplaced(sources: Sources) -> list[str]:
    """Modules whose part is in no layer."""
    placed = {part for layer in LAYERS for part in layer}
    return sorted(module for module in sources if (part_of(module) or "errors") not in placed)


def strangers(sources: Sources) -> list[str]:
    """Imports between parts that must not know each other."""
    return sorted({f"{module} imports {b}" for module, a, b in part_edges(sources) if (a, b) in STRANGERS})


def mutual(sources: Sources) -> list[str]:
    """Pairs of parts that import each other: a cycle, wherever it is hidden."""
    edges = {(own, other) for _, own, other in part_edges(sources)}
    return sorted(f"{a} and {b}" for a, b in edges if a < b and (b, a) in edges)


def opened_files(sources: Sources) -> list[str]:
    """Calls of the builtin `open`."""
    return sorted(
        f"{module}:{node.lineno} calls open"
        for module, source in sources.items()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "open"
    )


def parts_from(part: str) -> tuple[str, ...]:
    """The modules of a part's layer and of all layers above it."""
    return tuple(f"{PACKAGE}.{name}" for layer in LAYERS[layer_of(part) :] for name in layer)


def of_parts(sources: Sources, parts: set[str]) -> dict[str, str]:
    """The modules that lie in these parts."""
    return {module: source for module, source in sources.items() if part_of(module) in parts}


def listing(findings: list[str]) -> str:
    """All findings, for a message that pytest does not shorten."""
    return "\n  ".join(["", *findings])


def test_every_module_is_in_a_layer() -> None:
    found = unplaced(SOURCES)
    assert not found, f"give a place in LAYERS and in docs/design.md, section 2, to: {listing(found)}"


def test_no_import_points_up() -> None:
    found = upward(SOURCES)
    assert not found, listing(found)


def test_the_index_and_the_stores_do_not_know_each_other() -> None:
    found = strangers(SOURCES)
    assert not found, listing(found)


def test_no_two_parts_import_each_other() -> None:
    found = mutual(SOURCES)
    assert not found, listing(found)


def test_torch_is_not_imported_below_transfer() -> None:
    found = foreign(SOURCES, {"torch"}, parts_from("transfer"))
    assert not found, listing(found)


def test_vllm_is_imported_by_the_rim_alone() -> None:
    found = foreign(SOURCES, {"vllm"}, VLLM_MODULES)
    assert not found, listing(found)


def test_the_pure_parts_do_no_io() -> None:
    pure = of_parts(SOURCES, PURE_PARTS)
    found = foreign(pure, IO_MODULES, ()) + opened_files(pure)
    assert not found, listing(found)


def test_pickle_is_imported_nowhere() -> None:
    found = foreign(SOURCES, {"pickle", "marshal", "shelve", "cloudpickle", "dill"}, ())
    assert not found, listing(found)


@pytest.mark.parametrize(
    ("module", "source", "finding"),
    [
        ("keys", "from vllm_hicache.storage import base", "vllm_hicache.keys imports storage"),
        ("keys", "def f():\n    import vllm_hicache.storage.base", "vllm_hicache.keys imports storage"),
        ("index.tree", "from ..worker import Worker", "vllm_hicache.index.tree imports worker"),
        ("index.tree", "from .. import worker", "vllm_hicache.index.tree imports worker"),
        ("errors", "from . import keys", "vllm_hicache.errors imports keys"),
    ],
)
def test_an_upward_import_is_found_in_every_form(module: str, source: str, finding: str) -> None:
    others = {f"{PACKAGE}.{part}": "" for part in ("keys", "storage", "worker")}
    assert upward({**others, f"{PACKAGE}.{module}": source}) == [finding]


def test_a_downward_import_and_one_from_the_root_are_allowed() -> None:
    sources = {
        "vllm_hicache": "__version__ = '1'",
        "vllm_hicache.errors": "",
        "vllm_hicache.cli.main": "from vllm_hicache import __version__\nfrom vllm_hicache.errors import A",
    }
    assert upward(sources) == []


def test_an_import_by_the_root_is_upward() -> None:
    assert upward({"vllm_hicache": "from .keys import Key", "vllm_hicache.keys": ""}) != []


def test_an_unknown_module_is_named() -> None:
    assert unplaced({"vllm_hicache.helpers.strings": ""}) == ["vllm_hicache.helpers.strings"]


def test_a_name_that_only_begins_like_a_foreign_package_is_not_one() -> None:
    found = foreign({"vllm_hicache.keys": "import vllm_hicache.errors, vllm.config"}, {"vllm"}, VLLM_MODULES)
    assert found == ["vllm_hicache.keys imports vllm.config"]


def test_strangers_cycles_and_opened_files_are_found() -> None:
    sources = {
        "vllm_hicache.storage.file": "from vllm_hicache.index import tree\nopen('x')",
        "vllm_hicache.index.tree": "from vllm_hicache.storage import file",
    }
    assert strangers(sources) == [
        "vllm_hicache.index.tree imports storage",
        "vllm_hicache.storage.file imports index",
    ]
    assert mutual(sources) == ["index and storage"]
    assert opened_files(sources) == ["vllm_hicache.storage.file:2 calls open"]


def test_setup_cfg_holds_package_discovery_alone() -> None:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg", encoding="utf-8")
    assert set(parser.sections()) == {"options", "options.packages.find", "options.package_data"}
    assert dict(parser["options"]) == {"packages": "find:"}


@pytest.mark.parametrize("name", ["connectors", "storage"])
def test_the_top_level_link_leads_into_the_package(name: str) -> None:
    link = ROOT / name
    assert link.is_symlink()
    assert not os.path.isabs(os.readlink(link))
    assert link.resolve(strict=True) == ROOT / PACKAGE / name


def tracked_files() -> list[Path]:
    """What the repository holds, new files included that are not ignored."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    return [ROOT / os.fsdecode(name) for name in listing.stdout.split(b"\0") if name]


def content(path: Path) -> bytes:
    """A file's bytes, a link's target; nothing for a file that was removed but is still listed."""
    if path.is_symlink():
        return os.fsencode(os.readlink(path))
    return path.read_bytes() if path.is_file() else b""


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git checkout: nothing says what is tracked")
def test_no_tracked_file_names_the_checkouts_own_path() -> None:
    own_path = re.compile(re.escape(os.fsencode(ROOT)) + rb"(?![\w.-])")
    found = [str(path) for path in tracked_files() if own_path.search(content(path))]
    assert not found, listing(found)
