"""A head that a tool has trained guesses more than an untrained one, and as often as is told of what was written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import bench_drafters
import pytest
import texts
import torch
import train_head
from safetensors.torch import load_file, save_file
from training.heads import Eagle3Head, unrolled
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from widening.shapes import WideShape

from offload_runtime.weights import open_checkpoint
from tests.helpers.assembly import Assembled, make_runner
from tests.helpers.engine import one_thread, write_book, write_checkpoint  # noqa: F401 (an autouse fixture)
from tests.helpers.heads import Eagle3, run_head, tapped

pytestmark = pytest.mark.no_cover  # of the runtime it runs what others run
DEPTHS, PROMPT, ANSWER = 3, 24, 24
_OF_NO_TARGET = MagicMock()  # heads with an embedding of their own ask for nothing of it


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Whose next token depends above all on the last one: anything else would take long to learn."""
    directory = write_checkpoint(tmp_path_factory.mktemp("small") / "model", hidden_size=32, num_layers=3)
    file = directory / "model.safetensors"
    factors = {"o_proj": 0.02, "down_proj": 0.02, "lm_head": 2.0}
    tensors = load_file(file)
    for name, part in ((name, part) for name in tensors for part in factors if part in name):
        tensors[name] *= factors[part]
    tensors = {name: tensor.bfloat16().float() for name, tensor in tensors.items()}  # what heads are trained for
    save_file(tensors, file, metadata={"format": "pt"})
    return directory


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_book(tmp_path_factory.mktemp("book") / "book.txt")


def guessed(head: Assembled, model: Any, prompt: list[int], answer: list[int]) -> list[int]:
    """Of every place of an answer how many tokens in a row the head guesses, by whole passes."""
    tokens, found = prompt + answer, list[int]()
    with torch.no_grad():
        states = model(torch.tensor([tokens]), output_hidden_states=True, use_cache=False).hidden_states
    streams = [state[0] for state in states]
    kept = streams[-1] if head.runner.decoder.config.name == "mtp" else tapped(head, streams)
    for end in range(len(prompt), len(tokens) - DEPTHS + 1):
        text, hidden, count = tokens[:end], kept[: end - 1], 0
        for wanted in tokens[end : end + DEPTHS]:
            logits, given = run_head(head, text[1:], hidden)
            if int(logits[-1].argmax()) != wanted:
                break
            text, hidden, count = [*text, wanted], torch.cat((hidden, given[-1:])), count + 1
        found.append(count)
    return found


def test_rows_of_all_places_are_those_that_a_draft_makes_one_by_one() -> None:
    generator, shape = torch.Generator().manual_seed(0), WideShape(32, 72, 3, 4, 2, 16)
    embedding, states = torch.randn(60, 32, generator=generator), torch.randn(1, 14, 32, generator=generator)
    head = Eagle3Head(shape, 1e-5, embedding, torch.arange(0, 60, 2), (0,))
    with torch.no_grad():
        for parameter in head.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    angles = torch.outer(torch.arange(14.0), 1e4 ** -(torch.arange(0, 16, 2) / 16))
    tokens = torch.randint(60, (1, 14), generator=generator)
    rows = [one[0] for one in unrolled(head, tokens, (states,), torch.polar(torch.ones_like(angles), angles), DEPTHS)]
    settings = {"rms_norm_eps": 1e-5, "num_attention_heads": 4, "head_dim": 16, "rope_theta": 1e4, "vocab_size": 60}
    others = {"embed_tokens.weight": embedding, "d2t": head.ids - torch.arange(30)}
    plain = Eagle3({**head.state_dict(), **others}, settings)
    kept = head.fc(states[0]).detach()
    for place in range(len(rows[0])):
        hidden = kept[: place + 1]
        for depth, of_depth in enumerate(rows):
            text = tokens[0, 1 : place + 2 + depth].tolist()
            logits, stream = plain.logits(_OF_NO_TARGET, text, hidden)
            torch.testing.assert_close(head.all_logits(of_depth[place]), logits[-1], rtol=1e-4, atol=1e-4)
            hidden = torch.cat((hidden, stream[-1:]))


@pytest.mark.slow
@pytest.mark.parametrize("kind", train_head.KINDS)
def test_a_head_learns_to_guess(kind: str, small: Path, book: Path, tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    given = f"{kind} --source {small} --text {book} --code {book} --checkpoint {tmp_path / 'head'} --out {out}"
    given += f" --device cpu --steps 100 --answers 64 --rows 4 --row-tokens 64 --depths {DEPTHS}"
    given += " --draft-vocab 200 --taps 0,1,2" if kind == "eagle3" else ""
    given += f" --rate 0.03 --places 2 --prompt-tokens {PROMPT} --new-tokens {ANSWER}"
    assert train_head.main(given.split()) == 0
    report = json.loads(out.read_text())
    curve = [step["loss_by_depth"] for step in report["training"]["curve"]]
    before, after = ([row["acceptance_by_depth"] for row in report[when]] for when in ("untrained", "trained"))
    assert all(first > other + 0.15 for (first, *_), (other, *_) in zip(after, before, strict=True))
    assert all(last < first for first, last in zip(curve[0], curve[-1], strict=True))

    source = open_checkpoint(tmp_path / "head" if kind == "mtp" else small)
    target = make_runner(source)
    head_source = source.read_mtp() if kind == "mtp" else open_checkpoint(tmp_path / "head", draft=True)
    head = make_runner(head_source, target=target.runner)
    model = AutoModelForCausalLM.from_pretrained(small)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(small)
    counts = list[int]()
    for place in texts.held_out(book.read_text(), 0, 2, "prose"):
        prompt = tokenizer.encode(place)[:PROMPT]
        ids = model.generate(torch.tensor([prompt]), max_new_tokens=ANSWER, min_new_tokens=ANSWER, do_sample=False)
        counts += guessed(head, model, prompt, ids[0, PROMPT:].tolist())
    greedy = next(row for row in report["trained"] if row["text"] == "prose" and row["temperature"] == 0)
    assert greedy["places"] == len(counts)
    assert greedy["tokens_per_pass"] == pytest.approx(1 + sum(counts) / len(counts))

    drafter, own = ("mtp", tmp_path / "head") if kind == "mtp" else (tmp_path / "head", small)
    given = f"--source {own} --shape tiny --text {book} --code {book} --drafters none {drafter} --device cpu"
    given += f" --dtype fp32 --kinds prose --places 2 --tokens {ANSWER} --prompt-tokens {PROMPT} --context 256"
    assert bench_drafters.main([*given.split(), "--temperatures", "0", "--gammas", "3", "--out", str(out)]) == 0
    compared = json.loads(out.read_text())
    chain = next(one for one in compared["summary"] if one["window"] == "chain 3")
    assert chain["accepted_by_source"].keys() >= {kind} and chain["tokens_per_pass"] > 1.2
    if kind == "eagle3":
        written = load_file(tmp_path / "head" / "model.safetensors")
        assert written["t2d"].nonzero()[:, 0].tolist() == (written["d2t"] + torch.arange(200)).tolist()
