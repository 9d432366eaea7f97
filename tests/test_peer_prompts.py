"""How the systems of a comparison read prompts: warm-ups that are shorter, and long ones in chunks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import common
import compare
import measurement
import pytest
import torch
from common import options_from, peer_parser
from measurement import measure, measure_peer, read_in_chunks
from models import load_draft, prefill_bytes
from runs import Run, asked_generations, num_differing_of

from offload_runtime.errors import OptionError
from tests.helpers.engine import one_thread  # noqa: F401 (an autouse fixture)
from tests.helpers.peers import (
    NEW_TOKENS,
    PROMPT_TOKENS,
    SHORT,
    draft_of,
    peer_options,
    prepare,
)

TARGET = "widened_target"


@pytest.mark.slow
def test_warm_ups_may_be_shorter_and_are_not_measured_against(target: Path) -> None:
    seen: list[tuple[int, int]] = []

    def watched(options: Any) -> Any:
        prepared = prepare(options)
        generate = prepared.model.generate

        def noted(ids: torch.Tensor, **given: Any) -> torch.Tensor:
            found: torch.Tensor = generate(ids, **given)
            seen.append((ids.shape[1], found.shape[1] - ids.shape[1]))
            return found

        prepared.model.generate = noted
        return prepared

    pytest.importorskip("accelerate")
    whole = measure_peer(watched, peer_options(target))
    assert seen == [(PROMPT_TOKENS, NEW_TOKENS)] * 3
    seen.clear()
    short = measure_peer(watched, peer_options(target, *SHORT, "--warmup", "3"))
    assert seen == [(3, 2)] * 3 + [(PROMPT_TOKENS, NEW_TOKENS)]
    assert (
        short["tokens"] == whole["tokens"] and short["differing_generations"] == 0 and short["notes"] == whole["notes"]
    )
    assert [run["passes"] for run in short["runs"]] == [NEW_TOKENS - 1]
    assert short["settings"]["warmup_prompt_tokens"] == 3 and short["settings"]["warmup_new_tokens"] == 2


def test_a_short_warm_up_of_an_assistant_may_be_a_single_round(target: Path) -> None:
    pytest.importorskip("accelerate")
    options = peer_options(target, *draft_of(target), *SHORT, "--assistant-tokens", "1")
    assert measure_peer(prepare, options)["differing_generations"] == 0


def test_short_warm_ups_are_compared_with_each_other_only(target: Path) -> None:
    def answer(*tokens: int) -> Run:
        return Run(0, 0.0, (1.0, 2.0), (1, len(tokens) - 1), tokens)

    runs = [answer(5, 6), answer(5, 7), answer(1, 2, 3), answer(1, 2, 4), answer(1, 2, 4)]
    assert num_differing_of(peer_options(target, *SHORT), runs) == 3
    assert num_differing_of(peer_options(target), runs) == 4


TARGET = "widened_target"


def test_warm_ups_take_turns_with_the_prompts(target: Path, tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text(json.dumps([[1, 2, 3, 4], [5, 6, 7], [8, 9, 10]]))
    given = ["--target", str(target), "--device", "cpu", "--prompts", str(tmp_path / "p.json"), "--new-tokens", "7"]
    given += ["--warmup-prompt-tokens", "2", "--warmup", "4", "--repeats", "2"]
    asked = asked_generations(options_from(peer_parser("").parse_args(given)))
    assert [one.tokens for one in asked[:4]] == [(1, 2), (5, 6), (8, 9), (1, 2)]
    assert [one.tokens for one in asked[4:]] == [(1, 2, 3, 4), (5, 6, 7), (8, 9, 10)] * 2
    assert [one.prompt for one in asked] == [0, 1, 2, 0, 0, 1, 2, 0, 1, 2] and {one.new_tokens for one in asked} == {7}
    assert [one.measured for one in asked] == [False] * 4 + [True] * 6


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--warmup-prompt-tokens", "0"], "warmup_prompt_tokens must be at least 1"),
        (["--warmup-prompt-tokens", "513"], "warmup_prompt_tokens is 513, the shortest prompt has 512"),
        (["--warmup-new-tokens", "1"], "at least 2 and at most the 8 of new_tokens, not 1"),
        (["--warmup-new-tokens", "9"], "at least 2 and at most the 8 of new_tokens, not 9"),
        (["--prefill-chunk", "-1"], "prefill_chunk must be at least 1, or 0"),
    ],
)
def test_what_makes_no_sense_is_refused_by_peers_and_by_compare(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(OptionError, match=words):
        options_from(peer_parser("").parse_args(["--shape", "tiny", "--device", "cpu", *arguments]))
    given = ["--synthetic", "tiny", "--device", "cpu", "--new-tokens", "8", "--no-chart"]
    assert compare.main([*given, *arguments]) == 2
    told = capsys.readouterr().err
    assert words in told.splitlines()[-1] and "(1 of" not in told


def test_compare_refuses_warm_ups_longer_than_a_text(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text").write_text("the quick brown fox")
    given = ["--target", str(target), "--prompt-file", str(tmp_path / "text"), "--device", "cpu", "--no-chart"]
    assert compare.main([*given, "--warmup-prompt-tokens", "100"]) == 2
    told = capsys.readouterr().err
    assert "warmup_prompt_tokens is 100, the shortest prompt has " in told and "(1 of" not in told


def lengths_read(model: Any) -> list[int]:
    """A list that grows by the tokens of each of the model's passes."""
    lengths: list[int] = []
    model.model.embed_tokens.register_forward_pre_hook(lambda _, given: lengths.append(given[0].shape[1]))
    return lengths


def run_watched(options: Any, tokens: int | None) -> tuple[Run, list[int], list[int]]:
    """The measured generation, and the lengths that target and draft read in it."""
    prepared, draft = prepare(options), load_draft(options)
    measurement.chunk_prompts(prepared, draft, options)
    read, drafted = lengths_read(prepared.model), [] if draft is None else lengths_read(draft)
    (run,) = measure(prepared, options, draft, tokens)[0].runs
    return run, read, drafted


@pytest.mark.few(1)
@pytest.mark.parametrize("chunk", [1, 5, PROMPT_TOKENS - 1, PROMPT_TOKENS, 100])
def test_prompts_are_read_in_chunks_and_the_answers_stay(target: Path, chunk: int) -> None:
    pytest.importorskip("accelerate")
    expected, whole, _ = run_watched(peer_options(target), None)
    run, read, _ = run_watched(peer_options(target, "--prefill-chunk", str(chunk)), None)
    assert run.tokens == expected.tokens and run.counts == (1,) * NEW_TOKENS
    pieces = [min(chunk, PROMPT_TOKENS - start) for start in range(0, PROMPT_TOKENS, chunk)]
    assert read == (pieces + [1] * (NEW_TOKENS - 1)) * 3
    assert whole == ([PROMPT_TOKENS] + [1] * (NEW_TOKENS - 1)) * 3


@pytest.mark.slow
@pytest.mark.parametrize("temperature", ["0", "0.7"])
@pytest.mark.parametrize("chunk", [1, 5, PROMPT_TOKENS])
def test_target_and_assistant_read_chunks_and_the_right_draft_is_always_accepted(
    target: Path, chunk: int, temperature: str
) -> None:
    pytest.importorskip("accelerate")
    given = (*draft_of(target), "--temperature", temperature)
    expected, whole, _ = run_watched(peer_options(target, *given), 3)
    run, read, drafted = run_watched(peer_options(target, *given, "--prefill-chunk", str(chunk)), 3)
    assert run.tokens == expected.tokens and run.counts == expected.counts == (4, 4, 2)
    assert max(whole) == PROMPT_TOKENS + 3, "transformers alone reads prompt and proposals at once"
    # Its own proposals are never split: all of their logits are asked for in one pass.
    assert max(read) <= max(chunk, 4) and sum(read) == sum(whole)
    assert max(drafted) == max(chunk, 2) if chunk > 1 else set(drafted) == {1}


class Recorder(torch.nn.Module):
    """A model that notes what its passes are given."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[dict[str, Any]] = []

    def forward(self, **inputs: Any) -> int:
        """The number of the pass."""
        self.seen.append(inputs)
        return len(self.seen)


def test_a_piece_has_its_tokens_their_positions_and_the_mask_of_all_before_them() -> None:
    model, cache = Recorder(), SimpleNamespace(get_seq_length=lambda: 20)
    read_in_chunks(model, 4)
    ids = torch.arange(100, 111)[None]
    given = {"past_key_values": cache, "position_ids": torch.arange(20, 31)[None], "use_cache": True}
    assert model(input_ids=ids, attention_mask=torch.ones(1, 31), logits_to_keep=5, **given) == 3
    assert [one["input_ids"].tolist() for one in model.seen] == [
        [[100, 101, 102, 103]],
        [[104, 105]],
        [[*range(106, 111)]],
    ]
    assert [one["position_ids"][0].tolist() for one in model.seen] == [[*range(20, 24)], [24, 25], [*range(26, 31)]]
    assert [one["attention_mask"].shape[1] for one in model.seen] == [24, 26, 31]
    assert [one["logits_to_keep"] for one in model.seen] == [1, 1, 5]
    assert all(one["past_key_values"] is cache and one["use_cache"] for one in model.seen)
    assert model(input_ids=ids, logits_to_keep=0, **given) == 4, "all logits are asked for"
    assert model(input_ids=ids[:, :4], attention_mask=None, logits_to_keep=1, **given) == 5


@pytest.mark.slow
def test_a_report_says_how_prompts_were_read(target: Path) -> None:
    pytest.importorskip("accelerate")
    plain = measure_peer(prepare, peer_options(target, "--prefill-chunk", "5"))
    assert plain["settings"]["prefill_chunk"] == 5 and not any("hook" in note for note in plain["notes"])
    given = (*draft_of(target), "--assistant-tokens", "3", "--prefill-chunk")
    assisted = measure_peer(prepare, peer_options(target, *given, "5"))
    assert any("ignores prefill_chunk_size" in note for note in assisted["notes"])
    none = measure_peer(prepare, peer_options(target, *given, "0"))
    assert none["settings"]["prefill_chunk"] is None and not any("hook" in note for note in none["notes"])
    assert plain["tokens"] == assisted["tokens"] == none["tokens"]


def test_long_prompts_are_chunked_unless_forbidden_and_layers_find_the_room(monkeypatch: pytest.MonkeyPatch) -> None:
    long = replace(common.SHAPES["llama2-7b"], max_position_embeddings=131072)
    monkeypatch.setitem(common.SHAPES, "llama2-7b-128k", long)

    def options(tokens: int, *others: str) -> Any:
        given = ["--shape", "llama2-7b-128k", "--device", "cpu", "--prompt-tokens", str(tokens), "--new-tokens", "32"]
        return options_from(peer_parser("").parse_args([*given, *others]))

    assert options(8192).prefill_chunk is None and options(8193).prefill_chunk == 4096
    assert options(120000, "--prefill-chunk", "0").prefill_chunk is None
    assert options(64, "--prefill-chunk", "9").prefill_chunk == 9
    chunked, whole = options(120000), options(120000, "--prefill-chunk", "0")
    config = chunked.source.config()
    assert prefill_bytes(config, whole) == 8 * 120032 * 11008 * 2
    # The chunk's activations, and a mask of its queries over all keys as booleans and twice in bf16.
    assert prefill_bytes(config, chunked) == 8 * 4096 * 11008 * 2 + 4096 * 120032 * 5
    assert prefill_bytes(config, chunked) < 3.3e9 < 21e9 < prefill_bytes(config, whole)
