"""Runs whose KV cache cannot be page-locked in full: the same tokens, within every limit, the loss said beforehand."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from offload_runtime import plan as planning
from offload_runtime.config import SpeculationOptions
from offload_runtime.engine import Runtime
from offload_runtime.errors import BudgetError
from offload_runtime.plan import RunPlan, common_figures, pass_time, prefill_time, with_staging_rings
from offload_runtime.sizes import parse_bytes
from offload_runtime.stream import Registrar
from tests.helpers.engine import PROMPT, load, one_thread, refuse_weights  # noqa: F401 (an autouse fixture)
from tests.helpers.kv_runners import copying_threads
from tests.helpers.page_locking import LimitedRegistrar, load_locked_by
from tests.helpers.planning import load_streaming_kv, without_limit

TARGET = "deep_target"
NUM_LAYERS = 10
CONTEXT = 4096
NO_LIMIT = 1 << 60
LONG_PROMPT = [(7 * index) % 250 + 4 for index in range(750)]
NEW_TOKENS = 22  # behind 750 tokens a block becomes full


@pytest.fixture(scope="module")
def whole(target: Path) -> RunPlan:
    """The plan with all that is streamed on the host: every layer, and the keys and values of every layer."""
    with load(target, kv="host", resident_layers=0, draft="none", context=CONTEXT) as runtime:
        return runtime.plan


@pytest.fixture(scope="module")
def expected(target: Path) -> tuple[int, ...]:
    """Tokens without any streaming."""
    with load(target, draft="none", context=CONTEXT) as runtime:
        return tokens_of(runtime)


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    before = copying_threads()
    yield
    assert copying_threads() == before


def tokens_of(runtime: Runtime) -> tuple[int, ...]:
    return tuple(
        runtime.generate(LONG_PROMPT, max_new_tokens=NEW_TOKENS, temperature=0.8, seed=3, ignore_eos=True).tokens
    )


def on_host(registrar: LimitedRegistrar, target: Path, **options: Any) -> Runtime:
    return load_locked_by(registrar, target, **{"kv": "host", "context": CONTEXT, **options})


def least(plan: RunPlan) -> int:
    return with_staging_rings(plan.target, 0).ring_bytes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("share", "resident"), [(0.0, 3), (0.6, 0), (0.6, 3), (0.6, NUM_LAYERS), (0.9, 3), (1.0, NUM_LAYERS)]
)
def test_a_limit_is_kept(target: Path, whole: RunPlan, expected: tuple[int, ...], share: float, resident: int) -> None:
    model = whole.target
    kv_bytes, layer_bytes = model.host_kv_bytes, model.host_bytes_of_layers([0])
    limit = max(least(whole), int(share * (kv_bytes + (NUM_LAYERS - resident) * layer_bytes)))
    registrar = LimitedRegistrar(limit)
    with on_host(registrar, target, pinned=limit, resident_layers=resident) as runtime:
        assert tokens_of(runtime) == tokens_of(runtime) == expected
        plan = runtime.plan
        staged = plan.placement.staged_kv_layers
        assert registrar.most_locked_bytes <= plan.pinned_bytes <= limit
        assert (share == 1.0) == (not plan.is_staged)
        if share == 0.0:
            assert len(staged) == NUM_LAYERS
        if share == 0.6 and resident == NUM_LAYERS:
            assert 0 < len(staged) < NUM_LAYERS
        if staged:
            assert f"the KV cache of {len(staged)} layers" in runtime.placement
        stats = runtime.generate(PROMPT, max_new_tokens=2, ignore_eos=True).stats
        assert stats.pinned_bytes == registrar.locked_bytes <= plan.pinned_bytes
        assert (stats.pageable_bytes > 0) == plan.is_staged
        staged_kv_bytes = len(staged) * 2 * 49152  # two blocks of 700 tokens are full
        weight_bytes = len(plan.placement.staged_layers) * model.layer_bytes
        machine = replace(common_figures(), staging_gbps=15.0)
        decoding = pass_time(plan, machine, length_tokens=700, rows=1)
        assert decoding.staged_bytes == weight_bytes + staged_kv_bytes
        prefill = prefill_time(plan, machine, 700)
        assert prefill.staging_s == pytest.approx((weight_bytes + staged_kv_bytes) / 15e9)
        written_bytes = NUM_LAYERS * 2 * 49152
        assert prefill.link_bytes == decoding.weight_bytes + written_bytes
        assert (prefill.growth_s > 0) == (staged_kv_bytes < written_bytes)
    assert not registrar.locked


# --- what the system refuses


@pytest.mark.slow
def test_a_refusal_that_nobody_expected_says_what_to_ask_for(target: Path, expected: tuple[int, ...]) -> None:
    registrar = LimitedRegistrar(3_700_000)
    with on_host(registrar, target, resident_layers=NUM_LAYERS) as runtime:
        assert not runtime.plan.is_staged
        first = runtime.generate(LONG_PROMPT[:300], max_new_tokens=4, ignore_eos=True)
        with pytest.raises(BudgetError, match="could not grow") as caught:
            runtime.generate([*LONG_PROMPT, *LONG_PROMPT, *LONG_PROMPT], max_new_tokens=1)
        assert "shorten the prompt" in str(caught.value)
        again = runtime.generate(LONG_PROMPT[:300], max_new_tokens=4, ignore_eos=True)
        assert again.tokens == first.tokens
    asked = re.search(r"load again with --pinned (\S+), which stages the rest", str(caught.value))
    assert asked is not None
    limit = parse_bytes(asked[1])
    assert 3_400_000 < limit <= 3_700_000
    with on_host(registrar, target, resident_layers=NUM_LAYERS, pinned=limit) as runtime:
        assert runtime.plan.placement.staged_kv_layers
        assert tokens_of(runtime) == expected
        runtime.generate([*LONG_PROMPT, *LONG_PROMPT, *LONG_PROMPT], max_new_tokens=1)
    assert not registrar.locked


# --- what is refused, and what gives way

SMALL = {"budget_tokens": 256, "chunk_size": 8}


def test_triforce_needs_its_keys_and_values_page_locked(target: Path, one_layer_draft: Path, whole: RunPlan) -> None:
    kv_bytes = whole.target.host_kv_bytes
    registrar = LimitedRegistrar(NO_LIMIT)
    options = SpeculationOptions("triforce", **SMALL)
    with on_host(registrar, target, draft=one_layer_draft, speculation=options, pinned=kv_bytes) as runtime:
        assert runtime.plan.has_verifier
    with pytest.raises(BudgetError) as caught:
        on_host(
            registrar,
            target,
            draft=one_layer_draft,
            speculation=options,
            pinned=kv_bytes - 100_000,
            on_progress=refuse_weights,
        )
    said = str(caught.value)
    assert "no TriForce here" in said and "too little by 100.0 kB" in said and "--pinned page-locks" in said
    assert f"lower --context (now {CONTEXT})" in said and "--speculation chain" in said


@pytest.mark.gpu
def test_staged_keys_and_values_on_the_gpu(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All locked, half staged, all staged: bitwise the same on a GPU whose system locks no more."""
    options: dict[str, Any] = {"device": "cuda", "dtype": "bf16", "draft": "ngram", "kv": "host", "context": CONTEXT}
    with load_streaming_kv(target, **options, resident_layers=0) as runtime:
        plan = runtime.plan
        seen = [tokens_of(runtime)]
    kv_bytes = plan.target.host_kv_bytes
    assert kv_bytes > 0 and plan.pinned_bytes > kv_bytes
    for resident, share in ((0, 1.0), (0, 0.6), (0, 0.0), (NUM_LAYERS, 0.6), (NUM_LAYERS, 0.0)):
        weights_bytes = (NUM_LAYERS - resident) * plan.target.host_bytes_of_layers([0])
        limit = max(least(plan), int(share * (kv_bytes + weights_bytes)))
        registrar = LimitedRegistrar(limit, real=Registrar())
        asked = {**options, "resident_layers": resident, "pinned": limit}
        monkeypatch.setattr(planning, "find_plan", without_limit)
        with load_locked_by(registrar, target, **asked) as runtime:
            staged = len(runtime.plan.placement.staged_kv_layers)
            assert staged == {1.0: 0, 0.0: NUM_LAYERS}.get(share, staged) and (staged > 0) == (share < 1)
            seen += [tokens_of(runtime), tokens_of(runtime)]
            assert registrar.most_locked_bytes <= limit
        assert not registrar.locked
    assert all(tokens == seen[0] for tokens in seen)
