"""Messages reach chat templates in the form that each of them takes, whatever OpenAI's clients send."""

from types import SimpleNamespace
from typing import Any

import pytest

from offload_runtime.engine.chat_template import ChatTemplate, MessageError
from offload_runtime.engine.request import PromptRoom, Request
from offload_runtime.errors import OptionError
from offload_runtime.params import GenerationParams
from offload_runtime.server.parsers import AnswerParser
from offload_runtime.weights.sources import describe_model
from tests.helpers.engine import byte_level_tokenizer
from tests.helpers.planning import CONFIGS

CONFIG = describe_model(CONFIGS / "llama-3.1-8b").config()
LOOP, END = "{% for m in messages %}", "{% endfor %}"
CHATML = LOOP + "<{{ m.role }}>{{ m.content }}" + END


def calls(arguments: str = "") -> str:
    return "{% for c in m.tool_calls or [] %}{{ c.function.name }}(" + arguments + "){% endfor %}" + END


A = "c.function.arguments"
SAID = LOOP + "{{ m.content or '' }}"
AS_TEXT = SAID + calls(f"{{{{ {A} + '' }}}}")
AS_JSON = SAID + calls(f"{{{{ {A} | tojson }}}}")
AS_ITEMS = SAID + calls(f"{{% for k, v in {A}.items() %}}{{{{ k }}}}={{{{ v }}}}{{% endfor %}}")
EITHER = SAID + calls(f"{{% if {A} is string %}}{{{{ {A} }}}}{{% else %}}{{{{ {A} | tojson }}}}{{% endif %}}")
NAMED = AS_ITEMS.replace("{% for k, v", f"{{% if {A} is string %}}raw={{{{ {A} }}}}{{% else %}}{{% for k, v")
NAMED = NAMED.replace("{% endfor %})", "{% endfor %}{% endif %})")
WHOLE = SAID + "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}" + END
NONE = LOOP + "{% if m.content is none %}" + calls().removesuffix(END) + "{% else %}[{{ m.content }}]{% endif %}" + END
KEY = LOOP + "{% if 'content' in m %}[{{ m.content }}]{% endif %}" + calls()
LENGTH = LOOP + "{% if m.content | length %}[{{ m.content }}]{% endif %}" + calls()
ADDED = LOOP + "{{ '[' + m.content + ']' }}" + calls()
PLAIN = CHATML.removesuffix(END) + calls()
PARTS = LOOP + "{% for p in m.content %}{{ p.text }}|{% endfor %}" + END
BOTH = "{% if m.content is string %}{{m.content}}{% else %}{% for p in m.content %}({{p.text}}){% endfor %}{% endif %}"
BOTH = LOOP + BOTH + END
KNOWN = "{% if m.role not in ['system', 'user', 'assistant'] %}{{ raise_exception('role') }}{% endif %}"
KNOWN = LOOP + KNOWN + "<{{ m.role }}>{{ m.content }}" + END
DROPS = LOOP + "{% if m.role in ['system', 'user'] %}<{{ m.role }}>{{ m.content }}{% endif %}" + END
ELSE = LOOP + "{% if m.role in ['system', 'user'] %}<{{ m.role }}>{% else %}<model>{% endif %}{{ m.content }}" + END
USER, RESULT = {"role": "user", "content": "hi"}, {"role": "tool", "tool_call_id": "c1", "content": "42"}
DEVELOPER = [{"role": "developer", "content": "be"}, USER]


def template_of(template: str) -> ChatTemplate:
    tokenizer = byte_level_tokenizer()
    tokenizer.chat_template = template
    return ChatTemplate(tokenizer)


def text_of(template: str, messages: list[dict[str, Any]]) -> str:
    tokenizer = byte_level_tokenizer()
    tokenizer.chat_template = template
    return PromptRoom(tokenizer, CONFIG, 4096).encode_chat(messages)[0]


def called(arguments: Any, **message: Any) -> list[dict[str, Any]]:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [USER, {"role": "assistant", "content": "", **message, "tool_calls": [call]}, RESULT]


@pytest.mark.parametrize(("template", "arguments", "expected"), [
    (AS_TEXT, '{"x":  1}', 'hif({"x":  1})42'), (AS_TEXT, {"x": "é"}, 'hif({"x": "é"})42'),
    (AS_TEXT, "not JSON", "hif(not JSON)42"), (AS_JSON, '{"x":  1}', 'hif({"x": 1})42'),
    (AS_ITEMS, '{"x":  1}', "hif(x=1)42"), (EITHER, '{"x":  1}', 'hif({"x":  1})42'),
    (NAMED, '{"x":  1}', "hif(x=1)42"), (SAID + calls(f"{{{{ {A} }}}}"), '{"x":  1}', 'hif({"x":  1})42'),
    (WHOLE, '{"x":  1}', 'hi{"name": "f", "arguments": {"x": 1}}42'),
])  # fmt: skip
def test_arguments_are_as_the_template_takes_them(template: str, arguments: Any, expected: str) -> None:
    assert text_of(template, called(arguments)) == expected


@pytest.mark.parametrize("template", [AS_JSON, AS_ITEMS, WHOLE])
def test_arguments_that_are_no_json_are_refused_where_an_object_is_needed(template: str) -> None:
    with pytest.raises(OptionError, match=r"messages.1.tool_calls.0 has arguments that are not JSON"):
        text_of(template, called('{"x": '))


@pytest.mark.parametrize(
    ("template", "expected"),
    [(NONE, "[hi]f()[42]"), (KEY, "[hi]f()[42]"), (LENGTH, "[hi]f()[42]"), (ADDED, "[hi][]f()[42]"),
     (PLAIN, None)],
)  # fmt: skip
@pytest.mark.parametrize("message", [{"content": None}, {}, {"content": ""}])
def test_a_turn_of_calls_alone_shows_no_none(template: str, expected: str | None, message: dict[str, Any]) -> None:
    turns = called("{}")
    del turns[1]["content"]
    turns[1] |= message
    text = text_of(template, turns)
    assert "None" not in text
    if expected is not None and not (template == KEY and message.get("content") == ""):
        assert text == expected


@pytest.mark.parametrize(
    ("template", "expected"),
    [(CHATML, "<developer>be<user>hi"), (KNOWN, "<system>be<user>hi"), (DROPS, "<system>be<user>hi"),
     (ELSE, "<system>be<user>hi")],
)  # fmt: skip
def test_who_does_not_know_a_developer_has_a_system(template: str, expected: str) -> None:
    assert text_of(template, DEVELOPER) == expected


@pytest.mark.parametrize(("template", "content", "expected"), [
    (LOOP + "{{ m.content }}" + END, ["a", "b"], "a\nb"),
    (LOOP + "{{ m.content | trim }}" + END, ["a", "b", "c"], "a\nb\nc"), (LOOP + "{{ m.content }}" + END, [], ""),
    (PARTS, ["a", "b"], "a|b|"), (PARTS.replace("|", ""), ["a", "b"], "a\nb"), (PARTS, "ab", "ab|"),
    (BOTH, ["a", "b"], "(a)(b)"), (BOTH.replace("(", "").replace(")", ""), ["a", "b"], "a\nb"), (BOTH, "ab", "ab"),
])  # fmt: skip
def test_parts_are_parts_or_lines(template: str, content: Any, expected: str) -> None:
    parts = content if isinstance(content, str) else [{"type": "text", "text": text} for text in content]
    assert text_of(template, [{"role": "user", "content": parts}]) == expected


@pytest.mark.parametrize(("message", "named"), [
    ({"frobnicate": 1}, "messages.0.frobnicate"),
    ({"content": [{"type": "text", "text": "a", "x": 1}]}, "messages.0.content.0.x"),
    ({"tool_calls": [{"function": {"name": "f", "code": 1}}]}, "messages.0.tool_calls.0.function.code"),
    ({"function_call": {"name": "f"}}, "messages.0.function_call"),
])  # fmt: skip
def test_fields_that_nothing_reads_are_refused(message: dict[str, Any], named: str) -> None:
    asked = [{"role": "assistant", "content": "a", **message}]
    with pytest.raises(MessageError, match=f"{named} is not a field") as error:
        template_of(CHATML).require_fields(asked)
    assert error.value.param == named
    template_of(CHATML + "{# m.frobnicate m['x'] m.code m.function_call #}").require_fields(asked)


def test_fields_that_say_nothing_are_taken() -> None:
    empty = {"refusal": None, "function_call": None, "annotations": [], "audio": None, "tool_calls": None, "name": "n"}
    asked = [{"role": "assistant", "content": "a", "reasoning_content": "b", **empty}]
    template_of(CHATML).require_fields(asked)
    assert text_of(CHATML, asked) == "<assistant>a"


@pytest.mark.parametrize("message", [{"content": 5}, {"content": "a", "tool_calls": 1}, {"content": [1]}, {"role": ""}])
def test_messages_that_are_none_are_refused(message: dict[str, Any]) -> None:
    with pytest.raises(MessageError, match=r"messages\.0"):
        text_of(CHATML, [{"role": "assistant", **message}])


@pytest.mark.parametrize(
    ("template", "messages", "number"),
    [
        (DROPS.replace("m.role in", "m.role == 'user' or loop.first and m.role in"), [USER, DEVELOPER[0], USER], 1),
        (DROPS, [USER, {"role": "function", "name": "f", "content": "42"}], 1),
        (LOOP + "{% if m.role != 'critic' %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}" + END,
         [USER, {"role": "critic", "content": [{"type": "text", "text": "no"}]}], 1),
    ],
)  # fmt: skip
def test_instructions_that_a_template_leaves_out_are_refused(template: str, messages: Any, number: int) -> None:
    with pytest.raises(MessageError, match=rf"messages\.{number} has the role .* leaves it out"):
        text_of(template, messages)


ALTERNATING = "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('alternate') }}{% endif %}"
NO_SYSTEM = {
    "gemma": "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    + LOOP + ALTERNATING + "<{{ 'model' if m.role == 'assistant' else m.role }}>{{ m.content | trim }}" + END,
    "mistral": LOOP + ALTERNATING + "<{{ m.role }}>{{ m.content }}" + END,
    "drops": LOOP + "{% if m.role == 'user' %}<user>{{ m.content }}{% endif %}" + END,
    "parts": LOOP + "{% if m.role == 'user' %}<user>{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}" + END,
}  # fmt: skip
BE, SO = {"role": "system", "content": "be"}, {"role": "assistant", "content": "so"}


@pytest.mark.parametrize("name", NO_SYSTEM)
@pytest.mark.parametrize(
    "messages", [[BE, USER], DEVELOPER, [{**BE, "content": [{"type": "text", "text": "be"}]}, USER]]
)
def test_who_has_no_system_is_told_by_the_user(name: str, messages: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert text_of(NO_SYSTEM[name], messages) == "<user>be\n\nhi"
    (record,) = caplog.records
    assert "no system message" in record.message


@pytest.mark.parametrize(("messages", "expected"), [
    ([BE], "<user>be"), ([BE, BE, USER, SO, USER], "<user>be\n\nbe\n\nhi<model>so<user>hi"),
    ([USER, SO, BE, USER], "<user>hi<model>so<user>be\n\nhi"), ([BE, SO, USER], "<user>be<model>so<user>hi"),
])  # fmt: skip
def test_a_system_is_told_before_what_the_user_says_next(messages: Any, expected: str) -> None:
    assert text_of(NO_SYSTEM["gemma"], messages) == expected


def test_who_has_a_system_where_a_user_follows_keeps_it(caplog: pytest.LogCaptureFixture) -> None:
    """As Llama 2 and later Mistrals have it, within the user's message."""
    template = "{% set s = messages[0].content %}{% for m in messages[1:] %}[{{ s }}|{{ m.content }}]{% endfor %}"
    assert text_of(template, [BE, USER]) == "[be|hi]" and not caplog.records


def test_options_are_read_where_they_are_variables() -> None:
    """And not where a word of the template spells one."""
    template = (
        "{% if thinking is not defined %}{% set thinking = true %}{% endif %}{# effort #}{% generation %}" + CHATML
    )
    template += "{%- endgeneration -%}{% for x in tools %}{% if loop.first %}{% continue %}{% endif %}{% endfor %}"
    assert template_of(template).unread(["thinking", "effort", "role", "m", "tools"]) == ["effort", "role", "m"]


def test_instructions_that_a_template_words_otherwise_are_not_left_out() -> None:
    template = LOOP + "{{ m.content | upper | replace('NEEDLETEXT', 'needletext') | replace('/THINK', '') }}" + END
    assert text_of(template, [{"role": "system", "content": "be /think"}, USER]) == "BE HI"


QUESTION, BEGUN = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "So <|im_end|> it"}
THOUGHT = {"role": "assistant", "content": "", "reasoning_content": "hm"}


@pytest.mark.parametrize(("template", "answer", "expected"), [
    (CHATML + "<a>", BEGUN, "<user>hi<a>So <|im_end|> it"),
    (CHATML + "<a>", {**BEGUN, "content": [{"type": "text", "text": "So"}]}, "<user>hi<a>So"),
    (CHATML + "<a>", THOUGHT, "<user>hi<a><think>\nhm"),
    (CHATML + "<a>", THOUGHT | BEGUN, "<user>hi<a><think>\nhm\n</think>\n\nSo <|im_end|> it"),
    (CHATML + "<think>\n", THOUGHT, "<user>hi<think>\nhm"),
    (CHATML + "<think>\n", BEGUN, "<user>hi<think>\n\n</think>\n\nSo <|im_end|> it"),
    (CHATML + "<think></think>", THOUGHT | BEGUN, "<user>hi<think></think>So <|im_end|> it"),
    (CHATML + "{# [THINK] #}<a>", THOUGHT | BEGUN, "<user>hi<a>[THINK]hm[/THINK]So <|im_end|> it"),
])  # fmt: skip
def test_an_answer_goes_on_behind_its_beginning(template: str, answer: dict[str, Any], expected: str) -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.chat_template = template
    room = PromptRoom(tokenizer, CONFIG, 4096)
    text, tokens = room.encode_chat([QUESTION, answer], continue_final_message=True)
    assert text == expected and tokenizer.decode(tokens) == expected
    assert not {0, 1} & set(tokens), "a control token that was spelled is text"


def test_an_answer_in_channels_goes_on_behind_what_was_thought() -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|channel|>", "<|message|>", "<|start|>", "<|end|>"]})
    tokenizer.chat_template = CHATML + "<|start|>assistant"
    room = PromptRoom(tokenizer, CONFIG, 4096)
    text, _ = room.encode_chat([QUESTION, {**THOUGHT, "content": "So"}], continue_final_message=True)
    assert text == (
        "<user>hi<|start|>assistant<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>So"
    )
    with pytest.raises(OptionError, match="no answer can go on"):
        room.encode_chat([QUESTION, THOUGHT], continue_final_message=True)


@pytest.mark.parametrize("wrong", [
    [BEGUN], [QUESTION], [QUESTION, {"role": "assistant", "content": ""}],
    [QUESTION, {**BEGUN, "tool_calls": [{"type": "function", "function": {"name": "f"}}]}],
])  # fmt: skip
def test_what_is_no_beginning_of_an_answer_does_not_go_on(wrong: list[dict[str, Any]]) -> None:
    with pytest.raises(OptionError, match="go on"):
        PromptRoom(byte_level_tokenizer(), CONFIG, 4096).encode_chat(wrong, continue_final_message=True)


def test_a_template_that_knows_no_calls_is_told_them_in_words() -> None:
    text = text_of(KNOWN, called('{"x": 1}', content="So."))
    assert text == '<user>hi<assistant>So.\n{"name": "f", "arguments": {"x": 1}}<user>Result of the call:\n42'


# --- answers

TEMPLATES = {"hermes": "<tool_call>", "llama": "<|python_tag|>", "mistral": "[TOOL_CALLS]", "generic": CHATML}


def parse(template: str, answer: str, prompt: str = "", **options: Any) -> tuple[str, str, list[tuple[str, str]]]:
    """Thinking, text and calls of an answer, the same however it is cut."""
    found = []
    for size in (1, 3, len(answer)):
        tokenizer = SimpleNamespace(chat_template=template, added_tokens_decoder={}, decode=lambda *_, **__: prompt)
        parser, thought, text, calls = AnswerParser(tokenizer, [1], ["f", "g"], **options), "", "", []
        pieces = [parser.push(answer[at : at + size], 1) for at in range(0, len(answer), size)]
        for piece in (*pieces, parser.finish()):
            thought, text, calls = thought + piece[0], text + piece[1], calls + piece[2]
        found.append((thought.rstrip(), text, [(call.name, call.arguments) for call in calls]))
        assert parser.num_calls == len(calls)
    assert found[0] == found[1] == found[2]
    return found[0]


def hermes(arguments: str, name: str = "f") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def several(form: str) -> str:
    """What is in one pair of marks: objects of two calls, as a format has them."""
    objects = [f'{{"name": "{name}", "arguments": {MARKED}}}' for name in "fg"]
    return f"<tool_call>\n{form.format(*objects)}\n</tool_call>"


MARKED = '{"a": "x</tool_call>y \\" </tool_call> [TOOL_CALLS]g{}"}'


@pytest.mark.parametrize(("kind", "answer", "expected"), [
    ("hermes", f"<think>\nperhaps {hermes('{}')}?\n</think>\n\nNo.", (f"perhaps {hermes('{}')}?", "No.", [])),
    ("hermes", f"<think>a</think>{hermes('{}')}", ("a", "", [("f", "{}")])),
    ("hermes", f"<think>{hermes('{}')}", (hermes("{}"), "", [])),
    ("hermes", f"So <think> {hermes('{}')}", ("", "So <think>", [("f", "{}")])),
    ("hermes", f"{hermes(MARKED)}\n{hermes('{}', 'g')}", ("", "", [("f", MARKED), ("g", "{}")])),
    ("hermes", f"{hermes(MARKED)[:-12]}", ("", "", [("f", MARKED)])),
    ("hermes", hermes('{"a": "1\n2"}'), ("", "", [("f", '{"a": "1\\n2"}')])),
    ("hermes", f'{hermes("{}")[:12]}"{hermes("{}")[12:]} {hermes("{}")}', None),
    ("hermes", f"a{hermes('{')} {hermes('{}')} b", ("", f"a{hermes('{')} b", [("f", "{}")])),
    ("hermes", f"""{hermes('{"a": "x}')} {hermes("{}")}""", ("", hermes('{"a": "x}'), [("f", "{}")])),
    ("hermes", hermes("{}", "unknown"), ("", hermes("{}", "unknown"), [])),
    ("hermes", several("[{0}, {1}]"), ("", "", [("f", MARKED), ("g", MARKED)])),
    ("hermes", several("{0}\n{1}"), ("", "", [("f", MARKED), ("g", MARKED)])),
    ("hermes", several("{0}, {1};") + several("[{1}]"), ("", "", [("f", MARKED), ("g", MARKED), ("g", MARKED)])),
    ("hermes", several("[{0}, {1}]")[:-12], ("", "", [("f", MARKED), ("g", MARKED)])),
    ("hermes", several("{0} and {1}"), ("", several("{0} and {1}"), [])),
    ("hermes", several("[]") + hermes("{}"), ("", several("[]"), [("f", "{}")])),
    ("mistral", f"[TOOL_CALLS]f[ARGS]{MARKED}[TOOL_CALLS]g{{}}", ("", "", [("f", MARKED), ("g", "{}")])),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {}}] So.', ("", "So.", [("f", "{}")])),
    ("mistral", "[THINK]a[/THINK][TOOL_CALLS]f{}", None),
    ("hermes", f"Let me see.\n{hermes('{}')}", ("", "Let me see.", [("f", "{}")])),
    ("hermes", f"{hermes('{}')} and that is all", ("", " and that is all", [("f", "{}")])),
    ("hermes", "a < b, <tool_callers> and <tool_cal", ("", "a < b, <tool_callers> and <tool_cal", [])),
    ("hermes", "no call  \n ", ("", "no call  \n ", [])),
    ("mistral", "[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{}", ("", "", [("f", "{}")])),
    ("mistral", "[TOOL_CALLS]{", ("", "[TOOL_CALLS]{", [])), ("llama", "{", ("", "{", [])),
    ("llama", '<|python_tag|>{"name": "f", "parameters": {}} So.', ("", "So.", [("f", "{}")])),
    ("llama", '{"name": "f", "parameters": {}} So.', ("", '{"name": "f", "parameters": {}} So.', [])),
    ("generic", '{"name": "f", "arguments": {}}\n{"name": "g", "arguments": {}}', ("", "", [("f", "{}"), ("g", "{}")])),
    ("generic", '```json\n{"name": "f", "arguments": {}}\n```', ("", "", [("f", "{}")])),
    ("generic", '[{"name": "f", "arguments": {}}, {"name": "g"}]', ("", "", [("f", "{}"), ("g", "{}")])),
    ("generic", "[1, 2] are two.", ("", "[1, 2] are two.", [])),
    ("llama", '[{"name": "f", "parameters": {}}]', ("", "", [("f", "{}")])),
    ("generic", "```python\n1\n```", ("", "```python\n1\n```", [])),
])  # fmt: skip
def test_thinking_text_and_calls_are_told_apart(kind: str, answer: str, expected: Any) -> None:
    found = parse(TEMPLATES[kind], answer)
    if expected is not None:
        assert found == expected
    else:
        assert (found[2] or [("f", "{}")])[-1] == ("f", "{}")


MARKS_OF_GPT_OSS = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>")
CALL, PREAMBLE = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>", "<|channel|>commentary<|message|>"


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>No.<|return|>",
         ("Hm.", "No.", [])),
        (f"<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant{CALL}{MARKED}<|call|>",
         ("Hm.", "", [("f", MARKED)])),
        (f"{CALL}{{}}", ("", "", [("f", "{}")])),
        (" to=functions.f<|channel|>commentary json<|message|>{}<|call|>", ("", "", [("f", "{}")])),
        (f"{PREAMBLE}So.<|end|><|start|>assistant<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant{CALL}{{}}",
         ("Hm.", "So.", [("f", "{}")])),
        (f"{PREAMBLE}So.<|end|><|start|>assistant<|channel|>final<|message|>No.", ("", "So.\n\nNo.", [])),
        ("<|channel|>analysis<|message|>Hm", ("Hm", "", [])),
        (f"{CALL.replace('.f', '.h')}{{}}", ("", hermes("{}", "h").replace("\n", ""), [])),
        ("analysis of a model without channels", ("", "analysis of a model without channels", [])),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stop", [(), ("\n", "<think>", "m.No")], ids=["", "stops"])
def test_messages_of_gpt_oss_are_told_apart(answer: str, expected: Any, stop: tuple[str, ...]) -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(MARKS_OF_GPT_OSS)})
    tokenizer.chat_template = "{% if tools %}"
    prompt, tokens = tokenizer.encode("<|start|>assistant"), tokenizer.encode(answer)
    request = Request(
        prompt, GenerationParams(len(tokens), stop=stop), tokenizer, frozenset(), budget=None, has_channels=True
    )
    parser, found = AnswerParser(tokenizer, prompt, ["f", "g"]), list[Any]()
    for token in tokens:
        found.append(parser.push(request.push(token), token))
    thought, text, calls = zip(*found, parser.finish(), strict=True)
    called = [(call.name, call.arguments) for some in calls for call in some]
    assert ("".join(thought), "".join(text), called) == expected


def test_a_template_may_have_begun_the_thinking() -> None:
    answer = f"\nperhaps {hermes('{}')}\n</think>\n\nNo."
    assert parse("<tool_call>", answer, "<|assistant|><think>\n") == (f"perhaps {hermes('{}')}", "No.", [])
    assert parse("<tool_call>", "a", "<think>\n\n</think>\n\n") == ("", "a", [])
    assert parse("<tool_call>", "{}", "<think>\n", is_bound=True) == ("", "{}", [])
    assert parse("[THINK]", "[THINK]a[/THINK]b") == ("a", "b", [])


@pytest.mark.parametrize(("kind", "answer"), [
    ("hermes", f"{hermes('{}')}\n{hermes('{}', 'g')}"), ("mistral", "[TOOL_CALLS]f{}[TOOL_CALLS]g{}"),
    ("llama", '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}'),
    ("hermes", '<tool_call>[{"name": "f"}, {"name": "g"}]</tool_call>'),
])  # fmt: skip
def test_one_call_is_one(kind: str, answer: str) -> None:
    assert parse(TEMPLATES[kind], answer, most_calls=1) == ("", "", [("f", "{}")])
