"""Do sampled tokens follow the target's own probabilities? Pearson's chi-square test, with probabilities in float64.

The probabilities are computed here from the definition, with none of the sampler's code: softmax of logits / T, then
top-k, top-p and min-p in transformers' order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from offload_runtime.engine.runtime import Runtime
from offload_runtime.params import GenerationParams, SamplingParams
from offload_runtime.sampling import SlotSampling, sample
from offload_runtime.speculation import Proposer
from offload_runtime.verify.equality import transcribe

# The chi-square distribution is a limit. With cells of this size a nominal level of 1e-5 is truly 2e-5 (simulated with
# skewed probabilities), which is close enough; larger cells change little.
_MIN_EXPECTED = 16.0
_DRAWS_PER_SEED = 16
_MOST_CELLS = 32
GENERATION_TOKENS = 6
# No seed is used twice, so that all tests are independent of each other and of the identity runs.
_FIRST_ROW_SEED = 1 << 32
_FIRST_GENERATION_SEED = 1 << 48


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
        row = transcribe(runtime, prompt, GenerationParams(1)).rows[0].to(runtime.device)
        for setting_name, sampling in settings.items():
            name, of_test = f"{prompt_name}, {setting_name}", range(first, first + seeds)
            yield fit_row(name, row, sampling, position=len(prompt), seeds=of_test)
            first += seeds


def fit_generations(
    runtime: Runtime, prompt: Sequence[int], proposers: Sequence[Proposer], *, seeds: int, on_step: Callable[[], None]
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
        proposers: They take turns.
        seeds: Generations.
        on_step: Called after each generation.
    """
    answers = []
    for number in range(seeds):
        sampling = SamplingParams(temperature=1.0, seed=_FIRST_GENERATION_SEED + number)
        params = GenerationParams(GENERATION_TOKENS, gamma=GENERATION_TOKENS - 1, ignore_eos=True, sampling=sampling)
        answers.append(transcribe(runtime, prompt, params, proposers[number % len(proposers)]).tokens)
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
