"""What tokens cost: the dated table ``prices.yaml`` beside this file, overridden by the user's own (``prices:``).

An unknown model has no price: its calls are counted in tokens, never guessed in USD.
"""

from __future__ import annotations

import datetime
import importlib.resources
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pytest_cudaforge.errors import ConfigError
from pytest_cudaforge.records import Usage

__all__ = ["Price", "Prices", "load"]

_SNAPSHOT = re.compile(r"-(?:\d{4}-\d{2}-\d{2}|\d{8}|latest)$")
#: What a reply may cost at most where the configuration sets no ``max_output_tokens``: long code plus its reasoning.
ASSUMED_OUTPUT_TOKENS = 16_000


@dataclass(frozen=True)
class Price:
    """USD per million tokens; ``as_of`` is the day somebody looked it up (ISO date, "" unknown)."""

    input: float
    output: float
    cached: float | None = None
    as_of: str = ""


@dataclass(frozen=True)
class Prices:
    table: Mapping[str, Price]

    def of(self, model: str) -> Price | None:
        """The price of a model, or of the model a dated snapshot (``gpt-5-2025-08-07``) belongs to."""
        return self.table.get(model) or self.table.get(_SNAPSHOT.sub("", model))

    def usd(self, model: str, usage: Usage) -> float | None:
        """What a call cost; None where the model has no price."""
        price = self.of(model)
        if price is None:
            return None
        cached = min(usage.cached_tokens, usage.input_tokens)
        cached_price = price.input if price.cached is None else price.cached
        fresh = usage.input_tokens - cached
        return (fresh * price.input + cached * cached_price + usage.output_tokens * price.output) / 1e6

    def settle(self, model: str, usage: Usage) -> Usage:
        """``usage`` with its USD filled in."""
        return replace(usage, usd=self.usd(model, usage))

    def reserve_usd(self, model: str, prompt_tokens: int, max_output_tokens: int | None) -> float | None:
        """What a call will cost at most, to be reserved before it is made; None where the model has no price."""
        output = max_output_tokens or ASSUMED_OUTPUT_TOKENS
        return self.usd(model, Usage(input_tokens=prompt_tokens, output_tokens=output))


def load(override: Path | None = None) -> Prices:
    """The built-in table, with the entries of ``override`` in place of or beside it. Raises ``ConfigError``."""
    builtin = importlib.resources.files("pytest_cudaforge.chat").joinpath("prices.yaml").read_text(encoding="utf-8")
    table = _read(builtin, "prices.yaml")
    if override is not None:
        try:
            table |= _read(override.read_text(encoding="utf-8"), str(override))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"the price table {override} cannot be read: {error}",
                expected="a YAML file of the form of pytest_cudaforge/chat/prices.yaml",
                remedy="mend `prices:` in cudaforge.yaml",
            ) from error
    return Prices(table)


def _read(text: str, where: str) -> dict[str, Price]:
    import yaml

    try:
        data = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{where}: not valid YAML: {error}", expected="models: {name: {input: …, output: …}}"
        ) from error
    models = data.get("models") if isinstance(data, dict) else None
    if not isinstance(models, dict) or set(data) != {"models"}:
        raise ConfigError(
            f"{where}: not a price table", expected="models: {name: {input: 1.25, cached: 0.125, output: 10}}"
        )
    return {str(name): _price(where, str(name), entry) for name, entry in models.items()}


def _price(where: str, model: str, entry: Any) -> Price:
    fields = {"input", "output", "cached", "as_of"}
    if not isinstance(entry, dict) or not {"input", "output"} <= set(entry) <= fields:
        raise ConfigError(
            f"{where}: {model}: {entry!r} is no price",
            expected="input and output, and at most cached and as_of besides",
        )
    numbers = {name: value for name, value in entry.items() if name != "as_of"}
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e6:
            raise ConfigError(
                f"{where}: {model}: {name} is {value!r}", expected="USD per million tokens, a number >= 0"
            )
    as_of = entry.get("as_of", "")
    shown = as_of.isoformat() if isinstance(as_of, datetime.date) else str(as_of)
    return Price(**{name: float(value) for name, value in numbers.items()}, as_of=shown)
