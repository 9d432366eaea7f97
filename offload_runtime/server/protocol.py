r"""What all protocols tell of an answer (`Delta`, `Ending`) and in what parts (`Wording`); OpenAI's completions, plain
ones and chats, whole and as the chunks of a stream.

What is ours beside OpenAI's fields begins with `x_`: `x_stats` of every choice, and `x_tokens` where `x_sources` was
asked for. OpenAI's words for a part of a character are `bytes:\xe2` in completions and `\xe2` in chats.
"""

from __future__ import annotations

import codecs
import math
import secrets
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from offload_runtime.engine import TokenLogprobs
from offload_runtime.engine.spelling import TokenSpelling
from offload_runtime.params import SamplingParams
from offload_runtime.server.failures import Failure
from offload_runtime.server.parsers import ToolCall

if TYPE_CHECKING:
    from offload_runtime.engine import GenerationResult


def logprobs_of(spelling: TokenSpelling, logprobs: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
    """Return tokens with their log-probabilities, their bytes, and the likeliest in their places."""

    def likely(token: int, logprob: float) -> dict[str, Any]:
        return {"token": spelling.text_of(token), "logprob": logprob, "bytes": list(spelling.bytes_of(token)) or None}

    return [{**likely(one.token, one.logprob), "top_logprobs": [likely(*pair) for pair in one.top]} for one in logprobs]


class TextOffsets:
    """Knows where in a text each of its tokens begins, in characters. Tokens that share one begin where it does.

    Args:
        spelling: Of the text's tokens.
    """

    def __init__(self, spelling: TokenSpelling) -> None:
        self._spelling, self._decoder = spelling, codecs.getincrementaldecoder("utf-8")("replace")
        self._is_first, self._length = True, 0

    def push(self, token: int, text: str) -> int:
        """Return the place of the next token, of which `text` is shown, or of all behind it: some answers have no blank
        at the beginning."""
        begins_at, said = self._length, ""
        if self._spelling.is_shown(token):
            said = self._decoder.decode(self._spelling.bytes_of(token))
        if self._is_first and said:
            self._is_first = False
            said = said[1:] if said[0] == " " and text[:1] not in ("", " ") else said
        self._length += len(said)
        return begins_at


@dataclass
class Delta:
    """Says what has come of one choice since the last time: thinking, text, calls, of which the first has the number
    `first_call`, tokens with who proposed them, their log-probabilities where they are wanted, how many were thought,
    and once it has ended how."""

    reasoning: str = ""
    text: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    tokens: list[tuple[str, str]] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    index: int = 0
    first_call: int = 0
    reasoning_tokens: int = 0
    ending: Ending | None = None

    def add(self, other: Delta) -> None:
        """Put what came later behind it."""
        self.reasoning += other.reasoning
        self.text += other.text
        self.calls += other.calls
        self.tokens += other.tokens
        self.logprobs += other.logprobs
        self.reasoning_tokens += other.reasoning_tokens
        self.ending = other.ending


@dataclass(frozen=True)
class Ending:
    """Says how one choice ended: its finish reason, tokens of its prompt and its answer, figures for `x_stats`, and the
    stop string that has ended it."""

    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    stats: dict[str, Any]
    stop_string: str | None = None


def ending_of(result: GenerationResult, sampling: SamplingParams, *, has_calls: bool) -> Ending:
    """Say how an answer ended, with the figures that tell most of the run."""
    stats, reason = result.stats, result.finish_reason
    share = stats.link_gbps / stats.link_peak_gbps if stats.link_gbps is not None and stats.link_peak_gbps else None
    accepted, first_s = dict(stats.accepted_by_source), stats.time_to_first_token_s
    same = "passes kept_tokens tokens_per_pass tok_per_s link_gbps link_peak_gbps time_to_first_token_s"
    figures = {
        "seed": sampling.seed, "noise_id": sampling.noise_id, "finish_reason": reason, "link_share": share,
        **{name: getattr(stats, name) for name in same.split()},
        "sources": {**accepted, "target": len(result.tokens) - sum(accepted.values())},
        "seconds": first_s + (stats.new_tokens - 1) / stats.tok_per_s if stats.tok_per_s else first_s,
    }  # fmt: skip
    # OpenAI has no word for an answer that was cut by the clock.
    reason = "tool_calls" if has_calls and reason == "stop" else "length" if reason == "interrupted" else reason
    return Ending(reason, stats.prompt_tokens, len(result.tokens), figures, result.stop_string)


@dataclass(frozen=True)
class Answered:
    """Holds what all wordings are told of what is answered: the model's name, how it spells tokens, the length of each
    prompt in tokens, how many choices a prompt has, how many tokens fit the context, and how long the model was waited
    for."""

    model: str
    spelling: TokenSpelling
    prompt_tokens: Sequence[int]
    num_choices: int
    context_tokens: int
    load_s: float = 0.0


class Wording(Protocol):
    """The words of one protocol for one response; each value is an object of JSON.

    Attributes:
        last_line: What a stream of server-sent events ends with, where that is no JSON.
        is_lines: A stream has a value a line, and no server-sent events. Of these each has the name of its value's
            `type`.
    """

    last_line: ClassVar[str | None]
    is_lines: ClassVar[bool]

    def whole(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        """Return a response that does not stream, of all of every choice."""

    def opening(self) -> Iterable[dict[str, Any]]:
        """Yield what a stream begins with."""

    def chunk(self, delta: Delta) -> Iterable[dict[str, Any]]:
        """Yield what has come of a choice, and that it has ended if it has."""

    def closing(self, endings: Sequence[Ending]) -> Iterable[dict[str, Any]]:
        """Yield what a stream ends with where all has gone well."""

    def failed(self, failure: Failure) -> dict[str, Any]:
        """Return what one ends with where it has not."""


class Completions:
    """The words of OpenAI's completions.

    Args:
        answered: What is answered.
        is_chat: Chat completions, or plain ones.
        with_usage: A stream ends in a chunk with the tokens that there were.
        with_sources: Chunks say who proposed each token.
    """

    last_line: ClassVar[str | None] = "[DONE]"
    is_lines: ClassVar[bool] = False

    def __init__(
        self, answered: Answered, *, is_chat: bool, with_usage: bool = False, with_sources: bool = False
    ) -> None:
        self._answered, self._is_chat, self._spelling = answered, is_chat, answered.spelling
        self._with_usage, self._with_sources = with_usage, with_sources
        self._offsets = defaultdict[int, TextOffsets](lambda: TextOffsets(answered.spelling))  # by choice
        self._num_shown = Counter[int]()  # by choice, characters of its text
        # By choice, tokens that begin behind the text that is shown, and where.
        self._held = defaultdict[int, list[tuple[TokenLogprobs, int]]](list)
        self._id = f"{'chatcmpl' if is_chat else 'cmpl'}-{secrets.token_hex(12)}"
        self._model, self._created = answered.model, int(time.time())

    def _around(self, choices: list[dict[str, Any]], *, is_chunk: bool) -> dict[str, Any]:
        kind = "text_completion" if not self._is_chat else "chat.completion.chunk" if is_chunk else "chat.completion"
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model, "choices": choices}

    def whole(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        """Return a response that does not stream."""
        choices = []
        for delta in deltas:
            message: dict[str, Any] = {"role": "assistant", "content": delta.text}
            if delta.reasoning:
                message["reasoning_content"] = delta.reasoning.rstrip()
            if delta.calls:
                message |= {"content": delta.text if delta.text.strip() else None, "tool_calls": _calls(delta.calls)}
            choices.append(self._choice(delta, message=message))
        usage = usage_of([delta.ending for delta in deltas if delta.ending], self._answered.num_choices)
        return {**self._around(choices, is_chunk=False), "usage": usage}

    def opening(self) -> Iterator[dict[str, Any]]:
        """Yield the first chunk of each choice of a chat: whose turn it is."""
        said = {"role": "assistant", "content": ""}
        for index in range(self._answered.num_choices) if self._is_chat else ():
            yield self._around([self._choice(Delta(index=index), delta=said)], is_chunk=True)

    def chunk(self, delta: Delta) -> Iterator[dict[str, Any]]:
        """Yield what has come of a choice, and that it has ended if it has."""
        sources = {"x_tokens": [list(token) for token in delta.tokens]} if self._with_sources else {}
        has_come = delta.text or delta.reasoning or delta.calls or delta.logprobs or delta.ending
        if not has_come and not sources.get("x_tokens"):
            return
        said: dict[str, Any] = {"content": delta.text} if delta.text else {}
        if delta.reasoning:
            said["reasoning_content"] = delta.reasoning
        if delta.calls:
            said["tool_calls"] = _calls(delta.calls, delta.first_call)
        yield {**self._around([self._choice(delta, delta=said)], is_chunk=True), **sources}

    def _choice(self, delta: Delta, /, **of_chat: dict[str, Any]) -> dict[str, Any]:
        """Return what responses and chunks have in common of a choice; `of_chat` is a chat's in place of the text."""
        ending = delta.ending
        ended = {} if ending is None else {"finish_reason": ending.finish_reason, "x_stats": ending.stats}
        said = of_chat if self._is_chat else {"text": delta.text}
        return {"index": delta.index, "logprobs": self._logprobs(delta), "finish_reason": None, **ended, **said}

    def _logprobs(self, delta: Delta) -> dict[str, Any] | None:
        """Return those of the tokens that have come of a choice; of a completion that has not ended those whose text
        has come, as it may turn out to be that of a stop string. None where there are none."""
        if self._is_chat:
            if not delta.logprobs:
                return None
            return {"content": logprobs_of(self._spelling, delta.logprobs), "refusal": None}
        index, is_all = delta.index, delta.ending is not None
        self._num_shown[index] += len(delta.text)
        spelling, held, end = self._spelling, self._held[index], self._num_shown[index]
        held += [(one, self._offsets[index].push(one.token, delta.text)) for one in delta.logprobs]
        shown_parts = [(one, min(offset, end)) for one, offset in held if is_all or offset < end]
        if not shown_parts:
            return None
        del held[: len(shown_parts)]
        tokens = [one for one, _ in shown_parts]
        # The first token of an echoed prompt, which nothing comes before, has none.
        known = [None if math.isnan(one.logprob) else one.logprob for one in tokens]
        likeliest = [
            dict(zip(spelling.keys_of([token for token, _ in one.top]), [p for _, p in one.top], strict=True))
            for one in tokens
        ]
        return {
            "tokens": [spelling.text_of(one.token, prefix="bytes:") for one in tokens],
            "token_logprobs": known,
            "top_logprobs": [None if p is None else top for p, top in zip(known, likeliest, strict=True)],
            "text_offset": [offset for _, offset in shown_parts],
        }  # fmt: skip

    def closing(self, endings: Sequence[Ending]) -> Iterator[dict[str, Any]]:
        """Yield the last chunk of a stream whose usage was asked for."""
        if self._with_usage:
            yield {**self._around([], is_chunk=True), "usage": usage_of(endings, self._answered.num_choices)}

    def failed(self, failure: Failure) -> dict[str, Any]:
        """Return the error that a stream ends with."""
        return failure.body("/v1/completions")


def usage_of(endings: Sequence[Ending], num_choices: int) -> dict[str, int]:
    """Count the tokens that there were; a prompt counts once, however many answers (`num_choices`) it has."""
    prompt = sum(ending.prompt_tokens for ending in endings[::num_choices])
    completion = sum(ending.completion_tokens for ending in endings)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _calls(calls: Sequence[ToolCall], first: int | None = None) -> list[dict[str, Any]]:
    """Return calls as a message has them, or numbered from `first` as a chunk has."""
    found = []
    for number, call in enumerate(calls, start=first or 0):
        index = {} if first is None else {"index": number}
        found.append({**index, **function_call(call.id, call.name, call.arguments)})
    return found


def function_call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """Return a call as a message has it."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
