"""What lies in a bench's frames: how a trial's values come about, and what the oracle keeps of a call."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from pytest_cudaforge.evaluation.exchanges import Moved
from pytest_cudaforge.evaluation.subject import Weights

__all__ = ["Case", "Frame"]


@dataclass(frozen=True)
class Case:
    """How one trial's values come about. ``weights_seed`` None: weights as constructed; ``kept`` stay so anyway.

    ``exchanged``: the seed by which a few of their elements changed places since, or None; ``exchanged_alone``: two of
    this parameter's; ``moved``: how, and by which seed, all or some did so since. ``advanced``: what the reference's
    forward writes of its state, and of its inputs, is as so many calls left it. ``others``, ``unbiased``: as of
    ``Weights``.
    """

    seed: int
    family: str
    weights_seed: int | None
    kept: tuple[str, ...] = ()
    exchanged: int | None = None
    exchanged_alone: str = ""
    moved: tuple[tuple[Moved, int], ...] = ()
    advanced: int = 0
    others: tuple[str, ...] = ()
    others_seed: int | None = None
    unbiased: bool = False

    @property
    def weights(self) -> Weights:
        if self.weights_seed is None:
            return Weights(kept=self.kept, unbiased=True) if self.unbiased else Weights()
        others = (self.others, self.others_seed)
        changed = (self.exchanged, *others, self.exchanged_alone, self.moved)
        return Weights(self.weights_seed, self.kept, *changed, self.unbiased)


@dataclass
class Frame:
    """One call's inputs, and the outputs held of it (with where they lie) until another call has been looked at."""

    case: Case | None = None
    inputs: dict[str, Any] = field(default_factory=dict)
    tree: Any = None
    held: dict[str, Tensor] = field(default_factory=dict)
    held_at: dict[str, list[Any]] = field(default_factory=dict)
