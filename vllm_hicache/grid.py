"""The chunk grid: how a page of the whole model is cut into stored objects.

Pure. The grid belongs to the store's namespace, never to an engine's TP or PP: heads are cut in `head_groups`
equal parts, layers in `layer_groups` contiguous parts. Without explicit counts the parts are nearly equal, by the
same rule as vLLM's pipeline stages (`vllm/distributed/utils.py`, `get_pp_indices`), so that `layer_groups` stages
of an engine hold whole groups.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import gcd

from vllm_hicache.errors import ConfigError

_TEXT = re.compile(r"([1-9][0-9]{0,3}(?:\+[1-9][0-9]{0,3})*)x([1-9][0-9]{0,3})")
_MIN_OBJECT_BYTES = 2**20
_MOST_LAYER_GROUPS = 8


@dataclass(frozen=True, slots=True)
class Grid:
    """`layer_groups` x `head_groups` objects a page.

    `layer_counts` are the layers of each group where they are given; empty for nearly equal groups.
    """

    layer_groups: int = 1
    head_groups: int = 1
    layer_counts: tuple[int, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Grid:
        """Read `LxH`, e.g. `2x4`, or with the layers of each group, e.g. `31+30x4`.

        Raises:
            ConfigError: the text has another form.
        """
        match = _TEXT.fullmatch(text)
        if match is None:
            raise ConfigError(
                f"grid={text!r} is not of the form LAYERSxHEADS: write for example '1x1', '2x4', or '31+30x4' for "
                "groups of 31 and 30 layers"
            )
        counts = tuple(int(count) for count in match[1].split("+"))
        heads = int(match[2])
        return cls(counts[0], heads) if len(counts) == 1 else cls(len(counts), heads, counts)

    @classmethod
    def suited(cls, num_layers: int, num_heads: int, page_bytes: int) -> Grid:
        """The grid of a model whose operator names none: the finest whose objects have 1 MiB or more.

        It knows the model only, so that engines of every cut agree on it. Heads are cut before layers: tensor
        parallelism is the commoner. Layers are cut where stages of 2, 4 and 8 all hold whole groups, or else in 2.
        """
        most = max(1, page_bytes // _MIN_OBJECT_BYTES)
        heads = max(groups for groups in range(1, num_heads + 1) if num_heads % groups == 0 and groups <= most)
        layers = 1
        while 2 * layers <= min(_MOST_LAYER_GROUPS, num_layers, most // heads):
            if layers > 1 and num_layers % (2 * layers):
                break
            layers *= 2
        return cls(layers, heads)

    def __str__(self) -> str:
        layers = "+".join(map(str, self.layer_counts)) if self.layer_counts else str(self.layer_groups)
        return f"{layers}x{self.head_groups}"

    @property
    def shape(self) -> Grid:
        """The numbers of groups alone, as an object's header holds them."""
        return replace(self, layer_counts=())

    def resolved(self, num_layers: int) -> Grid:
        """The same grid with explicit counts where groups of this model differ in length: equal texts, equal bounds.

        Raises:
            ConfigError: more groups than layers, or counts of another model.
        """
        counts = tuple(stop - start for start, stop in self.layer_bounds(num_layers))
        return replace(self, layer_counts=counts if len(set(counts)) > 1 else ())

    def for_draft(self, num_heads: int) -> Grid:
        """The grid of a draft's layers: one layer group, for an engine holds them all on one stage; heads cut alike.

        A draft may have as few as one layer and other heads than the target, so that the target's own grid need not
        fit it.
        """
        return Grid(1, gcd(self.head_groups, num_heads))

    def layer_bounds(self, num_layers: int) -> list[tuple[int, int]]:
        """Half-open layer ranges of the groups.

        Raises:
            ConfigError: more groups than layers, or explicit counts that do not add up to `num_layers`.
        """
        counts = list(self.layer_counts)
        if not counts:
            if self.layer_groups > num_layers:
                raise ConfigError(
                    f"grid {self} cuts {num_layers} layers in {self.layer_groups} groups: use at most {num_layers}"
                )
            size, rest = divmod(num_layers, self.layer_groups)
            counts = [size] * self.layer_groups
            for group in range(rest):
                counts[-2 - group] += 1
        if sum(counts) != num_layers:
            raise ConfigError(
                f"grid {self} has {sum(counts)} layers in its groups, the model has {num_layers}: make them add up"
            )
        return list(pairwise(accumulate(counts, initial=0)))

    def head_bounds(self, num_heads: int) -> list[tuple[int, int]]:
        """Half-open head ranges of the groups, all of equal length.

        Raises:
            ConfigError: the heads cannot be cut equally.
        """
        if num_heads % self.head_groups:
            raise ConfigError(
                f"grid {self} cannot cut {num_heads} KV heads in {self.head_groups} equal groups: "
                f"use a divisor of {num_heads}"
            )
        size = num_heads // self.head_groups
        return [(group * size, (group + 1) * size) for group in range(self.head_groups)]
