"""An answer piece by piece (`TokenStream`), and a chat (`Conversation`): the messages so far, and the tokens whose keys
and values are still in the cache."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from offload_runtime.engine.engine import RequestOutput, TokenEvent
from offload_runtime.engine.request import GenerationResult, PromptRoom, Request
from offload_runtime.engine.sessions import messages_of, reading_session
from offload_runtime.errors import ContextLengthError, OptionError
from offload_runtime.options import documented, is_of_type, require
from offload_runtime.params import GenerationParams, SamplingParams, params_once
from offload_runtime.runners.model_runner import OnLayer
from offload_runtime.sampling import TokenLogprobs


class TokenStream(Iterator[str]):
    """Iterates over the pieces of text of one answer. Nothing is computed before the first piece is asked for.

    Args:
        request: The only one of its engine.
        step: Takes the next step of the request, and waits for other calls of the runtime before.
        cancel: Ends it.

    Attributes:
        prompt: Token ids of the prompt.
        has_ended: Whether the last piece was given, or the stream was closed: there is a result.
    """

    def __init__(
        self, request: Request, step: Callable[[Request], Sequence[RequestOutput]], cancel: Callable[[Request], None]
    ) -> None:
        self._request, self._step, self._cancel = request, step, cancel
        self._events = deque[TokenEvent]()
        self._is_over = self.has_ended = False  # no more pieces will come
        self.prompt = tuple(request.sequence)

    def __next__(self) -> str:
        while True:
            event = self._next_event()
            self._end_if(not any(later.text for later in self._events))
            if event.text:
                return event.text

    def tokens(self) -> Iterator[TokenEvent]:
        """Iterate over the same answer a token at a time: what it lets be shown, who proposed it, and its
        log-probability and those of the likeliest with their texts, where `logprobs` asks for them."""
        while True:
            try:
                event = self._next_event()
            except StopIteration:
                return
            self._end_if(not self._events)
            yield event

    def _next_event(self) -> TokenEvent:
        """Return the next token; raises `StopIteration` behind the last one."""
        while not self._is_over:
            if self._events and self._request.finish_reason != "interrupted":
                return self._events.popleft()
            self._is_over = True  # unless the step succeeds
            for output in self._step(self._request):
                self._events.extend(output.tokens)
                if output.error is not None:
                    raise output.error
            self._is_over = False
            self._end_if(not self._events)
        raise StopIteration

    def _end_if(self, is_last: bool) -> None:
        """End where the answer has ended and nothing is left: at once, so that whoever has the last piece has the
        result."""
        if is_last and self._request.finish_reason is not None:
            self._is_over = self.has_ended = True

    @property
    def result(self) -> GenerationResult:
        """Return the finished generation; raise `OptionError` before the last piece or `close`."""
        if not self.has_ended or self._request.result is None:
            raise OptionError("this answer has not ended: iterate to its end or call close() first")
        return self._request.result

    @property
    def said(self) -> str:
        """Return the answer so far as the next turn's prompt has it: without what gpt-oss thought."""
        return self._request.said

    @property
    def logprobs(self) -> Sequence[TokenLogprobs]:
        """Return those of the tokens so far, where they were asked for; some text of them may still be held back."""
        return self._request.logprobs

    def close(self) -> None:
        """Stop here. What was generated is kept in `result`, and the cache stays usable."""
        self._cancel(self._request)
        self._events.clear()
        self._is_over = self.has_ended = True


_Seen = tuple[str, tuple[int, ...]]  # text, and its tokens


class _Turn(NamedTuple):
    """A message with those before it, what was seen of those, what all of them are to the model, and the answer."""

    messages: list[dict[str, str]]
    before: _Seen
    prompt: _Seen
    reply: TokenStream


class ConversationState(NamedTuple):
    """Messages, the text and the tokens that the model has seen of them, and the same of earlier messages."""

    messages: list[dict[str, str]]
    seen: _Seen
    earlier: dict[int, _Seen]


class Answering(Protocol):
    """Answers prompts, and keeps what caches hold of them; see `Runtime`, whose methods these are."""

    room: PromptRoom

    def start(
        self, tokens: list[int], params: GenerationParams, *, owner: object | None, speculate: bool,
        on_prefill: OnLayer | None,
    ) -> TokenStream: ...  # fmt: skip

    def save_session(self, path: Path, record: Mapping[str, Any], seen: _Seen, *, owner: object) -> None: ...

    def load_session(self, path: Path, record: Mapping[str, Any], *, owner: object) -> tuple[_Seen, int]: ...


class Conversation:
    """Turns of user and assistant; only what is new goes through prefill. See `Runtime.conversation`.

    Args:
        runtime: Answers, and holds what was read.
        system: What the model is told first, or None.
        template_options: What the chat template is given beside messages.

    Attributes:
        num_regenerated: How often `regenerate` was called; saved with the messages.
    """

    def __init__(
        self, runtime: Answering, system: str | None = None, template_options: Mapping[str, Any] | None = None
    ) -> None:
        self._runtime, self._room, self._template_options = runtime, runtime.room, template_options
        self.num_regenerated = 0
        self._earlier: dict[int, _Seen] = {}  # by the number of messages what was seen of them, for `undo`
        self._newest: _Turn | None = None  # joins the conversation when its answer has ended
        self.set_system(system)

    @property
    def messages(self) -> list[dict[str, str]]:
        """Return what was said so far, each with a role and a content."""
        self._take_answer()
        return self._messages

    def _take_answer(self) -> None:
        """Let the newest turn join if its answer has ended."""
        if self._newest is None or not self._newest.reply.has_ended:
            return
        (messages, before, prompt, reply), self._newest = self._newest, None
        # Special tokens included, as the template writes them.
        text = prompt[0] + self._room.tokenizer.decode(reply.result.tokens, skip_special_tokens=False)
        self._earlier[len(messages) - 1] = before
        answered = [*messages, {"role": "assistant", "content": reply.said}]
        self._begin_with(answered, text, (*prompt[1], *reply.result.tokens))

    @documented(GenerationParams, SamplingParams)
    def say(
        self, text: str, *, params: GenerationParams | None = None, speculate: bool = True,
        on_prefill: OnLayer | None = None, **options: Any,
    ) -> TokenStream:  # fmt: skip
        """Answer a message. Options as in `Runtime.stream`, but an answer also ends where the context does, and earlier
        turns count as prompt for penalties.

        The message joins the conversation with its answer when that has ended; an interrupted answer stays as far as
        it got. One that has not ended by the next message is dropped.

        Raises:
            ContextLengthError: The message leaves no room for an answer; the conversation is as before.
        """
        asked = params_once(options, params, max_new_tokens=1024)
        return self._reply(self.messages, self._seen, text, asked, speculate=speculate, on_prefill=on_prefill)

    def regenerate(
        self, params: GenerationParams, *, speculate: bool = True, on_prefill: OnLayer | None = None
    ) -> TokenStream:  # fmt: skip
        """Answer the last message anew, in place of its answer: another `noise_id` draws another one, at a temperature
        above 0. Until the new one ends the conversation is as before.

        Raises:
            OptionError: There is no message; ContextLengthError: as of `say`.
        """
        before, seen, text = self._before_last()
        reply = self._reply(before, seen, text, params, speculate=speculate, on_prefill=on_prefill)
        self.num_regenerated += 1
        return reply

    def edit(
        self, text: str, *, params: GenerationParams | None = None, speculate: bool = True,
        on_prefill: OnLayer | None = None, **options: Any,
    ) -> TokenStream:  # fmt: skip
        """Answer another text in place of the last message. Options and errors as of `say`; until the answer ends the
        conversation is as before.

        Raises:
            OptionError: There is no message.
        """
        asked = params_once(options, params, max_new_tokens=1024)
        before, seen, _ = self._before_last()
        return self._reply(before, seen, text, asked, speculate=speculate, on_prefill=on_prefill)

    @property
    def state(self) -> ConversationState:
        """Return where the conversation is, for `go_back`."""
        self._take_answer()
        return ConversationState(self._messages, self._seen, dict(self._earlier))

    def go_back(self, state: ConversationState) -> None:
        """Be where the conversation was once; what the caches have lost of that since is read again."""
        self._begin_with(state.messages, *state.seen)
        self._earlier = dict(state.earlier)

    def undo(self) -> str:
        """Drop the last message and its answer; what came before is not read again. Returns the message.

        Raises:
            OptionError: There is none.
        """
        before, seen, text = self._before_last()
        self._begin_with(before, *seen)
        return text

    def _before_last(self) -> tuple[list[dict[str, str]], _Seen, str]:
        """Return the messages before the last one of the user, what the model has seen of them, and that message."""
        users = [place for place, message in enumerate(self.messages) if message["role"] == "user"]
        require(bool(users), "the conversation has no message yet: say something first")
        place = users[-1]
        return self.messages[:place], self._earlier.get(place, ("", ())), self.messages[place]["content"]

    def _reply(
        self, before: list[dict[str, str]], seen: _Seen, text: str, asked: GenerationParams, *, speculate: bool,
        on_prefill: OnLayer | None,
    ) -> TokenStream:  # fmt: skip
        """Return the answer to a message behind others, which joins them when it has ended."""
        messages = [*before, {"role": "user", "content": text}]
        prompt_text, tokens = self._room.encode_chat(messages, seen, template_options=self._template_options)
        room = self._room.context_tokens - len(tokens)
        if room < 1:
            full = f"the conversation has {len(tokens)} tokens and the context ends at {self._room.context_tokens}"
            raise ContextLengthError(f"{full}: start over with /reset, shorten the message or raise --context")
        most = min(asked.max_new_tokens, room)
        asked = replace(asked, max_new_tokens=most, min_tokens=min(asked.min_tokens, most))
        reply = self._runtime.start(tokens, asked, owner=self, speculate=speculate, on_prefill=on_prefill)
        self._newest = _Turn(messages, seen, (prompt_text, tuple(tokens)), reply)
        return reply

    def reset(self) -> None:
        """Forget all turns; the system message stays."""
        self._begin_with([message for message in self.messages if message["role"] == "system"])

    def set_system(self, text: str | None) -> None:
        """Tell the model something else first; forgets all turns."""
        self._begin_with([] if text is None else [{"role": "system", "content": text}])

    @property
    def num_tokens(self) -> int:
        """Return how many tokens the conversation has so far."""
        self._take_answer()
        return len(self._seen[1])

    def to_json(self) -> dict[str, Any]:
        """Return the messages and `num_regenerated`, ready to be saved."""
        messages = [dict(message) for message in self.messages]
        return {"version": 1, "messages": messages, "num_regenerated": self.num_regenerated}

    def save(self, path: str | Path) -> None:
        """Save the conversation: in a file its messages, as `to_json` gives them, and their tokens; in the directory
        `path`.kv beside it keys and values, of which a later save adds what is new. Whatever happens meanwhile, the
        session that was there before or the new one is whole.

        Raises:
            StorageError: It cannot be written, is no regular file, or another process uses it; what was there stays.
        """
        self._take_answer()
        text, tokens = self._seen
        # What was seen of earlier messages, for `undo`, as characters and tokens that all of it begins with.
        earlier = [
            [count, len(before), len(its_tokens)] for count, (before, its_tokens) in self._earlier.items()
            if text.startswith(before) and tokens[: len(its_tokens)] == its_tokens
        ]  # fmt: skip
        self._runtime.save_session(Path(path), self.to_json() | {"earlier": earlier}, self._seen, owner=self)

    def load(self, path: str | Path) -> int:
        """Go on from a conversation that was saved. Its answers have the bits that they would have had, and the next
        one reads nothing that had been read before.

        Returns:
            Tokens that need not be read again: none where there are no blocks, such as in a file from elsewhere.

        Raises:
            OptionError: It cannot be read, or is something else.
            SessionError: It is damaged, or of another model, dtype, type of GPU or version.
            StorageError: Another process uses it, a block cannot be read for now, or beside blocks no lock can be made,
                such as on a disk that cannot be written.
            ContextLengthError: It is longer than the context.
            After each of them the conversation is as before.
        """
        with reading_session(path := Path(path)) as record:
            messages, num_regenerated, earlier = messages_of(record), _count_of(record), record.get("earlier", [])
            fine = is_of_type(earlier, list[list[int]]) and all(len(one) == 3 and min(one) >= 0 for one in earlier)
            require(fine, f"{path} is not a saved conversation: `earlier` needs lists of three counts")
            (text, tokens), num_held = self._runtime.load_session(path, record, owner=self)
        self.num_regenerated = num_regenerated
        self._earlier = {count: (text[:characters], tokens[:most]) for count, characters, most in earlier}
        self._begin_with(messages, text, tokens)
        return num_held

    def _begin_with(self, messages: list[dict[str, str]], text: str = "", tokens: tuple[int, ...] = ()) -> None:
        """Go on from these messages, of which the model has seen or said `text` as `tokens`; what follows is tokenised
        apart from it."""
        self._messages, self._seen, self._newest = messages, (text, tokens), None
        self._earlier = {count: seen for count, seen in self._earlier.items() if text and count < len(messages)}


def _count_of(saved: Mapping[str, Any]) -> int:
    """`num_regenerated` of a conversation that was saved; 0 in a file from elsewhere. Raises `OptionError`."""
    count = saved.get("num_regenerated", 0)
    require(is_of_type(count, int) and count >= 0, "num_regenerated of the saved conversation is no count")
    return int(count)
