"""Runs on systems that lock too little memory, for weights or for keys and values: the same tokens, within every limit,
the loss said beforehand, refused before anything is read; locking block by block; and an embedding that is not the
head, on the host where that makes room for layers."""

import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from offload_runtime.config import RuntimeConfig, SpeculationOptions
from offload_runtime.engine import Runtime
from offload_runtime.errors import BudgetError, OptionError
from offload_runtime.hardware import load_profile
from offload_runtime.plan import search
from offload_runtime.plan.cost import pass_time, prefill_time
from offload_runtime.plan.search import plan_run, with_staging_rings
from offload_runtime.plan.sizes import PROCESS_BYTES, RunPlan, common_figures, describe_models
from offload_runtime.sizes import format_bytes, parse_bytes
from offload_runtime.stream.arena import HostArena, Registrar
from offload_runtime.stream.staging import ring_shape
from tests.helpers import engine as engines
from tests.helpers.assembly import copying_threads
from tests.helpers.page_locking import LimitedRegistrar, load_locked_by
from tests.helpers.planning import CONFIGS, load_streaming_kv, without_limit
from tests.test_weights_gguf import write

TARGET = "deep_target"
NUM_LAYERS = 10
NO_LIMIT = 1 << 60
NEW_TOKENS = 12


@pytest.fixture(scope="module")
def whole(target: Path) -> RunPlan:
    """The plan with every layer streamed."""
    with engines.load(target, resident_layers=0, draft="none") as runtime:
        return runtime.plan


@pytest.fixture(scope="module")
def layer_bytes(whole: RunPlan) -> int:
    return whole.target.host_bytes_of_layers([0])


@pytest.fixture(scope="module")
def expected(target: Path) -> list[int]:
    """Tokens without any streaming."""
    with engines.load(target, draft="none") as runtime:
        return list(tokens_of(runtime))


def tokens_of(runtime: Runtime) -> tuple[int, ...]:
    return runtime.generate(engines.PROMPT, max_new_tokens=NEW_TOKENS, temperature=0.8, seed=3, ignore_eos=True).tokens


@pytest.fixture
def nothing_left() -> Iterator[None]:
    before = threading.active_count()
    yield
    assert threading.active_count() == before


def staged_of(runtime: Runtime) -> tuple[int, ...]:
    return runtime.engine.target.placement.staged_layers


@pytest.mark.few(1)
@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("count", range(NUM_LAYERS + 1))
def test_a_refusal_anywhere_changes_no_token(target: Path, layer_bytes: int, expected: list[int], count: int) -> None:
    """The system refuses what nobody knew before: locks are moved, and make room for the ring."""
    limit = max(count * layer_bytes, 2 * ring_shape(layer_bytes).piece_bytes)
    registrar = LimitedRegistrar(limit)
    with load_locked_by(registrar, target, resident_layers=0) as runtime:
        assert list(tokens_of(runtime)) == expected
        staged = staged_of(runtime)
        assert (len(staged) == 0) == (count == NUM_LAYERS)
        assert registrar.locked_bytes <= limit
        assert runtime.engine.target.pinned_bytes == registrar.locked_bytes
        assert runtime.plan.placement.staged_layers == staged
        assert runtime.plan.pinned_bytes == registrar.locked_bytes
        if staged:
            assert f"{len(staged)} of 10 streamed layers are staged from pageable memory" in runtime.placement
            assert len(staged) <= NUM_LAYERS - count + 4  # the ring takes the place of four layers
        else:
            assert "staged" not in runtime.placement
    assert not registrar.locked


@pytest.mark.usefixtures("nothing_left")
def test_a_system_that_locks_nothing_is_told_so(target: Path) -> None:
    registrar = LimitedRegistrar(4096)
    with pytest.raises(BudgetError, match=r"refuses to page-lock even .* for the ring to stage layers through"):
        load_locked_by(registrar, target, resident_layers=0)
    with pytest.raises(BudgetError, match=r"refuses to page-lock even .* and take --kv gpu"):
        load_locked_by(registrar, target, resident_layers=0, kv="host")
    assert not registrar.locked


@pytest.mark.usefixtures("nothing_left")
def test_bytes_cross_the_link_once(target: Path, layer_bytes: int) -> None:
    with load_locked_by(LimitedRegistrar(5 * layer_bytes), target, resident_layers=0) as runtime:
        assert staged_of(runtime)
        engine = runtime.engine.target.cards[0].engine
        engine.drain()
        before = engine.bytes_copied
        result = runtime.generate(engines.PROMPT, max_new_tokens=4, ignore_eos=True)
        engine.drain()
        assert engine.bytes_copied - before == (result.stats.passes + 1) * result.stats.bytes_per_pass
        assert result.stats.pinned_bytes == runtime.engine.target.pinned_bytes > 0
        assert result.stats.link_peak_gbps


# --- budgets


def refused(target: Path, **options: Any) -> str:
    with pytest.raises(BudgetError) as caught:
        Runtime.load(target, device="cpu", draft="none", on_progress=engines.refuse_weights, **options)
    return str(caught.value)


def lock_refused(target: Path, **options: Any) -> str:
    with pytest.raises(BudgetError) as caught:
        load_locked_by(LimitedRegistrar(NO_LIMIT), target, on_progress=engines.refuse_weights, **options)
    return str(caught.value)


@pytest.mark.usefixtures("nothing_left")
def test_too_little_host_memory_is_refused_before_anything_is_read(target: Path) -> None:
    said = refused(target, ram=PROCESS_BYTES + 10_000, resident_layers=0)
    size = format_bytes(PROCESS_BYTES)
    assert f"--ram of {size} is too small by" in said and "streamed layers" in said
    assert f"Python and libraries {size}" in said and "What would do: with --ram" in said and "--vram" not in said
    said = refused(target, ram=PROCESS_BYTES + 10_000, kv="host", context=400)
    assert "with --ram" in said and "KV cache" in said


@pytest.mark.usefixtures("nothing_left")
def test_too_little_page_locked_memory_is_refused_before_anything_is_read(target: Path, layer_bytes: int) -> None:
    least = 2 * ring_shape(layer_bytes).piece_bytes
    message = lock_refused(target, resident_layers=0, pinned=least - 1)
    assert "--pinned page-locks" in message and "too little by 1 B" in message and "it fits" in message
    message = lock_refused(target, kv="host", context=400, pinned=1000)
    assert "pieces to write the KV cache through" in message and "with --kv gpu it fits" in message


def test_a_limit_that_means_nothing_is_refused(target: Path) -> None:
    with pytest.raises(OptionError, match="--pinned does nothing on a CPU"):
        Runtime.load(target, device="cpu", pinned="1GB")


# --- on a GPU


@pytest.mark.gpu
def test_staged_tokens_on_the_gpu(target: Path, layer_bytes: int) -> None:
    """Nothing staged, half of it, nearly all: bitwise the same on a GPU whose system refuses to lock more."""
    options: dict[str, Any] = {"device": "cuda", "resident_layers": 0, "dtype": "bf16"}
    seen = []
    for count in (NUM_LAYERS, NUM_LAYERS // 2, 2):
        registrar = LimitedRegistrar(count * layer_bytes, real=Registrar())
        with load_locked_by(registrar, target, **options) as runtime:
            assert (not staged_of(runtime)) == (count == NUM_LAYERS)
            seen += [tokens_of(runtime), tokens_of(runtime)]
        assert not registrar.locked
    assert all(tokens == seen[0] for tokens in seen)


@pytest.mark.gpu
def test_a_refusal_by_cuda_does_not_fail_the_next_kernel() -> None:
    registrar = Registrar()
    arena = HostArena(1 << 20, name="layer 0")
    arena.pin(registrar)
    assert registrar.register(arena.buffer.data_ptr(), arena.nbytes) != 0  # it is locked already
    assert int(torch.ones(3, device="cuda").sum()) == 3
    arena.close()


@pytest.mark.gpu
def test_blocks_side_by_side_are_copied_in_pieces() -> None:
    from offload_runtime.stream.queue import COPY_PIECE_BYTES, CudaCopyEngine

    arena = HostArena(3 * COPY_PIECE_BYTES + 12345, name="layer 0")
    arena.buffer.copy_(torch.randint(0, 256, (arena.nbytes,), dtype=torch.uint8))
    assert arena.lock(Registrar(), COPY_PIECE_BYTES) == 0
    gpu = torch.zeros(arena.nbytes, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    engine = CudaCopyEngine(torch.device("cuda"))
    free, ready = engine.new_event(), engine.new_event()
    engine.enqueue([(gpu, arena.buffer)], free=free, ready=ready)
    engine.compute_wait(ready)
    assert torch.equal(gpu.cpu(), arena.buffer)
    engine.close()
    arena.close()


LONG_PROMPT = [3 + 7 * i * i % 290 for i in range(300)]
# Rows, columns, and what is left over: of a GPU the driver's share is not the same for two runs.
SIZES = {"cpu": (2048, 64, 0), "cuda": (131072, 512, 34 << 20)}
CASES = [("cpu", "plain"), *(pytest.param("cuda", how, marks=pytest.mark.gpu) for how in ("plain", "coded", "Q8_0"))]


def answer_of(runtime: Runtime) -> list[int]:
    return list(runtime.generate(LONG_PROMPT, max_new_tokens=24, temperature=0.8, seed=3, ignore_eos=True).tokens)


@pytest.mark.parametrize(("device", "stored"), CASES)
def test_tokens_and_sizes_are_those_of_a_plan_that_has_it_on_the_host(device: str, stored: str, tmp_path: Path) -> None:
    vocab_size, columns, slack_bytes = SIZES[device]
    config = transformers.LlamaConfig(
        vocab_size=vocab_size, hidden_size=columns, intermediate_size=2 * columns, num_hidden_layers=6,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=1024, tie_word_embeddings=False,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():  # so that tokens depend on what was read
        model.model.embed_tokens.weight.normal_(0, 0.5)
    engines.byte_level_tokenizer().save_pretrained(tmp_path)
    path = write(tmp_path / "m.gguf", model, kind="Q8_0", vocabulary={}) if stored == "Q8_0" else tmp_path
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    asked: dict[str, Any] = {"device": device, "context": 512, "draft": "ngram", "tree_nodes": 16, "kv": "gpu"}
    asked |= {"dtype": "bf16" if device == "cuda" else "fp32", "encode": "always" if stored == "coded" else "none"}
    asked |= {"weights": "stored"} if stored == "Q8_0" else {}
    for resident in (None, 0):  # whole passes are captured where nothing is streamed
        with Runtime.load(path, resident_layers=resident, **asked) as runtime:
            expected, plan = answer_of(runtime), runtime.plan
            assert "embedding" not in plan.host and "embedding and head" in plan.device
        own_bytes = plan.target.layout.embedding.total_bytes
        limit_bytes = plan.device_bytes - own_bytes + slack_bytes
        asked_less = {**asked, "resident_layers": resident, "vram": limit_bytes}
        registrar = LimitedRegistrar(1 << 60, real=Registrar() if device == "cuda" else None)
        with load_locked_by(registrar, path, **asked_less) as runtime:
            assert answer_of(runtime) == answer_of(runtime) == expected
            smaller, budget = runtime.plan, runtime.engine.budgets[0]
            assert bool(smaller.placement.streamed_layers) == (resident == 0)
            assert smaller.captured_bytes == plan.captured_bytes
            assert 0 <= smaller.host["embedding"] - own_bytes < 4096 and "embedding and head" not in smaller.device
            assert budget.reserved_bytes <= smaller.device_bytes <= limit_bytes
            assert budget.reservations["target: head"] == smaller.device["head"]
            assert own_bytes <= runtime.engine.target.pinned_bytes == registrar.locked_bytes == smaller.pinned_bytes
        assert not registrar.locked
        with pytest.raises(BudgetError, match=r"could not page-lock .* for the embedding .* lower --pinned"):
            load_locked_by(LimitedRegistrar(4096), path, **asked_less)


def test_a_plan_has_it_where_a_pass_brings_less() -> None:
    card = load_profile("rtx4090")

    def planned(name: str, **options: Any) -> Any:
        asked: dict[str, Any] = {"draft": "none", "context": 8192, "kv": "gpu", **options}
        return plan_run(describe_models(RuntimeConfig(str(CONFIGS / name), **asked)), card)

    def nowhere_else(plan: Any) -> bool:
        return "embedding" not in plan.host and "embedding and head" in plan.device

    streamed, kept = planned("llama-3.1-8b", vram="12GB"), planned("llama-3.1-8b", vram="12GB", pinned="1GB")
    embedding_bytes = 128256 * 4096 * 2
    assert streamed.page_locked["embedding"] == streamed.host["embedding"] == embedding_bytes
    assert streamed.device["head"] == embedding_bytes + 8192  # and the last norm
    assert nowhere_else(kept) and kept.is_staged  # it may not be page-locked
    assert kept.streamed_bytes - streamed.streamed_bytes >= 2 * streamed.target.layer_bytes
    assert nowhere_else(planned("llama-3.1-8b")) and not planned("llama-3.1-8b").streamed_bytes
    assert nowhere_else(planned("llama-3.2-1b", vram="3GB"))  # which is the head too


KV_CONTEXT = 4096
BOOK = [(7 * index) % 250 + 4 for index in range(750)]
LONG_TOKENS = 22  # behind 750 tokens a block becomes full


@pytest.fixture(scope="module")
def wanted(target: Path) -> RunPlan:
    """The plan with all that is streamed on the host: every layer, and the keys and values of every layer."""
    with engines.load(target, kv="host", resident_layers=0, draft="none", context=KV_CONTEXT) as runtime:
        return runtime.plan


@pytest.fixture(scope="module")
def resident_tokens(target: Path) -> tuple[int, ...]:
    """Tokens without any streaming."""
    with engines.load(target, draft="none", context=KV_CONTEXT) as runtime:
        return long_tokens_of(runtime)


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    before = copying_threads()
    yield
    assert copying_threads() == before


def long_tokens_of(runtime: Runtime) -> tuple[int, ...]:
    return tuple(runtime.generate(BOOK, max_new_tokens=LONG_TOKENS, temperature=0.8, seed=3, ignore_eos=True).tokens)


def on_host(registrar: LimitedRegistrar, target: Path, **options: Any) -> Runtime:
    return load_locked_by(registrar, target, **{"kv": "host", "context": KV_CONTEXT, **options})


def least(plan: RunPlan) -> int:
    return with_staging_rings(plan.target, 0).ring_bytes


@pytest.mark.slow
@pytest.mark.parametrize(("share", "stay"), [(0.0, 3), (0.6, NUM_LAYERS), (0.9, 3), (1.0, NUM_LAYERS)])
def test_limits_hold(target: Path, wanted: RunPlan, resident_tokens: tuple[int, ...], share: float, stay: int) -> None:
    model = wanted.target
    kv_bytes, layer_bytes = model.host_kv_bytes, model.host_bytes_of_layers([0])
    limit = max(least(wanted), int(share * (kv_bytes + (NUM_LAYERS - stay) * layer_bytes)))
    registrar = LimitedRegistrar(limit)
    with on_host(registrar, target, pinned=limit, resident_layers=stay) as runtime:
        assert long_tokens_of(runtime) == long_tokens_of(runtime) == resident_tokens
        plan = runtime.plan
        staged = plan.placement.staged_kv_layers
        assert registrar.most_locked_bytes <= plan.pinned_bytes <= limit
        assert (share == 1.0) == (not plan.is_staged)
        if share == 0.0:
            assert len(staged) == NUM_LAYERS
        if share == 0.6 and stay == NUM_LAYERS:
            assert 0 < len(staged) < NUM_LAYERS
        if staged:
            assert f"the KV cache of {len(staged)} layers" in runtime.placement
        stats = runtime.generate(engines.PROMPT, max_new_tokens=2, ignore_eos=True).stats
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
def test_a_refusal_that_nobody_expected_says_what_to_ask_for(target: Path, resident_tokens: tuple[int, ...]) -> None:
    registrar = LimitedRegistrar(3_700_000)
    with on_host(registrar, target, resident_layers=NUM_LAYERS) as runtime:
        assert not runtime.plan.is_staged
        first = runtime.generate(BOOK[:300], max_new_tokens=4, ignore_eos=True)
        with pytest.raises(BudgetError, match="could not grow") as caught:
            runtime.generate([*BOOK, *BOOK, *BOOK], max_new_tokens=1)
        assert "shorten the prompt" in str(caught.value)
        again = runtime.generate(BOOK[:300], max_new_tokens=4, ignore_eos=True)
        assert again.tokens == first.tokens
    asked = re.search(r"load again with --pinned (\S+), which stages the rest", str(caught.value))
    assert asked is not None
    limit = parse_bytes(asked[1])
    assert 3_400_000 < limit <= 3_700_000
    with on_host(registrar, target, resident_layers=NUM_LAYERS, pinned=limit) as runtime:
        assert runtime.plan.placement.staged_kv_layers
        assert long_tokens_of(runtime) == resident_tokens
        runtime.generate([*BOOK, *BOOK, *BOOK], max_new_tokens=1)
    assert not registrar.locked


# --- what is refused, and what gives way

SMALL = {"budget_tokens": 256, "chunk_size": 8}


def test_triforce_needs_page_locked_keys(target: Path, one_layer_draft: Path, wanted: RunPlan) -> None:
    kv_bytes = wanted.target.host_kv_bytes
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
            on_progress=engines.refuse_weights,
        )
    said = str(caught.value)
    assert "no TriForce here" in said and "too little by 100.0 kB" in said and "--pinned page-locks" in said
    assert f"lower --context (now {KV_CONTEXT})" in said and "--speculation chain" in said


@pytest.mark.gpu
def test_staged_keys_and_values_on_the_gpu(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All locked, half staged, all staged: bitwise the same on a GPU whose system locks no more."""
    options: dict[str, Any] = {"device": "cuda", "dtype": "bf16", "draft": "ngram", "kv": "host", "context": KV_CONTEXT}
    with load_streaming_kv(target, **options, resident_layers=0) as runtime:
        plan = runtime.plan
        seen = [long_tokens_of(runtime)]
    kv_bytes = plan.target.host_kv_bytes
    assert kv_bytes > 0 and plan.pinned_bytes > kv_bytes
    for resident, share in ((0, 1.0), (0, 0.6), (0, 0.0), (NUM_LAYERS, 0.6), (NUM_LAYERS, 0.0)):
        weights_bytes = (NUM_LAYERS - resident) * plan.target.host_bytes_of_layers([0])
        limit = max(least(plan), int(share * (kv_bytes + weights_bytes)))
        registrar = LimitedRegistrar(limit, real=Registrar())
        asked = {**options, "resident_layers": resident, "pinned": limit}
        monkeypatch.setattr(search, "find_plan", without_limit)
        with load_locked_by(registrar, target, **asked) as runtime:
            staged = len(runtime.plan.placement.staged_kv_layers)
            assert staged == {1.0: 0, 0.0: NUM_LAYERS}.get(share, staged) and (staged > 0) == (share < 1)
            seen += [long_tokens_of(runtime), long_tokens_of(runtime)]
            assert registrar.most_locked_bytes <= limit
        assert not registrar.locked
    assert all(tokens == seen[0] for tokens in seen)
