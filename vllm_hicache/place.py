"""Which of an engine's ranks this is, and how the engine cuts its model.

Pure; built by each connector side from the engine's configuration.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm_hicache.names import Role


@dataclass(frozen=True, slots=True)
class Place:
    """A rank among others.

    Attributes:
        rank: pipeline stage x `tp_size` + tensor rank.
        num_heads: KV heads of the whole model.
        num_layers: attention layers of the whole model; those of a draft are numbered from there on, or named apart.
        num_neighbours: ranks on this machine, itself included: they share its memory.
        dcp_size: neighbouring tensor ranks over which the engine shards the KV of each request, block by block.
        draft_heads: KV heads of the whole draft.
        draft_tp_size: ranks that share the draft's heads; 1 where each holds all of them.
    """

    rank: int = 0
    tp_size: int = 1
    pp_size: int = 1
    num_heads: int = 0
    num_layers: int = 0
    num_neighbours: int = 1
    dcp_size: int = 1
    draft_heads: int = 0
    draft_tp_size: int = 1

    @property
    def tp_rank(self) -> int:
        """Place among the ranks that share each layer's heads."""
        return self.rank % self.tp_size

    @property
    def num_ranks(self) -> int:
        """Ranks of the engine."""
        return self.tp_size * self.pp_size

    @property
    def num_target_layers(self) -> int | None:
        """Where numbers of draft layers begin that have no name of their own; `None` without a draft."""
        return self.num_layers if self.draft_heads else None

    @property
    def is_alone(self) -> bool:
        """Whether it need not agree with anybody."""
        return self.num_ranks == 1

    def heads_of(self, role: Role, num_held: int) -> int:
        """KV heads of a role's whole model, for a rank that holds `num_held`. What a lone rank holds is the model."""
        if self.tp_size == 1:
            return num_held
        return self.num_heads if role is Role.TARGET else self.draft_heads

    def layers_of(self, role: Role, num_held: int) -> int:
        """Layers of a role's whole model, for a rank that holds `num_held`: all of a draft, all on a single stage."""
        return num_held if self.pp_size == 1 or role is Role.DRAFT else self.num_layers
