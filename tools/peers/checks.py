"""What is asked of all systems alike, checked before any of them runs."""

from __future__ import annotations

from offload_runtime.config import require_positive
from offload_runtime.errors import OptionError


def check_short_warmups(
    prompt_tokens: int | None, count: int | None, *, new_tokens: int, shortest_tokens: int | None
) -> None:
    """Refuse warm-ups that cannot be.

    Args:
        prompt_tokens: Of a prompt; None for all of it.
        count: Tokens that a warm-up generates; None for as many as others.
        new_tokens: Tokens that others generate.
        shortest_tokens: Of the shortest prompt; None while it is not known.

    Raises:
        OptionError: They would be longer than what is measured, or nothing would be left of them.
    """
    if prompt_tokens is not None:
        require_positive("warmup_prompt_tokens", prompt_tokens)
        if shortest_tokens is not None and prompt_tokens > shortest_tokens:
            raise OptionError(
                f"warmup_prompt_tokens is {prompt_tokens}, the shortest prompt has {shortest_tokens}: lower it"
            )
    if count is not None and not 2 <= count <= new_tokens:
        raise OptionError(
            f"warmup_new_tokens must be at least 2 and at most the {new_tokens} of new_tokens, not {count}"
        )


def check_prefill_chunk(tokens: int | None) -> None:
    """Refuse what is no number of tokens. Raises `OptionError`."""
    if tokens is not None and tokens < 0:
        raise OptionError(f"prefill_chunk must be at least 1, or 0 for whole prompts at once, not {tokens}")


def check_context(context: int | None, name: str, needed: int) -> None:
    """Refuse a prompt that takes, with its answer, `needed` tokens where fewer are reserved. Raises `OptionError`."""
    if context is not None and needed > context:
        raise OptionError(
            f"{name} and the answer are {needed} tokens, --context is {context}: raise it, or lower --prompt-tokens"
        )
