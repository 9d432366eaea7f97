"""One answer as it grows: tokens in, text out, and when it ends."""

from __future__ import annotations

from collections.abc import Sequence

from offload_runtime.config import GenerationParams
from offload_runtime.engine.text import IncrementalDecoder, StopStrings, Tokenizer


class Answer:
    """Tokens of one generation and their text.

    Args:
        tokenizer: Turns tokens into text.
        prompt: Tokens before the first one.
        params: When to end.
        eos_token_ids: Tokens that end it, unless `params` ignores them.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int], params: GenerationParams, eos_token_ids: frozenset[int]
    ) -> None:
        self.tokens: list[int] = []
        self.sequence = list(prompt)  # prompt and answer; grows, so that no round copies it
        self._params = params
        self._eos_token_ids = eos_token_ids
        self._pieces: list[str] = []
        self._decoder = IncrementalDecoder(tokenizer, prompt)
        self._stops = StopStrings(params.stop)

    @property
    def text(self) -> str:
        """Everything so far."""
        return "".join(self._pieces)

    @property
    def remaining(self) -> int:
        """Tokens that it may still grow by."""
        return self._params.max_new_tokens - len(self.tokens)

    def push(self, token: int) -> tuple[str, str | None]:
        """Append a token: the text it completes, and the reason to end after it."""
        self.tokens.append(token)
        self.sequence.append(token)
        if token in self._eos_token_ids and not self._params.ignore_eos:
            return "", "stop"
        piece, stopped = self._stops.push(self._decoder.push(token))
        self._pieces += [piece] if piece else []
        if stopped:
            return piece, "stop_string"
        return piece, None if self.remaining else "length"

    def finish(self, reason: str) -> str:
        """End for this reason; returns text that was held back."""
        if reason == "stop_string":
            return ""
        rest, stopped = self._stops.push(self._decoder.flush())
        rest += "" if stopped else self._stops.flush()
        self._pieces += [rest] if rest else []
        return rest
