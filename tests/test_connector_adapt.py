"""The rim: which vLLM and which engine are served, and what of a request enters its keys."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

from vllm_hicache.config import Config
from vllm_hicache.connectors import plugin
from vllm_hicache.connectors.adapt import (
    AdapterVersions,
    check_engine,
    draft_limit,
    draft_space,
    extra_keys,
    model_identity,
    namespace,
    parse_config,
    place,
)
from vllm_hicache.connectors.compat import SUPPORTED, check_version, version_tuple
from vllm_hicache.errors import ConfigError, UnsupportedEngineError
from vllm_hicache.geometry import PageLayout, RoleShape
from vllm_hicache.grid import Grid
from vllm_hicache.handoff.peers import PeerAccess
from vllm_hicache.handoff.roles import peer_access, peer_key, takes_over
from vllm_hicache.inventory import Agreed
from vllm_hicache.keys import Adapter, ExtraKey, PageKeys, chain_root
from vllm_hicache.names import PageKey, Role
from vllm_hicache.namespace import DraftSpace
from vllm_hicache.place import Place
from vllm_hicache.secrets import PEER_KEY_VARIABLE, SEAL_KEY_VARIABLE
from vllm_hicache.storage.envelope import HmacSealer

PAGE = 8

# Versions


@pytest.mark.parametrize("text", ["0.32.0", "0.33.1", "v0.32.0", "0.32.0+cpu", "0.33.0rc1", "0.32"])
def test_a_version_that_is_served_passes(text: str) -> None:
    check_version(text)
    assert version_tuple(text) in SUPPORTED


@pytest.mark.parametrize("text", ["0.31.0", "0.34.0", "1.32.0", "0.3.2", "0.320.0", "0.0.0.dev1"])
def test_another_version_is_refused_with_both_sides_and_the_way_out(text: str) -> None:
    with pytest.raises(UnsupportedEngineError) as refusal:
        check_version(text)
    for part in ("0.32.x, 0.33.x", f"vLLM {text} is installed", "install one of these"):
        assert part in str(refusal.value)


@pytest.mark.parametrize("text", ["dev", "", "main", "v", "32"])
def test_what_is_no_version_is_refused_as_such(text: str) -> None:
    with pytest.raises(UnsupportedEngineError, match=f"its version is '{text}': install a released vLLM"):
        check_version(text)


def test_the_plugin_registers_its_name_and_again_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVConnectorFactory, "_registry", {})
    plugin.register()
    loader = KVConnectorFactory._registry["HiCacheConnector"]
    plugin.register()
    assert KVConnectorFactory._registry == {"HiCacheConnector": loader}
    assert loader().__name__ == "HiCacheConnector"


# Engines


class FullAttentionSpec(SimpleNamespace):
    pass


class MLAAttentionSpec(SimpleNamespace):
    pass


class SlidingWindowSpec(SimpleNamespace):
    pass


def group(kind: type[SimpleNamespace] = FullAttentionSpec, *layers: str) -> SimpleNamespace:
    return SimpleNamespace(kv_cache_spec=kind(block_size=32, dtype=torch.bfloat16), layer_names=[*layers, "last"])


def groups(*members: SimpleNamespace) -> SimpleNamespace:
    return SimpleNamespace(kv_cache_groups=list(members))


def engine(**changes: object) -> SimpleNamespace:
    """A configuration that is served, with changes by dotted name (`__` for the dot)."""
    config = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_role="kv_both", kv_connector_extra_config={}),
        parallel_config=SimpleNamespace(
            rank=0,
            local_world_size=1,
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            decode_context_parallel_size=1,
            cp_kv_cache_interleave_size=1,
            dcp_kv_cache_interleave_size=1,
            prefill_context_parallel_size=1,
        ),
        speculative_config=None,
        cache_config=SimpleNamespace(cache_dtype="auto"),
        load_config=SimpleNamespace(load_format="auto"),
        model_config=SimpleNamespace(
            model="nowhere/at-all",
            revision=None,
            dtype=torch.bfloat16,
            hf_overrides={},
            quantization=None,
            use_mla=False,
            get_total_num_kv_heads=lambda: 3,
            get_total_num_hidden_layers=lambda: 12,
        ),
    )
    for name, value in changes.items():
        owner = config
        *path, last = name.split("__")
        for part in path:
            owner = getattr(owner, part)
        setattr(owner, last, value)
    return config


@pytest.mark.parametrize("kind", [FullAttentionSpec, MLAAttentionSpec])
def test_a_plain_engine_is_served(kind: type[SimpleNamespace]) -> None:
    check_engine(engine(), groups(group(kind)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "value", "message"),
    [
        (
            "parallel_config__decode_context_parallel_size",
            2,
            "cp_kv_cache_interleave_size=1 .* blocks of 32 .* set --cp-kv-cache-interleave-size 32 and .* 64 or more",
        ),
        ("parallel_config__prefill_context_parallel_size", 2, "prefill_context_parallel_size=2"),
        ("speculative_config", SimpleNamespace(method="medusa"), "'medusa' is not supported: .* use one of .*eagle"),
    ],
)
def test_an_engine_that_is_not_served_is_refused_by_property_and_value(
    change: str, value: object, message: str
) -> None:
    with pytest.raises(UnsupportedEngineError, match=message):
        check_engine(engine(**{change: value}), groups(group()))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["cp_kv_cache_interleave_size", "dcp_kv_cache_interleave_size"])
def test_requests_that_are_sharded_block_by_block_are_served(name: str) -> None:
    changes = {"parallel_config__decode_context_parallel_size": 2, f"parallel_config__{name}": 32}
    check_engine(engine(**changes), groups(group()))  # type: ignore[arg-type]
    assert place(engine(**changes)).dcp_size == 2  # type: ignore[arg-type]


PARALLEL = {
    "parallel_config__tensor_parallel_size": 2,
    "parallel_config__pipeline_parallel_size": 4,
    "parallel_config__local_world_size": 8,
}


def test_tensor_and_pipeline_parallelism_are_served() -> None:
    check_engine(engine(**PARALLEL), groups(group()))  # type: ignore[arg-type]


def test_a_rank_knows_its_place_and_the_whole_model() -> None:
    told = place(engine(parallel_config__rank=5, **PARALLEL))  # type: ignore[arg-type]
    assert told == Place(rank=5, tp_size=2, pp_size=4, num_heads=3, num_layers=12, num_neighbours=8)
    assert (told.tp_rank, told.num_ranks, told.is_alone) == (1, 8, False)
    assert place(engine(**PARALLEL), rank=3).rank == 3  # type: ignore[arg-type]


def test_a_lone_rank_is_alone_and_what_it_holds_is_the_model() -> None:
    told = place(engine())  # type: ignore[arg-type]
    assert (told.is_alone, told.heads_of(Role.TARGET, 7), told.layers_of(Role.TARGET, 9)) == (True, 7, 9)
    several = place(engine(**PARALLEL))  # type: ignore[arg-type]
    assert (several.heads_of(Role.TARGET, 7), several.layers_of(Role.TARGET, 9)) == (3, 12)


def test_a_latent_cache_has_one_head() -> None:
    assert place(engine(model_config__use_mla=True)).num_heads == 1  # type: ignore[arg-type]


def test_several_kinds_of_kv_are_refused_each_by_name() -> None:
    both = groups(group(FullAttentionSpec, "layers.0"), group(SlidingWindowSpec, "layers.1", "layers.2"))
    with pytest.raises(UnsupportedEngineError) as refusal:
        check_engine(engine(), both)  # type: ignore[arg-type]
    for part in (
        "2 KV cache groups",
        "FullAttentionSpec (2 layers, e.g. layers.0)",
        "SlidingWindowSpec (3 layers, e.g. layers.1)",
    ):
        assert part in str(refusal.value)


def test_a_model_without_kv_is_refused() -> None:
    with pytest.raises(UnsupportedEngineError, match="0 KV cache groups: none"):
        check_engine(engine(), groups())  # type: ignore[arg-type]


def test_a_sliding_window_is_refused_by_kind() -> None:
    with pytest.raises(UnsupportedEngineError, match="of kind SlidingWindowSpec; full attention and MLA are supported"):
        check_engine(engine(), groups(group(SlidingWindowSpec)))  # type: ignore[arg-type]


def test_settings_come_from_the_extra_config() -> None:
    config = engine(kv_transfer_config__kv_connector_extra_config={"page_tokens": 96})
    assert parse_config(config).page_tokens == 96  # type: ignore[arg-type]


# Drafts


class UniformTypeKVCacheSpecs(SimpleNamespace):
    pass


def drafting(method: str = "draft_model", **changes: object) -> SimpleNamespace:
    """An engine whose draft is a model beside the target."""
    draft = SimpleNamespace(
        **{**vars(engine().model_config), "max_model_len": 100, "get_total_num_kv_heads": lambda: 2}
    )
    speculative = SimpleNamespace(
        method=method,
        num_speculative_tokens=3,
        draft_model_config=draft,
        draft_parallel_config=SimpleNamespace(tensor_parallel_size=2),
        draft_load_config=None,
        kv_cache_dtype=None,
        use_eagle=lambda: method != "draft_model",
    )
    return engine(speculative_config=speculative, device_config=SimpleNamespace(device_type="cpu"), **changes)


@pytest.mark.parametrize("method", ["draft_model", "eagle", "eagle3", "mtp"])
def test_a_draft_with_state_is_served(method: str) -> None:
    check_engine(drafting(method), groups(group()))  # type: ignore[arg-type]
    told = place(drafting(method))  # type: ignore[arg-type]
    assert (told.draft_heads, told.draft_tp_size, draft_limit(drafting(method))) == (2, 2, 97)  # type: ignore[arg-type]


@pytest.mark.parametrize("method", ["ngram", "ngram_gpu", "suffix"])
def test_a_draft_without_state_is_served_as_if_there_were_none(method: str) -> None:
    config = drafting(method, **PARALLEL)
    check_engine(config, groups(group()))  # type: ignore[arg-type]
    assert place(config) == place(engine(**PARALLEL))  # type: ignore[arg-type]
    assert draft_limit(config) is None  # type: ignore[arg-type]


def test_a_draft_on_stages_is_refused_on_the_cpu_alone() -> None:
    config = drafting(parallel_config__pipeline_parallel_size=2)
    with pytest.raises(UnsupportedEngineError, match="pipeline_parallel_size=2 with speculative decoding crashes"):
        check_engine(config, groups(group()))  # type: ignore[arg-type]
    config.device_config.device_type = "cuda"
    check_engine(config, groups(group()))  # type: ignore[arg-type]


def test_layers_of_unequal_shape_in_one_group_are_looked_at_one_by_one() -> None:
    def mixed(draft: type[SimpleNamespace]) -> SimpleNamespace:
        one = group(UniformTypeKVCacheSpecs, "first")
        one.kv_cache_spec.kv_cache_specs = {"first": FullAttentionSpec(), "last": draft()}
        return groups(one)

    check_engine(drafting(), mixed(MLAAttentionSpec))  # type: ignore[arg-type]
    with pytest.raises(UnsupportedEngineError, match="of kind SlidingWindowSpec"):
        check_engine(drafting(), mixed(SlidingWindowSpec))  # type: ignore[arg-type]


# Namespaces

PINNED = Config(model_id="m")


LAYOUT = PageLayout((RoleShape(Role.TARGET, 12, 3, 4096), RoleShape(Role.DRAFT, 1, 1, 64)), 32, 64, Grid())


def namespace_of(
    config: Config = PINNED, encoding: str = "cpu", layout: PageLayout = LAYOUT, **changes: object
) -> dict[str, str | int]:
    agreed = Agreed(layout, {Role.TARGET: encoding, Role.DRAFT: "draft's"}, 9)
    return namespace(engine(**changes), groups(group()), config, agreed).fields()  # type: ignore[arg-type]


def target(*shape: int) -> PageLayout:
    return replace(LAYOUT, roles=(RoleShape(Role.TARGET, *shape), LAYOUT.roles[1]))


def test_the_namespace_says_what_the_engine_is() -> None:
    assert namespace_of() == {
        "model": "id:m",
        "generation": "0",
        "kv_dtype": "torch.bfloat16",
        "quantization": "none",
        "encoding": "cpu",
        "layers": 12,
        "kv_heads": 3,
        "slab_bytes": 4096,
        "block_tokens": 32,
        "page_tokens": 64,
        "grid": "1x1",
        "protection": "none",
        "format_version": 1,
    }


@pytest.mark.parametrize("plain", ["bfloat16", "half", "float"])
def test_a_plain_cache_dtype_is_that_of_the_tensors(plain: str) -> None:
    assert namespace_of(cache_config__cache_dtype=plain) == namespace_of()


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("kv_dtype", {"cache_config__cache_dtype": "fp8_e4m3"}),
        ("quantization", {"model_config__quantization": "awq"}),
        ("encoding", {"encoding": "other"}),
        ("model", {"config": Config(model_id="n")}),
        ("generation", {"config": Config(model_id="m", generation="1")}),
        ("page_tokens", {"layout": replace(LAYOUT, page_tokens=128)}),
        ("block_tokens", {"layout": replace(LAYOUT, block_tokens=16)}),
        ("grid", {"layout": replace(LAYOUT, grid=Grid(2, 3, (7, 5)))}),
        ("layers", {"layout": target(13, 3, 4096)}),
        ("kv_heads", {"layout": target(12, 6, 4096)}),
        ("slab_bytes", {"layout": target(12, 3, 8192)}),
    ],
)
def test_each_property_changes_its_field_of_the_namespace(field: str, changes: dict[str, object]) -> None:
    one, other = namespace_of(), namespace_of(**changes)  # type: ignore[arg-type]
    assert {name for name in one if one[name] != other[name]} == {field}


def test_the_namespace_of_a_draft_says_what_it_is(tmp_path: Path) -> None:
    agreed = Agreed(LAYOUT, {Role.TARGET: "cpu", Role.DRAFT: "draft's"}, 9)
    found = []
    for number in (1.0, 2.0, 1.0):
        config = drafting("eagle", model_config__hf_overrides=lambda config: config)
        config.speculative_config.draft_model_config.model = str(weights(tmp_path / "draft", number))
        config.speculative_config.draft_model_config.hf_overrides = lambda config: config
        found.append(draft_space(config, agreed))  # type: ignore[arg-type]
    first, other, again = found
    assert first == again != other
    assert first is not None
    assert first == DraftSpace("eagle", first.model, "auto", "none", "draft's", 1, 1, 64, "1x1", True)
    assert draft_space(engine(), agreed) is None  # type: ignore[arg-type]


def test_random_weights_of_a_draft_are_shared_with_nobody() -> None:
    agreed = Agreed(LAYOUT, {Role.TARGET: "cpu", Role.DRAFT: "draft's"}, 9)
    config = drafting(load_config=SimpleNamespace(load_format="dummy"))
    assert draft_space(config, agreed) != draft_space(config, agreed)  # type: ignore[arg-type]


# Models


def weights(folder: Path, number: float = 1.0) -> Path:
    folder.mkdir(exist_ok=True)
    save_file({"layer": np.full(64, number, np.float32)}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"hidden_size": 64}))
    return folder


def identity(path: Path, **changes: object) -> str:
    return model_identity(engine(model_config__model=str(path), **changes), Config())  # type: ignore[arg-type]


def test_other_weights_under_the_same_path_are_another_model(tmp_path: Path) -> None:
    before = identity(weights(tmp_path / "served name"))
    assert identity(weights(tmp_path / "served name", 2.0)) != before


def test_the_same_weights_elsewhere_are_the_same_model(tmp_path: Path) -> None:
    assert identity(weights(tmp_path / "a")) == identity(weights(tmp_path / "b"))


def test_what_overrides_the_files_is_part_of_the_model(tmp_path: Path) -> None:
    path = weights(tmp_path / "a")
    others = [{"model_config__dtype": torch.float16}, {"model_config__hf_overrides": {"rope_theta": 1}}]
    assert len({identity(path), *(identity(path, **other) for other in others)}) == 3


def test_random_weights_are_shared_with_nobody(tmp_path: Path) -> None:
    one, other = (identity(tmp_path, load_config__load_format="dummy") for _ in range(2))
    assert one.startswith("dummy:")
    assert one != other


def test_a_pinned_model_needs_no_files() -> None:
    assert model_identity(engine(), Config(model_id="mine")) == "id:mine"  # type: ignore[arg-type]


def test_a_model_whose_files_are_elsewhere_is_refused_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match=r"'nowhere/at-all' are not on this machine.*pin 'model_id'"):
        model_identity(engine(), Config())  # type: ignore[arg-type]


# What else decides KV


def request(prompt_embeds: torch.Tensor | None = None, *features: MultiModalFeatureSpec) -> SimpleNamespace:
    return SimpleNamespace(mm_features=list(features), prompt_embeds=prompt_embeds)


def image(identifier: str, offset: int, length: int = 4, modality: str = "image") -> MultiModalFeatureSpec:
    return MultiModalFeatureSpec(None, modality, identifier, PlaceholderRange(offset, length))


def extras(told: SimpleNamespace) -> list[ExtraKey]:
    return list(extra_keys(told, PAGE))  # type: ignore[arg-type]


def keys(told: SimpleNamespace, **root: object) -> list[PageKey]:
    chain = PageKeys(chain_root(b"n" * 32, **root), PAGE, extras(told))  # type: ignore[arg-type]
    chain.extend(range(4 * PAGE))
    return chain.keys


def changed(one: SimpleNamespace, other: SimpleNamespace) -> list[bool]:
    return [first != second for first, second in zip(keys(one), keys(other), strict=True)]


def test_a_text_request_has_no_extra_keys() -> None:
    assert extras(request()) == []


def test_a_media_item_gives_its_kind_its_whole_hash_and_its_place() -> None:
    told = request(None, image("cat" * 40, 10, 5, "video"))
    assert extras(told) == [ExtraKey(10, 15, "video", b"cat" * 40)]


@pytest.mark.parametrize(
    "other", [image("dog", 10), image("cat", 11), image("cat", 10, 5), image("cat", 10, modality="video")]
)
def test_another_item_or_the_same_elsewhere_changes_keys_from_its_page_on(other: MultiModalFeatureSpec) -> None:
    assert changed(request(None, image("cat", 10)), request(None, other)) == [False, True, True, True]


def test_two_images_of_one_prompt_are_told_apart_by_order() -> None:
    one = request(None, image("cat", 0), image("dog", 4))
    other = request(None, image("dog", 0), image("cat", 4))
    assert changed(one, other) == [True] * 4


def test_two_prompts_that_differ_in_their_second_image_share_what_comes_before_it() -> None:
    one, other = (request(None, image("cat", 0), image(name, 2 * PAGE)) for name in ("dog", "cow"))
    assert changed(one, other) == [False, False, True, True]


DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("position", [0, 9, 31])
def test_one_changed_embedding_changes_keys_from_its_page_on(position: int, dtype: torch.dtype) -> None:
    embeds = torch.arange(4 * PAGE * 3, dtype=torch.float32).reshape(-1, 3).to(dtype)
    other = embeds.clone()
    other[position, 2] += 1000
    assert changed(request(embeds), request(embeds.clone())) == [False] * 4
    assert changed(request(embeds), request(other)) == [page >= position // PAGE for page in range(4)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_embeddings_that_do_not_lie_in_one_piece_give_the_same_keys(dtype: torch.dtype) -> None:
    embeds = torch.arange(64, dtype=torch.float32).reshape(2, 32).to(dtype)
    assert not any(changed(request(embeds.T), request(embeds.T.contiguous())))


def test_embeddings_are_cut_at_pages_and_the_last_piece_is_short() -> None:
    pieces = extras(request(torch.zeros(19, 3, dtype=torch.bfloat16)))
    assert [(piece.start, piece.stop, piece.kind) for piece in pieces] == [
        (0, 8, "embeds"),
        (8, 16, "embeds"),
        (16, 19, "embeds"),
    ]


# Adapters


def lora(path: Path, name: str = "tenant", number: int = 1, reload: bool = False) -> LoRARequest:
    return LoRARequest(name, number, str(path), load_inplace=reload)


def adapter(versions: AdapterVersions, request: LoRARequest) -> Adapter:
    found = versions.adapter(request)
    assert found is not None
    return found


def test_no_adapter_is_no_adapter() -> None:
    assert AdapterVersions().adapter(None) is None


def test_changed_files_under_the_same_name_and_path_are_another_version_to_the_next_engine(tmp_path: Path) -> None:
    one, other = (adapter(AdapterVersions(), lora(weights(tmp_path / "lora", number))) for number in (1.0, 2.0))
    assert (other.name, other.path) == (one.name, one.path)
    assert other.version != one.version


@pytest.mark.parametrize("again", [{"reload": True}, {"number": 2}])
def test_changed_files_are_another_version_once_the_engine_loads_them_again(
    again: dict[str, int], tmp_path: Path
) -> None:
    versions = AdapterVersions()
    one = adapter(versions, lora(weights(tmp_path / "lora")))
    other = adapter(versions, lora(weights(tmp_path / "lora", 2.0), **again))  # type: ignore[arg-type]
    assert adapter(AdapterVersions(), lora(tmp_path / "lora")) == other != one


def test_files_that_changed_after_the_engine_loaded_them_cannot_be_told_apart(tmp_path: Path) -> None:
    versions = AdapterVersions()
    adapter(versions, lora(weights(tmp_path / "lora")))
    weights(tmp_path / "lora", 2.0)
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"adapter 'tenant' \(id 1\) changed .* load the adapter again"):
            versions.adapter(lora(tmp_path / "lora"))


def test_a_changed_setting_of_the_adapter_is_another_version(tmp_path: Path) -> None:
    seen = set()
    for alpha in (8, 16):
        (weights(tmp_path / "lora") / "adapter_config.json").write_text(json.dumps({"lora_alpha": alpha}))
        seen.add(adapter(AdapterVersions(), lora(tmp_path / "lora")).version)
    assert len(seen) == 2


def test_equal_files_have_one_version_wherever_they_are(tmp_path: Path) -> None:
    one, other = (adapter(AdapterVersions(), lora(weights(tmp_path / name))) for name in ("a", "b"))
    assert one.version == other.version
    assert one.path != other.path


def test_files_that_have_not_changed_are_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = AdapterVersions()
    one = adapter(versions, lora(weights(tmp_path / "lora")))
    monkeypatch.setattr(Path, "open", lambda *_: pytest.fail("read again"))
    assert adapter(versions, lora(tmp_path / "lora")) == one


def test_an_adapter_with_broken_files_cannot_be_told_apart(tmp_path: Path) -> None:
    (weights(tmp_path / "lora") / "model.safetensors").write_bytes(b"junk")
    with pytest.raises(ConfigError, match="no safetensors file"):
        AdapterVersions().adapter(lora(tmp_path / "lora"))


@pytest.mark.parametrize("path", ["someone/an-adapter", "~/no/such/adapter", "/no/such/adapter"])
def test_an_adapter_without_local_files_cannot_be_told_apart(path: str) -> None:
    with pytest.raises(ConfigError, match=f"'{os.path.expanduser(path)}' are not on this machine"):
        AdapterVersions().adapter(lora(Path(path)))


def rooted(folder: Path, path: str = "x", number: float = 1.0, name: str = "tenant") -> Adapter:
    """The adapter of a fresh engine, its files written first."""
    return adapter(AdapterVersions(), lora(weights(folder / path, number), name))


def test_salt_and_adapters_name_path_and_version_each_change_every_key(tmp_path: Path) -> None:
    roots: dict[str, dict[str, object]] = {
        "nobody": {},
        "salt": {"salt": "a"},
        "other salt": {"salt": "b"},
        "adapter": {"adapter": rooted(tmp_path)},
        "other name": {"adapter": rooted(tmp_path, name="other")},
        "other path": {"adapter": rooted(tmp_path, "y")},
        "other version": {"adapter": rooted(tmp_path, number=2.0)},
        "both": {"salt": "a", "adapter": rooted(tmp_path)},
    }
    chains = [keys(request(), **root) for root in roots.values()]
    assert len({key for chain in chains for key in chain}) == 4 * len(roots)


# Engines that hand prompts to each other


def role(name: str, **settings: object) -> SimpleNamespace:
    transfer = SimpleNamespace(kv_role=name, kv_connector_extra_config={"store": "none", **settings})
    return engine(kv_transfer_config=transfer)


@pytest.fixture
def without_key(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in (PEER_KEY_VARIABLE, SEAL_KEY_VARIABLE):
        monkeypatch.delenv(variable, raising=False)


HERE, ELSEWHERE = {"peer_host": "127.0.0.1"}, {"peer_host": "10.0.0.7"}
SERVED = [
    ("kv_both", {}),
    ("kv_both", HERE),
    ("kv_producer", HERE),
    ("kv_consumer", {}),
    ("kv_both", HERE | {"peer_port": 1}),
]


@pytest.mark.parametrize(("name", "settings"), SERVED, ids=str)
def test_roles_are_served_with_what_they_need(name: str, settings: dict[str, object], without_key: None) -> None:
    check_engine(role(name, **settings), groups(group()))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("kv_producer", {}, "kv_role='kv_producer' computes prompts for other engines, .*: set peer_host in kv_conn"),
        ("kv_consumer", HERE, "contradicts peer_host='127.0.0.1', .*: remove peer_host, or set kv_role to 'kv_both'"),
        ("kv_both", {"peer_port": 7001}, "peer_port=7001 without peer_host serves nobody: set peer_host .*, or remove"),
        ("kv_consumer", {"peer_port": 7001}, "peer_port=7001 without peer_host serves nobody"),
        (
            "kv_producer",
            ELSEWHERE,
            "peer_host='10.0.0.7' is reached from other machines, .*: set VLLM_HICACHE_PEER_KEY",
        ),
        ("kv_both", {"peer_host": "0.0.0.0"}, "there is no key: set VLLM_HICACHE_PEER_KEY .*openssl rand -hex 32"),
    ],
)
def test_a_role_without_what_it_needs_is_refused_with_the_way_out(
    name: str, settings: dict[str, object], message: str, without_key: None
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_engine(role(name, **settings), groups(group()))  # type: ignore[arg-type]


def test_with_a_key_pages_may_be_served_to_other_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PEER_KEY_VARIABLE, "ab" * 32)
    check_engine(role("kv_producer", **ELSEWHERE), groups(group()))  # type: ignore[arg-type]
    assert peer_key() == bytes.fromhex("ab" * 32)


def test_a_key_that_is_none_is_refused_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PEER_KEY_VARIABLE, "secret")
    with pytest.raises(ConfigError, match="VLLM_HICACHE_PEER_KEY of 6 characters is no key"):
        check_engine(role("kv_producer", **ELSEWHERE), groups(group()))  # type: ignore[arg-type]


def access(name: str, **settings: object) -> PeerAccess | None:
    told = role(name, **settings)
    return peer_access(name, parse_config(told))  # type: ignore[arg-type]


def test_only_an_engine_that_neither_serves_nor_reads_has_no_access_to_others(without_key: None) -> None:
    assert access("kv_both") is None
    assert None not in [access("kv_both", **HERE), access("kv_producer", **HERE), access("kv_consumer")]


@pytest.mark.parametrize(
    ("name", "settings", "expected"),
    [("kv_consumer", {}, True), ("kv_both", HERE, True), ("kv_both", {}, False), ("kv_producer", HERE, False)],
)
def test_prompts_are_taken_over_only_where_ranks_have_access_to_their_engines(
    name: str, settings: dict[str, object], expected: bool, without_key: None
) -> None:
    told = role(name, **settings)
    assert takes_over(name, parse_config(told)) is expected  # type: ignore[arg-type]
    assert not expected or access(name, **settings) is not None


def test_access_has_the_limits_of_the_settings_and_no_password_without_a_key(without_key: None) -> None:
    found = access("kv_consumer", peer_timeout_s=3.0)
    assert found is not None
    assert (found.password, found.timeout_s, found.num_connections) == (None, 3.0, Config().fetch_threads)


def test_engines_with_one_key_have_one_password_and_seal_with_their_seal_key(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for key in ("ab", "ab", "cd"):
        monkeypatch.setenv(PEER_KEY_VARIABLE, key * 32)
        monkeypatch.setenv(SEAL_KEY_VARIABLE, "ef" * 32)
        found.append(access("kv_consumer"))
    passwords = [each.password for each in found if each is not None]
    assert passwords[0] == passwords[1] != passwords[2]
    assert all(isinstance(each.sealer, HmacSealer) for each in found if each is not None)
