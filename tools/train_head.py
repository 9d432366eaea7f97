"""Train an MTP or an EAGLE-3 head for a small Llama, and write it as the checkpoints of such heads are published.

    python tools/train_head.py mtp --source demo --text BOOK --checkpoint smollm2-mtp --out FILE
    python tools/train_head.py eagle3 --source demo --text BOOK --checkpoint smollm2-eagle3 --out FILE

It learns the target's own distributions on a book, on Python's standard library, and on what the target itself writes
behind pieces of both; each row is unrolled over `--depths` tokens on the head's own output, as it drafts. `mtp` writes
the target with the head among its tensors, `eagle3` a directory of its own with an embedding, which also fits the
target widened (`widen_model.py`). At places of both texts that are never trained on, drawn by the seed, answers of the
target, greedy and at T = 0.6 with the runtime's noise, tell how often a guess at each depth is the target's token where
those before it are. Prints a table, then one JSON line.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import harness
import texts
import torch
from harness import check_out, emit, provenance, say, write_unfinished
from offload_runtime_kernels.gumbel_argmax import gumbel_argmax, noise_keys
from safetensors.torch import save_file
from torch import Tensor
from training.heads import Eagle3Head, Head, MtpHead, start_from, unrolled
from training.target import WRITTEN, HeldOut, Target, held_out
from widen_model import open_source
from widening.convert import atomic_directory, convert_to_safetensors
from widening.made import transformers_config_of

from offload_runtime.errors import OptionError
from offload_runtime.models.mtp import MtpConfig
from offload_runtime.stream.arena import Staging
from offload_runtime.stream.device import resolve_device
from offload_runtime.weights.checkpoint import CheckpointSource

KINDS = ("mtp", "eagle3")
# Of answers that are trained on: half of them as they are measured and used, others more varied and greedy.
_ANSWER_TEMPERATURES = (0.6, 1.0, 0.6, 0.0)
_ANSWERS_AT_ONCE = 1024
_ANSWERS_SHARE = 1 / 3  # of the time, at most
_PROMPT_SHARE = 0.25  # of an answer's row
_DEPTH_WEIGHT = 0.8  # of each depth against the one before it
_WARM_UP = 0.03
_DRAFT_VOCAB = 16384
_REPORTS = 50


@dataclass(frozen=True)
class Corpus:
    """What is trained on.

    Attributes:
        by_name: Tokens of each text that are not held out, 1-D, on the device.
        answers: [answers, L] of the target.
    """

    by_name: dict[str, Tensor]
    answers: Tensor

    def rows(self, count: int, length: int, draw: random.Random) -> Tensor:
        """Return [count, length]: half answers, and pieces of texts, drawn by the roots of how long these are."""
        parts, weights = [*self.by_name.values()], [math.sqrt(len(one)) for one in self.by_name.values()]
        from_answers = count // 2 if len(self.answers) else 0
        found = [self.answers[draw.randrange(len(self.answers))] for _ in range(from_answers)]
        for one in draw.choices(parts, weights, k=count - from_answers):
            start = draw.randrange(len(one) - length + 1)
            found.append(one[start : start + length])
        return torch.stack(found)


def corpus_of(options: argparse.Namespace, target: Target, ends_s: float) -> Corpus:
    """Read the texts and let the target write answers, no longer than a share of the time until `ends_s`.

    Raises:
        OptionError: A text is shorter than a row.
    """
    tokenizer, by_name = target.source.tokenizer(), dict[str, Tensor]()
    length = options.row_tokens + options.depths  # of which so many are only guessed
    for name, text in texts.texts_of(options).items():
        encoded = tokenizer(texts.trained_on(text, options.seed), verbose=False)["input_ids"]
        by_name[name] = torch.tensor([token for block in encoded for token in block], device=target.device)
        if len(by_name[name]) < length:
            raise OptionError(f"{name} has {len(by_name[name])} tokens to train on: lower --row-tokens")
    draw, prompt = random.Random(options.seed), int(length * _PROMPT_SHARE)
    answers, stops_s = [torch.empty(0, length, dtype=torch.int64, device=target.device)], time.monotonic()
    stops_s += (ends_s - stops_s) * _ANSWERS_SHARE
    for start in range(0, options.answers, _ANSWERS_AT_ONCE):
        if time.monotonic() > stops_s:
            break
        numbers = range(start, min(start + _ANSWERS_AT_ONCE, options.answers))
        sources = [[*by_name.values()][one % len(by_name)] for one in numbers]
        begun = [(one, draw.randrange(len(one) - prompt + 1)) for one in sources]
        prompts = torch.stack([one[at : at + prompt] for one, at in begun])
        kinds = len(_ANSWER_TEMPERATURES)
        keys = noise_keys([(_ANSWER_TEMPERATURES[one // 2 % kinds], options.seed + 1, one) for one in numbers])
        answers.append(target.continued(prompts, length - prompt, keys.to(target.device)))
        say(f"{numbers.stop} of {options.answers} answers of {length} tokens")
    return Corpus(by_name, torch.cat(answers))


def make_head(options: argparse.Namespace, target: Target, corpus: Corpus) -> Head:
    """A head that knows nothing yet but what it takes of the target."""
    config, model = target.source.config(), target.model
    eps, count = config.attention.norm.eps, config.num_layers
    embedding, lm_head = model.get_input_embeddings().weight, model.lm_head.weight
    torch.manual_seed(options.seed)
    head: Head
    if options.kind == "mtp":
        head = MtpHead(target.shape, eps, embedding, lm_head)
    else:
        seen = torch.cat([*corpus.by_name.values(), corpus.answers.flatten()])
        usual = torch.bincount(seen, minlength=len(embedding)).argsort(descending=True, stable=True)
        ids = usual[: options.draft_vocab or _DRAFT_VOCAB].sort().values
        taps = options.taps or (2, count // 2, count - 3)
        if min(taps) < 0 or max(taps) >= count:
            raise OptionError(f"--taps {taps} are not below layers of the target, which has {count}: name others")
        head = Eagle3Head(target.shape, eps, embedding, ids, taps)
    last = {name: one.float() for name, one in model.model.layers[-1].named_parameters()}
    start_from(head, last, model.model.norm.weight.float(), lm_head.float())
    return head.to(target.device)


def losses(head: Head, target: Target, tokens: Tensor, depths: int) -> Iterator[Tensor]:
    """By depth the cross entropy of rows [B, L] under the target's probabilities of the tokens that the head has."""
    logits, states = target.read(tokens)
    wanted = logits.float().softmax(-1)[..., head.ids]
    with target.autocast():
        for depth, normed in enumerate(unrolled(head, tokens, states, target.angles, depths)):
            goal = wanted[:, depth + 1 : depth + 1 + normed.shape[1]]
            said = head.logits(normed).float()
            yield torch.nn.functional.cross_entropy(said.flatten(0, 1), goal.flatten(0, 1))


def train(options: argparse.Namespace, head: Head, target: Target, corpus: Corpus, ends_s: float) -> dict[str, Any]:
    """Train until the time or the steps are over, with a rate that falls along a cosine; returns the curve."""
    parameters, started_s = [*head.parameters()], time.monotonic()
    optimizer = torch.optim.AdamW(parameters, options.rate, betas=(0.9, 0.95), weight_decay=0.01)
    draw, curve, lately, step, done = random.Random(options.seed), list[dict[str, Any]](), list[Tensor](), 0, 0.0
    weights = torch.tensor([_DEPTH_WEIGHT**depth for depth in range(options.depths)], device=target.device)
    left_s = max(ends_s - started_s, 1.0)  # where all the time has gone, a step or two
    while done < 1:
        for group in optimizer.param_groups:
            group["lr"] = options.rate * min(done / _WARM_UP + 0.01, 1.0) * 0.5 * (1 + math.cos(math.pi * done))
        tokens = corpus.rows(options.rows, options.row_tokens + options.depths, draw)
        by_depth = torch.stack([*losses(head, target, tokens, options.depths)])
        (by_depth * weights).sum().backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        lately.append(by_depth.detach())
        step += 1
        done = max((time.monotonic() - started_s) / left_s, step / options.steps if options.steps else 0.0)
        if done * _REPORTS >= len(curve) + 1 or done >= 1:
            mean = torch.stack(lately).mean(0).tolist()
            curve.append({"step": step, "seconds": time.monotonic() - started_s, "loss_by_depth": mean})
            say(f"{100 * done:3.0f} % step {step}: loss by depth " + " ".join(f"{one:.3f}" for one in mean))
            lately.clear()
    return {"steps": step, "tokens": step * options.rows * options.row_tokens, "curve": curve}


@torch.no_grad()
def acceptance(head: Head, target: Target, answers: HeldOut, depths: int) -> dict[str, Any]:
    """What a chain of guesses from each place of answers would bring."""
    tokens, keys, first = answers.tokens, answers.keys, answers.prompt_tokens - 2
    states = target.read(tokens[:, :-1])[1]
    alive, counts = torch.ones((), dtype=torch.bool, device=target.device), list[float]()
    with target.autocast():
        for depth, normed in enumerate(unrolled(head, tokens[:, :-1], states, target.angles, depths)):
            at = torch.arange(first, normed.shape[1], device=target.device) + depth + 1  # rows that choose these tokens
            guesses = [
                gumbel_argmax(head.all_logits(one[first:]), at, torch.full_like(at, slot), keys)
                for slot, one in enumerate(normed)
            ]
            right = torch.stack(guesses) == tokens[:, at + 1]
            alive = alive & right
            counts.append(float(alive.sum()))
    asked = [float(alive.numel()), *counts]
    by_depth = [got / most if most else 0.0 for got, most in zip(counts, asked, strict=False)]
    return {
        "text": answers.text, "temperature": answers.temperature, "acceptance_by_depth": by_depth,
        "tokens_per_pass": 1 + sum(counts) / asked[0], "places": int(asked[0]),
    }  # fmt: skip


def fill_with(tensor: Tensor, out: Tensor, _: Staging | None = None) -> None:
    """What a source of a tensor in memory does."""
    out.copy_(tensor)


def write(head: Head, target: Target, directory: Path) -> None:
    """Write the head in bf16. Raises `OptionError`: the directory is there already; `StorageError`."""
    tensors = {name: one.to(WRITTEN).cpu().contiguous() for name, one in head.state_dict().items()}
    source = target.source
    if isinstance(head, MtpHead):
        fills = {f"mtp.{name}": partial(fill_with, one) for name, one in tensors.items()}
        config, where = MtpConfig.of(source.config()), "the trained MTP layer"
        mtp = CheckpointSource(config, WRITTEN, where, source.settings, fills, source.tokenizer)
        convert_to_safetensors(replace(source, read_mtp=lambda: mtp), directory, dtype=WRITTEN)
        return
    assert isinstance(head, Eagle3Head)
    ids, vocab_size = head.ids.cpu(), len(head.embedding)
    tensors |= {
        "embed_tokens.weight": head.embedding.to(WRITTEN).cpu(), "d2t": ids - torch.arange(len(ids)),
        "t2d": torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, ids, True),
    }  # fmt: skip
    settings = transformers_config_of(source).to_dict() | {
        "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": len(ids),
        "target_hidden_size": target.shape.hidden_size, "eagle_aux_hidden_state_layer_ids": list(head.taps),
        "tie_word_embeddings": False, "dtype": "bfloat16",
    }  # fmt: skip
    with atomic_directory(directory, sum(one.nbytes for one in tensors.values())) as unfinished:
        save_file(tensors, unfinished / "model.safetensors", metadata={"format": "pt"})
        (unfinished / "config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")


def table(report: dict[str, Any]) -> str:
    """The figures for people."""
    return "\n".join(
        f"{row['text']:5} T {row['temperature']} {when}: {row['tokens_per_pass']:.2f} tokens a pass, by depth "
        + " ".join(f"{one:.3f}" for one in row["acceptance_by_depth"])
        for when in ("untrained", "trained")
        for row in report[when]
    )


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = harness.bench_parser(__doc__, device="auto")
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument(
        "--source", type=Path, required=True, help="the target, a plain Llama: directory, .gguf file, or demo"
    )
    texts.add_options(parser)
    texts.add_place_options(parser, places=12, prompt_tokens=200, new_tokens=256)
    parser.add_argument("--checkpoint", type=Path, required=True, help="a new directory")
    parser.add_argument("--seconds", type=float, default=600.0, help="of reading, answers and training")
    parser.add_argument("--steps", type=int, help="at most so many")
    parser.add_argument("--answers", type=int, default=4096, help="of the target, to train on; as the time allows")
    parser.add_argument("--rows", type=int, default=8, help="of a step")
    parser.add_argument("--row-tokens", type=int, default=1024)
    parser.add_argument("--depths", type=int, default=5, help="tokens that are guessed one after the other")
    parser.add_argument("--rate", type=float, default=1e-3, help="of AdamW")
    parser.add_argument("--draft-vocab", type=int, help="most frequent tokens that eagle3 has logits of (16384)")
    parser.add_argument("--taps", type=harness.integers, default=(), help="layers of the target, of eagle3")
    return parser.parse_args(argv)


def check(options: argparse.Namespace) -> None:
    """Refuse what would fail only after minutes.

    Raises:
        OptionError: A number makes no sense, or there is such a directory; StorageError: `--out` cannot be written.
    """
    numbers = ["rows", "row_tokens", "depths", "places", "prompt_tokens", "new_tokens"]
    numbers += [name for name in ("steps", "draft_vocab") if getattr(options, name) is not None]
    harness.require_all_positive(options, *numbers)
    if options.new_tokens <= options.depths or options.prompt_tokens < 2:
        raise OptionError("--new-tokens has to be more than --depths, and --prompt-tokens 2 or more")
    if options.kind == "mtp" and (options.taps or options.draft_vocab):
        raise OptionError("--taps and --draft-vocab are of eagle3: leave them out")
    if options.checkpoint.exists():
        raise OptionError(f"--checkpoint {options.checkpoint} exists already: name a new directory")
    check_out(options.out)


@harness.one_line_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Train, measure, write and print; returns the exit code."""
    options = parse(argv)
    check(options)
    device, ends_s = resolve_device(options.device), time.monotonic() + options.seconds
    longest = max(options.row_tokens + options.depths, options.prompt_tokens + options.new_tokens)
    target = Target.load(open_source(str(options.source)), device, longest)
    answers = held_out(options, target)
    corpus = corpus_of(options, target, ends_s)
    head = make_head(options, target, corpus)
    report: dict[str, Any] = {"benchmark": "train-head", "kind": options.kind}
    report["parameters"] = sum(one.numel() for one in head.parameters())
    report["texts_tokens"] = {name: len(one) for name, one in corpus.by_name.items()}
    report |= {"answers": len(corpus.answers)}
    report["untrained"] = [acceptance(head, target, one, options.depths) for one in answers]
    report["training"] = train(options, head, target, corpus, ends_s)
    with torch.no_grad():  # what is measured is what is written
        for parameter in head.parameters():
            parameter.copy_(parameter.to(WRITTEN))
    write(head, target, options.checkpoint)
    report |= {"settings": harness.settings_of(options), **provenance(device, commit=options.commit)}
    write_unfinished(report, options.out)
    report["trained"] = [acceptance(head, target, one, options.depths) for one in answers]
    print(table(report))
    emit(report, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
