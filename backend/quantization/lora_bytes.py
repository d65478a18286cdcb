"""Bytes of LoRAs next to quantized weights, by how tensor parallelism cuts them."""

from collections.abc import Iterable
from typing import NamedTuple


class LoraBytes(NamedTuple):
    """factors: of low-rank products, one of two of which is cut with a matrix. copies: of the weights as a
    whole, which are cut as they are. uncut: of Kronecker products, of which ranks have all but a little."""

    factors: int = 0
    copies: int = 0
    uncut: int = 0

    @property
    def total(self) -> int:
        """All of them, on a rank that has the whole model."""
        return sum(self)

    @classmethod
    def of_all(cls, every: "Iterable[LoraBytes]") -> "LoraBytes":
        """Add up the bytes of ``every``, field by field."""
        return cls(*map(sum, zip(cls(), *every)))

    def and_of(self, other: "LoraBytes") -> "LoraBytes":
        """Add the bytes of ``other``, field by field."""
        return self.of_all((self, other))

    def on_rank(self, matrices: float) -> float:
        """Return the bytes on a rank that has this share of each matrix."""
        return self.factors * (1 + matrices) / 2 + self.copies * matrices + self.uncut
