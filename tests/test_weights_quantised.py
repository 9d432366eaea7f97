"""Quantised safetensors checkpoints are kept as they are stored, and give the bits of their decoded copies."""

import json
import re
import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from offload_runtime import Runtime
from offload_runtime.core import TokenTree
from offload_runtime.errors import CheckpointError
from offload_runtime.weights.checkpoint import CheckpointSource
from offload_runtime.weights.encoding import GgufBlocks
from offload_runtime.weights.layout import checkpoint_tensors
from offload_runtime.weights.loader import load_weights
from offload_runtime.weights.mxfp4 import mxfp4_rows, with_experts
from offload_runtime.weights.safetensors import read_header
from offload_runtime.weights.sources import describe_model, open_checkpoint
from tests.helpers.assembly import make_runner, prefill, verify
from tests.helpers.families import family_config, family_model
from tests.helpers.models import assert_a_gpu_loads_the_same, load_plain, random_tokens, rows_of
from tests.helpers.quantising import BF16, FORMATS, FP16, FP32, Format, fp8, packed_int, write_decoded, write_quantised
from tests.test_weights_gguf_rows import logits


def bits_of(said: dict[str, Any]) -> torch.Tensor:
    """A tensor of the file of matrices that compressed-tensors packed."""
    stored = torch.frombuffer(bytearray.fromhex(said["bytes"]), dtype=torch.uint8)
    return stored.view(getattr(torch, said["dtype"])).view(said["shape"])


BY_LIBRARY = json.loads((Path(__file__).parent / "data" / "compressed_tensors.json").read_text())["matrices"]


def small_hybrid() -> Any:
    sizes = {"hidden_size": 192, "intermediate_size": 320, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"head_dim": 64, "linear_key_head_dim": 64, "linear_value_head_dim": 64, "linear_num_value_heads": 8}
    return family_model("qwen3_5_text", 1, **sizes)


CHOSEN, COUNT, LAYERS = 2, 6, 2


def small_mixture() -> Any:
    """Whose rows of experts end within units, groups and blocks."""
    sizes = {"hidden_size": 192, "moe_intermediate_size": 96, "head_dim": 64, "num_hidden_layers": LAYERS}
    sizes |= {"num_experts": COUNT, "num_experts_per_tok": CHOSEN, "decoder_sparse_step": 1}
    return family_model("qwen3_moe", 1, mlp_only_layers=[], **sizes)


class Checkpoint:
    """One of a format, and its decoded copy, which nothing of ours has decoded."""

    def __init__(self, directory: Path, name: str) -> None:
        self.path, model = directory / "quantised", None
        for other, make in ((" of a hybrid", small_hybrid), (" of a mixture", small_mixture)):
            if name.endswith(other):
                name, model = name.removesuffix(other), make()
        self.decoded = write_quantised(self.path, FORMATS[name], model)
        self.copy_path = write_decoded(directory / "decoded", self.path, self.decoded)

    @property
    def source(self) -> CheckpointSource:
        return open_checkpoint(self.path)

    @property
    def copy(self) -> CheckpointSource:
        return open_checkpoint(self.copy_path)


# By default one of each kind of number and of each way to pack it.
_OFTEN = ("FP8 of blocks of a hybrid", "packed 4 bits, mixed", "GPTQ, ordered", "AWQ of a mixture", "NVFP4")
_ALL = (*FORMATS, "FP8 of blocks of a hybrid", "AWQ of a hybrid", "AWQ of a mixture", "GPTQ, ordered of a mixture")


@pytest.fixture(
    scope="module", params=[name if name in _OFTEN else pytest.param(name, marks=pytest.mark.slow) for name in _ALL]
)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint(tmp_path_factory.mktemp("quantised"), request.param)


def test_weights_are_what_the_formula_says(checkpoint: Checkpoint) -> None:
    """As they are stored, and decoded as they are read, in every dtype of a run."""
    source = checkpoint.source
    for dtype in (FP32, BF16, FP16):
        for weights in (load_weights(source, source.layout(dtype)), load_plain(source, dtype)):
            for name, to in checkpoint_tensors(source.config()).items():
                assert torch.equal(rows_of(to, weights), checkpoint.decoded[name].to(dtype)), name


@pytest.mark.parametrize(("buffers", "resident"), [(0, None), (1, (1,))])
def test_logits_are_the_decoded_copys(checkpoint: Checkpoint, buffers: int, resident: tuple[int, ...] | None) -> None:
    found = logits(checkpoint.source, buffers=buffers, resident=resident)
    assert torch.equal(found, logits(checkpoint.copy, buffers=0, resident=None))
    assert len(found.unique()) > 1000


@pytest.mark.gpu
def test_a_gpu_gets_the_bytes_of_a_cpu(checkpoint: Checkpoint) -> None:
    source = checkpoint.source
    for layout in (source.layout(BF16), checkpoint.copy.layout(BF16)):
        assert_a_gpu_loads_the_same(source, layout)


@pytest.mark.gpu
@pytest.mark.few(40)
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize(("buffers", "resident"), [(0, None), (2, None), (1, (1,))])
def test_logits_on_a_gpu_are_those_of_the_decoded_copy(
    checkpoint: Checkpoint, buffers: int, resident: tuple[int, ...] | None, dtype: torch.dtype
) -> None:
    found = logits(checkpoint.source, buffers=buffers, resident=resident, device="cuda", dtype=dtype)
    assert torch.equal(found, logits(checkpoint.copy, buffers=0, resident=None, device="cuda", dtype=dtype))


def mixture_logits(checkpoint: Checkpoint, dtype: torch.dtype, device: str) -> list[torch.Tensor]:
    """Of prompts that bring whole layers, and of windows: of the decoded copy, and of what is stored, with all experts
    on the device or some, others on the CPU."""
    copy, source, found = checkpoint.copy, checkpoint.source, list[torch.Tensor]()
    cases: tuple[tuple[CheckpointSource, int | None, float | None], ...]
    cases = (copy, None, 0), (source, None, 0), (source, CHOSEN, 0), (source, COUNT, 1.0), (source, CHOSEN + 1, None)
    for one, buffers, share in cases:
        made = make_runner(
            one, layout=one.layout(dtype), pool_buffers=buffers, cpu_share=share, dtype=dtype,
            device=torch.device(device),
        )  # fmt: skip
        rows = [prefill(made.runner, 0, random_tokens(50)), *(verify(made.runner, {0: TokenTree((7, 8, 9))}),) * 2]
        found.append(torch.cat(rows))
        made.close()
    return found


@pytest.mark.slow  # a library is compiled
@pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler")
@pytest.mark.parametrize("name", ["FP8 of blocks", "packed 4 bits with zeros", "GPTQ 8 bits", "AWQ", "int8", "NVFP4"])
def test_experts_are_kept_and_multiplied_as_they_are_stored(name: str, tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path, f"{name} of a mixture")
    source, copy = checkpoint.source, checkpoint.copy
    for dtype in (FP32, BF16, FP16):
        weights = load_weights(source, source.layout(dtype))
        for tensor, to in checkpoint_tensors(source.config()).items():
            assert torch.equal(rows_of(to, weights), checkpoint.decoded[tensor].to(to.dtype or dtype)), tensor
    stored, decoded = (one.layout(BF16).experts[1] for one in (source, copy))
    most = {"uint4": 0.45, "E2M1": 0.6}.get(source.kinds[f"{EXPERTS}0.up_proj.weight"].number, 0.65)
    assert stored.as_stored and stored.total_bytes < most * decoded.total_bytes
    first, *others = mixture_logits(checkpoint, BF16, "cpu")
    assert all(torch.equal(one, first) for one in others) and len(first.unique()) > 100
    said = []
    pool: dict[str, Any] = {"weights": "stored", "expert_pool": 3 * stored.block.total_bytes, "cpu_share": 0}
    for path, options in ((checkpoint.copy_path, {"draft": "none"}), (checkpoint.path, {"draft": "ngram", **pool})):
        with Runtime.load(path, device="cpu", dtype="fp32", context=100, **options) as runtime:
            said.append(runtime.generate(random_tokens(30), max_new_tokens=12, ignore_eos=True, temperature=0.0).tokens)
    assert said[0] == said[1]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize(
    "name", ["FP8 of blocks", "FP8 of channels", "packed 4 bits with zeros", "GPTQ", "AWQ", "int8", "NVFP4"]
)
def test_experts_on_a_gpu_are_those_of_the_decoded_copy(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    first, *others = mixture_logits(Checkpoint(tmp_path, f"{name} of a mixture"), dtype, "cuda")
    assert all(torch.equal(one, first) for one in others) and len(first.unique()) > 100


@pytest.mark.parametrize(("part", "change", "message"), [
    ("weight_scale_inv", lambda scales: scales * torch.inf, r"scales of .*1\.up_proj\.weight are infinite"),
    ("weight", lambda weight: torch.full_like(weight, torch.nan), r"weights of .*1\.up_proj\.weight are no numbers"),
    ("weight_scale_inv", lambda scales: scales[:, :1], r"1\.up_proj\.weight_scale_inv is F32 \[1, 1\], expected"),
    ("weight_scale_inv", None, r"lacks .*experts\.1\.up_proj\.weight_scale_inv"),
])  # fmt: skip
def test_experts_that_are_damaged_are_refused(
    part: str, change: Callable[[torch.Tensor], torch.Tensor] | None, message: str, tmp_path: Path
) -> None:
    path, name = Checkpoint(tmp_path, "FP8 of blocks of a mixture").path, f"{EXPERTS}1.up_proj.{part}"
    stored = load_file(path / "model.safetensors")
    before = stored.pop(name)
    stored |= {} if change is None else {name: change(before).contiguous()}
    save_file(stored, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        Runtime.load(path, device="cpu", weights="stored", expert_pool="200KB")


@pytest.mark.parametrize("name", BY_LIBRARY)
def test_matrices_that_the_library_packed_are_what_it_decodes(name: str, tmp_path: Path) -> None:
    """One matrix, as every module of a small model."""
    said = BY_LIBRARY[name]
    matrix = Format(
        said["quantization_config"],
        lambda w: ({part: bits_of(each) for part, each in said["tensors"].items()}, bits_of(said["decoded"]).float()),
        bits_of(said["decoded"]).dtype,
    )
    decoded = write_quantised(
        tmp_path, matrix, num_hidden_layers=1, hidden_size=16, intermediate_size=16, num_key_value_heads=4
    )
    source = open_checkpoint(tmp_path)
    for dtype in (FP32, BF16, FP16):
        weights = load_weights(source, source.layout(dtype))
        for name, to in checkpoint_tensors(source.config()).items():
            assert torch.equal(rows_of(to, weights), decoded[name].to(dtype))
    assert len(source.kinds) == 7


@pytest.mark.parametrize("scale", [FP32, BF16])
def test_blocks_of_fp8_are_what_transformers_decodes(scale: torch.dtype, tmp_path: Path) -> None:
    """To the dtype of the scales, which is what it chooses; of whole blocks, which are all that it takes."""
    form = Format(
        {"quant_method": "fp8", "weight_block_size": [32, 64]},
        lambda w: fp8(w, 32, 64, scale, "weight_scale_inv", in_fp32=True), BF16,
    )  # fmt: skip
    write_quantised(tmp_path, form, num_hidden_layers=1)
    stored, source = load_file(tmp_path / "model.safetensors"), open_checkpoint(tmp_path)
    weights = load_weights(source, source.layout(scale))
    for name in source.kinds:
        parts = {"weight": stored[name], "weight_scale_inv": stored[f"{name}_scale_inv"]}
        to = checkpoint_tensors(source.config())[name]
        expected = Fp8Dequantize(None).convert(parts)["weight"]
        assert torch.equal(rows_of(to, weights), expected)


EXPERTS = "model.layers.0.mlp.experts."


def write_experts(path: Path, experts: int, rows: int, columns: int) -> dict[str, torch.Tensor]:
    """Random numbers as gpt-oss has them; returns what is stored."""
    torch.manual_seed(0)
    stored = dict[str, torch.Tensor]()
    for name, height in (("gate_up", 2 * rows), ("down", rows)):
        shape = (experts, height, columns // 32)
        stored[f"{EXPERTS}{name}_proj_blocks"] = torch.randint(256, (*shape, 16), dtype=torch.uint8)
        stored[f"{EXPERTS}{name}_proj_scales"] = torch.randint(228, shape, dtype=torch.uint8)
    save_file(stored, path)
    return stored


@pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.gpu)]
)
def test_experts_in_mxfp4_are_what_transformers_decodes(device: str, tmp_path: Path) -> None:
    """Two experts as large as gpt-oss', which are read in several pieces, by every power of two that is read. The sign
    of zeros does not count."""
    stored = write_experts(tmp_path / "model.safetensors", 2, 2880, 2880)
    found, how = with_experts(read_header(tmp_path / "model.safetensors")), GgufBlocks("MXFP4")
    assert len(found) == 6
    for stack, parts in (("gate_up", ("gate", "up")), ("down", ("down",))):
        blocks, scales = (stored[f"{EXPERTS}{stack}_proj_{what}"] for what in ("blocks", "scales"))
        decoded = convert_moe_packed_tensors(blocks, scales, dtype=BF16).transpose(1, 2)
        kept = torch.empty(2 * len(blocks[0]), how.row_bytes(2880), dtype=torch.uint8)
        how.store_rows(mxfp4_rows(blocks, scales).flatten(0, 1), 2880, kept)
        for number, (start, part) in product(range(2), enumerate(parts)):
            tensor, rows = found[f"{EXPERTS}{number}.{part}_proj.weight"], slice(start, None, len(parts))
            dense = torch.empty(2880, 2880, dtype=BF16, device=device)
            raw = torch.empty(2880, how.row_bytes(2880), dtype=torch.uint8, device=device)
            for out in (dense, raw):
                tensor.fill(out)
            assert torch.equal(dense.cpu(), decoded[number, rows])
            assert torch.equal(raw.cpu(), kept.unflatten(0, (2, -1))[number, rows])
            again = torch.empty_like(dense)
            how.decode_rows(raw, again)
            assert torch.equal(again, dense)


def test_a_mixture_in_mxfp4_is_read_as_its_decoded_copy(tmp_path: Path) -> None:
    """And one whose weights are not there yet is described as it will be."""
    config = Qwen3MoeConfig(
        vocab_size=64, hidden_size=64, moe_intermediate_size=32, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    settings = {**config.to_dict(), "architectures": ["Qwen3MoeForCausalLM"], "dtype": "bfloat16"}
    stored, decoded = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    for name, parameter in Qwen3MoeForCausalLM(config).state_dict().items():
        decoded[name] = parameter.to(BF16)
        if ".experts." not in name:
            stored[name] = decoded[name]
            continue
        shape = (*parameter.shape[:2], parameter.shape[2] // 32)
        blocks, scales = torch.randint(256, (*shape, 16), dtype=torch.uint8), torch.full(shape, 120, dtype=torch.uint8)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        rows = convert_moe_packed_tensors(blocks, scales).transpose(1, 2)
        halves = (rows[:, 0::2], rows[:, 1::2]) if "gate_up" in name else (rows,)  # transformers' own have halves
        decoded[name] = torch.cat(halves, dim=1).contiguous()
    sources = []
    for tensors, quantised in ((stored, {"quantization_config": {"quant_method": "mxfp4"}}), (decoded, {})):
        path = tmp_path / str(len(sources))
        path.mkdir()
        save_file(tensors, path / "model.safetensors")
        (path / "config.json").write_text(json.dumps({**settings, **quantised}))
        sources.append(open_checkpoint(path))
    assert set(sources[0].kinds.values()) == {"MXFP4"} and len(sources[0].kinds) == 12
    first, second = (load_weights(source, source.layout(BF16)) for source in sources)
    for to in checkpoint_tensors(config=sources[0].config()).values():
        assert torch.equal(rows_of(to, first), rows_of(to, second))
    (tmp_path / "0" / "model.safetensors").unlink()
    assert describe_model(tmp_path / "0").kinds == sources[0].kinds
    save_file(stored, tmp_path / "0" / "model.safetensors")
    (tmp_path / "0" / "config.json").write_text(json.dumps(settings))
    with pytest.raises(CheckpointError, match=r"neither its config\.json nor"):
        open_checkpoint(tmp_path / "0")


def test_a_mixture_whose_format_is_said_beside_its_configuration_is_what_the_formula_says(tmp_path: Path) -> None:
    """As ModelOpt's older checkpoints have it."""
    decoded = write_quantised(tmp_path, FORMATS["NVFP4 of ModelOpt"]._replace(config={}), small_mixture())
    config = json.loads((tmp_path / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    said = {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head", "*.mlp.gate"]}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": said}))
    source = open_checkpoint(tmp_path)
    weights = load_weights(source, source.layout(BF16))
    for tensor, to in checkpoint_tensors(source.config()).items():
        assert torch.equal(rows_of(to, weights), decoded[tensor].to(to.dtype or BF16)), tensor
    assert sum(".experts." in tensor for tensor in source.kinds) == sum(".experts." in tensor for tensor in decoded)


def test_experts_in_mxfp4_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    stored = write_experts(path, 2, 4, 64)
    blocks, scales = f"{EXPERTS}down_proj_blocks", f"{EXPERTS}down_proj_scales"
    for changed, message in (
        ({scales: stored[scales].clamp(min=228)}, "scales of .*experts.1.down_proj.weight are no numbers, or beyond"),
        ({scales: stored[scales][:, :, :1].clone()}, "its scales are U8"),
        ({blocks: stored[blocks].view(torch.int8)}, "down_proj_blocks is I8"),
        ({scales: None}, "lacks the scales of .*down_proj_blocks"),
    ):
        save_file({name: each for name, each in {**stored, **changed}.items() if each is not None}, path)
        with pytest.raises(CheckpointError, match=message):
            with_experts(read_header(path))[f"{EXPERTS}1.down_proj.weight"].fill(torch.empty(4, 64))


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint(tmp_path_factory.mktemp("packed"), "packed 4 bits, mixed")


def group(**weights: Any) -> dict[str, Any]:
    """The groups of a configuration with other arguments for weights of 4 bits."""
    return {"config_groups": {"all": {"targets": ["Linear"], "weights": {**PACKED_WEIGHTS, **weights}}}}


PACKED = FORMATS["packed 4 bits"].config
PACKED_WEIGHTS = PACKED["config_groups"]["group_0"]["weights"]


@pytest.mark.parametrize("prefix", ["model.", "model.language_model.", "language_model.model."])
def test_what_is_ignored_of_a_model_that_reads_images_is_known_without_its_weights(prefix: str, tmp_path: Path) -> None:
    config = json.loads(family_config("qwen3_5_moe_text", 0).to_json_string())
    modules = ["linear_attn.in_proj_a", "mlp.gate"]
    names = [f"{prefix}layers.0.{module}" for module in modules]
    blocks = {"quant_method": "fp8", "modules_to_not_convert": names}
    escaped = [f"re:{re.escape(name)}" for name in names]
    for stated in (blocks, {**PACKED, "ignore": names}, {**PACKED, "ignore": escaped}):
        (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": stated}))
        kinds = describe_model(tmp_path).kinds
        assert "model.layers.0.linear_attn.in_proj_z.weight" in kinds
        assert not kinds.keys() & {f"model.layers.0.{module}.weight" for module in modules}


@pytest.mark.parametrize(("config", "message"), [
    ("hqq", "quantised \\('hqq'\\), which is not read: .*compressed-tensors, fp8, gptq, awq, modelopt, mxfp4, or"),
    ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quantised \\('bitsandbytes'\\)"),
    ({"quant_method": "gptq", "bits": 3}, "bits 3, and only 4, 8 can be read"),
    ({"quant_method": "gptq"}, "bits None, and only 4, 8"),
    ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
    ({"quant_method": "gptq", "bits": 4, "is_marlin_format": True}, "is_marlin_format True"),
    ({"quant_method": "gptq", "bits": 4, "dynamic": {"-:.*": {}}}, "different bits"),
    ({"quant_method": "gptq", "bits": 4, "group_size": -2}, "group_size -2"),
    ({"quant_method": "awq", "bits": 4, "version": "GEMV"}, "version 'gemv', and only gemm"),
    ({"quant_method": "awq", "bits": 8}, "bits 8"), ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt 'e5m2'"),
    ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size"),
    ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "weight_block_size"),
    ({**PACKED, "format": "nvfp4-pack-quantized"}, "type 'int', and only float"),
    ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo 'W4A8_AWQ', and only NVFP4"),
    ({**PACKED, "format": None}, "format None"),
    ({**PACKED, "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse or transformed"),
    ({**PACKED, "transform_config": {"config_groups": {"R1": {}}}}, "sparse or transformed"),
    ({**PACKED, "config_groups": {"W4A16": ["Linear"]}}, "W4A16 .*, where an object"),
    ({**PACKED, "ignore": ["re:("]}, "no expression"), ({**PACKED, "ignore": ["re:" + "(" * 9999]}, "no expression"),
    ({"quant_method": "gptq", "bits": 4.0}, r"bits 4\.0"), (PACKED | group(num_bits=2), "num_bits 2"),
    (PACKED | group(type="float"), "type 'float'"), (PACKED | group(strategy="token"), "strategy 'token'"),
    (PACKED | group(group_size=None), "group_size 0"),
    (PACKED | group(strategy="tensor", group_size=None, symmetric=False), "strategy 'tensor'"),
    (PACKED | group(strategy="block", block_structure="128xwide"), "block_structure"),
    (PACKED | group(strategy="block", block_structure="9" * 5000), "block_structure"),
    ({**PACKED, "format": "float-quantized"} | group(type="float", num_bits=4), "num_bits 4, and only 8"),
])  # fmt: skip
def test_others_are_refused(packed: Checkpoint, config: dict[str, Any] | str, message: str, tmp_path: Path) -> None:
    """Before any weights are looked at."""
    settings = json.loads((packed.path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**settings, "quantization_config": config}))
    for door in (describe_model, open_checkpoint):
        with pytest.raises(CheckpointError, match=message):
            door(tmp_path)


_K_PROJ = "model.layers.1.self_attn.k_proj"


def without(part: str) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda stored: stored.pop(f"{_K_PROJ}.{part}")


def changed(part: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda stored: stored.update({f"{_K_PROJ}.{part}": change(stored[f"{_K_PROJ}.{part}"]).contiguous()})


def quantise_embedding(stored: dict[str, torch.Tensor]) -> None:
    embedding = stored["model.embed_tokens.weight"]
    stored["model.embed_tokens.weight"] = embedding.to(torch.float8_e4m3fn)
    stored["model.embed_tokens.weight_scale"] = torch.ones(len(embedding), 1)


def decode(stored: dict[str, torch.Tensor]) -> None:
    for name in [name for name in stored if name.endswith(".qweight")]:
        words = stored.pop(name)
        stored[name.replace("qweight", "weight")] = torch.zeros(words.shape[1], len(words) * 8)


@pytest.mark.parametrize(("name", "change", "message"), [
    ("GPTQ", without("scales"), rf"lacks {_K_PROJ}\.scales"), ("GPTQ", without("qzeros"), r"lacks .*k_proj\.qzeros"),
    ("GPTQ", without("qweight"), r"lacks 1 of .* tensors \(.*k_proj\.weight\)"),
    ("GPTQ", decode, "none of its matrices is"),
    ("GPTQ", changed("scales", lambda scales: scales[:-1]), r"scales is F16 \[2, 96\], expected .* \[3, 96\]"),
    ("GPTQ", changed("scales", lambda scales: scales.to(torch.int32)), "scales is I32"),
    ("GPTQ", changed("g_idx", lambda groups: groups + 1), "g_idx names groups that 3 scales do not have"),
    ("GPTQ", changed("g_idx", lambda groups: groups.long()), "g_idx is I64"),
    ("AWQ", changed("qweight", lambda words: words.t()), r"qweight is I32 \[12, 192\]"),
    ("packed 4 bits with zeros", without("weight_zero_point"), r"lacks .*weight_zero_point"),
    ("packed 4 bits", changed("weight_packed", lambda words: words[:, :-1]), "weight_packed is I32"),
    ("FP8 of blocks", changed("weight_scale_inv", lambda scales: scales.to(torch.uint8)), "weight_scale_inv is U8"),
    ("FP8 of channels", changed("weight_scale", lambda scales: scales[:1]), "weight_scale is F16"),
    ("FP8 of channels", changed("weight", lambda weight: weight.view(torch.int8)), "weight is I8"),
    ("NVFP4", without("weight_global_scale"), "lacks .*weight_global_scale"),
    ("NVFP4", changed("weight_scale", lambda scales: scales[:, 1:]), r"expected F8_E4M3 \[96, 12\]"),
    ("NVFP4 of ModelOpt", changed("weight", lambda weight: weight[:, 8:]), r"expected U8 \[96, 96\]"),
])  # fmt: skip
def test_weights_that_do_not_fit_are_refused_when_opened(
    name: str, change: Callable[[dict[str, torch.Tensor]], object], message: str, tmp_path: Path
) -> None:
    write_quantised(tmp_path, FORMATS[name], num_hidden_layers=2)
    stored = load_file(tmp_path / "model.safetensors")
    change(stored)
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path)


def test_a_quantised_embedding_and_odd_sizes_are_refused(tmp_path: Path) -> None:
    form = FORMATS["FP8 of channels"]
    config = json.loads(json.dumps(form.config))
    config["config_groups"]["group_0"]["targets"].append("Embedding")
    write_quantised(tmp_path, form._replace(config=config), num_hidden_layers=1)
    stored = load_file(tmp_path / "model.safetensors")
    quantise_embedding(stored)
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="the embedding is quantised"):
        open_checkpoint(tmp_path)
    config = {**PACKED, **group(strategy="channel", group_size=None)}
    odd = FORMATS["packed 4 bits"]._replace(config=config, pack=lambda w: packed_int(w, w.shape[1], 4))
    write_quantised(tmp_path, odd, num_hidden_layers=1, intermediate_size=324)
    with pytest.raises(CheckpointError, match=r"down_proj has shape .192, 324., and only multiples of 8 can be packed"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(("name", "part", "change", "message"), [
    ("FP8 of blocks", "weight_scale_inv", lambda scales: scales * torch.nan, "scales of {} are infinite or no numbers"),
    ("FP8 of blocks", "weight_scale_inv", lambda scales: 0 * scales - 2.0**101, "scales of {} are infinite or no"),
    ("AWQ", "scales", lambda scales: scales * torch.inf, "scales of {} are infinite or no numbers"),
    ("FP8 of channels", "weight", lambda weight: torch.full_like(weight, torch.nan), "weights of {} are no numbers"),
])  # fmt: skip
def test_what_is_not_finite_is_refused(
    name: str, part: str, change: Callable[[torch.Tensor], torch.Tensor], message: str, tmp_path: Path
) -> None:
    write_quantised(tmp_path, FORMATS[name], num_hidden_layers=2)
    stored = load_file(tmp_path / "model.safetensors")
    stored[f"{_K_PROJ}.{part}"][-1:] = change(stored[f"{_K_PROJ}.{part}"][-1:])
    save_file(stored, tmp_path / "model.safetensors")
    source = open_checkpoint(tmp_path)
    for load in (lambda: load_weights(source, source.layout(BF16)), lambda: load_plain(source, BF16)):
        with pytest.raises(CheckpointError, match=message.format(r".*k_proj\.weight")):
            load()
