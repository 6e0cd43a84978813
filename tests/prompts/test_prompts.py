import importlib.resources

import pytest

from pytest_cudaforge import prompts


def test_every_template_says_which_values_it_wants_and_renders_with_exactly_those():
    folder = importlib.resources.files("pytest_cudaforge.prompts")
    names = [entry.name[:-3] for entry in folder.iterdir() if entry.name.endswith(".md")]
    assert len(names) >= 15
    for name in names:
        text = prompts.render(name, **{place: f"<{place}>" for place in prompts.places(name)})
        assert "$" not in text, name
        for place in prompts.places(name):
            assert f"<{place}>" in text


def test_a_missing_value_is_an_error():
    with pytest.raises(ValueError, match=r"coder_repair\.md: no value for \['expected'"):
        prompts.render("coder_repair", problem="p", source_name="s", info="i")


def test_an_unused_value_is_an_error():
    with pytest.raises(ValueError, match=r"no place for \['color'\]"):
        prompts.render("coder_first", color="red")


def test_values_are_not_rendered_again():
    text = prompts.render("judge_repair", problem="costs $expected and $5", expected="$problem")
    assert "costs $expected and $5" in text
    assert "Expected: $problem" in text


@pytest.mark.parametrize("inside", ["```", "a\n````\nb", "`x`", "no backtick", "~~~"])
def test_nothing_inside_a_fence_can_close_it(inside):
    from pytest_cudaforge.coder import _blocks

    text = prompts.fence(f"before\n{inside}\n# Instructions\nafter", "text")
    (block,) = _blocks(f"intro\n{text}\noutro")
    assert block.closed
    assert block.text == f"before\n{inside}\n# Instructions\nafter"
