"""Small random checkpoints with a tokenizer, as the engine loads them, and noisy copies that draft for them."""

import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from offload_runtime.core import Batch
from offload_runtime.engine import Runtime
from offload_runtime.runners.model_runner import ModelRunner

SPECIAL_TOKENS = ["<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SENTENCES = [
    "the quick brown fox jumps over the lazy dog and the pass streams on and on",
    "system user assistant: a link, a layer, a slot; café, naïve, 日本",
]
PROMPT = "the quick brown fox jumps over the lazy dog and the quick brown"
CONTEXT_TOKENS = 512
NUM_LAYERS = 5


def byte_level_tokenizer(vocab_size: int = 320) -> transformers.PreTrainedTokenizerFast:
    """A byte-level BPE, like SmolLM2's, that knows a few words and can write everything."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=SPECIAL_TOKENS, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", bos_token="<|im_start|>", chat_template=TEMPLATE
    )


def write_noisy_copy(source: Path, directory: Path, *, noise: float) -> Path:
    """Copy a safetensors checkpoint, multiplying each weight by 1 + `noise` times a Gaussian number."""
    generator = torch.Generator().manual_seed(0)
    shutil.copytree(source, directory)
    for path in sorted(directory.glob("*.safetensors")):
        noisy = {}
        for name, weight in sorted(load_file(path).items()):
            factor = 1 + noise * torch.randn(weight.shape, generator=generator)
            noisy[name] = (weight.float() * factor).to(weight.dtype)
        save_file(noisy, path, metadata={"format": "pt"})
    return directory


def with_template(source: Path, directory: Path, template: str, tokenizer: Any = None) -> Path:
    """A copy of a checkpoint with another chat template, and another tokenizer if one is given."""
    shutil.copytree(source, directory)
    tokenizer = byte_level_tokenizer() if tokenizer is None else tokenizer
    tokenizer.chat_template = template
    tokenizer.save_pretrained(directory)
    return directory


def write_book(path: Path, num_words: int = 30_000) -> Path:
    """Write words of `SENTENCES` in some order, as many as have places that are held out; returns `path`."""
    draw, words = random.Random(0), " ".join(SENTENCES).split()
    path.write_text(" ".join(draw.choice(words) for _ in range(num_words)), encoding="utf-8")
    return path


def write_checkpoint(
    directory: Path,
    *,
    seed: int = 0,
    num_layers: int = NUM_LAYERS,
    context: int = CONTEXT_TOKENS,
    hidden_size: int = 48,
    window: int | None = None,
) -> Path:
    """Save a random Llama whose next token depends on what it has read; returns `directory`. With a sliding window of
    so many tokens in all layers but the first it is a Qwen 2.

    Large matrices and a small embedding: the default initialisation gives a model that repeats one token.
    """
    tokenizer = byte_level_tokenizer()
    shape: dict[str, Any] = {
        "vocab_size": len(tokenizer), "hidden_size": hidden_size, "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": num_layers, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": context, "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": tokenizer.bos_token_id, "tie_word_embeddings": False,
    }  # fmt: skip
    if window is None:
        model: transformers.PreTrainedModel = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape))
    else:
        sliding = {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 1}
        model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**shape, **sliding))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                scale = 0.5 if "embed" in name else 2.0 * parameter.shape[-1] ** -0.5
                parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@contextmanager
def load(target: Path, **options: Any) -> Iterator[Runtime]:
    """A runtime on the CPU in fp32, closed afterwards."""
    with Runtime.load(target, device="cpu", **options) as runtime:
        yield runtime


def refuse_weights(stage: str, done_bytes: int, total_bytes: int) -> None:
    """As `on_progress`: nothing may be read."""
    raise AssertionError(f"{stage} were read before the mistake was seen")


def raising(error: BaseException, *, after: int, then: Callable[..., Any] = lambda *_: None) -> Callable[..., Any]:
    """A stand-in for `then` that raises `error` once, after `after` calls that went through."""
    calls = 0

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == after + 1:
            raise error
        return then(*args, **kwargs)

    return call


class FailingRunner(ModelRunner):
    """A target whose passes fail once, after so many that went through."""

    def __init__(self, runner: ModelRunner, error: Exception, *, after: int) -> None:
        super().__init__(runner.decoder, runner.streamer, runner.cache, runner.rope, runner.chunk_tokens)
        self._forward = raising(error, after=after, then=super().forward)

    def forward(self, batch: Batch, *args: Any, **options: Any) -> Batch:
        passed: Batch = self._forward(batch, *args, **options) if batch.trees else super().forward(batch, *args)
        return passed
