"""TriForce over an answer that crosses many blocks: plain decoding's tokens, wherever a window is rejected."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from offload_runtime.config import SpeculationOptions
from offload_runtime.engine import Runtime
from offload_runtime.speculation import DraftRequest, Proposal
from tests.helpers.dense_levels import count_accepted
from tests.helpers.engine import load, one_thread  # noqa: F401 (an autouse fixture)
from tests.helpers.levels_together import verifier_of
from tests.helpers.trees import Watched

# From 512 tokens on there is something far: at the end two blocks, each of which came while decoding.
CONTEXT, COUNT, GAMMA = 1280, 300, 4
PROMPT = [3 + (7 * i * i + i // 5) % 290 for i in range(1000)]
START = PROMPT[:490]
OPTIONS = SpeculationOptions("triforce", "full", chunk_size=8, budget_tokens=96, gamma_draft=2, refresh_steps=2)


@pytest.fixture(scope="module", params=["two_layer_target", "mha_target"])
def target(request: pytest.FixtureRequest) -> Path:
    path: Path = request.getfixturevalue(request.param)
    return path


class Watch(Watched):
    """Keeps what a runtime proposed to its target, and how many blocks chunks were chosen from.

    Args:
        runtime: Which it proposes to from now on.
    """

    def __init__(self, runtime: Runtime) -> None:
        super().__init__(runtime.parts.proposer)
        self.far_blocks: set[int] = set()
        self._cache = verifier_of(runtime).cache
        runtime.parts = replace(runtime.parts, proposer=self)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        proposals = super().propose(requests)
        self.far_blocks.add(self._cache.recent[0].start)
        return proposals


def generate(runtime: Runtime, temperature: float, gamma: int | None = None) -> list[int]:
    tokens: list[int] = runtime.generate(
        START, max_new_tokens=COUNT, temperature=temperature, seed=3, ignore_eos=True, gamma=gamma
    ).tokens
    return tokens


@pytest.mark.slow
def test_a_rejection_at_every_place_and_new_chunks_in_between(target: Path, draft: Path) -> None:
    with (
        load(target, draft="none", context=CONTEXT) as plain,
        load(target, draft=draft, context=CONTEXT, kv="host", speculation=OPTIONS, max_gamma=GAMMA) as runtime,
    ):
        # How heads share keys and how tokens are chosen have nothing to do with each other.
        temperature = 0.6 if runtime.config.num_kv_heads == 2 else 0.0
        expected = generate(plain, temperature)
        watch = Watch(runtime)
        assert generate(runtime, temperature, GAMMA) == expected
        truth = START + expected
        accepted = {
            count_accepted(list(proposal.tokens), truth[len(request.tokens) :])
            for ((request, proposal),) in watch.rounds
            if len(proposal) == GAMMA
        }
        assert accepted == set(range(GAMMA + 1))
        assert watch.far_blocks == {0, 1, 2}


@pytest.mark.slow
@pytest.mark.parametrize("target", ["two_layer_target"], indirect=True)
def test_batches_that_cross_blocks_at_different_times(target: Path, draft: Path) -> None:
    """Prompts of no multiple of anything; each size of the batch has its own mixture of accepted windows."""
    prompts = [PROMPT[:489], PROMPT[100:865], PROMPT[50:61]]
    asked = {"max_new_tokens": 36, "temperature": 0.6, "seed": 3, "ignore_eos": True}
    with (
        load(target, draft="none", context=CONTEXT, max_batch=3) as plain,
        load(
            target, draft=draft, context=CONTEXT, kv="host", speculation=OPTIONS, max_gamma=GAMMA, max_batch=3
        ) as runtime,
    ):
        for chosen in (prompts, prompts[:2], prompts[2:]):
            expected = plain.generate_batch(chosen, **asked)
            together = runtime.generate_batch(chosen, gamma=GAMMA, **asked)
            assert [result.tokens for result in together] == [result.tokens for result in expected]
            assert len(chosen) < 3 or len({result.stats.passes for result in together}) > 1, "ragged"
