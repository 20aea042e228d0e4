"""Fingerprints: other weights under the same path or name are told apart, equal files elsewhere are not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from vllm_hicache.errors import ConfigError
from vllm_hicache.fingerprint import weights_fingerprint

CONFIG = {
    "hidden_size": 4,
    "rope_theta": 10000.0,
    "_name_or_path": "here",
    "transformers_version": "4",
    "use_cache": True,
}


def tensors() -> dict[str, np.ndarray]:
    return {"layer.0": np.arange(16, dtype=np.float32).reshape(4, 4), "layer.1": np.ones(8, np.float32)}


def a_model(folder: Path, weights: Mapping[str, np.ndarray] | None = None, **config: object) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(dict(weights or tensors()), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    return folder


def test_one_changed_number_in_one_tensor_is_another_model(tmp_path: Path) -> None:
    before, changed = weights_fingerprint(a_model(tmp_path / "m")), tensors()
    changed["layer.1"][5] += 1
    assert weights_fingerprint(a_model(tmp_path / "m", changed)) != before


@pytest.mark.parametrize("at", [0, 32767, 32768, 65535])
def test_a_change_at_the_start_the_middle_or_the_end_of_any_tensor_is_seen(at: int, tmp_path: Path) -> None:
    large = {f"layer.{index}": np.zeros(1 << 16, np.uint8) for index in range(9)}
    seen = {weights_fingerprint(a_model(tmp_path / "m", large))}
    for tensor in large.values():
        tensor[at] = 1
        seen.add(weights_fingerprint(a_model(tmp_path / "m", large)))
    assert len(seen) == 10


def test_the_same_bytes_in_another_shape_are_another_model(tmp_path: Path) -> None:
    before, changed = weights_fingerprint(a_model(tmp_path / "m")), tensors()
    changed["layer.0"] = changed["layer.0"].reshape(2, 8)
    assert weights_fingerprint(a_model(tmp_path / "m", changed)) != before


def test_the_same_bytes_under_another_tensor_name_or_dtype_are_another_model(tmp_path: Path) -> None:
    renamed = {name.replace(".0", ".2"): tensor for name, tensor in tensors().items()}
    recast = {name: tensor.view(np.int32) for name, tensor in tensors().items()}
    prints = {weights_fingerprint(a_model(tmp_path / "m", weights)) for weights in (tensors(), renamed, recast)}
    assert len(prints) == 3


def test_a_config_field_that_changes_the_computation_is_another_model(tmp_path: Path) -> None:
    before = weights_fingerprint(a_model(tmp_path / "m"))
    assert weights_fingerprint(a_model(tmp_path / "m", rope_theta=500000.0)) != before
    assert weights_fingerprint(a_model(tmp_path / "m", new_field=1)) != before


@pytest.mark.parametrize("field", ["_name_or_path", "transformers_version", "use_cache"])
def test_a_config_field_that_only_names_things_changes_nothing(field: str, tmp_path: Path) -> None:
    before = weights_fingerprint(a_model(tmp_path / "m"))
    assert weights_fingerprint(a_model(tmp_path / "m", **{field: "other"})) == before


def test_order_and_spacing_of_the_config_change_nothing(tmp_path: Path) -> None:
    before = weights_fingerprint(a_model(tmp_path / "m"))
    (tmp_path / "m/config.json").write_text(json.dumps(dict(reversed(CONFIG.items())), indent=7))
    assert weights_fingerprint(tmp_path / "m") == before


def test_the_same_files_elsewhere_are_the_same_model(tmp_path: Path) -> None:
    model = a_model(tmp_path / "m")
    shutil.copytree(model, tmp_path / "another name")
    (tmp_path / "link").symlink_to(model)
    assert {weights_fingerprint(tmp_path / name) for name in ("another name", "link")} == {weights_fingerprint(model)}


def test_files_that_are_no_weights_change_nothing(tmp_path: Path) -> None:
    before = weights_fingerprint(a_model(tmp_path / "m"))
    (tmp_path / "m/README.md").write_text("a model")
    assert weights_fingerprint(tmp_path / "m") == before


def test_every_shard_counts_and_so_does_its_name(tmp_path: Path) -> None:
    seen = {weights_fingerprint(a_model(tmp_path / "m"))}
    save_file(tensors(), tmp_path / "m/second.safetensors")
    seen.add(weights_fingerprint(tmp_path / "m"))
    (tmp_path / "m/second.safetensors").rename(tmp_path / "m/third.safetensors")
    seen.add(weights_fingerprint(tmp_path / "m"))
    assert len(seen) == 3


@pytest.mark.parametrize("share", [0.0, 0.5, 0.999])
def test_a_large_file_is_sampled_from_its_start_to_its_end(share: float, tmp_path: Path) -> None:
    content = np.zeros(1 << 20, np.uint8)
    content.tofile(tmp_path / "weights.gguf")
    before = weights_fingerprint(tmp_path)
    start = int(share * content.size)
    content[start : start + content.size // 50] = 1  # longer than the distance of two samples
    content.tofile(tmp_path / "weights.gguf")
    assert weights_fingerprint(tmp_path) != before


def test_a_longer_file_with_equal_samples_is_another_model(tmp_path: Path) -> None:
    prints = set()
    for size in (1 << 20, (1 << 20) + 1):
        np.zeros(size, np.uint8).tofile(tmp_path / "weights.bin")
        prints.add(weights_fingerprint(tmp_path))
    assert len(prints) == 2


def test_one_weight_file_can_be_named_itself(tmp_path: Path) -> None:
    model = a_model(tmp_path / "m")
    one, two = model / "model.safetensors", tmp_path / "renamed.safetensors"
    shutil.copy(one, two)
    assert weights_fingerprint(str(one)) == weights_fingerprint(two) != weights_fingerprint(model)


def test_an_adapters_config_counts(tmp_path: Path) -> None:
    model = a_model(tmp_path / "m")
    seen = {weights_fingerprint(model)}
    for alpha in (16, 32):
        (model / "adapter_config.json").write_text(json.dumps({"lora_alpha": alpha}))
        seen.add(weights_fingerprint(model))
    assert len(seen) == 3


@pytest.mark.parametrize("make", [lambda path: None, lambda path: (path / "config.json").write_text("{}")])
def test_without_weights_the_way_out_is_named(make: object, tmp_path: Path) -> None:
    assert callable(make)
    make(tmp_path)
    with pytest.raises(ConfigError, match=r"no weight file.*pin 'model_id'"):
        weights_fingerprint(tmp_path)


def test_a_path_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no weight file"):
        weights_fingerprint(tmp_path / "nowhere")


@pytest.mark.parametrize("kept", [0, 3, 8, 40])
def test_a_safetensors_file_that_ends_within_its_table_is_refused(kept: int, tmp_path: Path) -> None:
    file = a_model(tmp_path / "m") / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(ConfigError, match=rf"no safetensors file: its table claims \d+ bytes of {kept}"):
        weights_fingerprint(tmp_path / "m")


@pytest.mark.parametrize("missing", [8, 1])
def test_a_safetensors_file_that_ends_just_before_its_tables_end_is_refused(missing: int, tmp_path: Path) -> None:
    file = a_model(tmp_path / "m") / "model.safetensors"
    table_bytes = int.from_bytes(file.read_bytes()[:8], "little")
    file.write_bytes(file.read_bytes()[: 8 + table_bytes - missing])
    with pytest.raises(ConfigError, match=r"model\.safetensors' .*; replace the file"):
        weights_fingerprint(tmp_path / "m")


@pytest.mark.parametrize(
    "table", [b"[]", b"null", b'{"layer": 1}', b'{"layer": {}}', b'{"layer": {"data_offsets": [1]}}']
)
def test_a_table_that_is_no_table_of_tensors_is_refused(table: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(len(table).to_bytes(8, "little") + table)
    with pytest.raises(ConfigError, match="unreadable table of tensors"):
        weights_fingerprint(tmp_path)


def test_a_table_of_absurd_length_is_refused_without_reading_it(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(ConfigError, match="claims 18446744073709551615 bytes of 64"):
        weights_fingerprint(tmp_path)


def test_a_config_that_is_no_json_is_refused_by_path(tmp_path: Path) -> None:
    model = a_model(tmp_path / "m")
    (model / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"cannot read '.*config\.json'"):
        weights_fingerprint(model)


def test_a_config_that_is_no_mapping_is_refused_by_path(tmp_path: Path) -> None:
    model = a_model(tmp_path / "m")
    (model / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"cannot read '.*config\.json'"):
        weights_fingerprint(model)
