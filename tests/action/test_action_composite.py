"""The interpreter of composite actions that other tests stand on: expressions, commands and files as the runner's."""

from __future__ import annotations

from pathlib import Path

import pytest
from composite import Command, ExpressionError, Expressions, Log, read_variables

CONTEXTS = {
    "inputs": {"mode": "guard", "empty": "", "evil": "${{ github.token }}", "a-b": "x"},
    "steps": {"one": {"outcome": "success", "outputs": {"out-put": "v"}}},
    "github": {"token": "t"},
}


@pytest.mark.parametrize(
    ("source", "value"),
    [
        ("inputs.mode == 'GUARD'", True),
        ("inputs.nothing == ''", True),
        ("inputs.mode != 'guard' || inputs.empty || 'last'", "last"),
        ("inputs.mode && inputs.empty", ""),
        ("!(inputs.mode == 'plan') && steps.one.outputs.out-put", "v"),
        ("steps.two.outputs.x", None),
        ("'it''s'", "it's"),
        ("always() && !failure()", True),
    ],
)
def test_expressions_are_those_of_github(source: str, value: object) -> None:
    assert Expressions(CONTEXTS).value(source) == value


def test_a_condition_without_a_status_function_wants_success() -> None:
    assert Expressions(CONTEXTS).condition("inputs.mode == 'guard'")
    assert not Expressions(CONTEXTS, failed=True).condition("inputs.mode == 'guard'")
    assert Expressions(CONTEXTS, failed=True).condition("${{ always() && steps.one.outcome == 'success' }}")


def test_what_an_expression_gave_is_not_read_again() -> None:
    assert Expressions(CONTEXTS).text("a ${{ inputs.evil }} b") == "a ${{ github.token }} b"


@pytest.mark.parametrize("source", ["secrets.x", "inputs.mode ==", "hashFiles('x')", "(inputs.mode", "inputs.mode @"])
def test_what_is_not_known_is_an_error(source: str) -> None:
    with pytest.raises(ExpressionError):
        Expressions(CONTEXTS).value(source)


def test_commands_are_found_where_the_runner_finds_them() -> None:
    log = Log()
    log.read("plain ::error::no\n  ::error title=a%2Cb::x%0Ay%25\ntext ##[set-env name=A]b\n::unknown::x\n")
    assert log.commands == [Command("error", {"title": "a,b"}, "x\ny%"), Command("set-env", {"name": "A"}, "b")]
    log.read("::stop-commands::mark\n::error::quoted\n##[error]quoted\n::mark::\n::notice::heard\n::add-mask::s3cret\n")
    log.read("a s3cret")
    assert [one.name for one in log.commands] == ["error", "set-env", "notice"]
    assert "s3cret" not in log.text and "***" in log.text


def test_files_of_variables(tmp_path: Path) -> None:
    file = tmp_path / "output"
    file.write_text("a=1\nb<<M\nx\na=2\nM\n")
    assert read_variables(file) == {"a": "1", "b": "x\na=2"}
    for broken in ("b<<M\nx\n", "nonsense\n"):
        file.write_text(broken)
        with pytest.raises(ValueError):
            read_variables(file)
