import asyncio
import json
import threading

import pytest
from chat_requests import config, request

from pytest_cudaforge import chat
from pytest_cudaforge.chat import ChatReply
from pytest_cudaforge.chat.record import RecordedVerdict, Recorder, read_conversations, render_conversations
from pytest_cudaforge.errors import ConfigError, ProviderError, StoreError
from pytest_cudaforge.records import Evaluation, Isolation, Round, Status, Usage

DIGEST = "d" * 64


def said(text, asked):
    return ChatReply(text, Usage(10, 5, 0, 0.01), "gpt-5", 1.0, asked.digest)


def record(path, texts=("one", "two"), **key):
    recorder = Recorder(path)
    for ordinal, text in enumerate(texts, 1):
        asked = request(ordinal, **key)
        recorder.record(asked, said(text, asked))
    return recorder


def replaying(tmp_path, *paths):
    return chat.load(
        config(tmp_path, chat__coder__provider="replay", chat__replay__paths=[str(p) for p in paths]), "coder"
    )


def ask(model, asked):
    return asyncio.run(model.complete(asked))


def test_what_was_recorded_is_replayed_by_role_and_ordinal(tmp_path):
    path = tmp_path / "talk.jsonl"
    recorder = record(path)
    judged = request(1, role="judge")
    recorder.record(judged, said("{}", judged))
    model = replaying(tmp_path, path)
    assert ask(model, request(2)).text == "two"
    reply = ask(model, request(1))
    assert (reply.text, reply.model, reply.usage) == ("one", "replay:gpt-5", Usage(usd=0.0))
    assert reply.note == "replayed from talk.jsonl"
    assert ask(model, judged).text == "{}"


def test_a_different_prompt_is_noted_not_refused(tmp_path):
    record(tmp_path / "talk.jsonl")
    reply = ask(replaying(tmp_path, tmp_path), request(1, text="Write a kernel; eager takes 3.7 us."))
    assert reply.text == "one"
    assert "the prompt differs from the recorded one" in reply.note


def test_a_target_below_another_rootdir_is_found_by_its_source(tmp_path):
    record(tmp_path / "talk.jsonl", target="examples/layers.py::Norm")
    reply = ask(replaying(tmp_path, tmp_path), request(1))
    assert reply.text == "one"
    assert "recorded as examples/layers.py::Norm" in reply.note


def test_no_reply_left(tmp_path):
    record(tmp_path / "talk.jsonl")
    with pytest.raises(
        ProviderError, match=r"no recorded reply is left for the coder of layers.py::Norm \(cpp\)"
    ) as caught:
        ask(replaying(tmp_path, tmp_path), request(3))
    assert "number 3 was asked for" in str(caught.value)
    assert "has 2" in str(caught.value)
    assert "--forge-record" in caught.value.remedy


def test_a_changed_source_says_both_digests_and_how_to_record_again(tmp_path):
    record(tmp_path / "talk.jsonl")
    with pytest.raises(ProviderError, match=r"the source of layers\.py::Norm changed") as caught:
        ask(replaying(tmp_path, tmp_path), request(1, digest="e" * 64))
    assert "it is eeeeeeeeeeee now, recorded: dddddddddddd in" in str(caught.value)
    assert "--forge-record" in caught.value.remedy


def test_another_language_is_named(tmp_path):
    record(tmp_path / "talk.jsonl")
    with pytest.raises(ProviderError, match=r"no cuda conversation is recorded for layers\.py::Norm, only cpp"):
        ask(replaying(tmp_path, tmp_path), request(1, language="cuda"))


def test_an_unknown_target_gets_a_suggestion(tmp_path):
    record(tmp_path / "talk.jsonl")
    with pytest.raises(ProviderError, match=r"did you mean the one of layers\.py::Norm"):
        ask(replaying(tmp_path, tmp_path), request(1, target="layers.py::Norms", digest="f" * 64))


def test_verdicts_are_kept_for_strategies_and_reports(tmp_path):
    path = tmp_path / "talk.jsonl"
    recorder = record(path)
    verdict = Evaluation(Status.BUILD_ERROR, "no", "c", "t", Isolation("C"), device="cpu")
    recorder.verdict("layers.py::Norm", DIGEST, "cpp", Round(2, "correction", 1, None, verdict))
    recorder.verdict("layers.py::Norm", DIGEST, "cpp", Round(1, "first", None, None, None))
    model = replaying(tmp_path, path)
    assert model.verdicts("layers.py::Norm", DIGEST, "cpp") == (
        RecordedVerdict(1, "first"),
        RecordedVerdict(2, "correction", 1, "BUILD_ERROR", device="cpu"),
    )
    assert model.verdicts("layers.py::Norm", "e" * 64, "cpp") == ()


def test_recording_again_replaces_older_sources_and_keeps_the_rest(tmp_path):
    path = tmp_path / "talk.jsonl"
    record(path)
    record(path, target="layers.py::Other")
    record(path, texts=["new"], digest="e" * 64)
    found = {talk.target: talk for talk in read_conversations(path)}
    assert len(read_conversations(path)) == 2
    assert found["layers.py::Norm"].digest == "e" * 64
    assert [reply.text for reply in found["layers.py::Norm"].replies] == ["new"]
    assert len(found["layers.py::Other"].replies) == 2


def test_the_same_reply_recorded_twice_is_there_once(tmp_path):
    path = tmp_path / "talk.jsonl"
    record(path)
    record(path)
    (talk,) = read_conversations(path)
    assert len(talk.replies) == 2


def test_recorders_side_by_side_lose_nothing(tmp_path):
    path = tmp_path / "talk.jsonl"

    def work(name):
        record(path, texts=[f"{name}{i}" for i in range(6)], target=f"layers.py::{name}")

    threads = [threading.Thread(target=work, args=(f"N{i}",)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    talks = read_conversations(path)
    assert sorted(len(talk.replies) for talk in talks) == [6, 6, 6, 6]
    assert [p.name for p in tmp_path.iterdir()] == ["talk.jsonl"]


def test_a_file_comes_back_as_it_was_written(tmp_path):
    path = tmp_path / "talk.jsonl"
    record(path, texts=["```cpp\nint x;\n```\n✓\u2028end", ""])
    text = path.read_text()
    assert render_conversations(read_conversations(path)) == text
    assert len(text.split("\n")) == 4


def test_a_conversation_can_be_written_by_hand(tmp_path):
    path = tmp_path / "hand.jsonl"
    header = {
        "format": "cudaforge-conversation",
        "version": 1,
        "target": "layers.py::Norm",
        "digest": DIGEST,
        "language": "cpp",
    }
    path.write_text(
        "# played by hand\n"
        + json.dumps(header)
        + "\n\n"
        + json.dumps({"role": "coder", "ordinal": 1, "text": "hi"})
        + "\n"
    )
    reply = ask(replaying(tmp_path, path), request(1))
    assert (reply.text, reply.note) == ("hi", "replayed from hand.jsonl")


HEADER = '{"format": "cudaforge-conversation", "version": 1, "target": "t", "digest": "d", "language": "cpp"}\n'


@pytest.mark.parametrize(
    ("text", "line", "why"),
    [
        ('{"role": "coder", "ordinal": 1, "text": "x"}\n', 1, "before any header"),
        ("not json\n", 1, "Expecting value"),
        ("[1]\n", 1, "not a JSON object"),
        ('{"format": "other", "version": 1}\n', 1, "format 'other'"),
        ('{"format": "cudaforge-conversation", "version": 9}\n', 1, "version 9"),
        ('{"format": "cudaforge-conversation", "version": 1, "target": "t"}\n', 1, "lacks digest, language"),
        (HEADER + '{"role": "critic", "ordinal": 1, "text": "x"}\n', 2, "role must be"),
        (HEADER + '{"role": "coder", "ordinal": 0, "text": "x"}\n', 2, "ordinal at least 1"),
        (HEADER + '{"role": "coder", "ordinal": 1}\n', 2, "text"),
        (HEADER + '{"role": "coder", "ordinal": 1, "text": "x", "mood": "good"}\n', 2, "mood"),
        (HEADER + '{"role": "coder", "ordinal": 1, "text": "x"}\n' * 2, 3, "there twice"),
        (HEADER + '{"verdict": {"round": "one"}}\n', 2, "round"),
    ],
)
def test_malformed_files_name_file_and_line(tmp_path, text, line, why):
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"bad.jsonl:{line}: .*{why}"):
        replaying(tmp_path, path)


def test_a_file_that_is_not_text(tmp_path):
    (tmp_path / "bad.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="cannot be read"):
        replaying(tmp_path, tmp_path)


def test_paths_that_lead_nowhere(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        replaying(tmp_path, tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"holds no \.jsonl"):
        replaying(tmp_path, tmp_path / "empty")
    with pytest.raises(ConfigError, match=r"chat\.replay\.paths is empty"):
        replaying(tmp_path)


def test_one_conversation_in_two_files_is_ambiguous(tmp_path):
    record(tmp_path / "a.jsonl")
    record(tmp_path / "b.jsonl")
    with pytest.raises(ConfigError, match="recorded twice"):
        replaying(tmp_path, tmp_path)


def test_a_recording_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot be written") as caught:
        record(tmp_path / "file" / "talk.jsonl")
    assert "--forge-record" in caught.value.remedy


def test_a_target_recorded_in_another_language_only_says_so(tmp_path):
    record(tmp_path / "talk.jsonl", language="cpp")
    model = replaying(tmp_path, tmp_path / "talk.jsonl")
    key = request(1, language="cpp").key
    assert model.only_elsewhere(key.target, key.digest, "cuda") == (
        "its conversation is recorded for cpp only, not for cuda"
    )
    assert model.only_elsewhere(key.target, key.digest, "cpp") == ""
    assert model.only_elsewhere("other.py::Other", key.digest, "cuda") == ""
