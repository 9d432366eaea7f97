"""Which families there are, and from configurations in the form of `config.json` to a `ModelConfig`.

A family is a file of this folder and a line of `FAMILIES`. Refusals matter more than the translation: an option that
the layers would silently ignore gives wrong tokens. Families that do not run are refused before torch is imported,
with the reason and a comparable model that does, told by what a configuration says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from offload_runtime.errors import CheckpointError, OptionError, UnsupportedArchitectureError
from offload_runtime.fields import Fields, shown

if TYPE_CHECKING:
    import torch

    from offload_runtime.models.config import ModelConfig
    from offload_runtime.models.heads import HeadConfig


class FamilyNames(NamedTuple):
    """Says what a family is called by people, by transformers (its class) and by llama.cpp (its architectures), and
    whether it has experts."""

    title: str
    architecture: str
    gguf: tuple[str, ...]
    experts: bool = False


FAMILIES = {  # by transformers' model_type, which is the name of the file
    "llama": FamilyNames("Llama", "LlamaForCausalLM", ("llama",)),
    "mistral": FamilyNames("Mistral", "MistralForCausalLM", ()),  # llama.cpp's are called llama, too
    "qwen2": FamilyNames("Qwen2, Qwen2.5", "Qwen2ForCausalLM", ("qwen2", "qwen2vl")),
    "qwen3": FamilyNames("Qwen3", "Qwen3ForCausalLM", ("qwen3", "qwen3vl")),
    "smollm3": FamilyNames("SmolLM3", "SmolLM3ForCausalLM", ("smollm3",)),
    "olmo2": FamilyNames("OLMo 2", "Olmo2ForCausalLM", ("olmo2",)),
    "olmo3": FamilyNames("OLMo 3", "Olmo3ForCausalLM", ()),  # llama.cpp's are called olmo2, too
    "granite": FamilyNames("Granite 3", "GraniteForCausalLM", ("granite",)),
    "gemma2": FamilyNames("Gemma 2", "Gemma2ForCausalLM", ("gemma2",)),
    "gemma3_text": FamilyNames("Gemma 3", "Gemma3ForCausalLM", ("gemma3",)),
    "gemma4_text": FamilyNames("Gemma 4", "Gemma4ForCausalLM", ("gemma4",)),
    "cohere2": FamilyNames("Cohere 2", "Cohere2ForCausalLM", ("cohere2",)),
    "glm4": FamilyNames("GLM-4", "Glm4ForCausalLM", ("glm4",)),
    "phi3": FamilyNames("Phi-3, Phi-4", "Phi3ForCausalLM", ("phi3",)),
    "qwen3_5_text": FamilyNames("Qwen3.5, Qwen3.6", "Qwen3_5ForCausalLM", ("qwen35",)),
    "qwen3_5_moe_text": FamilyNames(
        "Qwen3.5's and Qwen3.6's mixtures", "Qwen3_5MoeForCausalLM", ("qwen35moe",), experts=True
    ),
    "qwen3_next": FamilyNames("Qwen3-Next", "Qwen3NextForCausalLM", ("qwen3next",), experts=True),
    "gpt_oss": FamilyNames("gpt-oss", "GptOssForCausalLM", ("gpt-oss",), experts=True),
    "glm4_moe": FamilyNames("GLM-4.5 to 4.7", "Glm4MoeForCausalLM", ("glm4moe",), experts=True),
    "olmo_hybrid": FamilyNames("OLMo hybrid", "OlmoHybridForCausalLM", ()),
    "ministral3": FamilyNames("Ministral 3", "Ministral3ForCausalLM", ("mistral3",)),
    "qwen3_moe": FamilyNames("Qwen3's mixtures of experts", "Qwen3MoeForCausalLM", ("qwen3moe",), experts=True),
    "mixtral": FamilyNames("Mixtral", "MixtralForCausalLM", (), experts=True),  # llama.cpp's are called llama, too
}
_SLIDING = {"llama": "mistral", "olmo2": "olmo3"}  # whose files say the same but for the windows
_MIXED = {"llama": "mixtral"}  # or but for the experts
# The text parts of models that read images, and whose they are like: of text, whose positions are the same on all three
# axes, the rotations of `mrope` are the plain ones.
_TEXT_PARTS = {
    "qwen2_vl": "qwen2", "qwen2_vl_text": "qwen2", "qwen2_5_vl": "qwen2", "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
}  # fmt: skip
HEADS = {  # files: what their classes are called, or keys that they have
    "dflash": ("dflash", "dflash_config"),
    "eagle3": ("eagle3", "draft_vocab_size"),
}
_OF_WHOLE = ("quantization_config", "dtype", "torch_dtype", "bos_token_id", "eos_token_id", "pad_token_id")
# transformers' values for what a file leaves out, where they are not None or False.
_DEFAULTS: dict[str, Any] = {
    "hidden_act": "silu", "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
}  # fmt: skip


def less_one(weight: torch.Tensor) -> torch.Tensor:
    """Return the weights of norms without what llama.cpp's converter has added to them."""
    return weight - 1


@dataclass(frozen=True)
class Family:
    """Says what a file of this folder says, as its `FAMILY`.

    Attributes:
        model: From what a configuration says, defaults included, to the model.
        defaults: transformers' values for what a file leaves out, where they differ from those of all.
        text_sizes: What configurations of text parts leave out, which were saved as differences from these.
        joined: By the ends of transformers' names, those of the tensors that checkpoints have in place of one, whose
            rows follow one another.
        renamed: What parts of transformers' names are of the parts that checkpoints have in their place.
        transposed: Whether checkpoints have all experts as [E, columns, rows], gates and ups taking turns.
        of_gguf: From the metadata of a GGUF file about the model, and the names of its tensors, to what a `config.json`
            would say besides what `config_from_gguf` reads of all files: sizes, epsilon, window and which layers slide,
            biases, rotation.
        rope_of_gguf: The same of what all files say of rotations; None where llama.cpp reads no more of them.
        gguf_interleaved: Whether llama.cpp rotates neighbouring channels and transformers halves, so that its converter
            has interleaved the rows of queries and keys.
        gguf_undo: By the ends of transformers' names, what brings back the values of tensors that it has changed.
    """

    model: Callable[[Fields], ModelConfig]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    text_sizes: Mapping[str, int] = field(default_factory=dict)
    joined: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)
    transposed: bool = False
    of_gguf: Callable[[Fields, Collection[str]], Mapping[str, Any]] = lambda fields, names: {}
    rope_of_gguf: Callable[[Fields, dict[str, Any]], dict[str, Any]] | None = None
    gguf_interleaved: bool = False
    gguf_undo: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = field(default_factory=dict)


def family_named(model_type: str) -> Family:
    """Return the family of a supported `model_type`."""
    found = import_module(f"offload_runtime.models.{model_type}").FAMILY
    assert isinstance(found, Family)
    return found


@dataclass(frozen=True)
class Head:
    """Says what a file of this folder says of heads that are checkpoints of their own, as its `HEAD`.

    Attributes:
        config: From what a configuration says, and the names of the tensors that are there (none where it is all that
            is known), to the head.
        renamed: From the name of a tensor in a checkpoint to the one that it has here; None of those that say nothing.
    """

    config: Callable[[Fields, Collection[str]], HeadConfig]
    renamed: Callable[[str], str | None]


def head_kind(settings: Mapping[str, Any]) -> str | None:
    """Return which of `HEADS` a `config.json` is of; None where it is a model's."""
    classes = settings.get("architectures")
    words = str([*(classes if isinstance(classes, list) else []), settings.get("speculators_model_type")]).lower()
    named = (kind for kind, (word, _) in HEADS.items() if word in words)
    return next(named, None) or next((kind for kind, (_, key) in HEADS.items() if settings.get(key)), None)


def head_named(kind: str) -> Head:
    """Return one of `HEADS`."""
    found = import_module(f"offload_runtime.models.{kind}").HEAD
    assert isinstance(found, Head)
    return found


def gguf_family(arch: str, *, slides: bool, experts: bool) -> str | None:
    """Return the family of one of llama.cpp's architectures, which may have sliding windows or experts; None of those
    that do not run."""
    found = next((name for name, known in FAMILIES.items() if arch in known.gguf), "")
    found = _MIXED.get(found, found) if experts else _SLIDING.get(found, found) if slides else found
    return found if found and (FAMILIES[found].experts or not experts) else None


def has_gguf(architecture: str) -> bool:
    """Return whether llama.cpp has models of one of transformers' classes."""
    family, known = next(item for item in FAMILIES.items() if item[1].architecture == architecture)
    return bool(known.gguf) or family in {*_SLIDING.values(), *_MIXED.values()}


def language_settings(settings: dict[str, Any], where: str) -> dict[str, Any]:
    """Return what `config.json` says of the language model: all of it, or of a model that reads images or sounds too
    the part about text, where that is of a family that runs."""
    fields = Fields(where, settings)
    part, outer = fields.mapping("text_config"), fields.text("model_type", "")
    if not part and outer in _TEXT_PARTS:
        part = settings
    named = part.get("model_type", "")
    family = _TEXT_PARTS.get(named, named) if isinstance(named, str) else ""
    generates = [name for name in fields.items("architectures", str) if not name.endswith("ForConditionalGeneration")]
    if family not in FAMILIES or generates or fields.flag("is_encoder_decoder"):
        return settings
    ties = [values["tie_word_embeddings"] for values in (settings, part) if "tie_word_embeddings" in values]
    return {
        **{name: settings[name] for name in _OF_WHOLE if settings.get(name) is not None},
        **{name: value for name, value in part.items() if name != "vision_config"},
        "model_type": family, "architectures": [FAMILIES[family].architecture], "text_part_of": outer,
        # Whoever saves a head of its own says so, or it is seen from the head.
        "tie_word_embeddings": any(ties) if ties else True,
    }  # fmt: skip


def require_family(fields: Fields) -> str:
    """Return the family that a configuration describes.

    Raises:
        UnsupportedArchitectureError: It does not run; says why, and what does.
    """
    family = fields.text("model_type", "")
    name = FAMILIES[family].architecture if family in FAMILIES else ""
    # A configuration made by hand has no list of class names; a base model's head is seen from its tensors.
    found = fields.items("architectures", str) or [name]
    if not name or not {name, name.replace("ForCausalLM", "Model")}.intersection(found):
        raise unsupported_model(fields)
    return family


def model_config_from_json(raw: Mapping[str, Any], reference: str) -> ModelConfig:
    """Translate the content of a `config.json`.

    Args:
        raw: The parsed file.
        reference: What the user named, for messages.

    Raises:
        UnsupportedArchitectureError: Another architecture, or an option of these that the layers do not have.
        CheckpointError: A size is missing, or the values contradict each other.
    """
    name = require_family(Fields(reference, raw))
    family = family_named(name)
    sizes = family.text_sizes if "text_part_of" in raw else {}
    fields = Fields(
        reference, {**_DEFAULTS, **family.defaults, **sizes, **raw, "architecture": FAMILIES[name].architecture}
    )
    if "hidden_size" not in fields.values:  # what some repositories of GGUF files have beside them
        raise CheckpointError(
            f"{reference} has a config.json without sizes, as those of GGUF files may be: name the file, on a hub as "
            "org/name:Q4_K_M, or give a checkpoint with safetensors"
        )
    try:
        return family.model(fields)
    except OptionError as error:
        raise CheckpointError(f"{reference} describes an impossible model: {error}") from error


class _Reason(NamedTuple):
    """Why models do not run: those that have one of `keys`, in `config.json` or in GGUF behind the architecture's name,
    or layers of one of `layers`, or are called as one of `names` or by that and more behind a `_` or `-`. A reason with
    `layers` is none for models all of whose layers attend."""

    why: str
    keys: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    layers: tuple[str, ...] = ()


_RECURRENT = "has {}, and of recurrent layers only those of the gated delta rule (Qwen3.5) run"
_ATTENDING = {"attention", "full", "sliding", "chunked"}
# The most telling first.
_REASONS = (
    _Reason("is an encoder-decoder model, and only decoders run", ("is_encoder_decoder",), (
        "t5", "mt5", "umt5", "t5gemma", "bart", "mbart", "whisper", "pegasus", "marian", "m2m_100", "encoder-decoder")),
    _Reason("makes images, sound or embeddings, and no text", ("_diffusers_version", "projector_type"), (
        "clip", "siglip", "vit", "dinov2", "flux", "sd1", "sd3", "sdxl", "wan", "ltxv", "hidream", "lumina2", "cosmos",
        "hyvid", "bert", "roberta", "xlm-roberta", "modernbert", "modern-bert", "nomic-bert", "jina-bert", "t5encoder",
        "mpnet", "distilbert", "wav2vec2", "gemma-embedding")),
    _Reason(_RECURRENT.format("Mamba layers"), (
        "mamba_d_state", "mamba_num_heads", "ssm_state_size", "state_size", "hybrid_override_pattern"), (
        "mamba", "mamba2", "falcon-h1", "granitehybrid", "jamba", "nemotron_h", "plamo2", "zamba2"), ("mamba",)),
    _Reason(_RECURRENT.format("RWKV's or xLSTM's layers"), ("wkv.head_size",), (
        "rwkv", "rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7", "xlstm")),
    _Reason(_RECURRENT.format("short convolutions or linear recurrences"), ("conv_L_cache", "shortconv.l_cache"), (
        "lfm2", "lfm2moe", "recurrent_gemma"), ("conv", "recurrent")),
    _Reason(_RECURRENT.format("linear attention of another kind (Kimi's, lightning)"), (
        "linear_num_heads", "linear_attn_config"), (
        "kimi_linear", "kimi-linear", "minimax_text_01", "minimax_m1", "bailing_hybrid", "bailing_moe_linear"), (
        "linear",)),
    _Reason("has latent attention, which does not run", ("kv_lora_rank", "attention.kv_lora_rank")),
    _Reason("is a mixture of experts of a kind that does not run", (
        "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "expert_count"), (
        "dbrx", "grok", "llama4", "arctic")),
    _Reason("has gated delta layers, which run, and others, which do not", (
        "linear_num_value_heads", "ssm.state_size")),
    _Reason("has embeddings for each layer, which do not run", (
        "hidden_size_per_layer_input", "embedding_length_per_layer_input"), ("gemma3n",)),
    _Reason("attends to images in some of its layers, which does not run", (
        "cross_attention_layers", "attention.cross_attention_layers"), ("mllama",)),
)  # fmt: skip
_OTHER_LAYERS = "has layers of another kind (other norms, activations or attention), which do not run"
_HEADS = ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering", "RewardModel", "ForRetrieval")
# What to take instead, up to so many billions of parameters of a dense model about as good.
_COMPARABLE = {
    2.5: "Qwen3-1.7B or Llama-3.2-1B", 6: "Qwen3-4B or SmolLM3-3B", 11: "Qwen3-8B or Llama-3.1-8B",
    20: "Qwen3-14B or Mistral-Nemo-12B", 48: "Qwen3-32B or Mistral-Small-24B",
    math.inf: "Llama-3.3-70B or Qwen2.5-72B",
}  # fmt: skip


def _says(value: Any) -> bool:
    return value not in (None, False, 0, 1, "") and value != [] and value != {}


def _why(values: Mapping[str, Any], names: Iterable[str]) -> str:
    """The first reason that a configuration and the names of a model's parts and classes give."""
    kinds = values.get("layer_types")
    layers = {str(kind).split("_")[0] for kind in kinds} if isinstance(kinds, list) else set()
    if "linear_num_value_heads" in values:  # of the gated delta rule
        layers.discard("linear")
    for reason in _REASONS:
        if reason.layers and layers and layers <= _ATTENDING:
            continue
        called = any(name == one or name.startswith((f"{one}_", f"{one}-")) for name in names for one in reason.names)
        if called or layers.intersection(reason.layers) or any(_says(values.get(key)) for key in reason.keys):
            return reason.why
    return "has another head than a language model's" if any(name.endswith(_HEADS) for name in names) else _OTHER_LAYERS


def _comparable(values: Mapping[str, Any]) -> str:
    """Supported models about as good as one of these sizes: a mixture counts as the geometric mean of all its weights
    and those that a token uses, as is usually said of them."""

    def size(*names: str) -> float:
        found = [
            item
            for name in names
            for item in (values[name] if isinstance(values.get(name), list) else [values.get(name)])
        ]
        return max((float(item) for item in found if isinstance(item, (int, float)) and 0 < item < 1e6), default=0.0)

    layers, hidden = size("num_hidden_layers", "block_count"), size("hidden_size", "embedding_length")
    dense = size("intermediate_size", "feed_forward_length")
    inner = size("moe_intermediate_size", "expert_feed_forward_length") or dense
    experts = size("num_experts", "num_local_experts", "n_routed_experts", "expert_count")
    used = size("num_experts_per_tok", "expert_used_count") or 1.0
    widths = (inner * experts, inner * used) if experts > 1 else (dense, dense)
    whole, active = (layers * hidden * (2.5 * hidden + 3 * width) for width in widths)
    billions = math.sqrt(whole * active) / 1e9 or 8.0  # of a usual size where none is said
    return next(name for most, name in _COMPARABLE.items() if billions <= most)


def unsupported_model(fields: Fields) -> UnsupportedArchitectureError:
    """Return the error for a model that the decoder does not implement.

    Args:
        fields: What its `config.json` says; or the metadata of a GGUF file about the model, with its architecture as
            `model_type`.
    """
    part, classes = fields.mapping("text_config"), fields.items("architectures", str)
    outer, inner = fields.text("model_type", ""), part.get("model_type")
    what = ", ".join(shown(name)[1:-1] for name in classes[:3]) or f"model_type {shown(outer)}"
    if not (classes or outer or inner):
        return UnsupportedArchitectureError(
            f"{fields.where} does not say what model it is (no model_type, no general.architecture): give a checkpoint "
            "of transformers, or a GGUF file of a model"
        )
    values, names = {**fields.values, **part}, [outer, *([inner] if isinstance(inner, str) else []), *classes]
    which = f"{what}'s text part ({shown(inner)[1:-1]})" if part and isinstance(inner, str) else what
    return UnsupportedArchitectureError(
        f"{fields.where}: {which} {_why(values, names)}: take another model, such as {_comparable(values)} "
        f"({', '.join(known.title for known in FAMILIES.values())} run)"
    )
