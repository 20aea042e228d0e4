"""From the parameters of a URL to the configuration of one of LMCache's L2 adapters, and to the adapter itself.

Owner: `storage/lmcache.py`. Thread: any; the first call of an adapter type imports its module, for seconds.
"""

from __future__ import annotations

import inspect
import json
import pkgutil
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any
from urllib.parse import urlencode

from vllm_hicache.errors import ConfigError
from vllm_hicache.storage.url import suggest


@contextmanager
def quiet_import() -> Iterator[None]:
    """Hush what LMCache's dependencies say about their own age while they are imported."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)
        yield


with quiet_import():
    from lmcache.v1.distributed import l2_adapters
    from lmcache.v1.distributed.l2_adapters.config import L2AdapterConfigBase, get_l2_adapter_config_class

SECRET_VARIABLE = "VLLM_HICACHE_LMCACHE_"
"""A secret field's environment variable is this and the field's name in capitals."""

_SECRET = re.compile(r"password|secret|(?<!_)token$")
_NESTED = ("{", "[")
_MODULE_END = "_l2_adapter"
# Modules that are named otherwise than the type that they register, or register none.
_OTHER_NAMES = {"native_connector": "", "sagemaker_hyperpod": "sagemaker-hyperpod"}
# Settings of LMCache's own storage manager, which is not in use here.
_WITHOUT_EFFECT = {"eviction", "max_capacity_gb"}
_BOOLS = {"true": True, "false": False}


@dataclass(frozen=True, slots=True)
class AdapterChoice:
    """An adapter type of LMCache's and a configuration that it accepted."""

    name: str
    config: L2AdapterConfigBase = field(repr=False)
    parameters: Mapping[str, str] = field(repr=False)
    """As the URL gave them."""
    secrets: tuple[str, ...] = field(repr=False)

    def describe(self) -> str:
        """Return the URL, without nested settings: nobody knows what they hold."""
        shown = {each: "..." if text[:1] in _NESTED else text for each, text in self.parameters.items()}
        return f"lmcache://{self.name}" + (f"?{urlencode(shown)}" if shown else "")

    def make(self) -> l2_adapters.L2AdapterInterface:
        """Return a new adapter. Raises whatever the adapter raises; see `without_secrets`."""
        with quiet_import():
            return l2_adapters.create_l2_adapter(self.config)

    def without_secrets(self, text: str) -> str:
        """Return an adapter's own message with what is secret struck out."""
        return _strike_out(text, self.secrets)


def choose(name: str, parameters: Mapping[str, str], num_workers: int, environment: Mapping[str, str]) -> AdapterChoice:
    """Configure the adapter type `name`, with `num_workers` where it has workers and the URL does not say.

    Secret fields come from `environment` alone. Raises ConfigError with LMCache's reason, or the closest name.
    """
    config_class = _config_class(name)
    known = _fields(config_class)
    for given in parameters:
        if given not in known and not _takes_anything(known):
            raise ConfigError(f"LMCache's adapter {name!r} has no setting {given!r}: {suggest(given, known)}")
        if _SECRET.search(given):
            raise ConfigError(
                f"setting {given!r} of LMCache's adapter {name!r} is a secret: give it as the environment "
                f"variable {SECRET_VARIABLE}{given.upper()}, not in the URL"
            )
    values = {given: _value(given, text, known.get(given, "")) for given, text in parameters.items()}
    if "num_workers" in known:
        values.setdefault("num_workers", num_workers)
    found = {each: environment.get(f"{SECRET_VARIABLE}{each.upper()}", "") for each in known if _SECRET.search(each)}
    secrets = {each: secret for each, secret in found.items() if secret}
    try:
        config = config_class.from_dict({"type": name, **values, **secrets})
    except Exception as error:  # stop: at start, and only a person can repair it
        reason = _strike_out(str(error), secrets.values())
        raise ConfigError(f"LMCache's adapter {name!r} refuses its settings: {reason}") from None
    return AdapterChoice(name, config, dict(parameters), tuple(secrets.values()))


def adapter_names() -> list[str]:
    """Return the names of the adapter types that this LMCache ships, importing none of them."""
    modules = [module.name for module in pkgutil.iter_modules(l2_adapters.__path__)]
    stems = [module.removesuffix(_MODULE_END) for module in modules if module.endswith(_MODULE_END)]
    return sorted(name for name in (_OTHER_NAMES.get(stem, stem) for stem in stems) if name)


def _config_class(name: str) -> type[L2AdapterConfigBase]:
    if name not in adapter_names():
        raise ConfigError(f"LMCache has no adapter {name!r}: {suggest(name, adapter_names())}")
    try:
        with quiet_import():
            # LMCache itself would import every adapter that sorts before this one, Google's clients among them.
            import_module(f"{l2_adapters.__name__}.{name.replace('-', '_')}{_MODULE_END}")
            config_class: type[L2AdapterConfigBase] = get_l2_adapter_config_class(name)
            return config_class
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"LMCache's adapter {name!r} needs the package {error.name!r}, which is not installed: pip install it"
        ) from error


def _fields(config_class: type[L2AdapterConfigBase]) -> dict[str, str]:
    """Return the settings that a configuration class takes, each with its type as the source has it."""
    signature = inspect.signature(config_class.__init__)
    found = {each.name: _annotation(each.annotation) for each in list(signature.parameters.values())[1:]}
    # Some are read from the dictionary alone; the help text that `lmcache` prints names them.
    for word in re.findall(r"^\s*- ([a-z]\w*)", config_class.help(), re.MULTILINE):
        found.setdefault(word, "")
    return {name: kind for name, kind in found.items() if name not in _WITHOUT_EFFECT}


def _strike_out(text: str, secrets: Iterable[str]) -> str:
    for secret in secrets:
        text = text.replace(secret, "***")
    return text


def _annotation(annotation: Any) -> str:  # noqa: ANN401 - whatever stands in LMCache's source
    return annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))


def _takes_anything(known: Mapping[str, str]) -> bool:
    return any(kind.startswith(("dict", "Any")) for kind in known.values())


def _value(name: str, text: str, kind: str) -> Any:  # noqa: ANN401 - as JSON would give it
    """Convert a parameter as LMCache's JSON would hold it. Raises ConfigError."""
    try:
        if text[:1] in _NESTED:
            return json.loads(text)
        if re.search(r"\bbool\b", kind):
            return _BOOLS[text.lower()]
        if not kind.startswith(("dict", "list")) and re.search(r"\bint\b", kind):
            return int(text)
        return float(text) if re.search(r"\bfloat\b", kind) else text
    except (ValueError, KeyError):
        raise ConfigError(f"LMCache setting {name}={text!r} is no {kind or 'JSON'}: correct the URL") from None
