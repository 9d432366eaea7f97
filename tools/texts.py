"""Texts that heads are trained and drafters are compared on, and the places of them that are never trained on.

A text is cut into blocks; which of them are held out depends on their numbers and the seed alone, so that who trains
and who measures agree on them without a file.
"""

from __future__ import annotations

import argparse
import json
import random
import string
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import harness  # noqa: F401 (finds the package, installed or not)

from offload_runtime.cli.terminal import read_text
from offload_runtime.errors import OptionError

KINDS = ("prose", "code", "copy", "json", "dialogue", "random")
BLOCK_CHARACTERS = 4096
_HELD_OUT = 12  # one block in so many
_TESTS = {"test", "tests", "idle_test"}
_RECORDS = 200
_QUESTIONS = (
    "What is the following passage about, and who speaks in it?", "Continue the story that begins like this.",
    "Explain to a child what happens here.", "Write a short letter to one of the people in this passage.",
    "Which words of this passage are old-fashioned, and what would we say today?",
)  # fmt: skip


def add_options(parser: argparse.ArgumentParser) -> None:
    """Where the texts come from, and the seed of places: `--text`, `--code`, `--seed`."""
    parser.add_argument("--text", type=Path, required=True, help="prose, such as a novel")
    parser.add_argument("--code", type=Path, help="programs, in place of Python's standard library")
    parser.add_argument("--seed", type=int, default=0, help="of the places that are never trained on, and all else")


def add_place_options(parser: argparse.ArgumentParser, *, places: int, prompt_tokens: int, new_tokens: int) -> None:
    """What is asked at places that are held out, with what is usual of it: `--places`, `--prompt-tokens`,
    `--new-tokens`."""
    parser.add_argument("--places", type=int, default=places, help="of each text, held out")
    parser.add_argument("--prompt-tokens", type=int, default=prompt_tokens, help="of each place")
    parser.add_argument("--new-tokens", type=int, default=new_tokens, help="of each answer")


def texts_of(options: argparse.Namespace) -> dict[str, str]:
    """The prose and the code that options name. Raises `OptionError`: one cannot be read."""
    code = standard_library() if options.code is None else read_text(options.code, option="--code")
    return {"prose": read_text(options.text, option="--text"), "code": code}


def standard_library() -> str:
    """The sources of the running interpreter's standard library, but for its tests, by their paths."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", *_TESTS}
    files = (file for file in root.rglob("*.py") if not skipped & set(file.relative_to(root).parts))
    return "\n".join(file.read_text(encoding="utf-8", errors="replace") for file in sorted(files))


def _divided(text: str, seed: int) -> tuple[list[str], list[str]]:
    blocks = [text[start : start + BLOCK_CHARACTERS] for start in range(0, len(text), BLOCK_CHARACTERS)]
    held = {number for number in range(len(blocks)) if random.Random(f"{seed}/{number}").randrange(_HELD_OUT) == 0}
    return [block for number, block in enumerate(blocks) if number not in held], [blocks[one] for one in sorted(held)]


def trained_on(text: str, seed: int) -> list[str]:
    """Blocks of a text that are not held out."""
    return _divided(text, seed)[0]


def held_out(text: str, seed: int, count: int, name: str) -> list[str]:
    """So many whole blocks of a text that are never trained on, drawn by the seed.

    Raises:
        OptionError: There are fewer.
    """
    blocks = [block for block in _divided(text, seed)[1] if len(block) == BLOCK_CHARACTERS]
    if len(blocks) < count:
        raise OptionError(
            f"{name} has {len(blocks)} held-out places of {BLOCK_CHARACTERS} characters and {count} are needed: name a "
            "longer text, or lower --places"
        )
    return random.Random(seed).sample(blocks, count)


def _records(words: Sequence[str], draw: random.Random) -> str:
    """A list of records as JSON."""
    found = [
        {
            "id": 1000 + number, "name": " ".join(draw.choices(words, k=2)).title(), "active": draw.random() < 0.5,
            "scores": [draw.randrange(100) for _ in range(3)],
            "address": {"street": f"{draw.randrange(1, 200)} {draw.choice(words).title()} Street"},
        }
        for number in range(_RECORDS)
    ]  # fmt: skip
    return json.dumps(found, indent=2)


def _prompt(kind: str, prose: str, code: str, tokens: int, draw: random.Random) -> Any:
    """What a runtime encodes: a text, or the messages of a chat."""
    passage = prose[: 2 * tokens]  # of about four characters a token
    if kind == "copy":
        return f"{passage}\n\nThe same passage once more:\n\n{passage[:40]}"
    if kind == "dialogue":
        return [{"role": "user", "content": f"{draw.choice(_QUESTIONS)}\n\n{passage}"}]
    if kind == "random":
        return "".join(draw.choices(string.ascii_letters + string.digits + " ", k=4 * tokens))
    if kind == "json":
        return _records(sorted({word for word in prose.split() if word.isalpha()}), draw)
    return prose if kind == "prose" else code


def prompts(
    options: argparse.Namespace, kinds: Sequence[str], count: int, tokens: int, encode: Callable[[Any], list[int]]
) -> dict[str, list[list[int]]]:
    """Prompts of about so many tokens, `count` of each kind, at held-out places drawn by the seed: prose and code to go
    on with, a passage that has begun to be copied, records to go on with, a question in a chat, random letters.

    Args:
        options: Those of `add_options`.
        encode: The runtime's: of a text, or of a chat's messages.

    Raises:
        OptionError: A text cannot be read, or is too short.
    """
    places = [held_out(text, options.seed, count, name) for name, text in texts_of(options).items()]
    found: dict[str, list[list[int]]] = {kind: [] for kind in kinds}
    for number, (prose, code) in enumerate(zip(*places, strict=True)):
        for kind in kinds:
            encoded = encode(_prompt(kind, prose, code, tokens, random.Random(f"{options.seed}/{number}")))
            found[kind].append(encoded if kind in ("copy", "dialogue") else encoded[:tokens])
    return found
