"""Four thousand damaged files and odd command lines: each is answered, or refused in two lines at most.

Half of them are the same in every run, the others new: FUZZ_SEED, which a failure names, repeats those.
"""

import gc
import io
import json
import os
import re
import secrets
import shlex
import shutil
import struct
import sys
from collections.abc import Callable
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import typer

from offload_runtime.config import RuntimeConfig
from offload_runtime.engine import fetch_demo_model
from offload_runtime.engine.request import IncrementalDecoder, PromptRoom
from offload_runtime.errors import CheckpointError
from offload_runtime.hardware import MachineProfile, load_profile
from offload_runtime.plan.report import Refusal, plan_or_refuse, upgrades
from offload_runtime.plan.sizes import describe_models
from offload_runtime.weights.checkpoint import CheckpointSource
from offload_runtime.weights.sources import describe_model, open_checkpoint
from tests.helpers import fuzzing
from tests.helpers.engine import load, write_checkpoint
from tests.helpers.models import BUILDERS, LENGTH_DEPENDENT_BUILDERS, load_plain
from tests.test_cli_fakes import FakeRuntime, app_of

pytestmark = pytest.mark.slow
INPUTS = 420  # of each of the two chunks of a part: 4,200 in all
RANDOM_SEED = os.environ.get("FUZZ_SEED") or str(secrets.randbelow(1 << 32))
SEEDS = {"known": "1", "random": f"{RANDOM_SEED}"}
# What one input of a part is, or a few: made by the random numbers, run by the judge.
Part = Callable[[Random, fuzzing.Judge], None]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("models") / "model", num_layers=1, hidden_size=32)


@pytest.fixture
def scratch(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory to work in, and nothing of the user's within reach."""
    for name in ("OFFLOAD_RUNTIME_CONFIG", "OFFLOAD_RUNTIME_STATE", "HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("OFFLOAD_RUNTIME_CACHE", str(model / "config.json"))  # a file, in which nothing can be put
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").symlink_to(model)
    return tmp_path


# --- files


def safetensors_headers(scratch: Path, stack: ExitStack) -> Part:
    directory = Path(shutil.copytree(scratch / "model", scratch / "damaged"))
    file = directory / "model.safetensors"
    valid = file.read_bytes()
    (length,) = struct.unpack("<Q", valid[:8])
    header, data = json.loads(valid[8 : 8 + length]), valid[8 + length :]
    index = {"metadata": {}, "weight_map": dict.fromkeys(header, file.name)}
    _open_and_load(directory)

    def one(random: Random, judge: fuzzing.Judge) -> None:
        (directory / "model.safetensors.index.json").unlink(missing_ok=True)
        kind = random.random()
        content, names = valid, []
        if kind < 0.7:
            changed, names = fuzzing.mutate_json(random, header, ("__metadata__", "lm_head.weight"))
            if kind < 0.1:
                names.append(_overlap(random, changed))
            text = fuzzing.json_bytes(changed)
            stated = len(text) if kind < 0.6 else random.choice([int(n) for n in fuzzing.ODD_NUMBERS[:20]]) % (1 << 64)
            content = struct.pack("<Q", stated) + text + data
        elif kind < 0.85:
            content, names = fuzzing.mutate_bytes(random, valid)
        else:
            changed, names = fuzzing.mutate_json(random, index, ("../config.json", "model.safetensors"))
            (directory / "model.safetensors.index.json").write_bytes(fuzzing.json_bytes(changed))
        file.write_bytes(content)
        judge.run(", ".join(names), lambda: _open_and_load(directory))

    return one


def _overlap(random: Random, header: Any) -> str:
    """Move a tensor's bytes somewhat."""
    entries = [entry for entry in header.values() if isinstance(entry, dict)] if isinstance(header, dict) else []
    if entries:
        entry, move = random.choice(entries), random.choice((-2, 2, 64, -64, 1 << 40))
        offsets = entry.get("data_offsets")
        if isinstance(offsets, list) and all(isinstance(offset, int) for offset in offsets):
            entry["data_offsets"] = [offset + move for offset in offsets]
    return "overlap"


def _open_and_load(path: Path) -> CheckpointSource:
    source = open_checkpoint(path)
    load_plain(source, torch.float32)
    return source


CONFIG_KEYS = (
    "rope_scaling", "rope_parameters", "rope_theta", "sliding_window", "use_sliding_window", "max_window_layers",
    "layer_types", "no_rope_layers", "no_rope_layer_interval", "partial_rotary_factor", "attention_bias", "mlp_bias",
    "head_dim", "num_key_value_heads", "quantization_config", "original_max_position_embeddings", "dtype",
    "torch_dtype", "eos_token_id", "model_type", "architectures", "hidden_act", "tie_word_embeddings", "factor",
    "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate", "rope_type", "type",
    "low_freq_factor", "high_freq_factor", "short_factor", "long_factor", "pad_token_id", "vocab_size",
    "transformers_version", "_attn_implementation", "id2label", "auto_map", "text_config",
)  # fmt: skip


def configurations(scratch: Path, stack: ExitStack) -> Part:
    """Every family's, planned with; and that of a model whose weights are there, opened and loaded."""
    whole = Path(shutil.copytree(scratch / "model", scratch / "damaged"))
    generation = whole / "generation_config.json"
    bases = [build().config.to_dict() for build in (BUILDERS | LENGTH_DEPENDENT_BUILDERS).values()]
    shipped = Path(__file__).parent / "data" / "configs"
    bases += [json.loads(path.read_text()) for path in sorted(shipped.glob("*/config.json"))]
    own, settings = (json.loads((whole / name).read_text()) for name in ("config.json", generation.name))
    described = scratch / "described"
    described.mkdir()
    machine = load_profile("rtx4090")
    (described / "config.json").write_bytes(fuzzing.json_bytes(bases[0]))
    _plan(described, machine)
    _open_whole(whole)

    def one(random: Random, judge: fuzzing.Judge) -> None:
        with_weights, of_generation = random.random() < 0.5, random.random() < 0.1
        base = settings if with_weights and of_generation else own if with_weights else random.choice(bases)
        changed, names = fuzzing.mutate_json(random, base, CONFIG_KEYS, times=2)
        content = fuzzing.json_bytes(changed)
        if random.random() < 0.1:
            content, more = fuzzing.mutate_bytes(random, content)
            names += more
        if with_weights:
            for path, usual in ((whole / "config.json", own), (generation, settings)):
                path.write_bytes(content if base is usual else fuzzing.json_bytes(usual))
            judge.run(f"with weights: {', '.join(names)}", lambda: _open_whole(whole))
        else:
            (described / "config.json").write_bytes(content)
            judge.run(f"{base['model_type']}: {', '.join(names)}", lambda: _plan(described, machine))

    return one


def _plan(directory: Path, machine: MachineProfile) -> None:
    outcome = plan_or_refuse(describe_models(RuntimeConfig(str(directory))), machine)
    if isinstance(outcome, Refusal):
        raise outcome.problem
    upgrades(outcome, machine)


def _open_whole(directory: Path) -> None:
    describe_model(directory)
    with load(directory, draft="none", context=64) as runtime:
        runtime.generate([1, 2, 3], max_new_tokens=2)


def gguf_headers(scratch: Path, stack: ExitStack) -> Part:
    file = scratch / "damaged.gguf"
    valid = {arch: fuzzing.small_gguf(arch) for arch in ("llama", "qwen2")}
    for whole in valid.values():
        file.write_bytes(fuzzing.gguf_bytes(whole))
        _open_and_load(file)

    def one(random: Random, judge: fuzzing.Judge) -> None:
        arch, kind = random.choice(list(valid)), random.random()
        if kind < 0.5:
            changed, names = fuzzing.mutate_gguf(random, valid[arch], random.choice(("general.", f"{arch}.", "")))
        else:
            tensors, names = fuzzing.mutate_json(random, valid[arch]["tensors"], times=2)
            changed = {**valid[arch], "tensors": tensors}
        content = fuzzing.gguf_bytes(changed, random if 0.4 < kind < 0.6 else None)
        if kind > 0.8:
            content, more = fuzzing.mutate_bytes(random, content)
            names += more
        file.write_bytes(content)
        judge.run(f"{arch}: {', '.join(names)}", lambda: _open_and_load(file))

    return one


# --- tokenizers


TOKENIZER_KEYS = (
    "chat_template", "added_tokens", "added_tokens_decoder", "normalizer", "pre_tokenizer", "post_processor", "decoder",
    "model", "vocab", "merges", "unk_token", "byte_fallback", "type", "truncation", "padding", "tokenizer_class",
    "model_max_length", "extra_special_tokens", "auto_map", "bos_token", "eos_token", "pattern", "dropout",
    "continuing_subword_prefix", "add_prefix_space", "trim_offsets", "special", "id", "content", "clean_up",
)  # fmt: skip


def tokenizers(scratch: Path, stack: ExitStack) -> Part:
    """Of files beside safetensors, and in the metadata of GGUF."""
    directory, file = Path(shutil.copytree(scratch / "model", scratch / "damaged")), scratch / "damaged.gguf"
    source = open_checkpoint(directory)
    valid = [fuzzing.small_gguf("llama"), fuzzing.small_gguf("llama", sentencepiece=True)]
    contents = {name: (directory / name).read_bytes() for name in ("tokenizer.json", "tokenizer_config.json")}
    parsed = {name: json.loads(content) for name, content in contents.items()}
    template = (directory / "chat_template.jinja").read_text()
    _use_tokenizer(source)
    for whole in valid:
        file.write_bytes(fuzzing.gguf_bytes(whole))
        _use_tokenizer(open_checkpoint(file))

    def of_directory(random: Random, judge: fuzzing.Judge) -> None:
        for name, content in contents.items():
            (directory / name).write_bytes(content)
        text = fuzzing.odd_text(random, template) if random.random() < 0.2 else template
        (directory / "chat_template.jinja").write_bytes(text.encode("utf-8", "surrogatepass"))
        name = random.choice(list(contents))
        changed, names = fuzzing.mutate_json(random, parsed[name], TOKENIZER_KEYS, times=2)
        content = fuzzing.json_bytes(changed)
        if random.random() < 0.1:
            content, names = fuzzing.mutate_bytes(random, contents[name])
        (directory / name).write_bytes(content)
        judge.run(f"{name}: {', '.join(names)}", lambda: _use_tokenizer(source))

    def one(random: Random, judge: fuzzing.Judge) -> None:
        if random.random() < 0.5:
            of_directory(random, judge)
            return
        changed, names = fuzzing.mutate_gguf(random, random.choice(valid), "tokenizer.")
        file.write_bytes(fuzzing.gguf_bytes(changed))
        judge.run(", ".join(names), lambda: _use_tokenizer(open_checkpoint(file)))

    return one


def _use_tokenizer(source: CheckpointSource) -> None:
    """As a runtime does: prompts, a chat, and an answer's tokens as text."""
    tokenizer = source.tokenizer()
    room = PromptRoom(tokenizer, source.config(), 4096)
    room.encode("the lazy dog's 12345 jumps,\n\n  日本 \x00\x1b <|im_end|>")
    tokens = room.encode([{"role": "user", "content": "and the quick brown"}])
    decoder = IncrementalDecoder(tokenizer, tokens)
    for token in range(0, source.config().vocab_size, 16):
        decoder.push(token)
    decoder.flush()


# --- the command line


def run_program(program: Any, words: list[str], stdin: bytes = b"") -> tuple[int, str, str]:
    """Run a command line in this process; returns the exit code and what it printed."""
    streams = [io.TextIOWrapper(io.BytesIO(data), encoding="utf-8") for data in (stdin, b"", b"")]
    before, sys.stdin = sys.stdin, streams[0]
    try:
        with redirect_stdout(streams[1]), redirect_stderr(streams[2]):
            program.main(words, prog_name="offload-runtime")
    except SystemExit as end:
        code = end.code
    finally:
        sys.stdin = before
    texts = []
    for stream in streams[1:]:
        stream.flush()
        texts.append(stream.buffer.getvalue().decode())  # type: ignore[attr-defined]
    assert isinstance(code, int), code
    return code, texts[0], texts[1]


def program_of(runtime: Any) -> Any:
    """The program with a runtime in place of its own. Typer takes longer to make it than to run most command lines."""
    given = SimpleNamespace(Runtime=runtime, fetch_demo_model=fetch_demo_model)
    return typer.main.get_command(app_of(given))


def _error_lines(stderr: str) -> list[str]:
    return [line.removeprefix("error: ") for line in stderr.split("\n") if line.startswith("error: ")]


def _fill(scratch: Path) -> None:
    """What names of files in command lines may mean."""
    (scratch / "directory").mkdir()
    (scratch / "dangling").symlink_to(scratch / "nowhere" / "else")
    (scratch / "to_directory").symlink_to(scratch / "directory")
    (scratch / "text.txt").write_text("a prompt\nof two lines")
    (scratch / "bytes.txt").write_bytes(b"\xff\xfe\x00")


def _stays_here(word: str) -> bool:
    """Whether a word, wherever it is taken for a path, leads nowhere else."""
    return not re.search(r"(^|[=\s])(/|~(?!nouser))|\.\.", word)


COMMAND_LINES = (
    "plan --target model --profile rtx4090 --context 64",
    "plan --target model --profile rtx4090 --vram 24GB --ram 32GiB --json --draft model --speculation chain",
    "plan --target model --profile rtx4090 --speculation triforce --budget-tokens 64 --chunk-size 8 --batch 2",
    "plan --target model --draft none --kv host --resident-layers 1 --pinned 1GB --gamma 4 --dtype bf16",
    "plan --target model --profile machine.toml --tree-nodes 64 --draft-cache streaming --sink-tokens 4 --plot x.png",
    "generate --target model --prompt hello --max-new-tokens 4 --temperature 0.5 --top-k 5 --top-p 0.9 --min-p 0.1",
    "generate --target model --prompt-file text.txt --prompt-file - --json --seed 3 --stop x --stop y --ignore-eos",
    "generate --target model --prompt hello --chat --explain --trace trace.json --no-progress --profile rtx4090",
    "chat --target model --system hello --seed 1 --device cpu --max-new-tokens 5 --no-progress --recent-tokens 9",
    "verify --target model --prompts text.txt --tokens 8 --seeds 2 --quick --json",
    "profile --full --quick --save mine --device cpu --json",
    "demo --prompt hello --max-new-tokens 4 --temperature 0.1 --seed 1 --gamma 2 --dtype fp32",
    "--version",
    "--help",
)
WORDS = (
    "nowhere", "org/name", "org/name:Q4_K_M", "text.txt", "bytes.txt", "directory", "dangling", "model", "machine.toml",
    "a=b", "--", "-", "--target", "--json", "--help", "--draft", "ngram", "none", "24GB", "1e400GB", "-1GB", "0",
    "9" * 400 + "GB", "nan", "inf", "1e-400", "-0", "2**64", str(1 << 64), str(1 << 63), "0x10", "\uff11", "true",
    "long" * 100, "--no-json", "--vram=", "--vram=-5", "--seed=nan", "damaged.toml",
)  # fmt: skip


def command_lines(scratch: Path, stack: ExitStack) -> Part:
    _fill(scratch)
    machine = (Path(__file__).parents[1] / "profiles" / "rtx4090.toml").read_bytes()
    (scratch / "machine.toml").write_bytes(machine)
    fake = FakeRuntime()
    program = program_of(fake)

    def change(random: Random, words: list[str]) -> None:
        place = random.randrange(len(words) + 1)
        old = words[place] if place < len(words) else ""
        what = random.randrange(6)
        new = random.choice(
            (random.choice(WORDS), random.choice(fuzzing.ODD_TEXTS), str(random.choice(fuzzing.ODD_NUMBERS[:-3])))
        )
        if what == 0:
            words[place : place + 1] = []
        elif what == 1:
            words[place : place + 1] = [old, old]
        elif what == 2:
            words.insert(place, new)
        elif what == 3:
            random.shuffle(words)
        elif what == 4:
            words[place : place + 1] = [fuzzing.odd_text(random, old)]
        else:
            words[place : place + 1] = [new]

    def one(random: Random, judge: fuzzing.Judge) -> None:
        words = shlex.split(random.choice(COMMAND_LINES))
        command, rest = words[:1], words[1:]
        for _ in range(random.randint(1, 3)):
            change(random, rest if random.random() < 0.95 else command)
        words = [word for word in command + rest if _stays_here(word)]
        if "profile" in words:  # it would measure
            words = ["profile", "--full", "--device=cpu", *(w for w in rest if "dev" not in w and _stays_here(w))]
        damaged, _ = fuzzing.mutate_bytes(random, machine)
        (scratch / "damaged.toml").write_bytes(damaged)
        answers = words[:1] in (["generate"], ["chat"])
        fake.load_error = None if answers else CheckpointError("there are no weights: give another model")

        def invoke() -> None:
            code, _, stderr = run_program(program, words, b"one line\nanother")
            errors = _error_lines(stderr)
            assert code in (0, 2), f"exit code {code}"
            assert code == 0 or len(errors) == 1, f"exit code {code} with {len(errors)} errors"
            judge.judge_lines(repr(words), errors)
            judge.refused += code == 2

        judge.run(repr(words), invoke)

    return one


PARTS = (gguf_headers, safetensors_headers, configurations, tokenizers, command_lines)


@pytest.mark.parametrize("chunk", SEEDS)
@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.__name__)
def test_nothing_but_typed_errors(part: Callable[[Path, ExitStack], Part], chunk: str, scratch: Path) -> None:
    judge = fuzzing.Judge()
    with ExitStack() as stack:
        one = part(scratch, stack)
        gc.collect()
        gc.freeze()  # what was imported by now: closing a runtime would look through all of it
        with fuzzing.limited_memory():
            while judge.count < INPUTS:
                one(Random(f"{SEEDS[chunk]}/{part.__name__}/{judge.count}"), judge)
    again = f"FUZZ_SEED={RANDOM_SEED} pytest -m slow tests/test_fuzz.py -k '{part.__name__} and {chunk}'"
    if judge.findings:
        pytest.fail(f"repeat with {again}\n{judge.report()}", pytrace=False)
    assert judge.refused > INPUTS // 10, "hardly an input was damaged"
