"""What engines say of a prompt's pages in the parameters that proxies carry, and what is made of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_hicache.errors import ConfigError
from vllm_hicache.geometry import Holding, PageLayout, RoleShape
from vllm_hicache.grid import Grid
from vllm_hicache.handoff.protocol import Serving, is_local, password, peer_of
from vllm_hicache.inventory import Inventory
from vllm_hicache.names import Role
from vllm_hicache.namespace import Spaces
from vllm_hicache.plan import Peer, PeerRank

KEY, OTHER_KEY = bytes(range(32)), bytes(32)
SPACES = Spaces(b"t" * 32, b"d" * 32)
LAYOUT = PageLayout((RoleShape(Role.TARGET, 4, 2, 64),), 16, 64, Grid(2, 2))
HOLDINGS = (
    (Holding(Role.TARGET, (0, 4), (0, 1)), Holding(Role.DRAFT, (0, 1), (0, 2), 0, 2)),
    (Holding(Role.TARGET, (0, 4), (1, 2)), Holding(Role.DRAFT, (0, 1), (0, 2), 1, 2)),
)
Words = dict[str, Any]


def serving(host: str = "127.0.0.1") -> Serving:
    ranks = [
        Inventory(rank, holdings, LAYOUT, 64, 8, {Role.TARGET: "test"}, port=7001 + rank)
        for rank, holdings in enumerate(HOLDINGS)
    ]
    return Serving("engine-1", host, ranks, tp_size=2)


def told(key: bytes | None = None, host: str = "127.0.0.1", spaces: Spaces = SPACES) -> Words:
    """An answer as a decode engine gets it: JSON has been made of it on the way."""
    carried: Words = json.loads(json.dumps(serving(host).told("cmpl-1", spaces, key)))
    return carried


def peer(host: str = "127.0.0.1") -> Peer:
    return Peer("cmpl-1", tuple(PeerRank(host, 7001 + rank, holdings) for rank, holdings in enumerate(HOLDINGS)))


# Round trip


@pytest.mark.parametrize("key", [None, KEY], ids=["without a key", "signed"])
def test_what_one_engine_says_another_understands_after_json_has_been_made_of_it(key: bytes | None) -> None:
    assert peer_of(told(key), SPACES, key) == peer()


def test_the_words_of_vllms_own_connector_are_all_there() -> None:
    words = told()
    del words["hicache"]
    assert words == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": "engine-1",
        "remote_request_id": "cmpl-1",
        "remote_block_ids": [],
        "remote_host": "127.0.0.1",
        "remote_port": 7001,
        "tp_size": 2,
    }


@pytest.mark.parametrize("parameters", [{}, {"do_remote_prefill": False}, {"do_remote_decode": True}], ids=str)
def test_a_request_whose_prompt_nobody_computed_has_no_peer(parameters: Words) -> None:
    assert peer_of(parameters, SPACES, KEY) is None


def test_an_engine_without_a_draft_says_so_and_is_understood() -> None:
    alone = Spaces(SPACES.target)
    words = told(spaces=alone)
    assert words["hicache"]["draft"] is None
    assert peer_of(words, alone, None) == peer()


def test_another_draft_is_no_hindrance_for_it_has_a_namespace_of_its_own() -> None:
    assert peer_of(told(KEY), replace(SPACES, draft=b"e" * 32), KEY) == peer()


holdings = st.builds(
    Holding,
    st.sampled_from(Role),
    st.tuples(st.integers(0, 99), st.integers(0, 99)),
    st.tuples(st.integers(0, 99), st.integers(0, 99)),
    st.integers(0, 9),
    st.integers(1, 9),
)
ranks = st.lists(st.tuples(st.integers(1, 65535), st.lists(holdings, max_size=2).map(tuple)), min_size=1, max_size=4)


@given(ranks, st.text(max_size=20), st.binary(min_size=32, max_size=32))
def test_ranks_and_names_cross_unchanged_whatever_they_are(
    held: list[tuple[int, tuple[Holding, ...]]], name: str, key: bytes
) -> None:
    inventories = [Inventory(0, each, LAYOUT, 64, 8, {}, port=port) for port, each in held]
    words = json.loads(json.dumps(Serving("e", "localhost", inventories, 1).told(name, SPACES, key)))
    assert peer_of(words, SPACES, key) == Peer(name, tuple(PeerRank("localhost", *each) for each in held))


# Whom to believe


def changed(*path: str | int, to: object) -> Callable[[Words], None]:
    def change(words: Words) -> None:
        place: Any = words
        for step in path[:-1]:
            place = place[step]
        place[path[-1]] = to

    return change


TAMPERINGS = {
    "host": changed("hicache", "ranks", 0, 0, to="10.0.0.9"),
    "port": changed("hicache", "ranks", 1, 1, to=7003),
    "role": changed("hicache", "ranks", 0, 2, 0, 0, to="draft"),
    "layers": changed("hicache", "ranks", 0, 2, 0, 2, to=3),
    "heads": changed("hicache", "ranks", 0, 2, 0, 3, to=1),
    "replica": changed("hicache", "ranks", 1, 2, 1, 5, to=0),
    "rank": changed("hicache", "ranks", 1, to=["127.0.0.1", 7002, []]),
    "draft": changed("hicache", "draft", to="65" * 32),
    "more": changed("hicache", "also", to=1),
    "signature": changed("hicache", "signature", to="0" * 64),
    "no text": changed("hicache", "signature", to=7),
    "no ascii": changed("hicache", "signature", to="\u00e9" * 64),
    "half a character": changed("hicache", "signature", to="\ud800"),
}


@pytest.mark.parametrize("tamper", TAMPERINGS.values(), ids=TAMPERINGS)
def test_whatever_is_changed_on_the_way_is_refused_where_there_is_a_key(tamper: Callable[[Words], None]) -> None:
    words = told(KEY)
    tamper(words)
    with pytest.raises(ConfigError, match=r"nobody with this engine's key has signed: .*VLLM_HICACHE_PEER_KEY"):
        peer_of(words, SPACES, KEY)


@pytest.mark.parametrize("key", [None, OTHER_KEY], ids=["nobody", "somebody else"])
def test_what_another_signed_or_nobody_is_refused_where_there_is_a_key(key: bytes | None) -> None:
    with pytest.raises(ConfigError, match="has signed"):
        peer_of(told(key), SPACES, KEY)


@pytest.mark.parametrize("host", ["10.0.0.9", "0.0.0.0", "prefill.example", "::", ""])
def test_without_a_key_only_this_machine_is_read(host: str) -> None:
    words = told(host=host)
    with pytest.raises(ConfigError, match=f"computed at {host}, .*their own machine only: set VLLM_HICACHE_PEER_KEY"):
        peer_of(words, SPACES, None)
    assert peer_of(told(KEY, host), SPACES, KEY) == peer(host)


def test_without_a_key_one_rank_elsewhere_is_enough_to_refuse_all() -> None:
    words = told()
    TAMPERINGS["host"](words)
    with pytest.raises(ConfigError, match=r"computed at 10\.0\.0\.9"):
        peer_of(words, SPACES, None)


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("127.8.9.1", True), ("::1", True), ("localhost", True), ("localhost.example", False)],
)
def test_addresses_of_this_machine_are_known(host: str, expected: bool) -> None:
    assert is_local(host) is expected


def test_a_password_is_made_of_the_key_and_does_not_tell_it() -> None:
    words = [password(KEY), password(OTHER_KEY)]
    assert password(None) is None
    assert len(set(words)) == 2
    assert KEY.hex() not in str(words)
    assert password(KEY) == words[0] != told(KEY)["hicache"]["signature"]


# Nonsense


@pytest.mark.parametrize("own", [None, 7, "hicache", [], {}, {"version": 2}, {"version": "1"}], ids=str)
def test_an_engine_that_speaks_otherwise_is_refused(own: object) -> None:
    words = told() | {"hicache": own}
    with pytest.raises(ConfigError, match=r"says nothing this one understands \(version 1\): run the same"):
        peer_of(words, SPACES, None)


@pytest.mark.parametrize("space", ["6f" * 32, None, 7], ids=str)
def test_another_namespace_is_refused_with_both_names(space: object) -> None:
    words = told()
    words["hicache"]["target"] = space
    with pytest.raises(ConfigError, match=f"under namespace {str(space)[:16]}, this engine's is {'74' * 8}: give both"):
        peer_of(words, SPACES, None)


def test_a_namespace_is_compared_with_a_key_too() -> None:
    with pytest.raises(ConfigError, match="under namespace"):
        peer_of(told(KEY), Spaces(b"o" * 32), KEY)


GOOD = ["target", 0, 4, 0, 1, 0, 1]
NO_RANKS: list[object] = [None, 7, "rank", [], [[]], [7], [["127.0.0.1", 7001]], [["127.0.0.1", 7001, [], 1]]]
PORTS: tuple[object, ...] = (None, "http", [], float("inf"), float("nan"), 0, -1, 65536)
NO_PORTS: list[object] = [[["127.0.0.1", port, []]] for port in PORTS]
HELD: tuple[object, ...] = (
    None,
    7,
    [[]],
    [7],
    [GOOD[:-1]],
    [[*GOOD, 1]],
    [["both", *GOOD[1:]]],
    [["target", "x", *GOOD[2:]]],
)
NO_HOLDINGS: list[object] = [[["127.0.0.1", 7001, held]] for held in HELD]


@pytest.mark.parametrize("ranks", [*NO_RANKS, *NO_PORTS, *NO_HOLDINGS], ids=str)
def test_ranks_that_make_no_sense_are_refused(ranks: object) -> None:
    words = told()
    words["hicache"]["ranks"] = ranks
    with pytest.raises(ConfigError, match="name its ranks in a way that makes no sense"):
        peer_of(words, SPACES, None)


def test_parameters_without_ranks_are_refused() -> None:
    words = told()
    del words["hicache"]["ranks"]
    with pytest.raises(ConfigError, match="makes no sense: 'ranks'"):
        peer_of(words, SPACES, None)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=12,
)


@given(json_values, st.sampled_from(["version", "target", "draft", "ranks", "signature"]), st.sampled_from([None, KEY]))
def test_nothing_that_a_client_can_say_does_more_than_have_its_own_request_refused(
    value: object, name: str, key: bytes | None
) -> None:
    words = told(key)
    words["hicache"][name] = value
    try:
        found = peer_of(words, SPACES, key)
    except ConfigError:
        return
    assert found is not None
    assert all(is_local(rank.host) and 0 < rank.port < 65536 for rank in found.ranks)
