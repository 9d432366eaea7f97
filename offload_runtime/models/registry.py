"""Which families there are, and from configurations in the form of `config.json` to a `ModelConfig`.

A family is a file of this folder and a line of `FAMILIES`. Refusals matter more than the translation: an option that
the layers would silently ignore gives wrong tokens. Families that do not run are refused before torch is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

from offload_runtime.errors import CheckpointError, OptionError
from offload_runtime.fields import Fields
from offload_runtime.models.unsupported import unsupported_model

if TYPE_CHECKING:
    from offload_runtime.models.config import ModelConfig

# By transformers' model_type, which is the name of the file: transformers' class, and llama.cpp's architectures.
FAMILIES: dict[str, tuple[str, tuple[str, ...]]] = {
    "llama": ("LlamaForCausalLM", ("llama",)),
    "mistral": ("MistralForCausalLM", ()),  # llama.cpp's are called llama, too
    "qwen2": ("Qwen2ForCausalLM", ("qwen2", "qwen2vl")),
    "qwen3": ("Qwen3ForCausalLM", ("qwen3", "qwen3vl")),
    "smollm3": ("SmolLM3ForCausalLM", ("smollm3",)),
    "olmo2": ("Olmo2ForCausalLM", ("olmo2",)),
    "olmo3": ("Olmo3ForCausalLM", ()),  # llama.cpp's are called olmo2, too
    "granite": ("GraniteForCausalLM", ("granite",)),
    "gemma2": ("Gemma2ForCausalLM", ("gemma2",)),
    "gemma3_text": ("Gemma3ForCausalLM", ("gemma3",)),
    "gemma4_text": ("Gemma4ForCausalLM", ("gemma4",)),
    "cohere2": ("Cohere2ForCausalLM", ("cohere2",)),
    "glm4": ("Glm4ForCausalLM", ("glm4",)),
    "phi3": ("Phi3ForCausalLM", ("phi3",)),
    "ministral3": ("Ministral3ForCausalLM", ("mistral3",)),
}
_SLIDING = {"llama": "mistral", "olmo2": "olmo3"}  # whose files say the same but for the windows
# The text parts of models that read images, and whose they are like: of text, whose positions are the same on all three
# axes, the rotations of `mrope` are the plain ones.
_TEXT_PARTS = {
    "qwen2_vl": "qwen2", "qwen2_vl_text": "qwen2", "qwen2_5_vl": "qwen2", "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
}  # fmt: skip
_OF_WHOLE = ("quantization_config", "dtype", "torch_dtype", "bos_token_id", "eos_token_id", "pad_token_id")
# transformers' values for what a file leaves out, where they are not None or False.
_DEFAULTS: dict[str, Any] = {
    "hidden_act": "silu", "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
}  # fmt: skip


def _nothing(fields: Fields, names: Collection[str]) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class Family:
    """What a file of this folder says, as its `FAMILY`.

    Attributes:
        model: From what a configuration says, defaults included, to the model.
        defaults: transformers' values for what a file leaves out, where they differ from those of all.
        text_sizes: What configurations of text parts leave out, which were saved as differences from these.
        of_gguf: From the metadata of a GGUF file about the model, and the names of its tensors, to what a `config.json`
            would say besides what `config_from_gguf` reads of all files: sizes, epsilon, window and which layers slide,
            biases, rotation.
        rope_of_gguf: The same of what all files say of rotations; None where llama.cpp reads no more of them.
        gguf_interleaved: Whether llama.cpp rotates neighbouring channels and transformers halves, so that its converter
            has interleaved the rows of queries and keys.
        gguf_norm_shift: What that has added to the weights of norms.
    """

    model: Callable[[Fields], ModelConfig]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    text_sizes: Mapping[str, int] = field(default_factory=dict)
    of_gguf: Callable[[Fields, Collection[str]], Mapping[str, Any]] = _nothing
    rope_of_gguf: Callable[[Fields, dict[str, Any]], dict[str, Any]] | None = None
    gguf_interleaved: bool = False
    gguf_norm_shift: float = 0.0


def family_named(model_type: str) -> Family:
    """The family of a supported `model_type`."""
    found = import_module(f"offload_runtime.models.{model_type}").FAMILY
    assert isinstance(found, Family)
    return found


def gguf_family(arch: str, *, slides: bool) -> str | None:
    """The family of one of llama.cpp's architectures, which may have sliding windows; None of those that do not run."""
    found = next((name for name, (_, archs) in FAMILIES.items() if arch in archs), None)
    return _SLIDING.get(found or "", found) if slides else found


def language_settings(settings: dict[str, Any], where: str) -> dict[str, Any]:
    """What `config.json` says of the language model: all of it, or of a model that reads images or sounds too the part
    about text, where that is of a family that runs."""
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
        "model_type": family, "architectures": [FAMILIES[family][0]], "text_part_of": outer,
        # Whoever saves a head of its own says so, or it is seen from the head.
        "tie_word_embeddings": any(ties) if ties else True,
    }  # fmt: skip


def require_family(fields: Fields) -> str:
    """The family that a configuration describes.

    Raises:
        UnsupportedArchitectureError: It does not run; says why, and what does.
    """
    family = fields.text("model_type", "")
    name = FAMILIES.get(family, ("", ()))[0]
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
    fields = Fields(reference, {**_DEFAULTS, **family.defaults, **sizes, **raw, "architecture": FAMILIES[name][0]})
    if "hidden_size" not in fields.values:  # what some repositories of GGUF files have beside them
        raise CheckpointError(
            f"{reference} has a config.json without sizes, as those of GGUF files may be: name the file, on a hub as "
            "org/name:Q4_K_M, or give a checkpoint with safetensors"
        )
    try:
        return family.model(fields)
    except OptionError as error:
        raise CheckpointError(f"{reference} describes an impossible model: {error}") from error
