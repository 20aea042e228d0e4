"""The keys of an engine, which come from the environment and nowhere else.

Lowest layer. Pure record; any thread. No message and no repr ever shows a key.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from vllm_hicache.errors import ConfigError

SEAL_KEY_VARIABLE = "VLLM_HICACHE_SEAL_KEY"
ENCRYPTION_KEY_VARIABLE = "VLLM_HICACHE_ENCRYPTION_KEY"
PEER_KEY_VARIABLE = "VLLM_HICACHE_PEER_KEY"
SECRET_BYTES = 32


@dataclass(frozen=True, slots=True)
class Secrets:
    """Keys of 32 bytes each, None where there is none.

    Attributes:
        seal_key: proves that an object was written by somebody who has it (`envelope.HmacSealer`).
        encryption_key: keeps objects unreadable to whoever has it not (`encrypted.Encrypted`).
        peer_key: shared by engines that hand prompts to each other (`handoff.protocol`).
    """

    seal_key: bytes | None = field(default=None, repr=False)
    encryption_key: bytes | None = field(default=None, repr=False)
    peer_key: bytes | None = field(default=None, repr=False)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Secrets:
        """Read all keys. Raises ConfigError for one that is empty or malformed; it never quotes the value."""
        variables = (SEAL_KEY_VARIABLE, ENCRYPTION_KEY_VARIABLE, PEER_KEY_VARIABLE)
        return cls(*(_key(environ, variable) for variable in variables))

    @property
    def protection(self) -> str:
        """What these keys do and which they are, such as `hmac-sha256:0a1b2c3d`, for the namespace; else `none`.

        It parts engines with other keys: they neither find nor remove each other's objects.
        """
        kinds = (("hmac-sha256", self.seal_key), ("aes-256-gcm", self.encryption_key))
        return "+".join(f"{kind}:{key_id(key)}" for kind, key in kinds if key is not None) or "none"


def key_id(key: bytes) -> str:
    """Return 8 hex digits that name a key without telling it, for namespaces and messages."""
    return hashlib.sha256(b"vllm-hicache key id" + key).hexdigest()[:8]


def _key(environ: Mapping[str, str], variable: str) -> bytes | None:
    text = environ.get(variable)
    if text is None:
        return None
    # An empty variable is a deployment that went wrong, never a wish to run without the key.
    key = _decode(text.strip())
    if key is None:
        raise ConfigError(
            f"environment variable {variable} of {len(text)} characters is no key: give {SECRET_BYTES} random "
            f"bytes as {2 * SECRET_BYTES} hex characters or in base64 (openssl rand -hex {SECRET_BYTES}), or unset it"
        )
    return key


def _decode(text: str) -> bytes | None:
    """Return the key that `text` spells, or None. Both alphabets of base64 are taken, padded or not."""
    try:
        if len(text) == 2 * SECRET_BYTES:
            key = bytes.fromhex(text)
        else:
            padded = text + "=" * (-len(text) % 4)
            key = base64.b64decode(padded.translate(str.maketrans("-_", "+/")), validate=True)
    except (ValueError, binascii.Error):
        return None
    return key if len(key) == SECRET_BYTES else None
