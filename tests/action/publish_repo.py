"""A repo on the fake GitHub, the folders that jobs left, and a publish of them: for tests of who publishes."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cudaforge_action import publish
from cudaforge_action.github import GitHubHost
from cudaforge_action.inputs import Inputs
from cudaforge_action.workflow import Commands
from fake_git import git
from fake_github import TOKEN, FakeGitHub, fake_github
from shard_records import forged, verified

from pytest_cudaforge.discovery import discover
from pytest_cudaforge.records import Target
from pytest_cudaforge.runtime.manifest import Manifest

BRANCH = "cudaforge/forge"
MANIFEST = "forged/manifest.json"


def layers(*names: str, body: str = "x") -> str:
    """A file with a target of each name; ``body`` is part of their sources."""
    marked = "@forge_target(inputs=lambda: [1])\nclass {}(Module):\n    def forward(self, x):\n        return {}\n"
    head = "from torch.nn import Module\nfrom pytest_cudaforge import forge_target\n\n\n"
    return head + "\n\n".join(marked.format(name, body) for name in names)


@dataclass
class Published:
    """One publish: its exit status, what the runner was told, and what it wrote."""

    status: int
    log: str
    outputs: dict[str, str]
    summary: str


@dataclass
class Repo:
    """A repo whose ``main`` holds ``layers.py``, and a folder that a publish job works in."""

    hub: FakeGitHub
    folder: Path
    runs: list[Published] = field(default_factory=list)

    @property
    def results(self) -> Path:
        return self.folder / ".cudaforge/action"

    def targets(self, *names: str, branch: str = "main") -> list[Target]:
        """The targets as they are on a branch."""
        place = self.folder / "sources" / self.hub.branches[branch]
        place.mkdir(parents=True, exist_ok=True)
        (place / "layers.py").write_text(self.file(branch, "layers.py"))
        found = discover([place], place).targets
        return [one for one in found if not names or one.qualname in names]

    def jobs(
        self, *names: str, shard: str = "01-cpu", text: str = "fast", speedup: float = 2.0, commit: str = ""
    ) -> None:
        """What a forge and a verify job of these targets leave, at the tip of ``main``."""
        targets = self.targets(*names)
        for job in ("forged", "verified"):
            shutil.rmtree(self.results / job / shard, ignore_errors=True)
        forged(self.results / "forged" / shard, targets, text=text, speedup=speedup)
        commit = commit or self.hub.branches["main"]
        verified(self.results / "verified" / shard, targets, text=text, speedup=speedup, commit=commit)

    def publish(self, *, event: str = "schedule", payload: Any = None, **given: Any) -> Published:
        environ = self.hub.environ(self.folder / f"step-{len(self.runs)}", event, payload)
        log = io.BytesIO()
        host = GitHubHost(environ, Commands(log))  # type: ignore[arg-type]
        inputs = Inputs(**{"mode": "publish", "token": TOKEN, "working_directory": self.folder, **given})
        try:
            status = publish.run(inputs, host)
        finally:
            outputs = _outputs(Path(environ["GITHUB_OUTPUT"]).read_text())
            summary = Path(environ["GITHUB_STEP_SUMMARY"]).read_text()
            done = Published(-1, log.getvalue().decode(), outputs, summary)
            self.runs.append(done)
        done.status = status
        return done

    # -- what is on the server -----------------------------------------------------------------------------------------

    def file(self, branch: str, path: str) -> str:
        return git(self.hub.bare, "show", f"{branch}:{path}")

    def files(self, branch: str = BRANCH) -> list[str]:
        return git(self.hub.bare, "ls-tree", "-r", "--name-only", branch).splitlines()

    def entries(self, branch: str = BRANCH) -> list[str]:
        """The targets that a branch has kernels for."""
        return [entry.target for entry in Manifest.parse(self.file(branch, MANIFEST)).entries]

    def merge(self) -> str:
        """As the button "Squash and merge" does: the branch's files become the base's."""
        tree = git(self.hub.bare, "rev-parse", f"{BRANCH}^{{tree}}")
        sha = git(self.hub.bare, "commit-tree", tree, "-p", "main", "-m", "merged (#1)")
        git(self.hub.bare, "update-ref", "refs/heads/main", sha)
        return sha


def _outputs(text: str) -> dict[str, str]:
    found, lines = {}, iter(text.splitlines())
    for line in lines:
        name, _, mark = line.partition("<<")
        found[name] = "\n".join(iter(lambda: next(lines), mark))
    return found


@contextmanager
def published_repo(folder: Path, *names: str, enterprise: bool = False, private: bool = False) -> Iterator[Repo]:
    with fake_github(folder, enterprise=enterprise, private=private) as hub:
        hub.commit("main", {"layers.py": layers(*(names or ("Scale", "Shift")))})
        yield Repo(hub, folder / "job")


def document(targets: Sequence[dict[str, Any]] = ()) -> str:
    """A ``--forge-json`` document of these targets."""
    return json.dumps({"format": "cudaforge-report", "version": 1, "environment": {}, "totals": {}, "targets": targets})
