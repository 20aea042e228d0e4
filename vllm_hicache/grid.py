"""The chunk grid: how a page of the whole model is cut into stored objects.

Pure. The grid belongs to the store's namespace, never to an engine's TP or PP: heads are cut in `head_groups`
equal parts, layers in `layer_groups` contiguous parts of nearly equal length with explicit bounds.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise

from vllm_hicache.errors import ConfigError

_TEXT = re.compile(r"([1-9][0-9]{0,3})x([1-9][0-9]{0,3})")


@dataclass(frozen=True, slots=True)
class Grid:
    """`layer_groups` x `head_groups` objects a page."""

    layer_groups: int = 1
    head_groups: int = 1

    @classmethod
    def parse(cls, text: str) -> Grid:
        """Read `LxH`, e.g. `2x4`.

        Raises:
            ConfigError: the text has another form.
        """
        match = _TEXT.fullmatch(text)
        if match is None:
            raise ConfigError(f"grid={text!r} is not of the form LAYERSxHEADS: write for example '1x1' or '2x4'")
        return cls(int(match[1]), int(match[2]))

    def __str__(self) -> str:
        return f"{self.layer_groups}x{self.head_groups}"

    def layer_bounds(self, num_layers: int) -> list[tuple[int, int]]:
        """Half-open layer ranges of the groups; the first ones take the remainder.

        Raises:
            ConfigError: more groups than layers.
        """
        if self.layer_groups > num_layers:
            raise ConfigError(
                f"grid {self} cuts {num_layers} layers in {self.layer_groups} groups: use at most {num_layers}"
            )
        size, rest = divmod(num_layers, self.layer_groups)
        starts = [group * size + min(group, rest) for group in range(self.layer_groups + 1)]
        return list(pairwise(starts))

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
