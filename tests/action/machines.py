"""Jobs of a workflow, each on a machine of its own: what the tests of whole runs are played on."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from composite import Composite, Ran
from fake_git import git
from fake_github import READER, FakeGitHub

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Machines:
    """Where jobs run: each in a fresh clone of what the hub has. ``artifacts`` are the run's."""

    hub: FakeGitHub
    folder: Path
    device: str = "cpu"
    jobs: int = 0

    def job(
        self,
        mode: str,
        *,
        run: str,
        ref: str = "main",
        event: str = "schedule",
        payload: Mapping[str, Any] | None = None,
        token: str = READER,
        **inputs: str,
    ) -> tuple[Ran, Path]:
        """One job of a workflow's run; its result and its checkout."""
        self.jobs += 1
        place = self.folder / f"job-{self.jobs:02d}-{mode}"
        checkout, temp = place / "repo", place / "temp"
        temp.mkdir(parents=True)
        git(place, "clone", "-q", str(self.hub.bare), str(checkout))
        git(checkout, "checkout", "-q", ref)
        environ = {
            "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin",
            "HOME": str(place),
            "OMP_NUM_THREADS": "1",
            **self.hub.environ(place / "runner", event, payload),
        }
        environ["GITHUB_WORKSPACE"] = str(checkout)
        if not payload:
            environ["GITHUB_SHA"] = git(checkout, "rev-parse", "HEAD")
        composite = Composite(
            ROOT,
            checkout,
            temp,
            self.folder / f"artifacts-{run}",
            {"token": token, "workspace": str(checkout)},
            environ,
        )
        given = {name.replace("_", "-"): text for name, text in inputs.items()}
        return composite.run({"mode": mode, "python": sys.executable, "device": self.device, **given}), checkout


def ended_well(ran: Ran) -> Ran:
    assert ran.ok, ran.log[-8000:]
    return ran
