"""Which of an engine's ranks this is, and how the engine cuts its model.

Pure; built by each connector side from the engine's configuration.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Place:
    """A rank among others.

    Attributes:
        rank: pipeline stage x `tp_size` + tensor rank.
        num_heads: KV heads of the whole model.
        num_layers: attention layers of the whole model.
        num_neighbours: ranks on this machine, itself included: they share its memory.
        dcp_size: neighbouring tensor ranks over which the engine shards the KV of each request, block by block.
    """

    rank: int = 0
    tp_size: int = 1
    pp_size: int = 1
    num_heads: int = 0
    num_layers: int = 0
    num_neighbours: int = 1
    dcp_size: int = 1

    @property
    def tp_rank(self) -> int:
        """Place among the ranks that share each layer's heads."""
        return self.rank % self.tp_size

    @property
    def num_ranks(self) -> int:
        """Ranks of the engine."""
        return self.tp_size * self.pp_size

    @property
    def is_alone(self) -> bool:
        """Whether it need not agree with anybody."""
        return self.num_ranks == 1

    def heads_of(self, num_held: int) -> int:
        """KV heads of the whole model, for a rank that holds `num_held`. What a lone rank holds is the model."""
        return num_held if self.tp_size == 1 else self.num_heads

    def layers_of(self, num_held: int) -> int:
        """Layers of the whole model, for a rank that holds `num_held`. What a single stage holds is the model."""
        return num_held if self.pp_size == 1 else self.num_layers
