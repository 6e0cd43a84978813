import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_cudaforge.config import ForgeConfig, RoleConfig, find_config, load, or_compiler
from pytest_cudaforge.errors import ConfigError


def read(tmp_path, text="", *, environ=None, start=None, **options):
    (tmp_path / "cudaforge.yaml").write_text(text)
    given = {name.replace("__", "."): value for name, value in options.items()}
    return load(given, root=tmp_path, start=start, environ=environ or {})


def fail(tmp_path, text="", **more):
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text, **more)
    return str(caught.value)


def test_without_a_file_everything_is_a_default_below_the_root(tmp_path):
    config = load({}, root=tmp_path)
    assert config.file is None
    assert (config.rounds, config.patience, config.concurrency, config.device) == (10, 4, 4, "auto")
    assert (config.forge_dir, config.run_dir) == (tmp_path / "forged", tmp_path / ".cudaforge")
    assert config.chat.coder == RoleConfig()
    assert config.max_usd is None


def test_importing_and_loading_without_a_file_loads_no_yaml(tmp_path):
    code = (
        "import sys; from pathlib import Path; from pytest_cudaforge.config import load;"
        f"load({{}}, root=Path({str(tmp_path)!r})); assert not {{'yaml', 'torch', 'pytest'}} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_file_then_environment_then_command_line(tmp_path):
    text = "rounds: 3\npatience: 2\ntrials: 6\n"
    environ = {"CUDAFORGE_PATIENCE": "5", "CUDAFORGE_TRIALS": "7", "HOME": "/x"}
    config = read(tmp_path, text, environ=environ, trials="8", isolation=None)
    assert (config.rounds, config.patience, config.trials, config.isolation) == (3, 5, 8, "auto")


def test_what_the_judge_leaves_out_comes_from_the_coder(tmp_path):
    text = "chat:\n  coder: {provider: replay, model: big, timeout_s: 9}\n  judge: {model: small}\n"
    config = read(tmp_path, text, environ={"CUDAFORGE_CHAT_CODER_MAX_RETRIES": "1"})
    assert config.chat.coder == RoleConfig(provider="replay", model="big", timeout_s=9.0, max_retries=1)
    assert config.chat.judge == RoleConfig(provider="replay", model="small", timeout_s=9.0, max_retries=1)


def test_every_setting_has_an_environment_variable(tmp_path):
    environ = {
        "CUDAFORGE_FORGE_CASES": "yes",
        "CUDAFORGE_LANGUAGES": "cpp, cuda",
        "CUDAFORGE_MAX_USD": "1.5",
        "CUDAFORGE_ARCH": "none",
        "CUDAFORGE_CHAT_COMMAND_ARGV": "agent --print 'two words'",
        "CUDAFORGE_CHAT_CODER_EXTRA": '{"seed": 7}',
        "CUDAFORGE_CHAT_CODER_TEMPERATURE": "0",
        "CUDAFORGE_FORGE_PATHS": "src,lib",
    }
    config = load({}, root=tmp_path, environ=environ)
    assert config.forge_cases is True
    assert config.languages == ("cpp", "cuda")
    assert config.max_usd == 1.5
    assert config.arch is None
    assert config.chat.command.argv == ("agent", "--print", "two words")
    assert config.chat.coder.extra == {"seed": 7}
    assert config.chat.judge.temperature == 0.0
    assert config.forge_paths == (tmp_path / "src", tmp_path / "lib")


def test_paths_in_a_file_are_relative_to_it_and_others_to_the_working_directory(tmp_path):
    inner = tmp_path / "pkg" / "deep"
    inner.mkdir(parents=True)
    (tmp_path / "pkg" / "cudaforge.yaml").write_text("forge_dir: out\nchat: {replay: {paths: [talks, /abs]}}\n")
    config = load({"run_dir": "runs"}, root=tmp_path, start=inner, environ={"CUDAFORGE_PRICES": "p.yaml"})
    assert config.file == tmp_path / "pkg" / "cudaforge.yaml"
    assert config.forge_dir == tmp_path / "pkg" / "out"
    assert config.chat.replay.paths == (tmp_path / "pkg" / "talks", Path("/abs"))
    assert config.run_dir == inner / "runs"
    assert config.prices == inner / "p.yaml"


def test_the_nearest_file_up_to_the_root_is_found(tmp_path):
    root = tmp_path / "root"
    (root / "a" / "b").mkdir(parents=True)
    (tmp_path / "cudaforge.yaml").write_text("")
    assert find_config(root / "a" / "b", root) is None
    (root / "cudaforge.yaml").write_text("")
    assert find_config(root / "a" / "b", root) == root / "cudaforge.yaml"
    (root / "a" / "cudaforge.yml").write_text("")
    assert find_config(root / "a" / "b", root) == root / "a" / "cudaforge.yml"
    assert find_config(tmp_path, root) == root / "cudaforge.yaml"


def test_links_are_kept_as_pytest_keeps_them(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "real" / "cudaforge.yaml").write_text("forge_dir: ../out")
    config = load({}, root=tmp_path / "link")
    assert config.root == tmp_path / "link"
    assert config.run_dir == tmp_path / "link" / ".cudaforge"
    assert config.forge_dir == tmp_path / "out"


def test_two_files_in_one_folder_are_refused(tmp_path):
    (tmp_path / "cudaforge.yml").write_text("")
    assert "holds both cudaforge.yaml and cudaforge.yml" in fail(tmp_path)


def test_a_file_can_be_named(tmp_path):
    (tmp_path / "other.yaml").write_text("rounds: 2")
    assert load({"config": "other.yaml"}, root=tmp_path).rounds == 2
    with pytest.raises(ConfigError, match=r"none\.yaml does not exist"):
        load({"config": "none.yaml"}, root=tmp_path)


@pytest.mark.parametrize("text", ["", "# only a comment\n", "---\n", "chat:\n", "chat:\n  coder:\n", "null\n"])
def test_empty_files_and_sections_are_fine(tmp_path, text):
    assert read(tmp_path, text).rounds == 10


@pytest.mark.parametrize(
    ("text", "where", "message"),
    [
        ("rounds: 3\nround: 4\n", "cudaforge.yaml:2", "unknown key round; did you mean rounds?"),
        ("chat:\n  coder:\n    modle: x\n", "cudaforge.yaml:3", "unknown key chat.coder.modle; did you mean model?"),
        ("chat: {critic: {}}\n", "cudaforge.yaml:1", "unknown key chat.critic"),
        ("file: x\n", "cudaforge.yaml:1", "unknown key file"),
        ("rounds: 3\nrounds: 4\n", "cudaforge.yaml:2", "rounds is given twice (first in line 1)"),
        ("- rounds\n", "cudaforge.yaml:1", "the file is not a mapping"),
        ("chat: openai\n", "cudaforge.yaml:1", "chat is not a mapping"),
        ("rounds: 3\n  patience: 4\n", "cudaforge.yaml:2:11", "not valid YAML: mapping values are not allowed here"),
        ("rounds: [3\n", "cudaforge.yaml:2:1", "not valid YAML"),
        ("rounds: 3\n\tpatience: 4\n", "cudaforge.yaml:2:1", "not valid YAML"),
        ("rounds: !!python/object:os.system 3\n", "cudaforge.yaml:1:9", "not valid YAML: could not determine a constr"),
        ("a: 1\n---\nb: 2\n", "cudaforge.yaml:2:1", "not valid YAML"),
    ],
)
def test_a_bad_file_says_line_and_reason(tmp_path, text, where, message):
    said = fail(tmp_path, text)
    assert f"{where}: {message}" in said
    assert "expected:" in said


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rounds: many", "rounds 'many' is of the wrong type\n  expected: a number >= 1"),
        ("rounds: 2.5", "rounds 2.5 is of the wrong type"),
        ("rounds: true", "rounds True is of the wrong type"),
        ("rounds: 0", "rounds 0 is not allowed\n  expected: a number >= 1"),
        ("max_usd: -1", "max_usd -1 is not allowed"),
        ("max_usd: .inf", "max_usd inf is of the wrong type"),
        ("max_minutes: 0", "max_minutes 0 is not allowed\n  expected: a number > 0"),
        ("forge_cases: maybe", "forge_cases 'maybe' is of the wrong type\n  expected: true or false"),
        ("isolation: some", "isolation 'some' is of the wrong type\n  expected: one of auto, none"),
        ("profile: yes", "profile True is of the wrong type\n  expected: one of auto, always, never"),
        ("profiles: auto", "unknown key profiles; did you mean profile?"),
        ("device: gpu", "device 'gpu' is not allowed\n  expected: auto, cpu, cuda or cuda:<index>"),
        ("arch: hopper", "arch 'hopper' is not allowed"),
        ("allow: [kernel, all]", "allow ['kernel', 'all'] is not allowed\n  expected: some of kernel, mixed"),
        ("languages: 3", "languages 3 is of the wrong type\n  expected: a list"),
        ("forge_paths: [1]", "forge_paths [1] is of the wrong type\n  expected: a path"),
        ("chat: {coder: {model: 5}}", "chat.coder.model 5 is of the wrong type\n  expected: text"),
        ("chat: {coder: {provider: gemini}}", "chat.coder.provider 'gemini' is not allowed"),
        ("chat: {coder: {extra: [1]}}", "chat.coder.extra [1] is of the wrong type\n  expected: a mapping"),
        (
            'chat: {command: {argv: "a \'b"}}',
            'chat.command.argv "a \'b" is of the wrong type\n  expected: a list, or text',
        ),
        ("strategy:", "strategy None is of the wrong type"),
    ],
)
def test_a_wrong_value_says_what_was_expected(tmp_path, text, message):
    said = fail(tmp_path, text)
    assert f"cudaforge.yaml:1: {message}" in said


@pytest.mark.parametrize(
    "text",
    [
        "chat: {coder: {api_key: sk-very-secret-1}}",
        "chat: {coder: {api_key_env: sk-very-secret-1}}",
        "chat: {coder: {base_url: 'https://user:sk-very-secret-1@host/v1'}}",
        "chat: {command: {env: [KEY=sk-very-secret-1]}}",
        "openai_key: sk-very-secret-1",
    ],
)
def test_a_key_in_a_file_is_refused_and_not_repeated(tmp_path, text):
    said = fail(tmp_path, text)
    assert "sk-very-secret" not in said
    assert "environment variable" in said


def test_bad_environment_variables(tmp_path):
    said = fail(tmp_path, environ={"CUDAFORGE_ROUND_COUNT": "3"})
    assert "CUDAFORGE_ROUND_COUNT is no setting" in said
    assert "did you mean CUDAFORGE_ROUNDS?" in fail(tmp_path, environ={"CUDAFORGE_RUONDS": "3"})
    assert "environment variable CUDAFORGE_ROUNDS: rounds 'x' is of" in fail(
        tmp_path, environ={"CUDAFORGE_ROUNDS": "x"}
    )
    assert "JSON object" in fail(tmp_path, environ={"CUDAFORGE_CHAT_CODER_EXTRA": "{"})


def test_our_other_variables_are_no_settings(tmp_path):
    environ = {"CUDAFORGE_ROLE": "coder", "CUDAFORGE_TARGET": "t", "CUDAFORGE_ROUND": "1", "CUDAFORGE_LANGUAGE": "cpp"}
    environ |= {"CUDAFORGE_CACHE_DIR": "/tmp/x"}
    assert load({}, root=tmp_path, environ=environ) == load({}, root=tmp_path)


def test_bad_options(tmp_path):
    assert "unknown option 'round'; did you mean rounds?" in fail(tmp_path, round=3)
    assert "option max_usd: max_usd 'much' is of the wrong type" in fail(tmp_path, max_usd="much")


def test_an_unreadable_file(tmp_path):
    (tmp_path / "cudaforge.yaml").write_bytes(b"rounds: \xff\xfe")
    with pytest.raises(ConfigError, match="cannot be read"):
        load({}, root=tmp_path)


@pytest.mark.parametrize("text", ["rounds: 2026-99-99", "rounds: " + "[" * 5000, "a: &a [*a]", "allow: &a [*a]"])
def test_values_that_break_the_yaml_reader(tmp_path, text):
    assert "cudaforge.yaml" in fail(tmp_path, text)


def test_a_config_is_frozen_all_the_way_down(tmp_path):
    config = read(tmp_path, "chat: {coder: {extra: {a: 1}}}")
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.rounds = 3
    with pytest.raises(TypeError):
        config.chat.coder.extra["a"] = 2
    assert dataclasses.is_dataclass(ForgeConfig)


def test_the_compiler_takes_the_place_of_a_model_only_where_none_is_wanted(tmp_path):
    alone = or_compiler(read(tmp_path, "rounds: 3\n"), {})
    assert (alone.chat.coder.provider, alone.chat.judge.provider, alone.rounds) == ("compiler", "compiler", 3)
    (note,) = alone.notes
    assert "no model is configured" in note and "cudaforge.yaml" in note
    for config, environ in (
        (read(tmp_path, "chat: {coder: {model: gpt-5}}"), {}),  # its key is missing: an error, later
        (read(tmp_path, "chat: {replay: {paths: [talks]}}"), {}),
        (read(tmp_path, environ={"CUDAFORGE_CHAT_CODER_MODEL": "m"}), {}),
        (read(tmp_path), {"OPENAI_API_KEY": "k"}),  # wants a model, has not said which
    ):
        assert or_compiler(config, environ) is config
    chosen = read(tmp_path, "chat: {judge: {model: small}}", chat__coder__provider="compiler")
    assert or_compiler(chosen, {}).chat.coder.provider == "compiler" and not chosen.notes
