"""Which generations a measurement consists of: warm-ups, which may be shorter, and those that count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from common import PeerOptions
from runs import Run, num_differing


@dataclass(frozen=True)
class Asked:
    """One generation: `new_tokens` after `tokens`, those of prompt number `prompt` or, of a warm-up, the first of them.

    `measured` says whether it counts.
    """

    prompt: int
    tokens: tuple[int, ...]
    new_tokens: int
    measured: bool


def asked_generations(options: PeerOptions) -> list[Asked]:
    """All of them in order: warm-ups, which take turns with the prompts, then every prompt, as often as is asked."""
    length, count = options.warmup_prompt_tokens, options.warmup_new_tokens
    warm = [run % len(options.prompts) for run in range(options.warmup)]
    return [
        *(Asked(p, options.prompts[p][:length], options.new_tokens if count is None else count, False) for p in warm),
        *(
            Asked(prompt, tokens, options.new_tokens, True)
            for _ in range(options.repeats)
            for prompt, tokens in enumerate(options.prompts)
        ),
    ]


def num_differing_of(options: PeerOptions, runs: Sequence[Run]) -> int:
    """Generations unlike the first that was asked the same, of all generations, warm-ups first.

    Shortened warm-ups answer another prompt, or end sooner: they are compared with each other only.
    """
    if not options.shortens_warmups:
        return num_differing(runs)
    return num_differing(runs[: options.warmup]) + num_differing(runs[options.warmup :])
