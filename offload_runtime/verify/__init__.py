"""The proof, on the machine at hand, that speculation and offloading change nothing: `offload-runtime verify`.

It drives a loaded `Runtime` from outside.

1. *Equality* (`equality`): over many prompts, settings of sampling, windows, drafters and turns, every generation
   is compared with plain decoding on the same runtime, token by token, and on CUDA bit by bit in the logits
   behind each.
2. *Goodness of fit*: sampled tokens follow the target's own probabilities, by Pearson's chi-square test. The
   probabilities are computed here from the definition, with none of the sampler's code: softmax of logits / T, then
   top-k, top-p and min-p in transformers' order, in float64.
3. *Several cards* (`compare_one_card`): plain decoding by all of them is that by the first alone.

Everything is seeded, so a second run on the same machine says the same.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, count, cycle, islice
from typing import Any

import torch

from offload_runtime.engine.request import PromptRoom
from offload_runtime.engine.runtime import Runtime
from offload_runtime.options import require
from offload_runtime.params import GenerationParams, SamplingParams
from offload_runtime.sampling import SlotSampling, sample
from offload_runtime.speculation.step import Drafter
from offload_runtime.verify import equality

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
MIN_TOKENS, MIN_SEEDS = 8, 32
# All prompts together, over and over, make a long one: several blocks of keys, and on a GPU enough for the attention of
# long prompts. It meets the first setting only.
LONG_PROMPT = "long"
# Of the whole run: how likely an exact runtime is called a defect by the tests of fit.
FAMILY_LEVEL = 1e-4

# The chi-square distribution is a limit. With cells of this size a nominal level of 1e-5 is truly 2e-5 (simulated with
# skewed probabilities), which is close enough; larger cells change little.
_MIN_EXPECTED = 16.0
_DRAWS_PER_SEED = 16
_MOST_CELLS = 32
GENERATION_TOKENS = 6
# No seed is used twice, so that all tests are independent of each other and of the identity runs.
_FIRST_ROW_SEED = 1 << 32
_FIRST_GENERATION_SEED = 1 << 48
_FIT_PROMPTS = 4
# What a token of a comparison takes on a CPU, prompts and tests of fit included, in times of a plain one: SmolLM2-135M
# on two cores took 1.3 for 1,000 of them and 1.9 for 600.
_CPU_SHARE = 1.8
_ONE_CARD_SETTINGS = 2


@dataclass(frozen=True)
class VerificationPlan:
    """Says what is compared: `prompts` and `settings` by name; `seeds` for every test of fit; `long_tokens` of a prompt
    that is made of the others, as far as the context has room for it."""

    prompts: Mapping[str, str] = field(default_factory=lambda: PROMPTS)
    settings: Mapping[str, SamplingParams] = field(default_factory=lambda: SETTINGS)
    tokens: int = 64
    seeds: int = 256
    long_tokens: int = 0

    def __post_init__(self) -> None:
        tokens, seeds = self.tokens, self.seeds
        require(tokens >= MIN_TOKENS, f"tokens must be at least {MIN_TOKENS}, or no window has room, not {tokens}")
        require(seeds >= MIN_SEEDS, f"seeds must be at least {MIN_SEEDS} for a chi-square test, not {seeds}")

    def encoded(self, room: PromptRoom) -> dict[str, list[int]]:
        """Return token ids of the prompts by name.

        Raises:
            ContextLengthError: One and the tokens that follow it exceed the context.
        """
        return {
            name: room.fit(text, self.tokens, name=f"the prompt {name!r}", option="--tokens")
            for name, text in self.prompts.items()
        }


FULL = VerificationPlan(long_tokens=1200)
# With these a 135M takes less than two minutes on two cores.
QUICK = VerificationPlan(dict(islice(PROMPTS.items(), 3)), dict(islice(SETTINGS.items(), 3)), 10, 32, long_tokens=600)


@dataclass(frozen=True)
class Fit:
    """Draws of one distribution, or the sum over several independent ones.

    `impossible` counts draws of tokens whose probability is zero. `freedom` 0 means a single cell, which
    tests nothing.
    """

    name: str
    draws: int
    statistic: float
    freedom: int
    impossible: int

    @property
    def p_value(self) -> float:
        """Return the probability of a statistic at least this large when the draws follow the probabilities.

        It is 0 for the impossible, and else from the regularised upper incomplete gamma function.
        """
        if self.impossible:
            return 0.0
        if self.freedom == 0:
            return 1.0
        half = torch.tensor([self.freedom / 2, self.statistic / 2], dtype=torch.float64)
        return float(torch.special.gammaincc(half[0], half[1]))


def target_probabilities(logits: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    """Return what `sampling` makes of logits: [V] of any floating dtype -> [V] float64 on the host, of sum 1."""
    scaled = logits.double().cpu() / sampling.temperature
    if sampling.top_k and sampling.top_k < scaled.numel():
        scaled = scaled.masked_fill(scaled < scaled.topk(sampling.top_k).values[-1], -torch.inf)
    if sampling.top_p < 1:
        ordered = scaled.sort(descending=True).values
        p = ordered.softmax(0)
        kept = int((p.cumsum(0) - p < sampling.top_p).sum())
        scaled = scaled.masked_fill(scaled < ordered[kept - 1], -torch.inf)
    if sampling.min_p > 0:
        scaled = scaled.masked_fill(scaled < scaled.max() + math.log(sampling.min_p), -torch.inf)
    return scaled.softmax(0)


def fit(name: str, counts: torch.Tensor, probabilities: torch.Tensor) -> Fit:
    """Compute chi-square of counts [V] int64 against probabilities [V] float64.

    Cells that are too small are pooled with those of similar probability, so that an error of the temperature, which
    moves tokens up or down by their probability, still shows in a flat distribution.
    """
    draws = int(counts.sum())
    expected, order = (probabilities * draws).sort(descending=True, stable=True)
    small = expected < _MIN_EXPECTED
    num_large = int((~small).sum())
    # Pools begin twice the least size apart and no member is larger than it, so all but the last are large enough.
    before = (expected[small].cumsum(0) - expected[small]) / (2 * _MIN_EXPECTED)
    cell = torch.cat([torch.arange(num_large), num_large + before.long()])
    cells = torch.stack([
        torch.bincount(cell, weights=counts[order].double()), torch.bincount(cell, weights=expected)
    ])  # [2, cells]: seen, expected  # fmt: skip
    if cells.shape[1] > 1 and cells[1, -1] < _MIN_EXPECTED:
        cells = torch.cat([cells[:, :-2], cells[:, -2:].sum(1, keepdim=True)], dim=1)
    statistic = ((cells[0] - cells[1]).square() / cells[1]).sum()
    impossible = int(counts[probabilities == 0].sum())
    return Fit(name, draws, float(statistic), cells.shape[1] - 1, impossible)


def total(name: str, fits: Sequence[Fit]) -> Fit:
    """Make one test of independent ones together: many small deviations in one direction show here first."""
    return Fit(
        name, sum(f.draws for f in fits), sum(f.statistic for f in fits), sum(f.freedom for f in fits),
        sum(f.impossible for f in fits),
    )  # fmt: skip


def fit_row(name: str, row: torch.Tensor, sampling: SamplingParams, *, position: int, seeds: Sequence[int]) -> Fit:
    """Draw from one row of logits over many seeds and a few positions: no pass of the target is needed.

    Args:
        name: The test is called so.
        row: [V] in the model's dtype, on the device whose sampler is tested.
        sampling: Its seed is replaced.
        position: First of `_DRAWS_PER_SEED` positions that are sampled with every seed.
        seeds: Each is used once.
    """
    rows = row.expand(_DRAWS_PER_SEED, -1).contiguous()
    positions = torch.arange(position, position + _DRAWS_PER_SEED, device=row.device)
    slots = torch.zeros_like(positions)
    draws = [
        sample(rows, SlotSampling.of([replace(sampling, seed=seed)], row.device), positions, slots) for seed in seeds
    ]
    counts = torch.bincount(torch.cat(draws).cpu(), minlength=row.numel())
    return fit(name, counts, target_probabilities(row, sampling))


def fit_rows(
    runtime: Runtime, prompts: Mapping[str, Sequence[int]], settings: Mapping[str, SamplingParams], *, seeds: int
) -> Iterator[Fit]:
    """Test the sampler on the logits behind each prompt, by name, in each setting, of which none is greedy; one pass of
    the target per prompt, `seeds` per test."""
    first = _FIRST_ROW_SEED
    for prompt_name, prompt in prompts.items():
        row = equality.transcribe(runtime, prompt, GenerationParams(1)).rows[0].to(runtime.device)
        for setting_name, sampling in settings.items():
            name, of_test = f"{prompt_name}, {setting_name}", range(first, first + seeds)
            yield fit_row(name, row, sampling, position=len(prompt), seeds=of_test)
            first += seeds


def fit_generations(
    runtime: Runtime, prompt: Sequence[int], drafters: Sequence[Drafter], *, seeds: int, on_step: Callable[[], None]
) -> list[Fit]:
    """Test whole speculative generations at temperature 1: every token given those before it, one test per place in the
    answer.

    Answers are read again by passes that know nothing of speculation. A token's *percentile* is the probability of all
    tokens likelier than it (of equals those before it) plus a random share of its own; given what came before, these
    are uniform and independent (Rosenblatt, "Remarks on a multivariate transformation", 1952). A token chosen from the
    logits of a wrong context is mostly an unlikely one, with a percentile near 1.

    Args:
        runtime: Generates with speculation.
        prompt: Token ids.
        drafters: They take turns.
        seeds: Generations.
        on_step: Called after each generation.
    """
    answers = []
    for number in range(seeds):
        sampling = SamplingParams(temperature=1.0, seed=_FIRST_GENERATION_SEED + number)
        params = GenerationParams(GENERATION_TOKENS, gamma=GENERATION_TOKENS - 1, ignore_eos=True, sampling=sampling)
        answers.append(equality.transcribe(runtime, prompt, params, drafters[number % len(drafters)]).tokens)
        on_step()
    shares = torch.rand(seeds, GENERATION_TOKENS, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    percentiles = torch.empty_like(shares)
    # One plain pass over each answer: nothing is proposed or accepted.
    for number, (answer, rows) in enumerate(zip(answers, runtime.logits(list(prompt), answers), strict=True)):
        for place, (token, row) in enumerate(zip(answer, rows.cpu(), strict=True)):
            p = target_probabilities(row, SamplingParams(temperature=1.0))
            likelier = (p > p[token]) | ((p == p[token]) & (torch.arange(p.numel()) < token))
            percentiles[number, place] = p[likelier].sum() + shares[number, place] * p[token]
    cells = min(_MOST_CELLS, int(seeds / _MIN_EXPECTED))
    uniform = torch.full((cells,), 1 / cells, dtype=torch.float64)
    places = (percentiles * cells).long().clamp_max(cells - 1)
    return [
        fit(f"token {index + 1} of an answer", torch.bincount(places[:, index], minlength=cells), uniform)
        for index in range(GENERATION_TOKENS)
    ]


@dataclass
class VerificationReport:
    """Everything that was found, or what there was until Ctrl-C, if it is `interrupted`."""

    bitwise: bool
    runs: list[equality.IdentityRun]
    fits: list[Fit]
    interrupted: bool = False

    @property
    def level(self) -> float:
        """Return the least p-value allowed to one test of fit (Bonferroni)."""
        return FAMILY_LEVEL / max(1, len(self.fits))

    @property
    def bad_runs(self) -> list[equality.IdentityRun]:
        """Return runs with a defect."""
        return [run for run in self.runs if run.finding.verdict == "defect"]

    @property
    def bad_fits(self) -> list[Fit]:
        """Return tests that the sampled tokens fail."""
        return [fit for fit in self.fits if fit.p_value < self.level]

    @property
    def verdict(self) -> str:
        """Return `defect`, `near-ties` when rounding explains what differs, or `exact`."""
        if self.bad_runs or self.bad_fits:
            return "defect"
        return "near-ties" if any(run.finding.verdict == "near-tie" for run in self.runs) else "exact"

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON."""
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
        on_progress: Called with (stage, done, all) after each comparison or test.
        on_expected: Called before the first of them with about how many seconds all of it takes.

    Returns:
        Everything, or at Ctrl-C what there is by then.

    Raises:
        ContextLengthError: A prompt and its tokens exceed the runtime's context.
        NumericalError: The target's logits are NaN.
    """
    verification = _Verification(runtime, plan, on_progress)
    try:
        if on_expected is not None:
            on_expected(verification.expected_s())
        verification.compare()
        verification.fit()
    except KeyboardInterrupt:
        verification.report.interrupted = True
    return verification.report


class _Verification:
    """A plan on its way to a report."""

    def __init__(self, runtime: Runtime, plan: VerificationPlan, on_progress: OnProgress) -> None:
        self.report = VerificationReport(runtime.device.type == "cuda", [], [])
        self._runtime, self._plan, self._on_progress = runtime, plan, on_progress
        self._prompts = plan.encoded(runtime.room)
        drafters = len(equality.drafters_of(runtime, (), accuracy=1.0)) + 2  # as loaded, and in one more history
        self._plain = len(plan.prompts) * len(plan.settings) + (plan.long_tokens > 0)
        self._runs = self._plain * drafters

    def compare(self) -> None:
        """Add every generation compared with plain decoding to the report."""
        runtime, plan, prompts = self._runtime, self._plan, self._prompts
        runs = equality.verify_identity(runtime, prompts, plan.settings, count=plan.tokens)
        if plan.long_tokens:
            most = min(plan.long_tokens, runtime.context_tokens - plan.tokens)
            long = {LONG_PROMPT: list(islice(cycle(chain.from_iterable(prompts.values())), most))}
            first = dict(islice(plan.settings.items(), 1))
            runs = chain(runs, equality.verify_identity(runtime, long, first, count=plan.tokens))
        for number, run in enumerate(runs, start=1):
            self.report.runs.append(run)
            self._on_progress("identity", number, self._runs)

    def fit(self) -> None:
        """Add whether sampling follows the target: single rows of logits, all together, whole generations."""
        runtime, plan, fits = self._runtime, self._plan, self.report.fits
        contexts = dict(islice(self._prompts.items(), _FIT_PROMPTS))
        settings = {name: sampling for name, sampling in plan.settings.items() if not sampling.greedy}
        steps, numbers = len(contexts) * len(settings) + plan.seeds, count(1)
        for found in fit_rows(runtime, contexts, settings, seeds=plan.seeds):
            fits.append(found)
            self._on_progress("sampling", next(numbers), steps)
        fits.append(total("rows of logits together", fits))
        prompt = next(iter(contexts.values()))
        likeliest = equality.transcribe(runtime, prompt, GenerationParams(GENERATION_TOKENS, ignore_eos=True)).tokens
        drafters = list(equality.drafters_of(runtime, [*prompt, *likeliest], accuracy=1.0).values())
        places = fit_generations(
            runtime, prompt, drafters, seeds=plan.seeds,
            on_step=lambda: self._on_progress("sampling", next(numbers), steps),
        )  # fmt: skip
        fits += [*places, total("answers together", places)]

    def expected_s(self) -> float:
        """Estimate how many seconds all of it takes, from a short plain answer that is timed."""
        runtime, plan, prompt = self._runtime, self._plan, next(iter(self._prompts.values()))
        for _ in range(2):  # what is made once is not timed
            begun_s = time.monotonic()
            equality.transcribe(runtime, prompt, GenerationParams(MIN_TOKENS, ignore_eos=True))
        token_s = (time.monotonic() - begun_s) / MIN_TOKENS
        of_cpu = _CPU_SHARE if runtime.device.type == "cpu" else 1.0
        return token_s * of_cpu * ((self._runs + self._plain) * plan.tokens + plan.seeds * GENERATION_TOKENS)


Plainly = dict[tuple[str, str], equality.Transcript]  # by the names of prompt and setting


def decode_plainly(runtime: Runtime, plan: VerificationPlan, on_progress: OnProgress, *, stage: str) -> Plainly:
    """Generate what plain decoding says to all prompts of a plan, greedily and in the next setting: the logits of every
    token stay on the host. Errors as of `verify`."""
    found: Plainly = {}
    prompts = plan.encoded(runtime.room)
    settings = dict(islice(plan.settings.items(), _ONE_CARD_SETTINGS))
    for prompt_name, prompt in prompts.items():
        for seed, (setting_name, setting) in enumerate(settings.items()):
            params = GenerationParams(plan.tokens, ignore_eos=True, sampling=replace(setting, seed=seed))
            found[prompt_name, setting_name] = equality.transcribe(runtime, prompt, params)
            on_progress(stage, len(found), len(prompts) * len(settings))
    return found


def compare_one_card(one: Plainly, several: Plainly, *, bitwise: bool) -> list[equality.IdentityRun]:
    """Compare what several cards say with what one says."""
    return [
        equality.IdentityRun.of(prompt, setting, equality.ON_ONE_CARD, one[prompt, setting], other, bitwise=bitwise)
        for (prompt, setting), other in several.items()
    ]
