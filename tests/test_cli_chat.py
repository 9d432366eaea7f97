"""`chat` through a pipe and its commands, with a runtime that has no model."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from offload_runtime.cli.app import app
from offload_runtime.cli.chat_commands import COMMANDS
from offload_runtime.cli.chat_session import ChatSession
from offload_runtime.engine import Conversation, GenerationResult, TokenEvent, TokenStream
from offload_runtime.engine.channels import has_channels
from offload_runtime.engine.engine import RequestOutput
from offload_runtime.engine.request import PromptRoom, Request
from offload_runtime.params import GenerationParams, SamplingParams
from offload_runtime.weights.sources import describe_model
from tests.helpers.engine import byte_level_tokenizer
from tests.helpers.planning import CONFIGS
from tests.test_cli_fakes import FakeRuntime, at_a_terminal, full_host, invoke, press_ctrl_c
from tests.test_cli_generate import NOISE, error_lines


@pytest.fixture
def runtime() -> FakeRuntime:
    return FakeRuntime()


def chat(runtime: FakeRuntime, *arguments: str, turns: str | bytes) -> Result:
    return invoke(["chat", "--target", "some/model", *arguments], {"Runtime": runtime}, input=turns)


def said(runtime: FakeRuntime) -> list[Any]:
    return [prompt for prompt, _ in runtime.requests]


def test_each_line_is_a_turn(runtime: FakeRuntime) -> None:
    shown = chat(runtime, "--system", "Be brief.", "--seed", "9", "--tree-nodes", "50", turns="one\n\n  \n two \nthree")
    assert runtime.loads[0].tree_nodes == 50
    assert (shown.exit_code, shown.stdout) == (0, (NOISE + "Hello\n") * 3)
    assert said(runtime) == ["one", "two", "three"]
    assert runtime.requests[2][1] == GenerationParams(1024, sampling=SamplingParams(0.7, seed=9))
    # Two words of system prompt, then a word each way and turn.
    assert "12.5 tokens/s · draft 1.5 tokens/pass · link 80 % · context 8 of 100\n" in shown.stderr


@pytest.mark.parametrize(
    ("named", "given", "sampling", "line"),
    [
        ({}, [], SamplingParams(0.7), "sampling at temperature 0.7: the model's files name no defaults"),
        ({}, ["--temperature", "0"], SamplingParams(), None),
        (
            {"temperature": 0.6, "top_k": 20, "top_p": 0.95}, ["--top-k", "5"],
            SamplingParams(0.6, top_k=5, top_p=0.95),
            "sampling as the model's generation_config.json has it: temperature 0.6, top-p 0.95",
        ),
        (
            {"temperature": 0.0}, [], SamplingParams(),
            "sampling as the model's generation_config.json has it: temperature 0",
        ),
        (
            {"repetition_penalty": 1.1}, [], SamplingParams(0.7, repetition_penalty=1.1),
            "sampling as the model's generation_config.json has it: repetition-penalty 1.1; it leaves temperature "
            "open: 0.7",
        ),
    ],
)  # fmt: skip
def test_what_is_left_open_is_as_the_models_makers_have_it(
    runtime: FakeRuntime, named: dict[str, float], given: list[str], sampling: SamplingParams, line: str | None
) -> None:
    runtime.sampling_defaults = named
    result = chat(runtime, *given, turns="one\n")
    assert runtime.requests[0][1].sampling == sampling
    assert [said for said in result.stderr.splitlines() if said.startswith("sampling")] == ([line] if line else [])


def test_json_is_one_object_per_turn_errors_included(runtime: FakeRuntime) -> None:
    runtime.context_tokens = 3
    result = chat(runtime, "--json", turns="one\n/stats\nfar too many words\n/nonsense\ntwo\n")
    assert result.exit_code == 0
    first, second, third = (json.loads(line) for line in result.stdout.splitlines())
    assert (first["text"], first["tokens"], first["dtype"]) == ("Hello", [1, 2, 3], "fp32")
    assert second["error_type"] == "ContextLengthError"
    assert third["text"] == "Hello"
    context_line, command_line = error_lines(result)
    assert context_line == "error: the context is full: start over with /reset"
    assert "unknown command /nonsense" in command_line


def test_memory_that_runs_out_keeps_what_was_said(runtime: FakeRuntime, tmp_path: Path) -> None:
    runtime.before_piece, path = full_host(at_piece=2), tmp_path / "chat.json"
    result = chat(runtime, turns=f"one\n/save {path}\n")
    assert (result.exit_code, result.stdout) == (0, NOISE + "Hel\n")
    assert error_lines(result) == ["error: the host is full"]
    assert [message["content"] for message in json.loads(path.read_text())["messages"]] == ["one", "Hel"]
    (record,) = (json.loads(line) for line in chat(runtime, "--json", turns="one\n").stdout.splitlines())
    assert (record["text"], record["error_type"], record["error"]) == ("Hel", "BudgetError", "the host is full")


def test_memory_that_runs_out_before_the_answer_drops_the_message(runtime: FakeRuntime) -> None:
    runtime.before_piece = full_host(at_piece=0)
    (record,) = (json.loads(line) for line in chat(runtime, "--json", turns="one\n").stdout.splitlines())
    assert record == {"error": "the host is full", "error_type": "BudgetError"}


def test_reset_and_system(runtime: FakeRuntime) -> None:
    turns = "one\n/reset\n/system\n/system You are terse.\n/system\n/system none\n/system\n"
    lines = chat(runtime, "--system", "Be brief.", turns=turns).stderr.splitlines()
    assert "system prompt: Be brief." in lines
    assert "system prompt: You are terse." in lines
    assert lines[-1] == "there is no system prompt"
    assert said(runtime) == ["one"]


def test_unknown_command_lists_the_known_ones_and_is_not_sent(runtime: FakeRuntime) -> None:
    result = chat(runtime, turns="/quiet please\n//etc is a directory?\n")
    assert said(runtime) == ["/etc is a directory?"]
    (line,) = error_lines(result)
    assert "unknown command /quiet" in line
    assert all(name in line for name in COMMANDS)


def test_help_and_stats(runtime: FakeRuntime) -> None:
    result = chat(runtime, turns="/stats\n/help\none\n/stats\n/exit\nnever read\n")
    assert result.exit_code == 0
    assert "no answer yet" in result.stderr
    assert all(command.help in result.stderr for command in COMMANDS.values())
    for figure in ("prompt of 7 tokens", "3 tokens in 2 passes", "2.0 GB a pass", "peak of 3.0 GB of memory, 4"):
        assert figure in result.stderr
    assert "predicted" not in result.stderr
    assert result.stderr.count(runtime.placement) == 3
    assert said(runtime) == ["one"]


def test_save_and_load(runtime: FakeRuntime, tmp_path: Path) -> None:
    path, broken = tmp_path / "my chat.json", tmp_path / "broken.json"
    broken.write_text("[1, 2]")
    turns = f"one\n/save {path}\n/reset\n/load {broken}\n/load {tmp_path}/absent\n/load\n/load {path}\n/save {path}\n"
    result = chat(runtime, turns=turns)
    assert result.exit_code == 0
    saved = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "Hello"}]
    assert json.loads(path.read_text(encoding="utf-8")) == {"version": 1, "messages": saved}
    lines = error_lines(result)
    assert len(lines) == 3
    assert "this is not a saved conversation" in lines[0]
    assert "No such file" in lines[1]
    assert "/load FILE" in lines[2]
    assert f"loaded 2 messages from {path}" in result.stderr
    assert sorted(os.listdir(tmp_path)) == ["broken.json", "my chat.json"]


def test_a_session_goes_on_where_it_was_and_is_saved_after_every_answer(runtime: FakeRuntime, tmp_path: Path) -> None:
    path, other = tmp_path / "chat.json", tmp_path / "other.json"
    chat(runtime, "--session", str(path), "--system", "Be brief.", turns="one\n")
    result = chat(runtime, "--session", str(path), turns=f"two\n/save\n/save {other}\n/reset\nthree\n/reset\n")
    assert f"loaded 3 messages from {path}\n" in result.stderr and f"saved 5 messages to {path}\n" in result.stderr
    messages = [message["content"] for message in json.loads(path.read_text())["messages"]]
    assert messages == ["Be brief.", "three", "Hello"] and len(json.loads(other.read_text())["messages"]) == 5
    result = chat(runtime, "--session", str(path), "--system", "Be long.", turns="four\n")
    assert result.exit_code == 2 and "another system prompt" in error_lines(result)[0]
    assert error_lines(chat(runtime, turns="/save\n"))[0].startswith("error: /save needs the name of a file")


@pytest.mark.parametrize("content", [
    b"# A project", b'{"name": "a project"}', b"", b"{", b"\xff\xfe", b"3", b"[" * 100_000, b'{"messages": "\xe9"}',
    b"9" * 9000,
], ids=lambda raw: repr(raw[:9]))  # fmt: skip
def test_what_is_no_session_is_refused_and_left_alone(runtime: FakeRuntime, tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    result = chat(runtime, "--session", str(path), turns="one\n")
    assert result.exit_code == 2 and not runtime.loads
    loaded = chat(runtime, "--session", str(tmp_path / "chat"), turns=f"/load {path}\none\n")
    for line in (error_lines(result)[0], *error_lines(loaded)):
        assert "saved conversation" in line or "not UTF-8" in line
    assert said(runtime) == ["one"] and path.read_bytes() == content


def test_a_line_that_is_not_text_is_named_and_skipped(runtime: FakeRuntime) -> None:
    result = chat(runtime, turns=b"one\nd\xe9j\xe0\ntwo\n")
    assert result.exit_code == 0
    assert said(runtime) == ["one", "two"]
    assert "line 2 of stdin is not UTF-8" in error_lines(result)[0]


def test_ctrl_c_ends_a_piped_chat_after_what_is_there(runtime: FakeRuntime) -> None:
    runtime.before_piece = lambda number: press_ctrl_c() if number == 1 else None
    result = chat(runtime, "--json", turns="one\ntwo\n")
    assert result.exit_code == 130
    record = json.loads(result.stdout)
    assert (record["text"], record["finish_reason"]) == ("Hel", "interrupted")
    assert said(runtime) == ["one"]


def test_ctrl_c_before_the_answer_drops_the_message(runtime: FakeRuntime) -> None:
    runtime.before_piece = lambda number: press_ctrl_c() if number == 0 else None
    result = chat(runtime, turns="one\ntwo\n")
    assert (result.exit_code, result.stdout) == (130, NOISE)
    assert "the message was not kept" in result.stderr


def test_an_answer_is_given_anew_with_other_noise(runtime: FakeRuntime) -> None:
    result = chat(runtime, turns="/retry\none\n/retry\n/retry\ntwo\n/set temperature 0\n/retry\n/undo\n/system\n")
    assert error_lines(result) == ["error: the conversation has no message yet"]
    asked = [(prompt, params.sampling.temperature, params.sampling.noise_id) for prompt, params in runtime.requests]
    # Noise that no answer had, but for messages, whose answers are those of a conversation without commands.
    assert asked == [("one", 0.7, 0), ("one", 0.7, 1), ("one", 0.7, 2), ("two", 0.7, 0), ("two", 0.0, 3)]
    assert result.stderr.count("at temperature 0 the answer is always the same: /set temperature 0.7") == 1
    assert "dropped your last message and its answer: two\n" in result.stderr


def test_sampling_is_set_as_the_command_line_has_it(runtime: FakeRuntime) -> None:
    settings = ["temperature 0.3", "logit-bias 5=-100", "logit-bias 6=1.5", "stop the end", "ignore-eos on", "seed 7"]
    lines = "".join(f"/set {one}\n" for one in settings)
    result = chat(runtime, "--top-k", "9", turns=f"one\n{lines}two\n/set stop none\n/set ignore-eos off\n/set\nthree\n")
    assert result.exit_code == 0 and not error_lines(result)
    first, second, third = (params for _, params in runtime.requests)
    sampling = SamplingParams(0.3, top_k=9, seed=7, logit_bias={5: -100.0, 6: 1.5})
    assert first.sampling == SamplingParams(0.7, top_k=9)
    assert second == GenerationParams(1024, ("the end",), ignore_eos=True, sampling=sampling)
    assert third == GenerationParams(1024, sampling=sampling)
    listed = dict(line.split(maxsplit=1) for line in result.stderr.splitlines()[-16:-1])
    assert (listed["temperature"], listed["top-k"], listed["top-p"]) == ("0.3", "9", "1")
    assert (listed["logit-bias"], listed["stop"], listed["ignore-eos"]) == ("5=-100 6=1.5", "none", "off")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("temperature hot", "temperature must be a number, not 'hot'"), ("top-p 3", "top-p must be in [0, 1]"),
        ("temperature", "temperature must be a number, not ''"), ("max-new-tokens 0", "must be at least 1, not 0"),
        ("ignore-eos maybe", "ignore-eos is on or off, not 'maybe'"),
        ("target other", "target is not an option of sampling: there are max-new-tokens, stop"),
        ("logit-bias 5", "is not a bias: write it like 1234=-100"), ("logprobs 3", "does nothing without --json"),
    ],
)  # fmt: skip
def test_what_cannot_be_set_changes_nothing(runtime: FakeRuntime, setting: str, message: str) -> None:
    result = chat(runtime, turns=f"/set {setting}\none\n")
    (line,) = error_lines(result)
    assert message in line
    assert runtime.requests[0][1] == GenerationParams(1024, sampling=SamplingParams(0.7))


def test_context_says_what_is_held_and_what_is_left(runtime: FakeRuntime) -> None:
    said = chat(runtime, "--system", "Be brief.", turns="one\n/context\n").stderr
    assert "  3 messages; 4 tokens have been read, their keys and values take 16.0 kB\n" in said
    assert "  room for 96 more of 100 tokens (--context)\n" in said


@pytest.mark.parametrize(
    ("typed", "found"), [("ch", "chat"), ("chat --tempe", "--temperature"), ("chat --kv h", "host")]
)
def test_a_shell_completes_commands_options_and_values(typed: str, found: str) -> None:
    words = f"offload-runtime {typed}"
    asked = {"_OFFLOAD_RUNTIME_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    result = CliRunner().invoke(app, [], prog_name="offload-runtime", env=asked)
    assert (result.exit_code, result.stdout.split()) == (0, [found])


def contents(session: ChatSession) -> list[str]:
    return [message["content"] for message in session.conversation.messages]


def test_files_come_with_the_next_message(runtime: FakeRuntime, tmp_path: Path) -> None:
    code, notes, broken = tmp_path / "my code.py", tmp_path / "notes", tmp_path / "broken"
    code.write_text('"""\n```\nfenced\n```\n"""\n')
    notes.write_text("on and on")
    broken.write_bytes(b"d\xe9j\xe0")
    commands = f"/file {code}\n/file {broken}\n/file {tmp_path}\n/file {notes}\nwhat is this?\nand?\n"
    result = chat(runtime, turns=f"{commands}/file {notes}\n/file none\n/file\nnothing\n")
    quoted = f'{code}:\n````\n"""\n```\nfenced\n```\n"""\n````\n\n{notes}:\n```\non and on\n```\n\nwhat is this?'
    assert said(runtime) == [quoted, "and?", "nothing"]
    assert f"{notes}, 9 characters, comes with the next message\n" in result.stderr
    assert result.stderr.count("no file comes with the next message\n") == 2
    assert ["not UTF-8" in line or "Is a directory" in line for line in error_lines(result)] == [True, True]


def test_files_of_a_message_that_was_refused_come_with_the_next_one(runtime: FakeRuntime, tmp_path: Path) -> None:
    runtime.context_tokens, file = 12, tmp_path / "file"
    file.write_text("a few words")
    long = "far too many words " * 3
    result = chat(runtime, turns=f"/file {file}\n{long}\nwhat?\n")
    assert said(runtime) == [f"{file}:\n```\na few words\n```\n\nwhat?"]
    assert "comes with the next message: /file none takes it back" in result.stderr


def test_a_message_is_changed_and_answered_in_its_place(runtime: FakeRuntime) -> None:
    result = chat(runtime, turns="/edit two\none\n/edit\n/edit two\n/undo\n")
    assert said(runtime) == ["one", "two"]
    first, second = error_lines(result)
    assert "no message yet" in first and "/edit TEXT" in second
    assert "dropped your last message and its answer: two\n" in result.stderr
    session, _ = at_a_terminal(runtime)
    session.take("a line\nand another")
    session.take("/edit")
    assert session.begun == "/edit a line\nand another"  # what the next line begins with


@pytest.mark.parametrize(("choice", "kept"), [([""], 3), (["2"], 2), (["9", "two", "1"], 1), (["0"], 0)])
def test_of_several_answers_one_is_chosen(
    runtime: FakeRuntime, choice: list[str], kept: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    session, asked = at_a_terminal(runtime, *choice)
    session.path = tmp_path / "chat"
    for number, line in enumerate(["one", "/retry", "/retry"]):
        runtime.pieces = ("answer ", str(number))
        session.take(line)
    answers, stream = ["answer 2", "first", "second", "third"], runtime.stream
    pieces = iter(answers[1:])

    def answer(*given: Any, **options: Any) -> Any:
        runtime.pieces = (next(pieces),)
        return stream(*given, **options)

    runtime.stream = answer  # type: ignore[method-assign]
    assert session.take("/retry 3")
    assert contents(session) == ["one", answers[kept]] and len(asked) == len(choice)
    assert [one["content"] for one in json.loads(session.path.read_text())["messages"]] == contents(session)
    assert "answer 3 of 3:" in capsys.readouterr().err


def test_several_answers_through_a_pipe(runtime: FakeRuntime) -> None:
    result = chat(runtime, turns="one\n/retry 2\n/retry 0\n/retry many\n/set temperature 0\n/retry 2\n")
    assert [params.sampling.noise_id for _, params in runtime.requests] == [0, 1, 2]
    assert [("1 to 99" in line, "all answers are the same" in line) for line in error_lines(result)] == [
        (True, False), (True, False), (False, True)
    ]  # fmt: skip


def test_the_last_messages_are_shown_after_loading(runtime: FakeRuntime, tmp_path: Path) -> None:
    path = tmp_path / "chat"
    chat(runtime, "--session", str(path), turns="one\n//two\nthree\n")
    said = chat(runtime, turns=f"/load {path}\n").stderr
    assert "  … 2 earlier messages\n  you: /two\n  model: Hello\n  you: three\n  model: Hello\n" in said


def test_whoever_leaves_is_asked_where_to_save(runtime: FakeRuntime, tmp_path: Path) -> None:
    session, asked = at_a_terminal(runtime, f"{tmp_path}/no/where", str(tmp_path / "chat"), "")
    session.offer_to_save()
    assert not asked  # there is nothing
    session.take("one")
    session.offer_to_save()
    assert len(asked) == 2 and json.loads((tmp_path / "chat").read_text())["messages"][0]["content"] == "one"
    session.offer_to_save()
    assert len(asked) == 2  # it has been
    session.take("two")
    session.offer_to_save()
    assert len(asked) == 3 and len(json.loads((tmp_path / "chat").read_text())["messages"]) == 2
    session.take(f"/load {tmp_path / 'chat'}")
    session.offer_to_save()
    assert len(asked) == 3


@pytest.mark.parametrize("exit_code", [0, 1])
def test_an_answer_is_copied_without_its_thoughts(
    runtime: FakeRuntime, tmp_path: Path, exit_code: int, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """By a program, and without one by asking the terminal."""
    program, copied = tmp_path / "xclip", tmp_path / "copied"
    program.write_text(f"#!/bin/sh\n/bin/cat > {copied}\nexit {exit_code}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("DISPLAY", ":0")
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    runtime.pieces = ("<think>\nHm.\n</think>\n\nHel", "lo")
    session, _ = at_a_terminal(runtime)
    session.take("/copy")
    session.take("one")
    session.take("/copy")
    assert copied.read_text() == "Hello"
    shown = capsys.readouterr().err
    assert "there is no answer yet" in shown
    assert ("did not take the text (exit code 1)" if exit_code else "copied 5 characters with xclip") in shown
    monkeypatch.delenv("DISPLAY")
    session.take("/copy")
    assert "\x1b]52;c;SGVsbG8=\x07" in capsys.readouterr().err
    assert "/copy is for a terminal" in error_lines(chat(runtime, turns="one\n/copy\n"))[0]


OF_GPT_OSS = (
    "{% for m in messages %}<|start|>{{ m.role }}{% if m.role == 'assistant' %}<|channel|>final{% endif %}<|message|>"
    "{{ m.content }}<|end|>{% endfor %}<|start|>assistant"
)


class GptOss(FakeRuntime):
    """Answers one after the other as they are told, with marks; what is real is the conversation."""

    def __init__(self, *answers: str) -> None:
        super().__init__()
        self.tokenizer, self.answers, self.prompts = byte_level_tokenizer(), list(answers), list[str]()
        marks = ["<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>"]
        self.tokenizer.add_special_tokens({"additional_special_tokens": marks})
        self.tokenizer.chat_template = OF_GPT_OSS
        config = describe_model(CONFIGS / "llama-3.1-8b").config()
        self.room = PromptRoom(self.tokenizer, config, self.context_tokens, has_channels=has_channels(self.tokenizer))

    def conversation(self, system: str | None, *, template_options: None) -> Any:
        return Conversation(self, system)

    def start(self, tokens: list[int], params: GenerationParams, **options: Any) -> TokenStream:
        self.prompts.append(self.tokenizer.decode(tokens))
        end = frozenset([self.tokenizer.convert_tokens_to_ids("<|return|>")])
        request = Request(tokens, params, self.tokenizer, end, budget=None, has_channels=self.room.has_channels)
        answer = iter(self.tokenizer.encode(self.answers.pop(0)))

        def step(request: Request) -> list[RequestOutput]:
            token = next(answer)
            event = TokenEvent(token, request.push(token), "target")
            if request.finish_reason:
                request.result = GenerationResult(request.tokens, request.text, request.finish_reason, self.stats)
            return [RequestOutput(request, [event])]

        return TokenStream(request, step, lambda request: None)


def test_what_gpt_oss_thinks_is_shown_and_not_told_again() -> None:
    thought, final = "<|channel|>analysis<|message|>Hm.", "<|channel|>final<|message|>The <think> tag."
    runtime = GptOss(f"{thought}<|end|><|start|>assistant{final}<|return|>", f"{thought}<|return|>", "Yes.<|return|>")
    result = chat(runtime, turns="one\ntwo\nthree\n")
    assert result.stdout == "<think>\nHm.\n</think>\n\nThe <think> tag.\n<think>\nHm.\nYes.\n"
    texts = [f"<|start|>user<|message|>{text}<|end|><|start|>assistant" for text in ("one", "two", "three")]
    said = [texts[0], f"{final}<|end|>{texts[1]}", f"<|channel|>final<|message|><|end|>{texts[2]}"]
    assert runtime.prompts == [said[0], "".join(said[:2]), "".join(said)]
