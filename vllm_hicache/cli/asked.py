"""What `doctor` is asked about: the settings, the model and this environment's keys.

Owner: `cli/`. Thread: the console's main thread.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from vllm_hicache.config import Config
from vllm_hicache.errors import ConfigError
from vllm_hicache.secrets import Secrets

_SECRET = re.compile(r"([?&][^=&]*(?:pass|secret|token|key)[^=&]*=)[^&]*", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Asked:
    """What the command line and the environment ask for.

    Attributes:
        raw: the settings as written.
        config: the settings, or None where they or a key are refused, for the reason `refusal`.
        model: the model's directory.
        secrets: the keys of the environment.
        prefill_tokens_per_s: what the engine computes, where the user knows it.
    """

    raw: Mapping[str, object]
    config: Config | None
    refusal: str
    model: Path | None
    secrets: Secrets
    prefill_tokens_per_s: float | None

    @classmethod
    def of(cls, args: argparse.Namespace, environ: Mapping[str, str]) -> Asked:
        """Read `doctor`'s arguments. Raises ConfigError for a command line that makes no sense."""
        raw = _raw_config(args.config) if args.config is not None else {}
        if args.store is not None:
            raw["store"] = args.store
        if args.prefill is not None and not args.prefill > 0:
            raise ConfigError(f"--prefill {args.prefill:g} is no speed: give tokens a second, such as 8000")
        model = Path(args.model).expanduser() if args.model is not None else None
        try:
            config, secrets = Config.parse(raw), Secrets.from_environment(environ)
        except ConfigError as error:
            return cls(raw, None, str(error), model, Secrets(), args.prefill)
        return cls(raw, config, "", model, secrets, args.prefill)


def without_secrets(url: str) -> str:
    """The URL without what may be a password: all before an @, and the values of telling parameters."""
    return re.sub(r"://[^/].*@", "://***@", _SECRET.sub(r"\1***", url), flags=re.DOTALL)


def _raw_config(text: str) -> dict[str, object]:
    """The extra config that `--config` gives; of a whole kv-transfer-config, that part of it."""
    try:
        content: object = json.loads(Path(text[1:]).expanduser().read_bytes() if text.startswith("@") else text)
    except OSError as error:
        raise ConfigError(f"cannot read {text[1:]!r} ({error.strerror}): give --config @FILE") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--config is not JSON ({error}): write '{{\"key\": value}}' or @FILE") from error
    if isinstance(content, dict) and content.keys() & {"kv_connector", "kv_connector_extra_config"}:
        content = content.get("kv_connector_extra_config", {})
    if not isinstance(content, dict):
        raise ConfigError(f"--config is a JSON {type(content).__name__}: write '{{\"key\": value}}'")
    return content
