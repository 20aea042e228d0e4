"""Fingerprints of models and adapters: which weights, not which path or served name.

Reads files; called once at start (and once per adapter version), never on a request's path. Cheap for hundreds
of gigabytes: the config, the table of tensors (names, shapes, dtypes) and the first, middle and last KiB of every
tensor enter, not all bytes. Training changes nearly every value of a tensor, so one tensor that was trained is
seen; a file patched by hand in a few values may not be, and then an operator pins `model_id`.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

from vllm_hicache.errors import ConfigError
from vllm_hicache.keys import digest

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_CONFIGS = ("config.json", "adapter_config.json")
_WINDOW_BYTES = 1024
_FILE_WINDOWS = 4096
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


def model_identity(fingerprint: str, dtype: str, overrides: str = "") -> str:
    """The namespace's `model` (hex) of weights computed in `dtype` (`torch.bfloat16`) under config overrides."""
    return digest(fingerprint.encode(), dtype.encode(), overrides.encode()).hex()


def _weight_files(root: Path) -> Iterator[Path]:
    if root.is_file():
        yield root
        return
    for directory, _, names in os.walk(root, followlinks=True):
        yield from (Path(directory, name) for name in names if name.endswith(_WEIGHTS))


def _canonical_config(path: Path) -> bytes:
    try:
        config = json.loads(path.read_text())
        if not isinstance(config, dict):
            raise ValueError("not a JSON object")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"cannot read {str(path)!r} for the model's fingerprint ({error}): repair it or pin 'model_id'"
        ) from error
    kept = {name: value for name, value in config.items() if name not in _COSMETIC}
    return json.dumps(kept, sort_keys=True).encode()


def _sample(path: Path, hasher: hashlib._Hash) -> None:
    size = path.stat().st_size
    with path.open("rb") as file:
        descriptor = file.fileno()
        if path.suffix == ".safetensors":
            table = _read_table(descriptor, path, size)
            hasher.update(table)
            spans = _tensor_spans(table, path)
        else:
            stride = max(_WINDOW_BYTES, size // _FILE_WINDOWS)
            spans = [(start, min(start + stride, size)) for start in range(0, max(1, size), stride)]
        for start, stop in spans:
            for offset in sorted(
                {start, max(start, (start + stop - _WINDOW_BYTES) // 2), max(start, stop - _WINDOW_BYTES)}
            ):
                hasher.update(os.pread(descriptor, min(_WINDOW_BYTES, stop - offset), offset))


def _read_table(descriptor: int, path: Path, size: int) -> bytes:
    """A safetensors file's table of tensor names, shapes, dtypes and places, as it stands in the file."""
    prefix = os.pread(descriptor, 8, 0)
    length = int.from_bytes(prefix, "little") if len(prefix) == 8 else size + 1
    if length > min(size - 8, _MAX_TABLE_BYTES):
        raise ConfigError(
            f"{str(path)!r} is no safetensors file: its table claims {length} bytes of {size}; replace the file"
        )
    return os.pread(descriptor, length, 8)


def _tensor_spans(table: bytes, path: Path) -> list[tuple[int, int]]:
    """Half-open byte ranges of the tensors in the file, in order."""
    try:
        entries = json.loads(table)
        places = [entry["data_offsets"] for name, entry in entries.items() if name != "__metadata__"]
        return sorted((8 + len(table) + int(start), 8 + len(table) + int(stop)) for start, stop in places)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"{str(path)!r} has an unreadable table of tensors ({error}): replace the file") from error
