"""Fields of requests that nothing here reads: with which values they change nothing, and what others call a field.

A client that fills in a field's usual value is not refused; with any other value the field would have to be read.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

_ANY: tuple[Any, ...] = ()  # whatever the value
# Values that change nothing, beside null.
HARMLESS: dict[str, tuple[Any, ...]] = {
    # of OpenAI
    "user": _ANY, "store": _ANY, "metadata": _ANY, "service_tier": _ANY, "safety_identifier": _ANY,
    "prompt_cache_key": _ANY, "prompt_cache_retention": _ANY,
    "modalities": (["text"],), "audio": (None,), "prediction": (None,), "web_search_options": (None,),
    "verbosity": ("medium",), "functions": ([],), "function_call": ("none", "auto"),
    "best_of": (1,), "suffix": ("",), "echo": (False,), "logprobs": (False,), "top_logprobs": (0,),
    "max_tokens": (-1,), "max_completion_tokens": (-1,),
    # of vLLM and SGLang
    "use_beam_search": (False,), "length_penalty": (1,), "early_stopping": (False,),
    "include_stop_str_in_output": (False,), "skip_special_tokens": (True,), "spaces_between_special_tokens": (True,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,), "truncate_prompt_tokens": (None,), "prompt_logprobs": (None,),
    "allowed_token_ids": (None,), "bad_words": ([],), "priority": (0,), "request_id": _ANY, "cache_salt": (None,),
    "return_token_ids": (False,), "return_tokens_as_token_ids": (False,), "documents": ([],), "chat_template": (None,),
    "include_reasoning": (True,), "separate_reasoning": (True,), "structured_outputs": (None,), "guided_json": (None,),
    "guided_regex": (None,), "guided_choice": (None,), "guided_grammar": (None,),
    # of llama.cpp
    "typical_p": (1,), "tfs_z": (1,), "top_a": (0,), "mirostat": (0,), "dynatemp_range": (0,), "xtc_probability": (0,),
    "dry_multiplier": (0,), "repeat_last_n": (-1,), "cache_prompt": _ANY, "id_slot": (-1,), "n_keep": (0, -1),
    "timings_per_token": (False,), "return_progress": (False,), "grammar": ("",), "json_schema": (None,),
    "reasoning_format": ("auto", "deepseek"),
}  # fmt: skip
# What llama.cpp, vLLM and SGLang call fields that are here.
ALIASES = {
    "repeat_penalty": "repetition_penalty", "n_predict": "max_tokens", "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
}  # fmt: skip


def renamed(given: Mapping[str, Any]) -> dict[str, Any]:
    """A body by the names that its fields have here. Raises `ValueError` where it says a field twice, differently."""
    found: dict[str, Any] = {}
    for name, value in given.items():
        own = ALIASES.get(name, name)
        if found.get(own) is None:
            found[own] = value
        elif value is not None and value != found[own]:
            raise ValueError(f"{name} says another {own} than the body does: give one of them")
    if found.get("best_of") == found.get("n"):
        found.pop("best_of", None)  # the best of them are all of them
    return found


def without_harmless(
    given: Mapping[str, Any], names: Collection[str], harmless: Mapping[str, tuple[Any, ...]]
) -> dict[str, Any]:  # fmt: skip
    """A body without values that change nothing: those of `harmless`, and null of its own `names`."""
    return {name: value for name, value in given.items() if not _changes_nothing(name, value, names, harmless)}


def _changes_nothing(
    name: str, value: Any, names: Collection[str], harmless: Mapping[str, tuple[Any, ...]]
) -> bool:  # fmt: skip
    if name not in harmless:
        return value is None and name in names
    values = harmless[name]
    # To Python true is 1, to JSON it is not.
    same = (one for one in values if one == value and isinstance(one, bool) == isinstance(value, bool))
    return values is _ANY or value is None or next(same, None) is not None
