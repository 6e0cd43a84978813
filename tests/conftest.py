"""Shared by all tests: pytest's own plugin tester, and what its inner runs leave out."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator, Iterator

import pytest
from quietness import Quietness

from pytest_cudaforge.evaluation.chance import CHANCE
from pytest_cudaforge.wiring import cache_dir

pytest_plugins = "pytester"

_QUIETNESS = pytest.StashKey[Quietness]()


def pytest_configure(config: pytest.Config) -> None:
    """What torch.compile makes of headers takes longer than nearly every test: one place for all, the user's."""
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_dir(os.environ) / "inductor"))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Workers share the cores: a team of torch's in each of them would wait for a core more than it computes."""
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(session.config, "workerinput"):
        torch.set_num_threads(1)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, bool, bool]:
    """Fixtures of every scope are set up in here."""
    with _quietness(item.config).among_others():
        return (yield)


@pytest.fixture(scope="session")
def quietness(pytestconfig: pytest.Config) -> Quietness:
    return _quietness(pytestconfig)


@pytest.fixture
def quiet(quietness: Quietness) -> Iterator[None]:
    """For a test that times something for real: the other workers of this run stand still meanwhile."""
    with quietness.alone():
        yield


def _quietness(config: pytest.Config) -> Quietness:
    if _QUIETNESS not in config.stash:
        folder = config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        under_xdist = hasattr(config, "workerinput")
        config.stash[_QUIETNESS] = Quietness(folder.parent if under_xdist else folder)
    return config.stash[_QUIETNESS]


@pytest.fixture(autouse=True)
def chance(request: pytest.FixtureRequest) -> Iterator[None]:
    """What verdicts draw follows from the test's name: what passes here passes elsewhere, as far as no time decides.
    ``CUDAFORGE_TEST_CHANCE=secret`` draws as verdicts do outside of tests, another text draws something else."""
    said = os.environ.get("CUDAFORGE_TEST_CHANCE", "")
    times = getattr(request.node, "execution_count", 1)  # what is run once more draws something else
    again = f" {times}" if times > 1 else ""
    CHANCE.follow(None if said == "secret" else f"{said} {request.node.nodeid}{again}")
    yield
    CHANCE.follow(None)


@pytest.fixture(autouse=True)
def few_ordinary_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verdicts make hundreds to find what is rare; here there are thousands of verdicts, which need not."""
    monkeypatch.setattr("pytest_cudaforge.evaluation.runs.ORDINARY_S", {"cpu": 0.0, "cuda": 0.0})


@pytest.fixture(autouse=True)
def without_slow_plugins(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plugins of a development environment that cost an inner run a third of a second, and change nothing in it."""
    if "pytester" in request.fixturenames:
        request.getfixturevalue("pytester")  # it clears the options
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p no:hypothesispytest -p no:anyio")
