import asyncio
import datetime

import pytest
from chat_requests import config, request

from pytest_cudaforge import chat
from pytest_cudaforge.chat import Message, estimate_tokens, prices, prompt_digest, render_text
from pytest_cudaforge.chat.scripted import ScriptedModel
from pytest_cudaforge.errors import ConfigError, ProviderError, ReplyPending
from pytest_cudaforge.records import Usage


def test_a_provider_can_be_anybodys_factory(tmp_path, monkeypatch):
    (tmp_path / "my_provider.py").write_text(
        "from pytest_cudaforge.chat.scripted import ScriptedModel\n"
        "def make(config, role):\n    return ScriptedModel({role: ['mine']}, name=config.chat.coder.model)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    options = {"chat__coder__provider": "my_provider:make", "chat__coder__model": "m"}
    model = chat.load(config(tmp_path, **options), "coder")
    assert asyncio.run(model.complete(request())).text == "mine"
    assert model.name == "m"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_such_package.module:make", "cannot be loaded: No module named"),
        ("pytest_cudaforge.chat:nothing", "cannot be loaded: module .* has no attribute"),
        ("pytest_cudaforge.chat:Role.__args__", "not callable"),
    ],
)
def test_a_provider_that_cannot_be_loaded(tmp_path, path, message):
    with pytest.raises(ConfigError, match=message):
        chat.load(config(tmp_path, chat__coder__provider=path), "coder")


def test_the_scripted_model_answers_by_ordinal_and_keeps_what_was_asked():
    model = ScriptedModel({"coder": ["one", ReplyPending("later")], "judge": ["{}"]})
    assert asyncio.run(model.complete(request(1))).text == "one"
    assert asyncio.run(model.complete(request(1))).text == "one"
    assert asyncio.run(model.complete(request(1, role="judge"))).text == "{}"
    with pytest.raises(ReplyPending):
        asyncio.run(model.complete(request(2)))
    with pytest.raises(ProviderError, match="the script has 2"):
        asyncio.run(model.complete(request(3)))
    assert len(model.requests) == 5


def test_the_scripted_model_can_be_a_function():
    model = ScriptedModel(lambda asked: f"reply {asked.key.ordinal}")
    assert asyncio.run(model.complete(request(7))).text == "reply 7"


def test_the_digest_tells_prompts_apart():
    one = (Message("system", "a"), Message("user", "b"))
    assert prompt_digest(one) == prompt_digest(list(one))
    assert prompt_digest(one) != prompt_digest((Message("system", "ab"), Message("user", "")))
    assert prompt_digest(one) != prompt_digest((Message("user", "a"), Message("user", "b")))


def test_one_message_is_its_own_text_and_more_are_titled():
    assert render_text([Message("user", "just this")]) == "just this"
    text = render_text([Message("system", "S"), Message("user", "U"), Message("assistant", "A"), Message("user", "V")])
    assert text.index("Instructions") < text.index("Task") < text.index("Your earlier reply")


def test_tokens_are_estimated_on_the_dear_side():
    assert estimate_tokens([Message("user", "x" * 3000)]) == 1008


# -- prices ------------------------------------------------------------------------------------------------------


def test_every_builtin_price_is_dated_and_sane():
    table = prices.load().table
    assert len(table) >= 10
    for name, price in table.items():
        assert datetime.date.fromisoformat(price.as_of), name
        assert 0 < price.input <= price.output, name
        assert price.cached is None or 0 < price.cached < price.input, name


def test_a_snapshot_has_its_models_price_and_a_variant_does_not():
    known = prices.load()
    assert known.of("gpt-5-2025-08-07") == known.of("gpt-5")
    assert known.of("claude-sonnet-4-5-20250929") == known.of("claude-sonnet-4-5")
    assert known.of("gpt-5-pro") is None
    assert known.usd("llama", Usage(10, 10)) is None
    assert known.reserve_usd("llama", 10, 10) is None


def test_cached_tokens_cost_less_and_never_more_than_all_of_them():
    known = prices.Prices({"m": prices.Price(2.0, 10.0, cached=0.5), "n": prices.Price(2.0, 10.0)})
    assert known.usd("m", Usage(1_000_000, 100_000, 400_000)) == pytest.approx(0.6 * 2 + 0.4 * 0.5 + 1.0)
    assert known.usd("n", Usage(1_000_000, 0, 400_000)) == pytest.approx(2.0)
    assert known.usd("m", Usage(10, 0, 400_000)) == pytest.approx(10 * 0.5 / 1e6)
    assert known.settle("m", Usage(0, 1_000_000)).usd == pytest.approx(10.0)


def test_a_user_overrides_and_extends_the_table(tmp_path):
    mine = tmp_path / "prices.yaml"
    mine.write_text("models:\n  gpt-5: {input: 9, output: 99}\n  local: {input: 0, output: 0}\n")
    known = prices.load(mine)
    assert known.of("gpt-5") == prices.Price(9.0, 99.0)
    assert known.usd("local", Usage(5, 5)) == 0.0
    assert known.of("gpt-5-mini") is not None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("models: [1]", "not a price table"),
        ("prices: {}", "not a price table"),
        ("- a", "not a price table"),
        ("models: {m: {input: 1}}", "m: {'input': 1} is no price"),
        ("models: {m: {input: 1, output: 2, per: day}}", "is no price"),
        ("models: {m: {input: -1, output: 2}}", "input is -1"),
        ("models: {m: {input: .nan, output: 2}}", "input is nan"),
        ("models: {m: {input: yes, output: 2}}", "input is True"),
        ("models: {m: [", "not valid YAML"),
        ("models: {m: {input: 1, output: 2, as_of: 2026-99-99}}", "not valid YAML"),
    ],
)
def test_a_bad_table_says_where(tmp_path, text, message):
    mine = tmp_path / "mine.yaml"
    mine.write_text(text)
    with pytest.raises(ConfigError) as caught:
        prices.load(mine)
    assert message in str(caught.value)
    assert "mine.yaml" in str(caught.value)


def test_a_table_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        prices.load(tmp_path / "none.yaml")


def test_a_call_is_reserved_at_its_dearest():
    known = prices.load()
    assert known.reserve_usd("gpt-5", 1_000_000, 1000) == pytest.approx(1.25 + 0.01)
    assert known.reserve_usd("gpt-5", 0, None) == pytest.approx(0.16)
