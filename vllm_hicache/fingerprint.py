"""Fingerprints of models and adapters: which weights, not which path or served name.

Reads files; called once at start (and once per adapter version), never on a request's path. Cheap for hundreds
of gigabytes: the config, the table of tensors (names, shapes, dtypes) and sampled bytes of every weight file
enter, not all bytes. Two fine-tunes of one base differ in nearly every sampled window.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

from vllm_hicache.errors import ConfigError

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_CONFIGS = ("config.json", "adapter_config.json")
_WINDOWS = 64
_WINDOW_BYTES = 4096
_MAX_TABLE_BYTES = 256 * 1024 * 1024
# Fields of config.json that name things without changing what the weights compute.
_COSMETIC = frozenset({"_name_or_path", "transformers_version", "use_cache"})


def weights_fingerprint(path: str | os.PathLike[str]) -> str:
    """Hex SHA-256 over the config and sampled bytes of every weight file below `path`.

    Args:
        path: directory of a model or adapter, or one weight file.

    Raises:
        ConfigError: there is no weight file.
    """
    root = Path(path)
    weights = sorted(_weight_files(root))
    if not weights:
        raise ConfigError(
            f"no weight file ({', '.join(_WEIGHTS)}) found at {str(root)!r}, so its KV cannot be told from another "
            "model's: give a local model directory or pin 'model_id' in kv_connector_extra_config"
        )
    hasher = hashlib.sha256()
    for name in _CONFIGS:
        if root.is_dir() and (root / name).is_file():
            hasher.update(_canonical_config(root / name))
    for file in weights:
        relative = file.relative_to(root).as_posix() if root.is_dir() else file.suffix
        hasher.update(f"{relative}\0{file.stat().st_size}\0".encode())
        _sample(file, hasher)
    return hasher.hexdigest()


def _weight_files(root: Path) -> Iterator[Path]:
    if root.is_file():
        yield root
        return
    for directory, _, names in os.walk(root, followlinks=True):
        yield from (Path(directory, name) for name in names if name.endswith(_WEIGHTS))


def _canonical_config(path: Path) -> bytes:
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"cannot read {str(path)!r} for the model's fingerprint ({error}): repair it or pin 'model_id'"
        ) from error
    kept = {name: value for name, value in config.items() if name not in _COSMETIC}
    return json.dumps(kept, sort_keys=True).encode()


def _sample(path: Path, hasher: hashlib._Hash) -> None:
    size = path.stat().st_size
    with path.open("rb") as file:
        if path.suffix == ".safetensors":
            prefix = file.read(8)
            hasher.update(file.read(_table_bytes(prefix, path, size)))
        stride = max(1, (size - _WINDOW_BYTES) // (_WINDOWS - 1))
        for offset in range(0, max(1, size), stride):
            file.seek(offset)
            hasher.update(file.read(_WINDOW_BYTES))


def _table_bytes(prefix: bytes, path: Path, size: int) -> int:
    """Length of a safetensors file's table of tensor names, shapes and dtypes."""
    length = int.from_bytes(prefix, "little") if len(prefix) == 8 else size + 1
    if length > min(size, _MAX_TABLE_BYTES):
        raise ConfigError(
            f"{str(path)!r} is no safetensors file: its table claims {length} bytes of {size}; replace the file"
        )
    return length
