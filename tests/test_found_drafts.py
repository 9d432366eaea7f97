"""Drafts: `--draft auto` finds a small model beside the target or in the hub's cache, where it would be faster; and
those whose vocabulary is not quite the target's: padded, with other control tokens, larger or smaller."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file

from offload_runtime import Runtime
from offload_runtime.cli.app import app
from offload_runtime.config import SpeculationOptions
from offload_runtime.errors import VocabularyMismatchError
from tests.helpers import engine
from tests.test_weights_gguf import build, write

CONFIGS = Path(__file__).parent / "data" / "configs"


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, a draft of a fortieth, and a directory for both."""
    directory = tmp_path_factory.mktemp("family")
    engine.write_checkpoint(directory / "large", hidden_size=256)
    engine.write_checkpoint(directory / "small", num_layers=1)
    return directory


@pytest.fixture(autouse=True)
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the hub's that holds nothing yet."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def placed(family: Path, tmp_path: Path, *, draft: str | None = None) -> Path:
    """The target alone, or with its draft by some name beside it."""
    shutil.copytree(family / "large", tmp_path / "models" / "large")
    if draft is not None:
        shutil.copytree(family / "small", tmp_path / "models" / draft)
    return tmp_path / "models" / "large"


def put_trouble_beside(target: Path, family: Path) -> None:
    """What may lie in a directory of models, and is none that could draft."""
    models = target.parent
    (models / "notes.txt").write_text("nothing")
    (models / "empty").mkdir()
    (models / "broken.gguf").write_bytes(b"GGUF\x03\0\0\0" + b"\xff" * 64)
    for number in range(12):
        (models / f"half {number}.gguf").write_bytes(b"GGUF\x03")
    for name, file, content in (
        ("truncated", "model.safetensors", (family / "small" / "model.safetensors").read_bytes()[:-9]),
        ("no json", "config.json", b"{"),
        ("images", "config.json", b'{"architectures": ["CLIPModel"], "model_type": "clip"}'),
        ("other text", "tokenizer.json", b'{"model": {"vocab": {"a": 0, "b": 1}}}'),
    ):
        shutil.copytree(family / "small", models / name)
        (models / name / file).write_bytes(content)
    shutil.copytree(family / "large", models / "another of its size")
    (models / "dangling").symlink_to(models / "nowhere")


def test_a_small_model_beside_the_target_drafts(family: Path, tmp_path: Path) -> None:
    target = placed(family, tmp_path, draft="small")
    put_trouble_beside(target, family)
    with engine.load(target) as runtime, engine.load(target, draft="none") as plain:
        assert runtime.plan.draft is not None and "drafting with small" in runtime.placement
        assert (
            runtime.generate(engine.PROMPT, max_new_tokens=12).tokens
            == plain.generate(engine.PROMPT, max_new_tokens=12).tokens
        )
    with engine.load(target, draft="ngram") as runtime:
        assert runtime.plan.draft is None


def test_a_small_model_in_the_cache_of_the_hub_drafts(family: Path, tmp_path: Path, hub: Path) -> None:
    repository = hub / "models--org--small"
    shutil.copytree(family / "small", repository / "snapshots" / "abc")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    with engine.load(placed(family, tmp_path)) as runtime:
        assert runtime.plan.draft is not None and "drafting with org/small" in runtime.placement


def run_plan(capsys: pytest.CaptureFixture[str], target: str | Path, *options: str) -> dict[str, Any]:
    with pytest.raises(SystemExit) as ended:
        app(["plan", "--target", str(target), "--profile", "rtx4090", "--context", "4096", "--json", *options])
    output = capsys.readouterr()
    assert ended.value.code == 0, output.err
    assert "draft" not in output.err  # the answer comes first
    return json.loads(output.out)


@pytest.mark.slow
def test_a_plan_finds_it_and_says_what_for(family: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By configurations and tokenizers alone; without a vocabulary to compare the target's own copy is taken."""
    for name in ("qwen2.5-32b", "qwen2.5-0.5b"):
        shutil.copytree(CONFIGS / name, tmp_path / name)
    record = run_plan(capsys, tmp_path / "qwen2.5-32b")
    assert "drafting with a copy of its streamed layers in 4 bits, predicted to be " in record["draft_note"]
    for name in ("qwen2.5-32b", "qwen2.5-0.5b"):
        shutil.copy(family / "small" / "tokenizer.json", tmp_path / name)
    record = run_plan(capsys, tmp_path / "qwen2.5-32b")
    assert record["draft_cache"] is not None and "drafting with qwen2.5-0.5b, predicted to be " in record["draft_note"]


@pytest.mark.parametrize("downloaded", [True, False])
def test_a_draft_without_its_weights_is_not_promised(
    downloaded: bool, family: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Beside a target that is named as one of LM Studio's."""
    models = placed(family, tmp_path, draft="small").parent
    if not downloaded:
        (models / "small" / "model.safetensors").unlink()
    (tmp_path / ".lmstudio" / "models").mkdir(parents=True)
    models.rename(tmp_path / ".lmstudio" / "models" / "maker")
    monkeypatch.setenv("HOME", str(tmp_path))
    note = run_plan(capsys, "maker/large", "--context", "64")["draft_note"]
    assert (note is not None and "small" in note) is downloaded


TOKENS = 320  # of the tokenizer, the first two of which are <|im_start|> and <|im_end|>
TEXT = [40, 60, 80, 301, 75, 90, 41, 61, 81, 302]
RETRIEVING = SpeculationOptions(mode="triforce", budget_tokens=32, chunk_size=4, gamma_draft=6)
STREAMING = SpeculationOptions(draft_cache="streaming", sink_tokens=2, recent_tokens=8)


def write_model(directory: Path, *, rows: int = TOKENS, loud: tuple[int, int] | None = None, seed: int = 0) -> Path:
    """The same small Llama for the same seed, with `rows` of embedding and head; without masking it would say nothing
    but the two `loud` tokens, whose logits are far above and far below all others."""
    engine.write_checkpoint(directory, seed=seed, num_layers=2)
    weights = load_file(directory / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        filling = torch.randn(rows - TOKENS, weights[name].shape[1], generator=generator)
        weights[name] = torch.cat((weights[name], filling))
    if loud is not None:
        voice = 500 * torch.randn(weights["lm_head.weight"].shape[1], generator=generator)
        weights["lm_head.weight"][list(loud)] = torch.stack((voice, -voice))
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    edit(directory / "config.json", lambda config: config.update(vocab_size=rows))
    return directory


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def renamed(directory: Path, names: Mapping[str, str]) -> Path:
    """Tokens by other names, in all of the tokenizer's files."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (directory / name).read_text()
        for before, after in names.items():
            text = text.replace(json.dumps(before), json.dumps(after))
        (directory / name).write_text(text)
    return directory


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Pairs by what is unlike, all of one model; what only the draft has would drown everything else."""
    at = tmp_path_factory.mktemp("models")
    return {
        "plain": write_model(at / "plain"),
        "padded": write_model(at / "padded", rows=TOKENS + 12),
        "padded draft": write_model(at / "padded-draft", rows=TOKENS + 12, loud=(TOKENS, TOKENS + 11)),
        "other controls": renamed(
            write_model(at / "controls", loud=(0, 1)), {"<|im_start|>": "<|user|>", "<|im_end|>": "<|done|>"}
        ),
    }


ASKED: dict[str, Any] = {
    "max_new_tokens": 14, "ignore_eos": True, "temperature": 0.7, "logit_bias": {0: -5, 330: 5}, "seed": 3,
}  # fmt: skip
CHAIN, TREE = {"tree_nodes": 0}, {"tree_nodes": 8}
PROMPTS = {"plain": TEXT, "padded": [*TEXT, TOKENS + 5, 70]}


@pytest.fixture(scope="module")
def plainly(models: dict[str, Path]) -> dict[str, list[list[int]]]:
    """What the targets say without a draft."""
    found = {}
    for name, prompt in PROMPTS.items():
        with engine.load(models[name], draft="none", max_batch=2) as runtime:
            asked = ASKED if name == "padded" else {**ASKED, "logit_bias": {0: -5}}
            found[name] = [one.tokens for one in runtime.generate_batch([prompt, [*prompt, 0, 1, 90]], **asked)]
    return found


@pytest.mark.parametrize(("target", "draft", "options"), [
    ("plain", "padded draft", CHAIN), ("plain", "padded draft", TREE), ("plain", "other controls", CHAIN),
    pytest.param("plain", "other controls", TREE, marks=pytest.mark.slow),
    ("plain", "other controls", {"speculation": RETRIEVING}),
    pytest.param("padded", "plain", CHAIN, marks=pytest.mark.slow), ("padded", "plain", TREE),
    pytest.param("padded", "plain", {"speculation": RETRIEVING}, marks=pytest.mark.slow),
    ("padded", "plain", {**CHAIN, "speculation": STREAMING}),
])  # fmt: skip
def test_a_draft_proposes_what_the_target_has_and_nothing_else(
    models: dict[str, Path], plainly: dict[str, list[list[int]]], target: str, draft: str, options: dict[str, Any]
) -> None:
    """A draft with the target's own weights is right but for the tokens that are masked, and the answers are the
    target's, whatever tokens of theirs the draft lacks."""
    prompt, asked = PROMPTS[target], ASKED if target == "padded" else {**ASKED, "logit_bias": {0: -5}}
    with engine.load(models[target], draft=models[draft], max_batch=2, gamma=3, **options) as runtime:
        results = runtime.generate_batch([prompt, [*prompt, 0, 1, 90]], **asked)
    assert [result.tokens for result in results] == plainly[target]
    if draft != "plain":
        accepted = [result.stats.accepted_by_source for result in results]
        assert all(sum(one.values()) >= 7 for one in accepted), "what only the draft has is never right"


@pytest.mark.gpu
@pytest.mark.parametrize("options", [CHAIN, TREE, {"speculation": RETRIEVING}])
def test_graphs_mask_what_only_the_draft_has(models: dict[str, Path], options: dict[str, Any]) -> None:
    with Runtime.load(
        models["plain"], draft=models["other controls"], device="cuda", dtype="bf16", gamma=3, **options
    ) as runtime:
        drafted = [
            runtime.generate(TEXT, max_new_tokens=14, ignore_eos=True, speculate=speculate)
            for speculate in (True, False)
        ]
    assert drafted[0].tokens == drafted[1].tokens
    assert sum(drafted[0].stats.accepted_by_source.values()) >= 7


def test_penalties_and_schemas_go_with_a_draft_of_fewer_tokens(models: dict[str, Path]) -> None:
    schema = json.dumps({"enum": ["jumps over", "the lazy dog"]})
    with engine.load(models["padded"], draft=models["plain"], gamma=3) as runtime:
        both = [
            runtime.generate(PROMPTS["padded"], repetition_penalty=1.2, speculate=drafts, **ASKED).tokens
            for drafts in (True, False)
        ]
        answer = runtime.generate(TEXT, max_new_tokens=40, json_schema=schema)
    assert both[0] == both[1] and json.loads(answer.text) in ("jumps over", "the lazy dog")


def write_gguf(path: Path, tokens: list[str], types: list[int]) -> Path:
    """A model of one layer with a tokenizer of these tokens."""
    vocabulary = {"model": "gpt2", "pre": "qwen2", "tokens": tokens, "token_type": types}
    return write(
        path, build(num_hidden_layers=1, vocab_size=len(tokens), max_position_embeddings=512), vocabulary=vocabulary
    )


def plan(target: Path, draft: Path) -> int:
    with pytest.raises(SystemExit) as ended:
        app(["plan", "--target", str(target), "--draft", str(draft), "--profile", "rtx4090", "--context", "256"])
    return int(ended.value.code or 0)


def test_vocabularies_are_compared(models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    described = json.loads((models["plain"] / "tokenizer.json").read_text())
    by_id = {index: token for token, index in described["model"]["vocab"].items()}
    tokens = [by_id[index] for index in range(TOKENS)]
    types = [int(gguf.TokenType.CONTROL)] * 2 + [int(gguf.TokenType.NORMAL)] * (TOKENS - 2)
    padding = [f"[PAD{index}]" for index in range(TOKENS, TOKENS + 8)]
    unused = [int(gguf.TokenType.UNUSED)] * len(padding)
    padded = write_gguf(tmp_path / "padded.gguf", tokens + padding, types + unused)
    assert plan(models["plain"], padded) == plan(padded, models["padded"]) == 0
    tokens[100], tokens[200] = tokens[200], tokens[100]
    other = write_gguf(tmp_path / "other.gguf", tokens, types)
    capsys.readouterr()
    assert plan(models["plain"], other) == 2
    message = capsys.readouterr().err
    for words in ("2 entries differ", "id 100", repr(by_id[100]), repr(by_id[200]), "--draft ngram"):
        assert words in message


def test_a_draft_whose_tokens_mean_other_text_is_refused(models: dict[str, Path], tmp_path: Path) -> None:
    other = renamed(write_model(tmp_path / "other"), {"a": "swapped", "b": "a", "swapped": "b"})
    with pytest.raises(VocabularyMismatchError, match="2 entries differ"):
        Runtime.load(models["plain"], draft=other, device="cpu", on_progress=engine.refuse_weights)
