"""A thousand damaged files: each is read, or refused in two lines at most.

Half of them are the same in every run, the others new: FUZZ_SEED, which a failure names, repeats those.
"""

import gc
import json
import os
import secrets
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from random import Random

import pytest
import torch

from offload_runtime.config import RuntimeConfig
from offload_runtime.hardware import MachineProfile, load_profile
from offload_runtime.plan.report import Refusal, plan_or_refuse, upgrades
from offload_runtime.plan.sizes import describe_models
from offload_runtime.weights.checkpoint import CheckpointSource
from offload_runtime.weights.sources import describe_model, open_checkpoint
from tests.helpers import fuzzing
from tests.helpers.engine import load, write_checkpoint
from tests.helpers.models import BUILDERS, LENGTH_DEPENDENT_BUILDERS, load_plain

pytestmark = pytest.mark.slow
INPUTS = 250  # of each of the two chunks of a part: 1,000 in all
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


PARTS = (gguf_headers, configurations)


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
