"""How often the experts that a mixture's tokens need are in the pool of a card: what is published at first, and what
runs have measured, kept beside the user's profiles for the next plan.

With room for a share s of the experts, beyond what a token takes of all other layers, s^e of them are found there. The
exponent e is a model's: that of routers that choose the same experts again and again is small.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

from offload_runtime.errors import StorageError
from offload_runtime.files import user_directory, write_atomically, writing
from offload_runtime.models.config import ModelConfig
from offload_runtime.models.experts import Experts

# Of what is published, and of random routers: `ModelPlan.expected_hits` has the figures.
PUBLISHED_EXPONENT = 0.5
_LEAST, _MOST = 0.02, 4.0
# Experts that a run has to have wanted, and as how many all earlier runs together count at the most.
_FEWEST_WANTED, _REMEMBERED = 2_000, 1_000_000
_REMEDY = "free some space, or set OFFLOAD_RUNTIME_CONFIG to a directory that can be written"


def _file() -> Path:
    return user_directory("config", holds="settings") / "expert-hits.json"


def _kept() -> dict[str, tuple[float, int]]:
    """Return by model the exponent and as how many experts it counts; nothing of a file that is none of ours."""
    try:
        found = json.loads(_file().read_text(encoding="utf-8"))
        kept = {str(key): (float(one["exponent"]), int(one["wanted"])) for key, one in found.items()}
    except (OSError, StorageError, ValueError, LookupError, TypeError, AttributeError):
        return {}
    return {key: one for key, one in kept.items() if _LEAST <= one[0] <= _MOST and 0 < one[1] <= _REMEMBERED}


def _key(config: ModelConfig) -> str:
    """Return what models that route alike have in common."""
    of_layers = [layer.mlp for layer in config.layers if isinstance(layer.mlp, Experts)]
    count = f"{of_layers[-1].chosen} of {of_layers[-1].num_experts}"
    return f"{config.architecture}: {count} in {len(of_layers)} layers of {config.hidden_size}"


def hit_exponent(config: ModelConfig) -> float:
    """Return the exponent of a model, measured or published; of one without experts no file is asked."""
    if not any(isinstance(layer.mlp, Experts) for layer in config.layers):
        return PUBLISHED_EXPONENT
    return _kept().get(_key(config), (PUBLISHED_EXPONENT, 0))[0]


def note_hits(config: ModelConfig, *, room: float, wanted: int, found: int) -> None:
    """Keep what a run has measured, with what earlier ones have, if it was long enough to say anything.

    Args:
        config: Of the model.
        room: The share of the experts, beyond what a token takes of all other layers, that there was room for.
        wanted: Experts that its passes of few rows have wanted.
        found: Those of them that were in the pool.

    Raises:
        StorageError: The file cannot be written; it is then as it was.
    """
    if wanted < _FEWEST_WANTED or not (0 < room < 1 and 0 < found < wanted):
        return
    measured = min(max(math.log(found / wanted) / math.log(room), _LEAST), _MOST)
    kept, file = _kept(), _file()
    before, counted = kept.get(_key(config), (0.0, 0))
    exponent = (counted * before + wanted * measured) / (counted + wanted)
    kept[_key(config)] = exponent, min(counted + wanted, _REMEMBERED)
    content = {key: {"exponent": one, "wanted": count} for key, (one, count) in sorted(kept.items())}
    with writing(file, _REMEDY):
        file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, json.dumps(content, indent=1) + "\n", remedy=_REMEDY)
