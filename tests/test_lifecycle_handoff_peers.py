"""Handoffs that go wrong: peers that die, stay silent or say nonsense, aborts, resets and want of room on either side.

In each, every byte that attention reads is checked on every rank, kept pages are kept and the rest is computed; at the
end neither engine has leases, operations, exports or held blocks.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping

import pytest
from handoff_kit import (
    KEYS,
    PATIENT,
    TEXT,
    ReadsOf,
    chain_of,
    every_cut,
    talker,
)
from simulated_handoff import (
    Cuts,
    StartPair,
    close_servers,
)
from simulated_model import BLOCK

from vllm_hicache.names import PageKey
from vllm_hicache.secrets import PEER_KEY_VARIABLE

pytest_plugins = ["handoff_fixtures", "lifecycle_fixtures"]


IN_ORDER = {"io_threads": 1}
"""Every rank fetches one page after the other."""


def own(told: Mapping[str, object], **changes: object) -> dict[str, object]:
    """Parameters of which the connector's own words are changed."""
    return {**told, "hicache": {**told["hicache"], **changes}}


def at(told: Mapping[str, object], host: str, port: int) -> dict[str, object]:
    """The same, of ranks elsewhere."""
    return own(told, ranks=[[host, port, held] for _, _, held in told["hicache"]["ranks"]])


class TestAPeerThatDies:
    @every_cut
    def test_before_anything_is_read_all_is_computed_here(self, start: StartPair, cuts: Cuts) -> None:
        pair = start(*cuts)
        told = pair.ready(TEXT)
        close_servers(pair.prefill)
        pair.serve(TEXT, told)
        pair.check_computed_here()
        pair.expire()
        assert pair.prefill.counters["handoffs|expired"] == 1

    @every_cut
    @pytest.mark.parametrize("num_pages", [1, 2, 4, 6])
    def test_in_mid_load_the_pages_that_have_come_are_kept_and_the_rest_is_computed_here(
        self, start: StartPair, reads_of: ReadsOf, cuts: Cuts, num_pages: int
    ) -> None:
        pair = start(*cuts, of_decode=IN_ORDER)
        told, reads, chain = pair.ready(TEXT), reads_of(pair.prefill), chain_of(pair.decode, TEXT)

        def cut(page: PageKey) -> None:
            if chain.index(page) >= num_pages:
                raise ConnectionResetError

        reads.before = cut
        job = pair.serve(TEXT, told)
        pair.settle()
        assert pair.decode.counters["hit_tokens|peer"] == num_pages * BLOCK
        pair.decode.drop_device()
        assert pair.decode.serve(job.tokens[:100]).num_external == 96

    @every_cut
    @pytest.mark.parametrize("num_pages", [1, 4])
    def test_in_mid_load_for_good(self, start: StartPair, reads_of: ReadsOf, cuts: Cuts, num_pages: int) -> None:
        pair = start(*cuts)
        told, reads, chain = pair.ready(TEXT), reads_of(pair.prefill), chain_of(pair.decode, TEXT)
        reads.before = lambda page: close_servers(pair.prefill) if page == chain[num_pages] else None
        pair.serve(TEXT, told)
        assert pair.decode.counters["hit_tokens|peer"] < 99
        pair.expire()

    @every_cut
    @pytest.mark.parametrize("num_local", [32, 40])
    def test_what_was_here_already_is_kept(self, start: StartPair, cuts: Cuts, num_local: int) -> None:
        pair = start(*cuts)
        pair.decode.serve(TEXT[:num_local], max_tokens=1)
        pair.decode.drop_device()
        told = pair.ready(TEXT)
        close_servers(pair.prefill)
        pair.serve(TEXT, told)
        pair.check_computed_here()
        assert pair.decode.counters["hit_tokens|host"] == 32
        pair.expire()

    @every_cut
    def test_a_peer_that_never_answers_is_waited_for_no_longer_than_the_limit(
        self, start: StartPair, cuts: Cuts
    ) -> None:
        pair = start(*cuts, of_decode=PATIENT)
        told = pair.ready(TEXT)
        with socket.create_server(("127.0.0.1", 0)) as mute:
            pair.serve(TEXT, at(told, *mute.getsockname()))
        pair.check_computed_here()
        assert pair.decode.counters["misses|timeout"] > 0
        pair.expire()

    @pytest.mark.parametrize("answer", [b"-LOADING\r\n", b"$9999999999\r\n", b":12\r\n$-1\r\n", b"\0" * 64], ids=repr)
    def test_a_peer_that_says_nonsense_gives_nothing(self, start: StartPair, answer: bytes) -> None:
        pair = start(of_decode=PATIENT)
        told = pair.ready(TEXT)
        with talker(answer) as (host, port):
            pair.serve(TEXT, at(told, host, port))
        pair.check_computed_here()
        pair.expire()

    @every_cut
    def test_bytes_that_change_on_their_way_are_not_used(
        self, start: StartPair, reads_of: ReadsOf, monkeypatch: pytest.MonkeyPatch, cuts: Cuts
    ) -> None:
        pair = start(*cuts, of_decode=IN_ORDER)
        told, reads, chain = pair.ready(TEXT), reads_of(pair.prefill), chain_of(pair.decode, TEXT)

        def damage(page: PageKey, payload: bytes) -> bytes:
            return payload if chain.index(page) < 3 else bytes([payload[0] ^ 1]) + payload[1:]

        reads.sent = damage
        pair.serve(TEXT, told)
        pair.settle()
        assert pair.decode.counters["hit_tokens|peer"] == 3 * BLOCK
        assert pair.decode.counters["misses|corrupt"] > 0


class TestWhatIsNotBelieved:
    """A prompt's parameters that do not fit are no reason to connect to anybody."""

    @pytest.mark.parametrize(
        "changes",
        [
            {"version": 2},
            {"target": "00" * 32},
            {"ranks": []},
            {"ranks": [["127.0.0.1"]]},
            {"ranks": [["198.51.100.1", 1, [["target", 0, 3, 0, 2, 0, 1]]]]},
        ],
        ids=["another version", "another namespace", "no ranks", "ranks without ports", "ranks elsewhere"],
    )
    def test_is_refused_and_computed_here(self, start: StartPair, changes: Mapping[str, object]) -> None:
        pair = start()
        pair.serve(TEXT, own(pair.ready(TEXT), **changes))
        pair.check_computed_here()
        pair.expire()
        assert pair.decode.counters["handoffs|refused"] == 1
        assert pair.prefill.counters["peer_bytes|sent"] == 0

    @pytest.mark.parametrize(
        "held",
        [
            ["target", 0, 3, 0, 99, 0, 1],
            ["target", 0, 99, 0, 2, 0, 1],
            ["target", 2, 1, 1, 0, 0, 1],
            ["target", -2, -1, -1, 0, 0, 1],
            ["target", 0, 3, 0, 2, 5, 0],
            ["draft", 0, 1, 0, 2, 0, 1],
        ],
        ids=str,
    )
    def test_ranks_that_hold_what_no_rank_of_this_model_does_stop_nothing(
        self, start: StartPair, held: list[object]
    ) -> None:
        pair = start(of_decode=PATIENT)
        told = pair.ready(TEXT)
        pair.serve(TEXT, own(told, ranks=[["127.0.0.1", pair.prefill.servers[0].port, [held]]]))
        pair.decode.serve(TEXT)
        pair.expire()

    def test_parameters_of_another_connector_are_refused(self, start: StartPair) -> None:
        pair = start()
        told = {name: each for name, each in pair.ready(TEXT).items() if name != "hicache"}
        pair.serve(TEXT, told)
        pair.check_computed_here()
        pair.expire()
        assert pair.decode.counters["handoffs|refused"] == 1

    def test_engines_with_one_key_believe_each_other(self, start: StartPair, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(PEER_KEY_VARIABLE, KEYS[0])
        assert start().hand_over(TEXT).num_external == 99

    @pytest.mark.parametrize(("theirs", "ours"), [KEYS, ("", KEYS[0])], ids=["another key", "no key"])
    def test_what_others_have_signed_or_nobody_has_is_refused(
        self, start: StartPair, monkeypatch: pytest.MonkeyPatch, theirs: str, ours: str
    ) -> None:
        if theirs:
            monkeypatch.setenv(PEER_KEY_VARIABLE, theirs)
        strangers = start()
        told = strangers.ready(TEXT)
        monkeypatch.setenv(PEER_KEY_VARIABLE, ours)
        pair = start()
        pair.serve(TEXT, told)
        pair.check_computed_here()
        assert pair.decode.counters["handoffs|refused"] == 1
        assert strangers.prefill.counters["peer_bytes|sent"] == 0
        strangers.expire()

    def test_what_was_changed_after_it_was_signed_is_refused(
        self, start: StartPair, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv(PEER_KEY_VARIABLE, KEYS[0])
        pair = start()
        pair.serve(TEXT, at(pair.ready(TEXT), "127.0.0.1", 9))
        pair.check_computed_here()
        pair.expire()
        assert pair.decode.counters["handoffs|refused"] == 1
