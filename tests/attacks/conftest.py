"""Fork servers of the attack suite: one set per choice of defences, kept for the whole run."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from pytest_cudaforge.evaluation.sandbox import Defences, SandboxSettings
from pytest_cudaforge.evaluation.zygote import ForkServers

SECRET_NAME, SECRET = "FORGE_TEST_API_KEY", "do-not-tell-8d1f"


@pytest.fixture(scope="session")
def servers_with() -> Iterator[Callable[[Defences], ForkServers]]:
    """Fork servers with the defences given, started once; the environment they start from holds a secret."""
    opened: dict[Defences, ForkServers] = {}

    def provide(defences: Defences) -> ForkServers:
        if defences not in opened:
            os.environ[SECRET_NAME] = SECRET
            try:
                servers = ForkServers(SandboxSettings(defences=defences))
                servers.warm("plain")
            finally:
                del os.environ[SECRET_NAME]
            opened[defences] = servers
        return opened[defences]

    yield provide
    for servers in opened.values():
        servers.close()


@pytest.fixture(scope="session")
def guarded(servers_with: Callable[[Defences], ForkServers]) -> ForkServers:
    """Every defence on. Skips where this machine cannot isolate native code at all."""
    servers = servers_with(Defences())
    found = servers.isolation("cpp")
    if found.grade == "C":
        pytest.skip(f"no isolation of native code here: {'; '.join(found.reasons)}")
    return servers
