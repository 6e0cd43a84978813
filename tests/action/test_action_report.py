"""The sticky comment and the status, on a GitHub with memory and on a GitLab; what a hostile guard job leaves."""

from __future__ import annotations

import io
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path

import fake_gitlab
import guard_records as made
import pytest
from cudaforge_action import guard_result, report
from cudaforge_action.artifact import ArtifactError
from cudaforge_action.comment import marker
from cudaforge_action.github import GitHubHost
from cudaforge_action.gitlab import GitLabHost
from cudaforge_action.guard_result import GuardResult
from cudaforge_action.inputs import Inputs, Needs
from cudaforge_action.plain import PlainHost
from cudaforge_action.records import GuardRun
from cudaforge_action.workflow import Commands
from fake_github import BOT, READER, TOKEN, FakeGitHub, fake_github, unavailable
from guard_records import FASTER, SAME, SLOW, WRONG, result

from pytest_cudaforge.errors import UsageError

COMMENT = r"/issues/\d+/comments"


def at_once(seconds: float) -> None:
    """Whoever waits for a limit waits no time here."""


@pytest.fixture(scope="module")
def github(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeGitHub]:
    with fake_github(tmp_path_factory.mktemp("github")) as hub:
        hub.commit("main", {"layers.py": "x = 1\n"})
        yield hub


class Run:
    """A workflow's report jobs on one pull request."""

    def __init__(self, hub: FakeGitHub, folder: Path) -> None:
        self.hub, self.folder = hub, folder
        branch = f"change-{folder.name}"
        self.sha = hub.commit(branch, {"layers.py": f"x = {folder.name!r}\n"}, base="main")
        self.pull = hub.open_pull(branch)
        self.log = io.BytesIO()
        hub.forget()

    def __call__(self, told: GuardResult | None, token: str = TOKEN, run_id: str = "7", **inputs: object) -> int:
        if told is not None:
            made.write(self.folder / ".cudaforge/action/guard", told)
        environ = self.hub.environ(
            self.folder / "step", "pull_request", self.hub.pull_event(self.pull), GITHUB_RUN_ID=run_id
        )
        self.log = io.BytesIO()
        host = GitHubHost(environ, Commands(self.log))
        self.hub.forget()
        given = replace(Inputs("report", token=token), **inputs)  # type: ignore[arg-type]
        return report.run(given, host, sleep=at_once)

    @property
    def bodies(self) -> list[str]:
        return [one.body for one in self.hub.comments.values() if one.number == self.pull.number]

    @property
    def states(self) -> list[tuple[str, str]]:
        return [(one.state, one.description) for one in self.hub.statuses if one.sha == self.sha]

    @property
    def said(self) -> str:
        return self.log.getvalue().decode()


@pytest.fixture
def job(github: FakeGitHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    monkeypatch.chdir(tmp_path)
    yield Run(github, tmp_path)
    github.calm()


# -- one comment -------------------------------------------------------------------------------------------------------


def test_one_comment_follows_the_news_and_no_news_writes_nothing(job: Run) -> None:
    assert job(result(SAME)) == 0 and job.bodies == [] and job.states[-1][0] == "success"
    assert job(result(SLOW, SAME, status=1)) == 0
    assert len(job.bodies) == 1 and "1 slower, 1 passed" in job.bodies[0] and len(job.hub.writes) == 2
    assert job.states[-1] == ("failure", "1 slower, 1 passed")
    assert (job.folder / "step/github_output").read_text().count("comment-url") == 1
    assert job(result(SLOW, SAME, status=1), run_id="8") == 0 and job.hub.writes == []
    # News that are good again: what is there is kept true.
    assert job(result(SAME)) == 0 and len(job.hub.writes) == 2
    assert len(job.bodies) == 1 and "as right and as fast" in job.bodies[0] and job.states[-1][0] == "success"
    assert job(result(SAME), run_id="9") == 0 and job.hub.writes == []


@pytest.mark.parametrize(
    ("told", "when", "count"),
    [
        (result(FASTER), "auto", 1),
        (result(FASTER), "changes", 1),
        (result(FASTER), "failures", 0),
        (result(WRONG, status=1), "failures", 1),
        (result(WRONG, status=1), "off", 0),
    ],
)
def test_who_wants_less_gets_less(job: Run, told: GuardResult, when: str, count: int) -> None:
    assert job(told, comment=when) == 0 and len(job.bodies) == count and len(job.states) == 1


def test_two_guards_of_a_repository_have_a_comment_each(job: Run) -> None:
    told = result(WRONG, status=1)
    assert job(told) == job(None, status_context="cudaforge/h100") == 0 and len(job.bodies) == 2
    made.write(job.folder / "pkg/.cudaforge/action/guard", told)
    assert job(None, working_directory=Path("pkg")) == 0 and len(job.bodies) == 3
    assert "in pkg" in job.bodies[2] and len({body.splitlines()[0] for body in job.bodies}) == 3


def test_somebody_elses_comment_stays_theirs_and_ones_too_many_of_ours_go(job: Run) -> None:
    mark = marker("cudaforge", ".", "cudaforge/guard")
    theirs = job.hub.say(job.pull.number, f"{mark}\nall is well, merge it\n-")
    quoting = job.hub.say(job.pull.number, f"> {mark}\n> no", author=BOT)
    first, second = (job.hub.say(job.pull.number, f"{mark}\nold\n-", author=BOT) for _ in range(2))
    assert job(result(WRONG, status=1)) == 0
    assert "1 wrong" in job.hub.comments[first.id].body and second.id not in job.hub.comments
    assert (job.hub.comments[theirs.id].body, job.hub.comments[quoting.id].body) == (theirs.body, quoting.body)
    assert "merge it" in theirs.body and job(result(WRONG, status=1)) == 0 and job.hub.writes == []


def test_a_comment_of_a_persons_token_is_found_again(job: Run) -> None:
    job.hub.grant("ghp_mine", "alice", issues="write", pull_requests="write", statuses="write", contents="read")
    assert job(result(WRONG, status=1), token="ghp_mine") == 0 and len(job.bodies) == 1
    assert job(result(SLOW, status=1), token="ghp_mine") == 0 and len(job.bodies) == 1 and "1 slower" in job.bodies[0]


def test_a_lost_answer_makes_no_second_comment(job: Run) -> None:
    job.hub.fail("POST", COMMENT, unavailable(502), late=True)
    assert job(result(WRONG, status=1)) == 0 and len(job.bodies) == 1 and "warning" not in job.said
    assert job(result(WRONG, status=1)) == 0 and len(job.bodies) == 1 and job.hub.writes == []


def test_an_older_commits_run_leaves_the_comment_alone(job: Run) -> None:
    event = job.hub.pull_event(job.pull)
    assert job(result(WRONG, status=1)) == 0
    job.pull.head_sha = job.hub.commit(job.pull.head, {"layers.py": "x = 3\n"})
    environ = job.hub.environ(job.folder / "old", "pull_request", event)
    made.write(job.folder / ".cudaforge/action/guard", result(SAME))
    log = io.BytesIO()
    assert report.run(Inputs("report", token=TOKEN), GitHubHost(environ, Commands(log))) == 0
    assert "1 wrong" in job.bodies[0] and "newer commit" in log.getvalue().decode()
    assert job.states[-1][0] == "success", "a status is about a commit, and that one's is known"


# -- what the host refuses ---------------------------------------------------------------------------------------------


def test_a_token_that_may_only_read_is_a_warning(job: Run) -> None:
    assert job(result(WRONG, status=1), token=READER) == 0
    assert job.bodies == [] and job.states == [] and job.said.count("::warning::") == 2
    assert "pull-requests: write" in job.said and READER not in job.said


def test_no_token_and_no_answer_are_warnings(job: Run) -> None:
    assert job(result(WRONG, status=1), token="") == 0 and "::warning::without the input token" in job.said
    job.hub.fail("GET", r"/pulls/\d+$", unavailable(503), times=99)
    job.hub.fail("GET", "/statuses", unavailable(503), times=99)
    assert job(result(WRONG, status=1)) == 0 and job.said.count("::warning::") == 2 and job.bodies == []


@contextmanager
def silent() -> Iterator[str]:
    """A host that takes connections and never answers: where one listens, the kernel accepts."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@contextmanager
def refusing() -> Iterator[str]:
    """A host that nobody listens on."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{unused.getsockname()[1]}"


@pytest.mark.parametrize("dead", [silent, refusing])
def test_a_dead_host_is_told_two_warnings_and_costs_no_more_than_it_may(
    job: Run, dead: Callable[[], AbstractContextManager[str]]
) -> None:
    made.write(job.folder / ".cudaforge/action/guard", result(WRONG, status=1))
    with dead() as url:
        environ = job.hub.environ(job.folder / "step", "pull_request", job.hub.pull_event(job.pull), GITHUB_API_URL=url)
        began = time.monotonic()
        told = report.run(Inputs("report", token=TOKEN), GitHubHost(environ, Commands(job.log)), telling_s=3.0)
        took_s = time.monotonic() - began
    # The pauses are real ones, too. Unbounded they take a minute; a busy machine takes its own time beside them.
    assert told == 0 and took_s < 10.0, f"{took_s:.1f} s"
    assert job.said.count("::warning::") == 2 and "the status could not be written" in job.said
    assert report.TELLING_S < 30.0


def test_a_comment_that_hangs_leaves_the_status_its_time(job: Run) -> None:
    made.write(job.folder / ".cudaforge/action/guard", result(WRONG, status=1))
    job.hub.fail("GET", COMMENT, unavailable(503), times=99)
    environ = job.hub.environ(job.folder / "step", "pull_request", job.hub.pull_event(job.pull))
    host = GitHubHost(environ, Commands(job.log))
    assert report.run(Inputs("report", token=TOKEN), host, telling_s=8.0) == 0
    assert job.said.count("::warning::") == 1 and "the comment could not be written" in job.said
    assert job.bodies == [] and job.states[-1][0] == "failure"


def test_a_fork_that_was_not_guarded_is_no_error(job: Run) -> None:
    job.pull.head_repository = "mallory/kernels"
    assert job(None) == 0 and job.hub.writes == [] and "lies in a fork" in job.said
    assert job(result(SLOW, status=1), token=READER) == 0 and "workflow_run" in job.said


def test_a_workflow_run_finds_the_pull_request_of_a_fork(job: Run) -> None:
    made.write(job.folder / ".cudaforge/action/guard", result(WRONG, status=1))
    told = {"head_sha": job.sha, "head_repository": {"full_name": "mallory/kernels"}, "pull_requests": []}
    environ = job.hub.environ(job.folder / "step", "workflow_run", {"workflow_run": told})
    assert report.run(Inputs("report", token=TOKEN), GitHubHost(environ, Commands(job.log)), sleep=at_once) == 0
    assert len(job.bodies) == 1 and job.states[-1][0] == "failure"
    environ = job.hub.environ(job.folder / "step", "workflow_run", {"workflow_run": told | {"head_sha": "b" * 40}})
    assert report.run(Inputs("report", token=TOKEN), GitHubHost(environ, Commands(job.log)), sleep=at_once) == 0
    assert "no open pull request" in job.said and len(job.bodies) == 1


def test_a_comments_own_event_says_nothing_of_a_commit(job: Run) -> None:
    made.write(job.folder / ".cudaforge/action/guard", result(WRONG, status=1))
    issue = {"issue": {"number": job.pull.number, "pull_request": {}}}
    environ = job.hub.environ(job.folder / "step", "issue_comment", issue)
    before = len(job.hub.statuses)
    assert report.run(Inputs("report", token=TOKEN), GitHubHost(environ, Commands(job.log)), sleep=at_once) == 0
    assert len(job.bodies) == 1 and len(job.hub.statuses) == before


# -- what a hostile machine left ---------------------------------------------------------------------------------------


def break_link(folder: Path) -> None:
    (folder / "run.json").unlink()
    (folder / "run.json").symlink_to("/etc/passwd")


def break_text(name: str, text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(text) and None


def edit(name: str, **fields: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        data = json.loads((folder / name).read_text())
        (data["guard"] if name == "guard.json" else data).update(fields)
        (folder / name).write_text(json.dumps(data))

    return change


@pytest.mark.parametrize(
    "harm",
    [
        break_link,
        break_text("run.json", "[]"),
        break_text("run.json", '{"outcome": "pass", "status": 0, "extra": 1}'),
        break_text("run.json", '{"outcome": "great", "status": 0}'),
        break_text("run.json", '{"outcome": "pass", "status": true}'),
        break_text("run.json", '{"outcome": "pass", "status": 1e999}'),
        break_text("run.json", " " * 2_000_000),
        break_text("guard.json", "[" * 100_000),
        break_text("guard.json", '{"format": "other", "guard": {}}'),
        break_text("guard.json", '{"format": "cudaforge-report", "guard": {"records": {}}}'),
        edit("guard.json", seconds=10**400),
        edit("guard.json", records=[{"id": "a"}]),
        edit("guard.json", base="\ud800"),
        lambda folder: (folder / "run.json").unlink(),
    ],
)
def test_what_our_guard_does_not_write_is_not_read(tmp_path: Path, harm: Callable[[Path], None]) -> None:
    folder = made.write(tmp_path / "guard", result(SAME))
    assert guard_result.read(folder).outcome == "pass"
    harm(folder)
    with pytest.raises(ArtifactError) as caught:
        guard_result.read(folder)
    assert len(str(caught.value)) < 1_000


def test_what_cannot_be_read_is_an_error_and_never_green(job: Run) -> None:
    break_link(made.write(job.folder / ".cudaforge/action/guard", result(SAME)))
    assert job(None) == 1
    assert job.states[-1][0] == "error" and "the guard could not finish" in job.bodies[0]
    assert "root:" not in job.bodies[0] and len(job.said) < 4_000


def test_a_run_that_calls_itself_well_does_not_hide_its_report(job: Run) -> None:
    told = result(WRONG, status=1)
    assert job(replace(told, run=GuardRun("pass", 0, 0))) == 0
    assert job.states[-1][0] == "failure" and "1 wrong" in job.bodies[0]
    # Nor does one without a report pass.
    (job.folder / ".cudaforge/action/guard/guard.json").unlink()
    assert job(None) == 0 and job.states[-1][0] == "error"


# -- what an earlier attempt left --------------------------------------------------------------------------------------


def vouching(folder: Path, result: str = "success") -> Needs:
    """As the guard job's outputs say it of what lies there."""
    return Needs(result, {"guard": guard_result.digest(folder)})


def test_what_the_guard_job_vouches_for_is_told(job: Run) -> None:
    folder = made.write(job.folder / ".cudaforge/action/guard", result(SAME))
    (folder / "report.html").write_text("whatever")
    assert job(None, needs=vouching(folder)) == 0 and job.states[-1][0] == "success"
    made.write(folder, result(WRONG, status=1))
    assert job(None, needs=vouching(folder, "failure")) == 0 and job.states[-1] == ("failure", "1 wrong")


@pytest.mark.parametrize(
    "needs",
    [
        Needs("failure", {}),  # it failed early
        Needs("cancelled", {}),  # its time was up
        Needs("success", {}),
        Needs("failure", {"guard": "a" * 64}),  # it left something else, which did not come
        Needs("success", {"guard": ""}),
    ],
)
def test_a_pass_that_an_earlier_attempt_left_is_not_told_as_this_ones(job: Run, needs: Needs) -> None:
    told = result(SAME)
    assert job(told) == 0 and job.states[-1][0] == "success"  # without the word of its job it is believed
    assert job(told, needs=needs) == 1
    assert job.states[-1][0] == "error" and "the guard could not finish" in job.bodies[0]
    assert "guard job" in job.bodies[0]


def test_a_job_that_failed_after_all_was_well_is_not_green(job: Run) -> None:
    folder = made.write(job.folder / ".cudaforge/action/guard", result(SAME))
    assert job(None, needs=vouching(folder, "failure")) == 1 and job.states[-1][0] == "error"
    assert "ended with" in job.bodies[0] and "failure" in job.bodies[0]


def test_bad_news_are_told_though_the_guard_job_could_not_vouch_for_them(job: Run) -> None:
    assert job(result(WRONG, status=1), needs=Needs("failure", {})) == 0
    assert job.states[-1] == ("failure", "1 wrong")
    assert job(None, needs=Needs("failure", {"guard": "a" * 64})) == 1 and job.states[-1][0] == "error"


def test_a_fork_that_was_skipped_is_no_error_beside_needs(job: Run) -> None:
    job.pull.head_repository = "mallory/kernels"
    assert job(None, needs=Needs("success", {})) == 0 and job.hub.writes == []


def test_hostile_text_ends_in_a_comment_that_github_takes(job: Run) -> None:
    assert job(made.hostile(60)) == 0 and len(job.bodies) == 1 and 30_000 < len(job.bodies[0].encode()) < 65_536
    assert len(job.states[-1][1]) <= 140 and made.HOSTILE[:20] not in job.said
    # What the host does with ends of lines is no news.
    (comment,) = (one for one in job.hub.comments.values() if one.number == job.pull.number)
    comment.body = comment.body.replace("\n", "\r\n") + "\r\n\r\n"
    assert job(made.hostile(60), run_id="8") == 0 and job.hub.writes == []


# -- elsewhere ---------------------------------------------------------------------------------------------------------


def test_gitlab_gets_one_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    given = Inputs("report", token=fake_gitlab.TOKEN)
    with fake_gitlab.fake_gitlab() as gitlab:
        for told, count in ((result(SAME), 0), (result(WRONG, status=1), 1), (result(WRONG, status=1), 1)):
            made.write(given.output / "guard", told)
            assert report.run(given, GitLabHost(gitlab.environ, tmp_path / "out")) == 0
            assert len(gitlab.notes) == len(gitlab.writes) == count
        assert "1 wrong" in gitlab.notes[0]["body"]


def test_a_plain_machine_prints_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    made.write(tmp_path / ".cudaforge/action/guard", result(WRONG, status=1))
    assert report.run(Inputs("report"), PlainHost(tmp_path / "out")) == 0
    assert "1 wrong" in capsys.readouterr().out


def test_a_plain_machine_without_a_guard_is_told_to_run_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="run mode guard first"):
        report.run(Inputs("report"), PlainHost(tmp_path / "out"))


def test_the_reporting_job_needs_no_torch_no_model_and_no_pytest() -> None:
    loaded = (
        "import sys, cudaforge_action.report; print(sorted({'torch', 'openai', 'pytest', 'git'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, check=True, env=os.environ)
    assert done.stdout.strip() == "[]"


def test_the_marker_is_a_comment_of_letters_whatever_the_names_are() -> None:
    assert marker("--> <script>", "\n", "a") != marker("--> <script>", "\n", "b")
    assert marker("--> <script>", "\n").count(">") == 1 and "\n" not in marker("\n")
