"""What a user can do wrong: each mistake is a typed error that names the way out, before anything large is read."""

import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from offload_runtime import errors
from offload_runtime.config import SpeculationOptions
from offload_runtime.engine import Runtime
from offload_runtime.sizes import parse_bytes
from tests.helpers import engine


def refused(kind: type[errors.OffloadError], target: str | Path, *words: str, **options: Any) -> str:
    """Load and expect an error of `kind` whose message has each of `words`, before weights are read if nothing else is
    said; returns the message."""
    before = threading.active_count()
    with pytest.raises(kind) as caught:
        Runtime.load(target, **{"device": "cpu", "on_progress": engine.refuse_weights, **options})
    assert caught.type is kind
    assert threading.active_count() == before, "a copy engine was left behind"
    for word in words:
        assert word in str(caught.value)
    return str(caught.value)


class TestBeforeLoading:
    """Mistakes that are seen without reading weights."""

    def test_a_truncated_file_says_what_is_missing(self, copy: Path) -> None:
        weights = copy / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1000])
        refused(errors.CheckpointError, copy, "truncated by 1000 bytes", "again")

    def test_a_damaged_draft_is_refused_too(self, target: Path, copy: Path) -> None:
        weights = copy / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-8])
        refused(errors.CheckpointError, target, "truncated", draft=copy)

    def test_a_context_longer_than_the_model(self, target: Path) -> None:
        refused(errors.ContextLengthError, target, "513", "512", "--context", context=engine.CONTEXT_TOKENS + 1)

    @pytest.mark.few(2)
    @pytest.mark.parametrize("resident", ["auto", 0, 3, engine.NUM_LAYERS])
    @pytest.mark.parametrize("draft", ["ngram", "model"])
    def test_too_little_vram_names_what_would_do(
        self, target: Path, copy: Path, resident: int | str, draft: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        options: dict[str, Any] = {"resident_layers": resident, "draft": copy if draft == "model" else "ngram"}
        message = refused(errors.BudgetError, target, "--vram", vram="1MB", **options)
        named = re.search(r"([0-9.]+ [kMG]?B) is the least", message)
        assert named is not None
        refused(errors.BudgetError, target, vram=int(0.95 * parse_bytes(named[1])), **options)
        monkeypatch.undo()
        with engine.load(target, vram=named[1], **options) as runtime:
            stats = runtime.generate(engine.PROMPT, max_new_tokens=3, ignore_eos=True).stats
            assert stats.new_tokens == 3 and stats.peak_vram_bytes <= parse_bytes(named[1])

    @pytest.mark.parametrize(("options", "word"), [
        ({"dtype": "int8"}, "bf16"), ({"vram": "-1GB"}, "24GB"), ({"resident_layers": -1}, "at least 0, not -1"),
        ({"resident_layers": engine.NUM_LAYERS + 1}, "between 0 and 5"),
        ({"tree_nodes": 9999}, "9999 proposals in a window are more than the 512 tokens"),
        ({"max_gamma": 9999}, "lower --gamma or --tree-nodes"),
        ({"tree_nodes": 30, "draft": "none"}, "--tree-nodes 30 does nothing with --draft none"),
        ({"tree_nodes": 30, "speculation": SpeculationOptions("none")}, "nothing with --speculation none"),
        ({"speculation": SpeculationOptions("triforce"), "resident_layers": 2, "draft": "none"}, "--speculation none"),
        ({"speculation": SpeculationOptions("triforce")}, "--draft none"),
        ({"speculation": SpeculationOptions("none"), "draft": "some/model"}, "idle"),
        ({"speculation": SpeculationOptions("chain"), "draft": "none"}, "--speculation none"),
    ], ids=str)  # fmt: skip
    def test_values_that_make_no_sense(self, target: Path, options: dict[str, Any], word: str) -> None:
        refused(errors.OptionError, target, word, **options)

    def test_triforce_needs_all_layers_on_the_device(self, target: Path) -> None:
        asked = {"speculation": SpeculationOptions("triforce", budget_tokens=64), "resident_layers": 2, "draft": "none"}
        refused(errors.BudgetError, target, "3 of 5 layers would be streamed", "resident-layers auto it fits", **asked)

    @pytest.mark.parametrize(("device", "error", "word"), [
        ("gpu", errors.OptionError, "cuda"), ("mps", errors.OptionError, "cuda:N or cpu"),
        ("cuda:99", errors.DeviceError, "cuda:99" if torch.cuda.is_available() else "--device cpu"),
    ])  # fmt: skip
    def test_devices_not_there(self, target: Path, device: str, error: type[errors.OffloadError], word: str) -> None:
        refused(error, target, word, device=device)


@pytest.mark.few(2)
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_a_failure_while_loading_leaves_nothing_running(target: Path, share: float) -> None:
    def fail(stage: str, done_bytes: int, total_bytes: int) -> None:
        if done_bytes >= share * total_bytes:
            raise errors.BudgetError("no memory")

    refused(errors.BudgetError, target, "no memory", resident_layers=0, on_progress=fail)


@pytest.fixture(scope="module")
def runtime(target: Path) -> Iterator[Runtime]:
    with engine.load(target, max_gamma=20, context=64) as runtime:
        yield runtime


@pytest.mark.parametrize(
    ("prompt", "options", "kind", "words"),
    [
        ([5] * 60, {"max_new_tokens": 5}, errors.ContextLengthError,
         ["60 tokens", "5 new", "64", "by 1", "512", "--context"]),
        ([5] * 65, {"max_new_tokens": 1}, errors.ContextLengthError, ["65 tokens", "by 2"]),
        (engine.PROMPT, {"max_new_tokens": 0}, errors.OptionError, ["max_new_tokens must be at least 1"]),
        (engine.PROMPT, {"max_new_tokens": 4, "gamma": 21}, errors.OptionError, ["gamma 21", "20", "max_gamma"]),
        (
            engine.PROMPT, {"max_new_tokens": 4, "tree_nodes": 257}, errors.OptionError,
            ["tree_nodes 257 exceeds the 256", "--tree-nodes 257"],
        ),
        (engine.PROMPT, {"max_new_tokens": 4, "stop": ["x", ""]}, errors.OptionError, ["empty stop string"]),
        ("", {"max_new_tokens": 4}, errors.OptionError, ["empty"]),
        ([], {"max_new_tokens": 4}, errors.OptionError, ["empty"]),
        ([5, 320], {"max_new_tokens": 4}, errors.OptionError, ["320 is outside the vocabulary of 320"]),
        ([5, -1], {"max_new_tokens": 4}, errors.OptionError, ["-1 is outside"]),
        *((wrong, {"max_new_tokens": 4}, errors.OptionError, ["list of token ids"])
          for wrong in (None, 5, b"fox", {5}, [True], [5, "fox"], {"role": "user", "content": "hi"})),
        (engine.PROMPT, {"max_new_tokens": "4"}, errors.OptionError, ["max_new_tokens must be of type int, not '4'"]),
        (engine.PROMPT, {"params": 4}, errors.OptionError, ["params must be of type"]),
        ([{"role": "user"}, "fox"], {"max_new_tokens": 4}, errors.OptionError, ["list of chat messages"]),
    ],
    ids=str,
)  # fmt: skip
def test_requests_that_make_no_sense(
    runtime: Runtime, prompt: Any, options: dict[str, Any], kind: type[errors.OffloadError], words: list[str]
) -> None:
    for call in (runtime.generate, runtime.stream):
        with pytest.raises(kind) as caught:
            call(prompt, **options)
        assert caught.type is kind and all(word in str(caught.value) for word in words)
    assert len(runtime.generate([5] * 60, max_new_tokens=4, ignore_eos=True).tokens) == 4


@pytest.mark.parametrize("prompts", [None, 5, "fox", b"fox"])
def test_prompts_that_are_none(runtime: Runtime, prompts: Any) -> None:
    with pytest.raises(errors.OptionError, match=r"prompts must be of type Sequence\[.*Any\], not"):
        runtime.generate_batch(prompts)
    with pytest.raises(errors.OptionError, match=r"noise_ids must be of type Sequence\[int\], not 5"):
        runtime.generate_batch([engine.PROMPT], noise_ids=5)  # type: ignore[arg-type]


def test_gamma_without_a_draft(target: Path) -> None:
    with engine.load(target, draft="none") as runtime:
        with pytest.raises(errors.OptionError, match="--draft ngram"):
            runtime.generate(engine.PROMPT, max_new_tokens=4, gamma=3)
        with pytest.raises(errors.OptionError, match=r"tree_nodes 3 does nothing .* --draft ngram"):
            runtime.generate(engine.PROMPT, max_new_tokens=4, tree_nodes=3)
        assert len(runtime.generate(engine.PROMPT, max_new_tokens=4, ignore_eos=True).tokens) == 4


def test_chat_without_a_template(copy: Path) -> None:
    (copy / "chat_template.jinja").unlink(missing_ok=True)
    with engine.load(copy) as runtime, pytest.raises(errors.OptionError, match="no chat template"):
        runtime.generate([{"role": "user", "content": "hi"}], max_new_tokens=4)


@pytest.mark.parametrize("tensor", ["lm_head.weight", "model.layers.3.mlp.down_proj.weight"])
def test_nan_weights_are_an_error_and_not_tokens(copy: Path, tensor: str) -> None:
    weights = load_file(copy / "model.safetensors")
    weights[tensor][1, 2] = float("nan")
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    with engine.load(copy) as runtime:
        for _ in range(2):
            with pytest.raises(errors.NumericalError, match=r"NaN.*damaged"):
                runtime.generate(engine.PROMPT, max_new_tokens=4)


def test_prompts_are_checked_before_weights_are_read(target: Path) -> None:
    read: list[str] = []
    options: dict[str, Any] = {"context": 64, "on_progress": lambda stage, done, total: read.append(stage)}
    with (
        pytest.raises(errors.ContextLengthError, match="60 tokens and 5 new ones exceed the context of 64 tokens by 1"),
        engine.load(target, check=lambda room: room.fit([5] * 60, 5), **options),
    ):
        pass
    with (
        pytest.raises(errors.OptionError, match=r"prompt 2 of 2: .*empty"),
        engine.load(target, check=lambda room: room.fit_all(["a", ""], 5), **options),
    ):
        pass
    assert not read
    with engine.load(target, check=lambda room: room.fit([5] * 60, 4), **options) as runtime:
        assert read and len(runtime.generate([5] * 60, max_new_tokens=4, ignore_eos=True).tokens) == 4
