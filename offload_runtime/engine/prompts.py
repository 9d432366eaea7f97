"""Prompts to token ids: a text, token ids, or chat messages through the model's template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from offload_runtime.config import ModelConfig
from offload_runtime.errors import ContextLengthError, OptionError

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]


def encode_prompt(prompt: Prompt, tokenizer: Any, vocab_size: int) -> list[int]:
    """Token ids of a prompt.

    Args:
        prompt: Text, token ids or chat messages.
        tokenizer: The model's, of transformers.
        vocab_size: Token ids that the model knows.

    Raises:
        OptionError: It is empty, not a prompt, or has ids outside the vocabulary.
    """
    if isinstance(prompt, str):
        tokens = list(tokenizer.encode(prompt))
    elif prompt and all(isinstance(item, Mapping) for item in prompt):
        text = render_chat([dict(item) for item in prompt if isinstance(item, Mapping)], tokenizer, open_answer=True)
        tokens = list(tokenizer.encode(text, add_special_tokens=False))
    else:
        tokens = [item for item in prompt if isinstance(item, int)]
        if len(tokens) < len(prompt):
            raise OptionError("a prompt is a text, a list of token ids or a list of chat messages")
    if not tokens:
        raise OptionError("the prompt is empty: give it at least one token")
    outside = [token for token in tokens if not 0 <= token < vocab_size]
    if outside:
        raise OptionError(f"token id {outside[0]} is outside the vocabulary of {vocab_size}")
    return tokens


@dataclass(frozen=True)
class PromptRoom:
    """What prompts have to go with: the model's `tokenizer` and `config`, and `context_tokens` that are reserved."""

    tokenizer: Any
    config: ModelConfig
    context_tokens: int

    def fit(self, prompt: Prompt, max_new_tokens: int) -> list[int]:
        """Token ids of a prompt that leaves room for its answer.

        Raises:
            ContextLengthError: It does not; OptionError: as of `encode_prompt`.
        """
        tokens = encode_prompt(prompt, self.tokenizer, self.config.vocab_size)
        room = self.context_tokens - len(tokens)
        if room < max_new_tokens:
            raise ContextLengthError(
                f"the prompt of {len(tokens)} tokens and {max_new_tokens} new ones exceed the context of "
                f"{self.context_tokens} tokens by {max_new_tokens - room}: raise --context (the model allows "
                f"{self.config.max_position_embeddings}), shorten the prompt or lower --max-new-tokens"
            )
        return tokens

    def fit_all(self, prompts: Sequence[Prompt], max_new_tokens: int) -> list[list[int]]:
        """The same of several, whose errors say which of them it is."""
        fitting = []
        for number, prompt in enumerate(prompts, start=1):
            try:
                fitting.append(self.fit(prompt, max_new_tokens))
            except (OptionError, ContextLengthError) as error:
                raise type(error)(f"prompt {number} of {len(prompts)}: {error}") from error
        return fitting


def render_chat(messages: list[dict[str, str]], tokenizer: Any, *, open_answer: bool) -> str:
    """Chat messages as the text the model was trained on, with the beginning of an answer if `open_answer`."""
    if getattr(tokenizer, "chat_template", None) is None:
        raise OptionError("this model has no chat template: use a plain prompt (generate without --chat)")
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=open_answer))
    except Exception as error:  # templates raise whatever they like about the messages
        raise OptionError(f"the chat template refused the messages: {error}") from error
