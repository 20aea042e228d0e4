"""URLs, settings and secrets of `lmcache://` stores."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from lmcache_rig import make, scripted
from lmcache_scripted import Medium
from redis_server import HOST, RedisServer

from vllm_hicache.errors import ConfigError, StoreTimeout
from vllm_hicache.storage.base import Rights, StoreOptions
from vllm_hicache.storage.lmcache_config import choose
from vllm_hicache.storage.registry import open_store

pytest_plugins = ["lmcache_fixtures"]


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("lmcache://resq?host=h&port=1", "no adapter 'resq'.*did you mean 'resp'"),
        ("lmcache://?host=h", "no adapter ''"),
        ("lmcache://resp?hosst=h&port=1", "no setting 'hosst'.*did you mean 'host'"),
        ("lmcache://resp?port=1", "refuses its settings: host must be a non-empty string"),
        ("lmcache://resp?host=h&port=x", "port='x' is no int"),
        ("lmcache://resp?host=h&port=-1", "refuses its settings: port must be a positive integer"),
        ("lmcache://resp?host=h&port=1&password=hunter2", "VLLM_HICACHE_LMCACHE_PASSWORD"),
        ("lmcache://fs?base_path=/d&use_odirect=maybe", "use_odirect='maybe' is no bool"),
        ("lmcache://u:hunter2@resp?host=h&port=1", "takes no user or password"),
        ("lmcache://resp/6379?host=h&port=1", "has the path '/6379'"),
    ],
)
def test_a_url_that_names_no_adapter_is_refused_with_the_way_out(url: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        open_store(url)
    assert "hunter2" not in str(caught.value)


def test_settings_become_what_lmcache_expects(tmp_path: Path) -> None:
    choice = choose("fs", {"base_path": "123", "read_ahead_size": "4096", "use_odirect": "false"}, 4, {})
    config = choice.config
    assert (config.base_path, config.read_ahead_size, config.use_odirect) == ("123", 4096, False)
    assert choose("resp", {"host": "h", "port": "1"}, 7, {}).config.num_workers == 7
    assert choose("resp", {"host": "h", "port": "1", "num_workers": "3"}, 7, {}).config.num_workers == 3


def test_a_directory_that_cannot_be_made_is_a_config_error_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store = make("fs", base_path=str(tmp_path / "file" / "below"))
    with pytest.raises(ConfigError, match="does not start: NotADirectoryError"):
        store.probe()
    store.close()


def test_a_password_comes_from_the_environment_and_is_never_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RedisServer(tmp_path / "redis", password="hunter2") as server:
        url = f"lmcache://resp?host={HOST}&port={server.port}"
        monkeypatch.setenv("VLLM_HICACHE_LMCACHE_PASSWORD", "hunter2")
        store = open_store(url)
        assert store.probe() == Rights()
        assert store.describe() == url
        assert "hunter2" not in repr(choose("resp", {"host": HOST, "port": "1"}, 4, os.environ))
        store.close()
        monkeypatch.setenv("VLLM_HICACHE_LMCACHE_PASSWORD", "wrong-one")
        store = open_store(url, StoreOptions(0.5, 4))
        with pytest.raises(StoreTimeout, match="check its address and password") as caught:
            store.probe()
        assert "wrong-one" not in str(caught.value)
        store.close()


def test_a_secret_in_lmcaches_own_message_is_struck_out() -> None:
    choice = choose("resp", {"host": "h", "port": "1"}, 4, {"VLLM_HICACHE_LMCACHE_PASSWORD": "hunter2"})
    assert choice.config.password == "hunter2"
    assert choice.without_secrets("no such user hunter2") == "no such user ***"


def test_nested_settings_are_not_told(medium: Medium) -> None:
    store = scripted(medium)
    assert medium.label not in store.describe()
    assert "class_name=ScriptedAdapter" in store.describe()
    store.close()
