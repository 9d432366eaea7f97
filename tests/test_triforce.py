"""TriForce on a small model: the tokens of plain decoding, whatever the levels say."""

from __future__ import annotations

from pathlib import Path

import pytest

from offload_runtime.config import SpeculationOptions
from offload_runtime.engine import Runtime
from offload_runtime.errors import OptionError
from tests.helpers.engine import load, one_thread  # noqa: F401 (an autouse fixture)

TARGET = "long_target"
CONTEXT, COUNT = 700, 28
PROMPT = [3 + (7 * i * i + i // 5) % 290 for i in range(500)]


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_retrieval_verifier_that_sees_everything_is_right_in_every_generation(target: Path, device: str) -> None:
    """Also where steps are replays of what an earlier generation captured, and chunks are chosen in some steps only."""
    options = SpeculationOptions("triforce", budget_tokens=512, refresh_steps=3)
    with Runtime.load(
        target, draft="none", device=device, dtype="fp32", context=CONTEXT, kv="host", speculation=options
    ) as runtime:
        for seed in (1, 1, 2, 1):
            result = runtime.generate(
                PROMPT, max_new_tokens=COUNT, ignore_eos=True, gamma=19, temperature=0.6, seed=seed
            )
            assert result.stats.passes <= 3  # a near-tie may cost one of the two that are needed


def test_what_triforce_cannot_do_is_refused_before_loading(target: Path) -> None:
    with pytest.raises(OptionError, match="4096 tokens is more than the context of 700"):
        load(target, draft="none", context=CONTEXT, speculation=SpeculationOptions("triforce")).__enter__()
