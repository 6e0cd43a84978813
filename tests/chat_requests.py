"""Requests and configurations the chat tests share."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pytest_cudaforge.chat import ChatRequest, ConversationKey, Message, Role
from pytest_cudaforge.config import ForgeConfig, load


def request(
    ordinal: int = 1,
    *,
    role: Role = "coder",
    target: str = "layers.py::Norm",
    digest: str = "d" * 64,
    language: str = "cpp",
    schema: Mapping[str, Any] | None = None,
    text: str = "Write a kernel.",
) -> ChatRequest:
    messages = (Message("system", "You write kernels."), Message("user", text))
    return ChatRequest(role, messages, ConversationKey(target, digest, language, role, ordinal, ordinal), schema)


def config(root: Path, **options: object) -> ForgeConfig:
    """Settings by dotted name with ``__`` for the dot: ``chat__coder__model="m"``."""
    return load({name.replace("__", "."): value for name, value in options.items()}, root=root, environ={})
