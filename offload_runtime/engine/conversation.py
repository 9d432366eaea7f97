"""A chat: the messages so far, and the tokens whose keys and values are still in the cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from offload_runtime.config import GenerationParams, SamplingParams
from offload_runtime.engine.generate import OnPrefill, TokenStream
from offload_runtime.engine.request import stop_strings
from offload_runtime.engine.stats import GenerationResult
from offload_runtime.errors import ContextLengthError, OptionError

_ROLES = ("system", "user", "assistant")


class CachedAnswers(Protocol):
    """What a conversation needs of a `Runtime`: answers that go on from what the cache holds."""

    context_tokens: int
    tokenizer: Any

    def render_chat(self, messages: list[dict[str, str]], *, open_answer: bool = True) -> str:
        """Messages as the text the model was trained on."""

    def start(
        self, tokens: list[int], params: GenerationParams, *, owner: object | None, num_kept: int, speculate: bool,
        on_prefill: OnPrefill | None,
    ) -> TokenStream:  # fmt: skip
        """Begin an answer whose first `num_kept` tokens `owner` left in the cache."""

    def owns_cache(self, owner: object) -> bool:
        """Whether what the cache holds was left there by `owner`."""

    def cached_tokens(self) -> int:
        """Committed tokens in the cache."""

    def frequency_set(self, length: int) -> int:
        """Which rotary frequencies a prompt of `length` tokens gets."""


class Conversation:
    """Turns of user and assistant; only what is new goes through prefill.

    Args:
        runtime: Answers.
        system: What the model is told first, or None.
    """

    def __init__(self, runtime: CachedAnswers, system: str | None = None) -> None:
        self._runtime = runtime
        self.messages: list[dict[str, str]] = []
        # Text and tokens of the conversation as the model saw and said it; what follows is tokenised apart from it.
        self._text = ""
        self._tokens: list[int] = []
        # What the cache holds, if it is still ours, is a beginning of this.
        self._cached: list[int] = []
        self._frequencies = 0
        self.set_system(system)

    def say(
        self, text: str, *, max_new_tokens: int = 1024, temperature: float = 0.0, top_k: int = 0, top_p: float = 1.0,
        min_p: float = 0.0, seed: int = 0, stop: str | Sequence[str] = (), gamma: int | None = None,
        speculate: bool = True, ignore_eos: bool = False, on_prefill: OnPrefill | None = None,
        tree_nodes: int | None = None,
    ) -> Reply:  # fmt: skip
        """Answer a message. Options as in `Runtime.stream`, but an answer also ends where the context does.

        The message joins the conversation when its first piece is asked for; an interrupted answer stays as far as
        it got.

        Raises:
            ContextLengthError: The message leaves no room for an answer; the conversation is as before.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        prompt_text = self._runtime.render_chat(messages)
        tokens = self._tokens_of(prompt_text)
        room = self._runtime.context_tokens - len(tokens)
        if room < 1:
            raise ContextLengthError(
                f"the conversation has {len(tokens)} tokens and the context ends at {self._runtime.context_tokens}: "
                "start over with /reset, shorten the message or raise --context"
            )
        sampling = SamplingParams(temperature, top_k, top_p, min_p, seed)
        params = GenerationParams(
            min(max_new_tokens, room), stop_strings(stop), gamma, ignore_eos, sampling, tree_nodes
        )
        stream = self._runtime.start(
            tokens, params, owner=self, num_kept=self._num_kept(tokens), speculate=speculate, on_prefill=on_prefill
        )
        self._cached, self._frequencies = tokens, self._runtime.frequency_set(len(tokens))
        return Reply(self, stream, messages, prompt_text)

    def reset(self) -> None:
        """Forget all turns; the system message stays."""
        self.messages = [message for message in self.messages if message["role"] == "system"]
        self._text, self._tokens = "", []

    def set_system(self, text: str | None) -> None:
        """Tell the model something else first; forgets all turns."""
        self.messages = [] if text is None else [{"role": "system", "content": text}]
        self._text, self._tokens = "", []

    @property
    def num_tokens(self) -> int:
        """Tokens of the conversation so far."""
        return len(self._tokens)

    def to_json(self) -> dict[str, Any]:
        """The messages, ready to be saved."""
        return {"version": 1, "messages": [dict(message) for message in self.messages]}

    def restore(self, saved: Any) -> None:
        """Go on from what `to_json` gave.

        Raises:
            OptionError: It is something else; the conversation is as before.
        """
        messages = saved.get("messages") if isinstance(saved, dict) else None
        if not isinstance(messages, list) or saved.get("version") != 1:
            raise OptionError("this is not a saved conversation: it needs version 1 and a list of messages")
        for number, message in enumerate(messages):
            good = isinstance(message, dict) and message.get("role") in _ROLES
            if not good or not isinstance(message.get("content"), str):
                raise OptionError(f"message {number} of the saved conversation has no role of {_ROLES} or no text")
        self.messages = [{"role": message["role"], "content": message["content"]} for message in messages]
        self._text, self._tokens = "", []

    def finish(self, messages: list[dict[str, str]], prompt_text: str, stream: TokenStream) -> None:
        """Take the answer of a turn into the conversation."""
        result = stream.result
        self.messages = [*messages, {"role": "assistant", "content": result.text}]
        self._tokens = stream.sequence_tokens
        if stream.is_current:
            self._cached = self._tokens
        # Special tokens included, as the template writes them.
        answer = self._runtime.tokenizer.decode(result.tokens, skip_special_tokens=False)
        self._text = prompt_text + answer

    def _tokens_of(self, prompt_text: str) -> list[int]:
        """Tokens of the rendered conversation; the known part keeps the tokens it was made of."""
        encode = self._runtime.tokenizer.encode
        if self._text and prompt_text.startswith(self._text):
            return self._tokens + list(encode(prompt_text[len(self._text) :], add_special_tokens=False))
        return list(encode(prompt_text, add_special_tokens=False))

    def _num_kept(self, tokens: list[int]) -> int:
        """Leading tokens whose keys and values are still in the cache; the last token always goes through again."""
        if not self._runtime.owns_cache(self):
            return 0
        if self._frequencies != self._runtime.frequency_set(len(tokens)):
            return 0  # what is cached was rotated otherwise than this length wants it
        kept = min(self._runtime.cached_tokens(), len(self._cached), len(tokens) - 1)
        return next((i for i in range(kept) if tokens[i] != self._cached[i]), kept)


class Reply:
    """An answer being given: iterate for text, `result` afterwards."""

    def __init__(
        self, conversation: Conversation, stream: TokenStream, messages: list[dict[str, str]], prompt_text: str
    ) -> None:
        self._conversation = conversation
        self._stream = stream
        self._messages = messages
        self._prompt_text = prompt_text
        self._settled = False

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        try:
            return next(self._stream)
        except StopIteration:
            self._settle()
            raise

    @property
    def result(self) -> GenerationResult:
        """The finished answer; only after the last piece or `close`."""
        return self._stream.result

    def close(self) -> None:
        """Stop the answer here and keep what there is of it."""
        self._stream.close()
        self._settle()

    def _settle(self) -> None:
        if not self._settled:
            self._settled = True
            self._conversation.finish(self._messages, self._prompt_text, self._stream)
