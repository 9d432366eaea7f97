"""Inputs that are nearly right, and a judge of what a program makes of them: mutations of JSON, texts, bytes, GGUF."""

import copy
import json
import math
import resource
import struct
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any

import gguf

from offload_runtime.errors import OffloadError
from tests.helpers.engine import TEMPLATE, byte_level_tokenizer

MOST_EXTRA_BYTES = 200_000_000
MOST_ADDRESS_BYTES = 4 << 30  # beyond what is mapped already: reached, it is a MemoryError rather than a full machine
MOST_LINES, LONGEST_LINE = 2, 300

# --- the judge


@dataclass
class Judge:
    """Runs inputs and keeps what none of them may do, by kind: an untyped error, a book for a message, much
    memory."""

    count: int = 0
    refused: int = 0
    findings: dict[str, list[str]] = field(default_factory=dict)

    def run(self, name: str, action: Callable[[], object]) -> None:
        """Run one input, of which typed errors are expected."""
        self.count += 1
        before_bytes, peak_bytes = _resident_bytes(), _peak_bytes()
        try:
            action()
        except OffloadError as error:
            self.refused += 1
            self.judge_message(name, _kind_of(error), str(error))
        except (Exception, SystemExit) as error:
            self._find(_kind_of(error), name)
        except BaseException as error:  # a panic of a library in Rust is no Exception
            if isinstance(error, KeyboardInterrupt):
                raise
            self._find(_kind_of(error), name)
        now_bytes = _peak_bytes()
        if now_bytes > peak_bytes and now_bytes - before_bytes > MOST_EXTRA_BYTES:
            self._find("too large", f"{name}: {(now_bytes - before_bytes) / 1e6:.0f} MB")

    def judge_message(self, name: str, kind: str, message: str) -> None:
        """Find fault with an error that is empty or too long to read."""
        lines = message.splitlines()
        if not message.strip() or len(lines) > MOST_LINES or max(map(len, lines)) > LONGEST_LINE:
            longest = max(map(len, lines), default=0)
            self._find(f"too long: {kind}", f"{len(lines)} lines, the longest of {longest}: {name}")

    def _find(self, kind: str, name: str) -> None:
        self.findings.setdefault(kind, []).append(name)

    def report(self) -> str:
        """Every kind of finding, how often it was met, and with what for the first few times."""
        parts = []
        for kind, names in sorted(self.findings.items(), key=lambda item: -len(item[1])):
            shown = "".join(f"\n    {name[:600]}" for name in names[:3])
            parts.append(f"{len(names)} x {kind}{shown}")
        return "\n".join(parts)


def _kind_of(error: BaseException) -> str:
    """Its type and the line of ours that it comes from; of an error that is not ours also what it says."""
    ours = [f for f in traceback.extract_tb(error.__traceback__) if "/offload_runtime/" in f.filename]
    where = f"{ours[-1].filename.rpartition('/offload_runtime/')[2]}:{ours[-1].lineno}" if ours else "the test"
    text = "" if isinstance(error, OffloadError) else f": {str(error)[:120]!r}"
    return f"{type(error).__name__} of {where}{text}"


def _peak_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _resident_bytes() -> int:
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:  # not Linux
        return _peak_bytes()


@contextmanager
def limited_memory() -> Iterator[None]:
    """Let no input map so much that the machine runs out of it."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    try:
        with open("/proc/self/statm", "rb") as file:
            mapped_bytes = int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        yield
        return
    resource.setrlimit(resource.RLIMIT_AS, (mapped_bytes + MOST_ADDRESS_BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


# --- values and texts


def nested(depth: int) -> Any:
    """Lists in lists."""
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


ODD_NUMBERS = (
    0, 1, -1, 2, 3, 7, 12, 14, 31, 33, 41, 255, 1 << 16, 1 << 31, (1 << 32) - 1, 1 << 40, (1 << 63) - 1, 1 << 63,
    1 << 64, -(1 << 63), 10**400, 0.0, -0.0, 0.5, -1.5, 1e-300, 5e-324, 1e300, 1e6, float("nan"), float("inf"),
    float("-inf"),
)  # fmt: skip
ODD_TEXTS = (
    "", " ", "x", "0", "-1", "1e999", "nan", "null", "auto", "\0", "a\0b", "\x1b[2J\x1b]0;x\x07", "\r\n", "\u2028",
    "\x85", "\ud800", "\udcff", "\ufeff", "日本", "e\u0301" * 50, "\u202eabc", "🦆" * 300, "x" * 5000, "%s%n{}{0}",
    "../x", "~nouser/x", "<|im_end|>", "9" * 5000, "-" * 300, "\U0001d518" * 100_000, "line\n" * 1000,
)  # fmt: skip
ODD_VALUES = (
    None, True, False, [], {}, [None], [[]], {"": None}, {"a": {"b": [1]}}, [1, "a", None, 2.5], list(range(100_000)),
    {str(n): n for n in range(1000)}, nested(50), nested(200), [float("nan")] * 8, [0] * 8, ["a"] * 8,
)  # fmt: skip


def odd_value(random: Random) -> Any:
    """A value of any type, most of them wrong."""
    return copy.deepcopy(random.choice(random.choice((ODD_NUMBERS, ODD_TEXTS, ODD_VALUES))))


def odd_text(random: Random, text: str) -> str:
    """A text with a character too many, too few, or another one."""
    place = random.randrange(len(text) + 1)
    piece = random.choice((*ODD_TEXTS[:24], ""))
    return text[:place] + piece + text[place + random.choice((0, 0, 1, 5)) :]


# --- JSON

# In front of a key it is left out of the text, so that one object holds the key twice.
_AGAIN = "\x01again"


def _containers(value: Any) -> list[Any]:
    """Objects and lists that hold something, those within them included."""
    found, waiting = [], [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, (dict, list)) and item:
            found.append(item)
            # Of a long list or vocabulary a few are like the others.
            children = list(item.values() if isinstance(item, dict) else item)
            waiting += children[:40]
    return found


def mutate_json(random: Random, document: Any, keys: Sequence[str] = (), *, times: int = 3) -> tuple[Any, list[str]]:
    """A copy with one to `times` changes, and their names; `keys` are others that the reader knows."""
    changed, names = copy.deepcopy(document), []
    for _ in range(random.randint(1, times)):
        holder = random.choice(_containers(changed) or [{}])
        key = random.choice(list(holder) if isinstance(holder, dict) else range(len(holder))) if holder else ""
        what = random.choice(("replace", "replace", "replace", "nudge", "drop", "again", "add", "wrap", "swap"))
        names.append(f"{what} {str(key)[:40]}")
        if not holder:
            continue
        old = holder[key]
        if what == "drop":
            del holder[key]
        elif what == "nudge" and isinstance(old, (int, float)) and not isinstance(old, bool):
            near = (old + 1, old - 1, -old, old * 2, old * 1000, str(old))
            holder[key] = random.choice((*near, old / 3, float(old)) if abs(old) < 1e300 else near)
        elif what == "nudge" and isinstance(old, str):
            holder[key] = odd_text(random, old)
        elif what == "again" and isinstance(holder, dict):
            holder[_AGAIN + str(key)] = odd_value(random)
        elif what == "add" and isinstance(holder, dict):
            holder[random.choice((*keys, "new"))] = odd_value(random)
            names[-1] += f" {list(holder)[-1][:40]}"
        elif what == "wrap":
            holder[key] = random.choice(([old], {"x": old}, [old] * 3, str(old)[:1000]))
        elif what == "swap":
            other = random.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
            holder[key], holder[other] = holder[other], old
        else:
            holder[key] = odd_value(random)
            names[-1] += f" by {repr(holder[key])[:60]}"
    return changed, names


def json_bytes(document: Any) -> bytes:
    """The document as text; infinities, NaN and lone surrogates as Python writes them."""
    return json.dumps(document).replace("\\u0001again", "").encode()


def mutate_bytes(random: Random, data: bytes) -> tuple[bytes, list[str]]:
    """A file that was cut, overwritten in places, or is another one."""
    place = random.randrange(len(data) + 1)
    changes: dict[str, Callable[[], bytes]] = {
        "cut": lambda: data[:place],
        "flip": lambda: data[:place] + bytes([random.randrange(256)]) + data[place + 1 :],
        "not UTF-8": lambda: data[:place] + b"\xff\xfe\xc0" + data[place:],
        "zeros": lambda: data[:place] + bytes(64) + data[place + 64 :],
        "more": lambda: data + random.randbytes(64),
        "twice": lambda: data * 2,
        "gap": lambda: data[:place] + data[place + random.randint(1, 64) :],
        "UTF-16": lambda: data.decode(errors="replace").encode("utf-16"),
        "deep": lambda: data[:place] + b"[" * 50_000 + data[place:],
        "nothing": lambda: b"",
    }
    name = random.choice(list(changes))
    return changes[name](), [f"{name} at {place}"]


# --- GGUF, as a document that is changed as JSON is

GGUF_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
STRING, ARRAY = 8, 9
FLOAT32, Q8_0 = 0, 8  # of tensors
GgufValue = list[Any]  # a type of the format, and a value of it; of an array the type of its items and a list


def _packed(form: str, value: Any) -> bytes:
    """A number of the format; of one that it does not hold, and of what is none, some bits."""
    try:
        return struct.pack(form, value)
    except (struct.error, OverflowError):
        size = struct.calcsize(form)
        return ((value if isinstance(value, int) else len(str(value))) % (1 << 8 * size)).to_bytes(size, "little")


def gguf_bytes(file: dict[str, Any], random: Random | None = None) -> bytes:
    """A GGUF file; with `random` a few counts and lengths of it are odd.

    Args:
        file: `metadata` of values by key, `tensors` of shape (the fastest first), type and offset by name, and as many
            zeros as `data_bytes`. What is of another form is written as if it were of this.
        random: Decides.
    """
    data, numbers = bytearray(b"GGUF"), list[tuple[int, str]]()
    metadata, tensors = (one if isinstance(one := file.get(name), dict) else {} for name in ("metadata", "tensors"))

    def number(form: str, value: Any) -> None:
        numbers.append((len(data), form))
        data.extend(_packed(form, value))

    def text(value: Any) -> None:
        raw = value if isinstance(value, bytes) else str(value).replace(_AGAIN, "").encode("utf-8", "surrogatepass")
        number("<Q", len(raw))
        data.extend(raw)

    def put(kind: Any, value: Any) -> None:
        if kind == STRING:
            text(value)
        elif kind == ARRAY:
            of, items = value if isinstance(value, list) and len(value) == 2 else (4, value)
            number("<I", of)
            number("<Q", len(items := items if isinstance(items, list) else [items]))
            for item in items:
                put(of, item)
        else:
            form = GGUF_SCALARS.get(kind) if isinstance(kind, int) else None
            data.extend(bytes(8) if form is None else _packed(form, value))

    for form, count in (("<I", 3), ("<Q", len(tensors)), ("<Q", len(metadata))):
        number(form, count)
    for key, entry in metadata.items():
        kind, value = entry if isinstance(entry, list) and len(entry) == 2 else (STRING, entry)
        text(key)
        number("<I", kind)
        put(kind, value)
    for name, entry in tensors.items():
        shape, kind, offset = entry if isinstance(entry, list) and len(entry) == 3 else (entry, 99, 0)
        text(name)
        number("<I", len(shape := shape if isinstance(shape, list) else [shape]))
        for size in shape:
            number("<Q", size)
        number("<I", kind)
        number("<Q", offset)
    for _ in range(0 if random is None else random.randint(1, 2)):
        assert random is not None
        place, form = random.choice(numbers)
        odd = random.choice((*(int(n) for n in ODD_NUMBERS if n == n and abs(n) < 1e19), random.randrange(1 << 16)))
        data[place : place + struct.calcsize(form)] = _packed(form, odd)
    nbytes = file["data_bytes"] if isinstance(file.get("data_bytes"), int) else 0
    return bytes(data) + bytes(-len(data) % gguf.GGUF_DEFAULT_ALIGNMENT + min(max(nbytes, 0), 1 << 20))


def mutate_gguf(random: Random, file: dict[str, Any], prefix: str = "") -> tuple[dict[str, Any], list[str]]:
    """A copy with one to three changes of the metadata whose keys begin with `prefix`, and their names."""
    chosen = {key: entry for key, entry in file["metadata"].items() if key.startswith(prefix)}
    changed, names = mutate_json(random, chosen)
    rest = {key: entry for key, entry in file["metadata"].items() if key not in chosen}
    return {**file, "metadata": {**rest, **changed} if isinstance(changed, dict) else rest}, names


def _typed(value: Any) -> GgufValue:
    """A value with its type; integers of lists have a sign."""
    if isinstance(value, list):
        return [ARRAY, [5 if isinstance(value[0], int) else _typed(value[0])[0], value]]
    kinds = {str: STRING, bool: 7, int: 4, float: 6}
    return [kinds[type(value)], value]


def _byte_level() -> dict[str, Any]:
    """The tokenizer of the other tests."""
    vocabulary = json.loads(byte_level_tokenizer().backend_tokenizer.to_str())["model"]
    tokens = sorted(vocabulary["vocab"], key=vocabulary["vocab"].get)
    return {
        "model": "gpt2", "pre": "gpt-2", "tokens": tokens,
        "token_type": [3 if token.startswith("<|") else 1 for token in tokens],
        "merges": [" ".join(merge) for merge in vocabulary["merges"]], "add_bos_token": False, "bos_token_id": 0,
        "eos_token_id": 1, "eot_token_id": 1,
    }  # fmt: skip


def small_gguf(arch: str) -> dict[str, Any]:
    """A model of one layer, with a tokenizer, as `gguf_bytes` takes it."""
    tokenizer, tensors, offset = _byte_level(), dict[str, Any](), 0
    own = {
        "context_length": 128, "embedding_length": 32, "block_count": 1, "feed_forward_length": 64,
        "attention.head_count": 4, "attention.head_count_kv": 2, "vocab_size": len(tokenizer["tokens"]),
        "attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 1e4, "rope.scaling.type": "yarn",
        "rope.scaling.factor": 2.0, "rope.scaling.original_context_length": 64, "rope.dimension_count": 8,
        "attention.sliding_window": 0, "expert_count": 0,
    }  # fmt: skip
    metadata = {"general.architecture": arch, "general.alignment": 32, "split.count": 0}
    metadata |= {f"{arch}.{name}": value for name, value in own.items()}
    metadata |= {f"tokenizer.ggml.{name}": value for name, value in tokenizer.items()}
    metadata["tokenizer.chat_template"] = TEMPLATE
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd": (len(tokenizer["tokens"]), 32), "output_norm": (32,), "blk.0.attn_norm": (32,),
        "blk.0.ffn_norm": (32,), "blk.0.attn_q": (32, 32), "blk.0.attn_k": (16, 32), "blk.0.attn_v": (16, 32),
        "blk.0.attn_output": (32, 32), "blk.0.ffn_gate": (64, 32), "blk.0.ffn_up": (64, 32),
        "blk.0.ffn_down": (32, 64),
    }  # fmt: skip
    named = {f"{name}.weight": shape for name, shape in shapes.items()}
    if arch == "qwen2":
        named |= {f"blk.0.attn_{name}.bias": shapes[f"blk.0.attn_{name}"][:1] for name in "qkv"}
    for name, shape in named.items():
        kind = FLOAT32 if len(shape) == 1 else Q8_0
        elements, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)]
        tensors[name] = [list(reversed(shape)), kind, offset]
        nbytes = math.prod(shape) // elements * block_bytes
        offset += nbytes + -nbytes % gguf.GGUF_DEFAULT_ALIGNMENT
    return {"metadata": {key: _typed(item) for key, item in metadata.items()}, "tensors": tensors, "data_bytes": offset}
