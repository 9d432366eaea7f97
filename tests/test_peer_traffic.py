"""Keys and values over the link in a comparison, of transformers and of ours, and what ours says of its windows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import compare
import measurement
import ours_runtime
import psutil
import pytest
import systems
import torch
from common import PeerOptions, options_from, peer_parser
from measurement import measure_peer
from models import load_draft
from offloaded_cache import MendedCache, offloaded_traffic, pinned_bytes, require_host_memory, return_outgrown_blocks
from ours_runtime import OurOptions
from runs import KVTraffic, Run, asked_generations, figures
from transformers.cache_utils import DynamicLayer

from offload_runtime.config import ModelConfig
from offload_runtime.engine import Runtime
from offload_runtime.errors import BudgetError
from offload_runtime.weights import open_checkpoint
from tests.helpers.engine import one_thread  # noqa: F401 (an autouse fixture)
from tests.helpers.peers import (
    NEW_TOKENS,
    PROMPT_TOKENS,
    SHORT,
    draft_of,
    one_result,
    peer_options,
    prepare,
)

TARGET = "widened_target"


class FakeStream:
    """A CUDA stream where there is none: everything happens at once."""

    def wait_stream(self, other: Any) -> None:
        """Nothing is in flight."""

    def __enter__(self) -> None:
        """Copies happen where they are asked for."""

    def __exit__(self, *error: Any) -> None:
        """Nothing to wait for."""


@pytest.fixture
def crossing(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """What transformers' offloaded cache moves, counted at its own calls, on the CPU."""
    moved = {"to_device": 0, "to_host": 0}

    def nbytes(layer: Any) -> int:
        return int(layer.keys.nbytes + layer.values.nbytes) if layer.is_initialized else 0

    def prefetch(layer: Any) -> None:
        moved["to_device"] += nbytes(layer)

    def offload(layer: Any) -> None:
        moved["to_host"] += nbytes(layer)

    monkeypatch.setattr(torch, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda *_: FakeStream())
    monkeypatch.setattr(DynamicLayer, "prefetch", prefetch)
    monkeypatch.setattr(DynamicLayer, "offload", offload)
    return moved


class Offloading(PeerOptions):
    """Options of a peer whose keys and values cross the link, although there is none."""

    offloads_cache = True


def offloading(options: PeerOptions) -> Offloading:
    return Offloading(**vars(options))


@pytest.mark.parametrize("assistant", [None, 3])
@pytest.mark.parametrize("chunk", ["0", "5"])
def test_what_the_offloaded_cache_moves_is_told_from_lengths(
    target: Path, assistant: int | None, chunk: str, crossing: dict[str, int]
) -> None:
    """A pass brings each layer once, and the first layer already for the next pass."""
    pytest.importorskip("accelerate")
    options = offloading(peer_options(target, "--prefill-chunk", chunk, *(draft_of(target) if assistant else ())))
    prepared, draft = prepare(options), load_draft(options)
    generate, caches = prepared.model.generate, list[Any]()

    def noted(ids: torch.Tensor, *, past_key_values: Any, **given: Any) -> torch.Tensor:
        caches.append(past_key_values)
        found: torch.Tensor = generate(ids, past_key_values=past_key_values, **given)
        return found

    prepared.model.generate = noted
    measurement.chunk_prompts(prepared, draft, options)
    marks: list[dict[str, int]] = []

    class Clock(measurement.RoundClock):
        def put(self, value: torch.Tensor) -> None:
            marks.append(dict(crossing))
            super().put(value)

    (asked,) = [one for one in asked_generations(options) if one.measured]
    clock = Clock(options.device, sample_memory=False)
    if draft is not None:
        measurement.set_assistant(draft, assistant)
    run = measurement.generate_once(prepared, options, asked, draft, clock)
    assert run.kv is not None and len(run.counts) >= 3 and isinstance(caches[0], MendedCache)
    # Marks: the prompt, the first round, …, the last one. Of the layer that is brought ahead of its pass the first
    # pass found the prompt's keys on the device, and the last one left its own there, dropped proposals included.
    moved = {way: marks[-1][way] - marks[1][way] for way in crossing}
    layer_bytes = options.source.config().kv_bytes_per_token(4) // options.layers
    ahead = caches[0].layers[0].keys.shape[-2] - (PROMPT_TOKENS + run.counts[0] - 1)
    if draft is None:
        assert moved == {"to_device": run.kv.to_device + ahead * layer_bytes, "to_host": run.kv.to_host}
    else:
        assert abs(moved["to_device"] - run.kv.to_device - ahead * layer_bytes) <= 3 * layer_bytes


@pytest.mark.parametrize(("free_share", "returned"), [(2.1, []), (1.9, [300, 256, 256])])
def test_blocks_left_by_a_growing_cache_are_returned_where_memory_is_short(
    target: Path, monkeypatch: pytest.MonkeyPatch, free_share: float, returned: list[int]
) -> None:
    """Between the pieces of a prompt only; and the cache is refused where even that is not enough."""
    options = peer_options(target)
    config = options.source.config()
    tokens = PROMPT_TOKENS + NEW_TOKENS  # of 4 heads of 24 channels in fp32: 8448 bytes, 16 KiB
    size_bytes = 2 * config.num_layers * 16384
    assert pinned_bytes(config, 4, tokens) == size_bytes
    even = replace(config, num_kv_heads=4, head_dim=32)  # 512 bytes a token
    assert pinned_bytes(even, 4, 256) == 2 * config.num_layers * 131072 == pinned_bytes(even, 4, 257) // 2
    memory = SimpleNamespace(available=int(free_share * size_bytes), total=int(1.5 * size_bytes))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    require_host_memory(options)
    model, seen = torch.nn.Module(), list[int]()
    model.forward = lambda input_ids: None  # type: ignore[method-assign]
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: seen.append(length), raising=False)
    note = return_outgrown_blocks(model, options)  # type: ignore[arg-type]
    assert (note is not None) == bool(returned)
    for length in (300, 256, 255, 64, 1, 256):
        model(input_ids=torch.zeros(1, length))
    assert seen == returned
    memory.total -= 1
    with pytest.raises(BudgetError, match=r"offloaded KV cache takes up to 245\.8 kB .* this machine has 245\.8 kB"):
        require_host_memory(options)


def test_a_cache_that_no_memory_can_hold_is_refused_before_anything_is_loaded(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=1000, available=1000))
    with pytest.raises(BudgetError, match="leave this system out"):
        measure_peer(lambda _: pytest.fail("loaded something"), offloading(peer_options(target)))


def test_sliding_windows_leave_the_traffic_unknown(target: Path) -> None:
    config: ModelConfig = open_checkpoint(target).config()
    assert offloaded_traffic(config, 2, prompt_tokens=100, counts=(1, 1, 3)) == KVTraffic(
        (100 + 101) * config.kv_bytes_per_token(2), (101 + 104) * config.kv_bytes_per_token(2)
    )
    windowed = replace(config, layer_windows=(*config.layer_windows[:-1], 64))
    assert offloaded_traffic(windowed, 2, prompt_tokens=100, counts=(1, 1, 3)) is None


def test_keys_and_values_count_for_the_link_and_its_bound_where_they_are_known() -> None:
    runs = [
        Run(0, 0.0, (1.0, 3.0), (1, 1), (1, 2), KVTraffic(6 * 10**9, 10**9)),
        Run(0, 0.0, (1.0, 5.0), (1, 1, 1)[:2], (1, 2), KVTraffic(8 * 10**9, 3 * 10**9)),
    ]
    found = figures(runs, weight_bytes=2 * 10**9, peak_gbps=10.0)
    assert found["streamed"] == {"weights": 2 * 10**9, "kv": 7 * 10**9, "kv_to_host": 2 * 10**9}
    assert found["bytes_per_pass"] == 9 * 10**9 and found["bound"]["s_per_pass"] == pytest.approx(0.9)
    assert found["link_gbps"] == 10 / 4
    unknown = figures([*runs, replace(runs[0], kv=None)], weight_bytes=2 * 10**9, peak_gbps=10.0)
    assert unknown["streamed"] == {"weights": 2 * 10**9, "kv": None, "kv_to_host": None}
    assert unknown["bytes_per_pass"] == 2 * 10**9


def test_the_bound_leaves_out_systems_whose_keys_and_values_are_unknown_and_the_table_says_so() -> None:
    note = "GB/s and bound: weights only, because x"
    results = {"a": one_result(2.0, 3 * 10**9, None, (note, "another")), "b": one_result(1.0, 12 * 10**9, 10**9)}
    bound = systems.link_bound(results)
    assert bound is not None and bound["bytes_per_pass"] == 12 * 10**9 and bound["tok_per_s"] == 5.0
    assert systems.link_bound({"a": results["a"]}) is None
    lines = systems.table({"results": results, "times_ours_over": {}, "bound": bound, "agreement": None}).splitlines()
    assert lines[2].strip() == note and lines[3].startswith("b ") and "another" not in "".join(lines)


KV_BLOCK = 256


def measure_ours(target: Path, own: OurOptions, *others: str) -> dict[str, Any]:
    """`ours_runtime.py` on 600 random tokens, all layers resident."""
    given = ["--target", str(target), "--device", "cpu", "--dtype", "fp32", "--prompt-tokens", "600", *SHORT]
    given += ["--new-tokens", "12", "--repeats", "1", "--resident-layers", "all", "--vram", "2GB", *others]
    return ours_runtime.measure(options_from(peer_parser("").parse_args(given)), own)


@pytest.mark.few(1)
@pytest.mark.parametrize("resident", [0, 2])
def test_streamed_keys_and_values_of_ours_are_in_its_bytes(two_layer_target: Path, resident: int) -> None:
    own = OurOptions(draft="none", speculation="auto", gamma=None, tree_nodes=None, kv="host")
    found = measure_ours(two_layer_target, own, "--vram", "all", "--resident-layers", str(resident))
    options = peer_options(two_layer_target, "--prompt-tokens", "600")
    kv_bytes = 600 // KV_BLOCK * KV_BLOCK * options.source.config().kv_bytes_per_token(4)
    weights = found["streamed"]["weights"]
    assert found["streamed"] == {"weights": weights, "kv": kv_bytes, "kv_to_host": 0} and bool(weights) == (
        not resident
    )
    assert found["bytes_per_pass"] == weights + kv_bytes
    assert found["speculation"]["levels"] == [] and found["speculation"]["windows"] == {"plain": 11}
    assert found["settings"]["warmup_prompt_tokens"] == 3 and found["differing_generations"] == 0
    with Runtime.load(
        two_layer_target, draft="none", device="cpu", dtype="fp32", context=612, kv="host", resident_layers=resident
    ) as runtime:  # fmt: skip
        stats = runtime.generate(list(options.prompts[0]), max_new_tokens=12, ignore_eos=True).stats
    assert stats.bytes_per_pass == found["bytes_per_pass"]


@pytest.mark.slow
def test_ours_says_its_windows_and_the_acceptance_of_every_level(two_layer_target: Path, one_layer_draft: Path) -> None:
    own = OurOptions(
        draft=str(one_layer_draft), speculation="triforce", gamma=3, tree_nodes=None, kv="host", budget_tokens=64,
        draft_cache="streaming",
    )  # fmt: skip
    found = measure_ours(two_layer_target, own, "--repeats", "2", "--vram", "all")
    told, passes = found["speculation"], sum(run["passes"] for run in found["runs"])
    assert sum(told["windows"].values()) == passes and set(told["windows"]) <= {"chain 3", "plain"}
    draft, verifier = told["levels"]
    assert (draft["proposed_by"], draft["verified_by"]) == ("draft", "retrieval") and draft["proposed"] > 0
    assert (verifier["proposed_by"], verifier["verified_by"]) == ("retrieval", "target")
    assert verifier["accepted"] == told["accepted"] and verifier["proposed"] == told["proposed"] > 0
    assert verifier["rate"] == told["acceptance"] and 0 <= draft["rate"] < 1
    assert found["settings"]["budget_tokens"] == 64 and found["settings"]["draft_cache"] == "streaming"
    assert found["streamed"]["kv"] > 0
    (note,) = found["notes"]
    assert note.startswith("GB/s and bound: without the chunks")
    roomy = measure_ours(two_layer_target, own)
    assert roomy["streamed"]["kv"] == 0 and roomy["notes"] == [], "nothing is gathered from the host where all fits"
    plain = measure_ours(two_layer_target, replace(own, draft="none", speculation="none", budget_tokens=None,
                                              draft_cache=None, gamma=None))  # fmt: skip
    assert found["tokens"] == plain["tokens"] and plain["notes"] == []


def test_ours_names_the_cards_that_it_ran_on(two_layer_target: Path) -> None:
    own = OurOptions(draft="none", speculation="auto", gamma=None, tree_nodes=None, kv="auto", devices="cpu,cpu")
    machine = measure_ours(two_layer_target, own)["machine"]
    assert machine["device"] == "cpu" and machine["cards"] == [{"device": "cpu"}] * 2


def test_options_of_transformers_are_refused_by_ours(capsys: pytest.CaptureFixture[str]) -> None:
    assert ours_runtime.main(["--shape", "tiny", "--device", "cpu", "--prefill-chunk", "4"]) == 2
    assert "--prefill-chunk are transformers'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--budget-tokens", "64", "--speculation", "chain"], "--budget-tokens 64 does nothing with --speculation"),
        (["--draft-cache", "streaming"], "--draft-cache streaming does nothing without a draft model"),
        (["--budget-tokens", "66", "--speculation", "triforce"], "not made of whole chunks"),
        (["--systems", "accelerate", "--budget-tokens", "64"], "--budget-tokens is for none of accelerate"),
        (["--systems", "ours", "--prefill-chunk", "64"], "--prefill-chunk is for none of ours"),
        (["--systems", "accelerate", "--devices", "cpu,cpu"], "--devices is for none of accelerate"),
    ],
)
def test_compare_refuses_options_that_nothing_would_use(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare.main(["--synthetic", "tiny", "--device", "cpu", "--no-chart", *arguments]) == 2
    told = capsys.readouterr().err
    assert words in told.splitlines()[-1] and "(1 of" not in told
