"""The proof that speculation changes nothing, on the machine at hand.

1. *Equality* (`equality`): over many prompts, ways of sampling, windows, proposers and turns of conversations, every
   generation is compared with plain decoding on the same runtime, token by token, and on CUDA bit by bit in the logits
   behind each.
2. *Goodness of fit*: sampled tokens follow the target's own probabilities (`distribution`).

3. *Several cards* (`compare_one_card`): plain decoding by all of them is that by the first alone, in the same way.

Everything is seeded, so a second run on the same machine says the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from itertools import chain, count, cycle, islice
from typing import Any

from offload_runtime.engine.request import PromptRoom
from offload_runtime.engine.runtime import Runtime
from offload_runtime.errors import require
from offload_runtime.params import GenerationParams, SamplingParams
from offload_runtime.verify import equality
from offload_runtime.verify.distribution import GENERATION_TOKENS, Fit, fit_generations, fit_rows, total
from offload_runtime.verify.equality import (
    IdentityRun,
    Plainly,
    ScriptedProposer,
    loaded_proposers,
    transcribe,
    verify_identity,
)

OnProgress = Callable[[str, int, int], None]

PROMPTS = {
    "prose": "The history of the steam engine began when",
    "code": "def fibonacci(n):\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n    return",
    "repetition": "one two three four one two three four one two three four one two three",
    "story": "It was late in the evening when the old man opened the door, looked at the boy, and said:",
    "list": "Things to pack for the journey:\n1. a warm coat\n2. a map\n3. a lamp\n4.",
    "data": '{"name": "Anna", "age": 31, "city": "Oslo"}\n{"name": "Ben", "age": 27, "city":',
    "dialogue": "Q: What is the capital of France?\nA: Paris.\nQ: What is the capital of Italy?\nA: Rome.\nQ:",
    "languages": "Le petit café est fermé. Das kleine Café ist geschlossen. 小さな",
}
SETTINGS = {
    "greedy": SamplingParams(),
    "T 0.6": SamplingParams(temperature=0.6),
    "T 1, top-p 0.9": SamplingParams(temperature=1.0, top_p=0.9),
    "T 1": SamplingParams(temperature=1.0),
    "T 0.8, top-k 20": SamplingParams(temperature=0.8, top_k=20),
}
TOKENS, SEEDS = 64, 256
# With these a 135M takes less than two minutes on two cores.
QUICK_PROMPTS, QUICK_SETTINGS, QUICK_TOKENS, QUICK_SEEDS, QUICK_LONG_TOKENS = 3, 3, 10, 32, 600
MIN_TOKENS, MIN_SEEDS = 8, 32
# All prompts together, over and over, make one of so many tokens: several blocks of keys, and on a GPU enough for the
# attention of long prompts. It meets the first setting only.
LONG_PROMPT, LONG_TOKENS = "long", 1200
# Of the whole run: how likely an exact runtime is called a defect by the tests of fit.
FAMILY_LEVEL = 1e-4

_FIT_PROMPTS = 4
# What a token of a comparison takes on a CPU, prompts and tests of fit included, in times of a plain one: SmolLM2-135M
# on two cores took 1.3 for 1,000 of them and 1.9 for 600.
_CPU_SHARE = 1.8
_ONE_CARD_SETTINGS = 2
_GENERATION_SAMPLING = SamplingParams(temperature=1.0)


@dataclass(frozen=True)
class VerificationPlan:
    """What is compared: `prompts` and `settings` by name; `seeds` for every test of fit; `long_tokens` of a prompt that
    is made of the others, as far as the context has room for it."""

    prompts: Mapping[str, str]
    settings: Mapping[str, SamplingParams]
    tokens: int = 64
    seeds: int = SEEDS
    long_tokens: int = 0

    def __post_init__(self) -> None:
        tokens, seeds = self.tokens, self.seeds
        require(tokens >= MIN_TOKENS, f"tokens must be at least {MIN_TOKENS}, or no window has room, not {tokens}")
        require(seeds >= MIN_SEEDS, f"seeds must be at least {MIN_SEEDS} for a chi-square test, not {seeds}")

    @classmethod
    def built_in(
        cls, *, quick: bool, tokens: int | None, seeds: int | None, extra: Mapping[str, str] | None = None
    ) -> VerificationPlan:
        """The built-in prompts and settings, or with `quick` the first few, and `extra` prompts by name."""
        prompts = dict(islice(PROMPTS.items(), QUICK_PROMPTS if quick else None))
        settings = dict(islice(SETTINGS.items(), QUICK_SETTINGS if quick else None))
        tokens = (QUICK_TOKENS if quick else TOKENS) if tokens is None else tokens
        seeds = (QUICK_SEEDS if quick else SEEDS) if seeds is None else seeds
        long_tokens = QUICK_LONG_TOKENS if quick else LONG_TOKENS
        return cls({**prompts, **(extra or {})}, settings, tokens, seeds, long_tokens)

    def encoded(self, room: PromptRoom) -> dict[str, list[int]]:
        """Token ids of the prompts by name.

        Raises:
            ContextLengthError: One and the tokens that follow it exceed the context.
        """
        return {
            name: room.fit(text, self.tokens, name=f"the prompt {name!r}", option="--tokens")
            for name, text in self.prompts.items()
        }


@dataclass
class VerificationReport:
    """Everything that was found, or what there was until Ctrl-C, if it is `interrupted`."""

    bitwise: bool
    runs: list[IdentityRun]
    fits: list[Fit]
    interrupted: bool = False

    @property
    def level(self) -> float:
        """Least p-value allowed to one test of fit (Bonferroni)."""
        return FAMILY_LEVEL / max(1, len(self.fits))

    @property
    def bad_runs(self) -> list[IdentityRun]:
        """Runs with a defect."""
        return [run for run in self.runs if run.finding.verdict == "defect"]

    @property
    def bad_fits(self) -> list[Fit]:
        """Tests that the sampled tokens fail."""
        return [fit for fit in self.fits if fit.p_value < self.level]

    @property
    def verdict(self) -> str:
        """`defect`, `near-ties` when rounding explains what differs, or `exact`."""
        if self.bad_runs or self.bad_fits:
            return "defect"
        return "near-ties" if any(run.finding.verdict == "near-tie" for run in self.runs) else "exact"

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        fits = [{**asdict(fit), "p_value": fit.p_value} for fit in self.fits]
        return {
            "verdict": self.verdict, "interrupted": self.interrupted, "bitwise_compared": self.bitwise,
            "identity": [asdict(run) for run in self.runs], "fit_level": self.level, "fit": fits,
        }  # fmt: skip


def verify(
    runtime: Runtime, plan: VerificationPlan, *, on_progress: OnProgress = lambda stage, done, steps: None,
    on_expected: Callable[[float], None] | None = None,
) -> VerificationReport:  # fmt: skip
    """Compare speculation with plain decoding, and sampled tokens with the target's probabilities.

    Args:
        runtime: Loaded with the draft under test; it must allow a gamma of 63, and ends its current generation.
        plan: What to compare.
        on_progress: Called with (stage, done, all) after each generation or test.
        on_expected: Called before the first of them with about how many seconds all of it takes.

    Returns:
        Everything, or at Ctrl-C what there is by then.

    Raises:
        ContextLengthError: A prompt and its tokens exceed the runtime's context.
        NumericalError: The target's logits are NaN.
    """
    report = VerificationReport(runtime.device.type == "cuda", [], [])
    try:
        prompts = plan.encoded(PromptRoom(runtime.tokenizer, runtime.config, runtime.context_tokens))
        if on_expected is not None:
            on_expected(_expected_s(runtime, plan))
        _compare(runtime, plan, prompts, report, on_progress)
        _fit(runtime, plan, prompts, report, on_progress)
    except KeyboardInterrupt:
        report.interrupted = True
    return report


def _compare(
    runtime: Runtime, plan: VerificationPlan, prompts: Mapping[str, list[int]], report: VerificationReport,
    on_progress: OnProgress,
) -> None:  # fmt: skip
    """Add every generation beside plain decoding to a report."""
    long_tokens = min(plan.long_tokens, runtime.context_tokens - plan.tokens)
    rounds = len(prompts) * len(plan.settings) + (long_tokens > 0)
    on_step = _counter("identity", rounds * (len(loaded_proposers(runtime)) + 4), on_progress)
    work = [(prompts, plan.settings)]
    if long_tokens > 0:
        tokens = islice(cycle(chain.from_iterable(prompts.values())), long_tokens)
        work.append(({LONG_PROMPT: list(tokens)}, dict(islice(plan.settings.items(), 1))))
    for texts, settings in work:
        for run in verify_identity(runtime, texts, settings, count=plan.tokens, on_step=on_step):
            report.runs.append(run)


def _fit(
    runtime: Runtime, plan: VerificationPlan, prompts: Mapping[str, list[int]], report: VerificationReport,
    on_progress: OnProgress,
) -> None:  # fmt: skip
    """Add to a report whether sampling follows the target: single rows of logits, all together, whole generations."""
    contexts = dict(islice(prompts.items(), _FIT_PROMPTS))
    settings = {name: sampling for name, sampling in plan.settings.items() if not sampling.greedy}
    on_step = _counter("sampling", len(contexts) * len(settings) + plan.seeds, on_progress)
    for fit in fit_rows(runtime, contexts, settings, seeds=plan.seeds, on_step=on_step):
        report.fits.append(fit)
    report.fits.append(total("rows of logits together", report.fits))
    prompt = next(iter(contexts.values()))
    likeliest = transcribe(runtime, prompt, GenerationParams(GENERATION_TOKENS, ignore_eos=True)).tokens
    script = ScriptedProposer([*prompt, *likeliest], runtime.config.vocab_size, accuracy=1.0, seed=0)
    proposers = [script, *loaded_proposers(runtime).values()]
    places = fit_generations(runtime, prompt, _GENERATION_SAMPLING, proposers, seeds=plan.seeds, on_step=on_step)
    report.fits += [*places, total("answers together", places)]


def _expected_s(runtime: Runtime, plan: VerificationPlan) -> float:
    """About how many seconds `verify` takes, from a short plain answer that is timed."""
    encoded = plan.encoded(PromptRoom(runtime.tokenizer, runtime.config, runtime.context_tokens))
    prompt, params = next(iter(encoded.values())), GenerationParams(MIN_TOKENS, ignore_eos=True)
    transcribe(runtime, prompt, params)  # what is made once is not timed
    begun_s = time.monotonic()
    transcribe(runtime, prompt, params)
    token_s = (time.monotonic() - begun_s) / MIN_TOKENS
    generations = (len(encoded) * len(plan.settings) + 1) * (len(loaded_proposers(runtime)) + 4)
    of_cpu = _CPU_SHARE if runtime.device.type == "cpu" else 1.0
    return token_s * of_cpu * (generations * plan.tokens + plan.seeds * GENERATION_TOKENS)


def decode_plainly(runtime: Runtime, plan: VerificationPlan, on_progress: OnProgress, *, stage: str) -> Plainly:
    """What plain decoding says to all prompts of a plan, greedily and in the next setting: the logits of every token
    stay on the host. Errors as of `verify`."""
    prompts = plan.encoded(PromptRoom(runtime.tokenizer, runtime.config, runtime.context_tokens))
    settings = dict(islice(plan.settings.items(), _ONE_CARD_SETTINGS))
    on_step = _counter(stage, len(prompts) * len(settings), on_progress)
    return equality.decode_plainly(runtime, prompts, settings, count=plan.tokens, on_step=on_step)


def _counter(stage: str, total_steps: int, on_progress: OnProgress) -> Callable[[], None]:
    """What counts a step of a stage and tells whoever wants to know."""
    numbers = count(1)
    return lambda: on_progress(stage, next(numbers), total_steps)
