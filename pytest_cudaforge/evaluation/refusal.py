"""How a stage of an evaluation ends it early: the verdict's status, reason and the parts known so far."""

from __future__ import annotations

from pytest_cudaforge.records import Build, Status, Verification

__all__ = ["Refusal"]


class Refusal(Exception):
    """Raised by the evaluator's stages and caught by the evaluator alone: a refused candidate is data."""

    def __init__(
        self, status: Status, reason: str, *, build: Build | None = None, verification: Verification | None = None
    ) -> None:
        self.status, self.reason = status, reason
        self.build, self.verification = build, verification
        super().__init__(reason)
