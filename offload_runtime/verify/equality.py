"""Is every answer what plain decoding says? Token by token, and the logits behind each bit by bit.

With every drafter, as the next turn of a conversation whose keys and values were kept, as a turn said once more, and
beside others in a batch. Generations are made with the logits behind every token: what was said, and what the target
thought of it. They run through the runtime's own token loop, with the drafter under test in place of its own.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import cycle, islice, zip_longest

import torch

from offload_runtime.core import DraftBudget, TokenTree
from offload_runtime.engine.runtime import Runtime
from offload_runtime.params import GenerationParams, SamplingParams
from offload_runtime.sampling import SlotSampling, sample
from offload_runtime.speculation.ngram import NGRAM, NgramDrafter, drafting
from offload_runtime.speculation.step import Budgets, Drafter, Texts

# Both sides of the edges of a tile: 8 rows on a CPU, 64 on a GPU, where one row of a window is the token before it.
GAMMAS = (1, 7, 17, 8, 63)
# The runtime as a user has it, in place of the name of a drafter: from the beginning, behind what was kept, the same
# turn once more, and with others.
AS_LOADED, NEXT_TURN, SAME_TURN, IN_A_BATCH = "as loaded", "next turn", "same turn again", "in a batch"
# Plain decoding by the first card alone, beside that by several.
ON_ONE_CARD = "on one card"
_SCRIPT_ACCURACY = 0.85
# Its trees have so many times as many nodes as the longest of their paths, as far as a window of the longest has room.
_SCRIPT_BRANCHES = 3
# What rounding may do to a row of logits: the standard deviation of its change, in roundoffs of the row's own standard
# deviation. On a real model of 30 layers 30 roundoffs were seen in bf16 and 155 in fp32, where sums round too; the
# logits behind another token are 100 (bf16) and 6 million (fp32) away, or more.
_ROUNDING = {torch.bfloat16: 48 * 2.0**-8, torch.float16: 48 * 2.0**-11, torch.float32: 512 * 2.0**-24}
# Two tokens whose logits moved by more than so many standard deviations of the row's change were not moved by rounding.
_SPREAD = 16.0


class ScriptedDrafter(Drafter):
    """Proposes a known continuation, in windows of every length, each token wrong with probability `1 - accuracy`.

    So windows are accepted, cut and rolled back everywhere, however little a model's text can be guessed. Where there
    is room for more than a chain it also proposes wrong branches around it, in any order that a tree can have.

    Args:
        script: Prompt and continuation.
        vocab_size: Wrong tokens are drawn from it.
        accuracy: Probability of proposing the script's own token.
        seed: Of the mistakes and the lengths.
    """

    def __init__(self, script: Sequence[int], vocab_size: int, *, accuracy: float, seed: int) -> None:
        self._script, self._vocab_size, self._accuracy = list(script), vocab_size, accuracy
        self._random = random.Random(seed)

    name = "script"

    def modes(self, texts: Texts) -> Sequence[str]:
        return ("chain", "tree")

    def propose(self, texts: Texts, budgets: Budgets) -> dict[int, TokenTree]:
        return {slot: self._propose(len(texts[slot]), budget) for slot, budget in budgets.items()}

    def _propose(self, length: int, budget: DraftBudget) -> TokenTree:
        chain = self._guess(length, self._random.randint(1, budget.longest_chain))
        paths, room = [chain], 0 if budget.tree_nodes is None else max(0, budget.size - len(chain))
        for _ in range(self._random.randint(0, room)):
            at = self._random.randrange(budget.gamma)
            branch = [*chain[:at], self._random.randrange(self._vocab_size)]
            branch += self._guess(length + len(branch), budget.gamma - len(branch))
            paths.append(branch[: self._random.randint(1, len(branch))])
        self._random.shuffle(paths)
        tree = TokenTree()
        for path in paths:
            tree = tree.joined(TokenTree.chain(path, self.name), budget.size)
        return tree

    def _guess(self, start: int, count: int) -> list[int]:
        return [
            token if self._random.random() < self._accuracy else self._random.randrange(self._vocab_size)
            for token in self._script[start : start + count]
        ]


@dataclass(frozen=True)
class Transcript:
    """One generation.

    Attributes:
        tokens: What was said.
        rows: [N, V] in the model's dtype, on the host: the target's logits that each token was chosen from.
        params: What was asked for, and how the tokens were chosen.
        first_position: Of the first token.
        passes: Passes of the target after prefill.
    """

    tokens: list[int]
    rows: torch.Tensor
    params: GenerationParams
    first_position: int
    passes: int

    @cached_property
    def foreign_tokens(self) -> int:
        """Count tokens that are not what the host, sampling once more at absolute positions, makes of their logits."""
        again = resample(self.rows, self.params.sampling, self.first_position)
        return sum(a != b for a, b in zip_longest(again, self.tokens))


def transcribe(
    runtime: Runtime, prompt: Sequence[int], params: GenerationParams, drafter: Drafter | None = None, *,
    owner: object | None = None, mates: Sequence[list[int]] = (),
) -> Transcript:  # fmt: skip
    """Generate and keep the logits behind every token: tokens * V * itemsize bytes of host memory.

    Args:
        runtime: Its current generation, if any, ends.
        prompt: Token ids.
        params: What to generate; where tokens are counted it should ignore the end of the text.
        drafter: Guesses in place of the runtime's own; None decodes plainly, one token a pass.
        owner: As of `Runtime.replay`.
        mates: As of `Runtime.replay`.
    """
    result, rows = runtime.replay(list(prompt), params, drafter=drafter, owner=owner, mates=mates)
    return Transcript(result.tokens, rows, params, len(prompt), result.stats.passes)


def drafters_of(runtime: Runtime, script: Sequence[int], *, accuracy: float, seed: int = 0) -> dict[str, Drafter]:
    """Return the drafters to test on a runtime: n-gram lookup, the runtime's own if it is another, and a script."""
    own = drafting(runtime.engine.drafter)
    drafters: dict[str, Drafter] = {NGRAM: NgramDrafter()}
    if own.name not in (None, NGRAM):
        drafters["triforce" if own.name == "retrieval" else "draft"] = own
    scripted = ScriptedDrafter(script, runtime.config.vocab_size, accuracy=accuracy, seed=seed)
    return {**drafters, scripted.name: scripted}


def resample(rows: torch.Tensor, sampling: SamplingParams, first_position: int) -> list[int]:
    """Return the tokens that rows of logits [N, V] stand for, at `first_position` and the positions after it."""
    positions = torch.arange(first_position, first_position + rows.shape[0], device=rows.device)
    slots = SlotSampling.of([sampling], rows.device)
    return sample(rows, slots, positions, torch.zeros_like(positions)).tolist()


@dataclass(frozen=True)
class Mismatch:
    """Figures of a token that is not plain decoding's, in units of logits / T.

    Both tokens follow from their rows of logits, or they are foreign: the question is how far the rows are apart.

    Attributes:
        plain_token: What plain decoding says.
        token: What speculation says.
        swing: How far the logits of these two moved, together.
        moved: Standard deviation of the difference between speculation's row of logits and plain decoding's.
        rounding: The most of it that rounding explains.
    """

    plain_token: int
    token: int
    swing: float
    moved: float
    rounding: float

    @property
    def near_tie(self) -> bool:
        """Return whether rounding explains it: the logits moved no further, those of the two tokens included."""
        return self.moved <= self.rounding and self.swing <= _SPREAD * self.moved


@dataclass(frozen=True)
class Finding:
    """Says what a comparison found.

    Attributes:
        verdict: `identical`, `near-tie` (explained by rounding; never on CUDA) or `defect`.
        first_difference: Index of the first new token that differs; what follows it has another context.
        differing_logit_rows: Tokens up to there whose logits are not the same to the last bit.
        foreign_tokens: Tokens of either generation that are not what their logits, seed and position stand for.
        mismatch: Figures of the first token that differs.
    """

    verdict: str
    first_difference: int | None
    differing_logit_rows: int
    foreign_tokens: int
    mismatch: Mismatch | None


@dataclass(frozen=True)
class IdentityRun:
    """One generation beside plain decoding.

    Attributes:
        prompt: Name of the prompt.
        setting: Name of the way of sampling.
        seed: Of the noise.
        drafter: `ngram`, `draft`, `triforce`, or `script`: plain decoding's own tokens with mistakes; `as loaded`
            is what a user gets, n-grams beside the draft included, and so are `next turn`, `same turn again` and
            `in a batch`; `on one card` is plain decoding by several cards beside that by the first alone.
        gamma: Most tokens proposed per pass in a row; None where the runtime's own setting decides, or chooses.
        tokens: Compared.
        passes: Passes of the target; plain decoding has one for every token but the first.
        finding: Of the comparison.
        tree_nodes: Most tokens proposed per pass in all; None where the runtime's own setting decides.
    """

    prompt: str
    setting: str
    seed: int
    drafter: str
    gamma: int | None
    tokens: int
    passes: int
    finding: Finding
    tree_nodes: int | None = None

    @classmethod
    def of(
        cls, prompt: str, setting: str, name: str, plain: Transcript, other: Transcript, *, bitwise: bool
    ) -> IdentityRun:
        """Compare a generation of this `name` with plain decoding."""
        params, tokens, finding = other.params, len(other.tokens), compare(plain, other, bitwise=bitwise)
        seed, gamma = params.sampling.seed, params.gamma
        return cls(prompt, setting, seed, name, gamma, tokens, other.passes, finding, params.tree_nodes)


def verify_identity(
    runtime: Runtime, prompts: Mapping[str, Sequence[int]], settings: Mapping[str, SamplingParams], *, count: int
) -> Iterator[IdentityRun]:
    """Compare `count` tokens with plain decoding, one run after the other: of all drafters, and of what the runtime
    does by itself, in a batch and as a further turn too. The gammas take turns; each meets every setting and drafter.

    Args:
        runtime: Both sides of every comparison.
        prompts: Token ids by name.
        settings: By name; seeds are replaced.
        count: Tokens of every generation.
    """
    for prompt_number, (prompt_name, prompt) in enumerate(prompts.items()):
        for setting_number, (setting_name, setting) in enumerate(settings.items()):
            seed, number = prompt_number * len(settings) + setting_number, prompt_number + setting_number
            params = GenerationParams(count, ignore_eos=True, sampling=replace(setting, seed=seed))
            plain = transcribe(runtime, prompt, params)
            for name, expected, other in _generate_otherwise(runtime, plain, prompt, list(prompts.values()), number):
                bitwise = runtime.device.type == "cuda"
                yield IdentityRun.of(prompt_name, setting_name, name, expected, other, bitwise=bitwise)


def _generate_otherwise(
    runtime: Runtime, plain: Transcript, prompt: Sequence[int], prompts: Sequence[Sequence[int]], number: int
) -> Iterator[tuple[str, Transcript, Transcript]]:
    """Generate what plain decoding said with every drafter; then as a user does, from the beginning and in another
    way. `number` chooses the way and the first gamma.

    Yields:
        A name for it, plain decoding of the same prompt from the beginning, and the generation.
    """
    params = plain.params
    drafters = drafters_of(runtime, [*prompt, *plain.tokens], accuracy=_SCRIPT_ACCURACY, seed=params.sampling.seed)
    for turn, (name, drafter) in enumerate(drafters.items(), start=number):
        gamma = GAMMAS[turn % len(GAMMAS)]
        nodes = min(_SCRIPT_BRANCHES * gamma, max(GAMMAS)) if "tree" in drafter.modes({}) else None
        yield name, plain, transcribe(runtime, prompt, replace(params, gamma=gamma, tree_nodes=nodes), drafter)
    own, owner, half = runtime.engine.drafter, object(), len(plain.tokens) // 2
    yield AS_LOADED, plain, transcribe(runtime, prompt, params, own, owner=owner)
    room = runtime.plan.target.batch - 1
    history = (NEXT_TURN, SAME_TURN, IN_A_BATCH)[number % (3 if room else 2)]
    if history == NEXT_TURN:
        # A quarter of the answer is kept, what is behind it is cut off, and as many other tokens are new.
        new = islice(cycle(prompt), half - half // 2)
        longer, shorter = [*prompt, *plain.tokens[: half // 2], *new], replace(params, max_new_tokens=half)
        following = transcribe(runtime, longer, shorter, own, owner=owner)
        yield history, transcribe(runtime, longer, shorter), following
    elif history == SAME_TURN:
        yield history, plain, transcribe(runtime, prompt, params, own, owner=owner)
    else:
        mates = [list(mate) for mate in islice(cycle(prompts), room)]
        yield history, plain, transcribe(runtime, prompt, params, own, mates=mates)


def compare(plain: Transcript, other: Transcript, *, bitwise: bool) -> Finding:
    """Find what differs between a generation and plain decoding, and whether rounding explains it.

    `bitwise` demands logits that are the same to the last bit, as passes on CUDA promise.
    """
    tokens = enumerate(zip_longest(plain.tokens, other.tokens))  # the end of the shorter one differs as well
    at = next((index for index, (expected, token) in tokens if expected != token), None)
    same_context = min(len(plain.rows), len(other.rows), len(plain.tokens) if at is None else at + 1)
    bits = torch.int16 if plain.rows.element_size() == 2 else torch.int32
    row, other_row = (one.rows[:same_context].view(bits) for one in (plain, other))
    differing = int((row != other_row).any(-1).sum())
    foreign = plain.foreign_tokens + other.foreign_tokens
    mismatch = None if at is None or at >= same_context else _measure(plain, other, at)
    if foreign or (bitwise and (differing or at is not None)):
        verdict = "defect"
    elif at is None:
        verdict = "identical"
    else:
        verdict = "near-tie" if mismatch is not None and mismatch.near_tie else "defect"
    return Finding(verdict, at, differing, foreign, mismatch)


def _measure(plain: Transcript, other: Transcript, at: int) -> Mismatch:
    """Measure how far the logits behind new token `at` are from those of plain decoding."""
    scale, row = 1 / (plain.params.sampling.temperature or 1.0), plain.rows[at]
    expected, token = plain.tokens[at], other.tokens[at]
    change = (row.float() - other.rows[at].float()) * scale
    swing, rounding = change[[expected, token]].abs().sum(), scale * _ROUNDING[row.dtype] * row.float().std()
    return Mismatch(expected, token, float(swing), float(change.std()), float(rounding))
