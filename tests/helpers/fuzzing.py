"""Inputs that are nearly right, and a judge of what a program makes of them: mutations of JSON, texts, bytes, GGUF."""

from __future__ import annotations

import copy
import json
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

    def judge_lines(self, name: str, lines: Sequence[str]) -> None:
        """The same of errors as the command line prints them, each of one line."""
        for line in lines:
            if not line or len(line) > MOST_LINES * LONGEST_LINE + 1:
                self._find("too long: a line of the command line", f"{len(line)} characters: {name}")

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
    0, 1, -1, 2, 3, 7, 255, 1 << 16, 1 << 31, (1 << 32) - 1, 1 << 40, (1 << 63) - 1, 1 << 63, 1 << 64, -(1 << 63),
    10**400, 0.0, -0.0, 0.5, -1.5, 1e-300, 5e-324, 1e300, 1e6, float("nan"), float("inf"), float("-inf"),
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


# --- GGUF

GGUF_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
STRING, ARRAY = 8, 9
FLOAT32, Q8_0 = 0, 8  # of tensors
GgufValue = tuple[int, Any]  # a type of the format, and a value of it; of an array the type of its items and a list


@dataclass
class GgufFile:
    """What a GGUF file says, in its order: `metadata` of key and value, `tensors` of name, shape (the fastest first),
    type and offset, and as many zeros as `data_bytes`."""

    metadata: list[tuple[str, GgufValue]]
    tensors: list[tuple[str, list[int], int, int]]
    data_bytes: int

    def encode(self, random: Random | None = None) -> bytes:
        """The file; with `random` a few counts and lengths of it are odd."""
        out = _GgufWriter()
        out.add(b"GGUF")
        for form, number in (("<I", 3), ("<Q", len(self.tensors)), ("<Q", len(self.metadata))):
            out.number(form, number)
        for key, (kind, value) in self.metadata:
            out.text(key)
            out.number("<I", kind)
            out.value(kind, value)
        for name, shape, kind, offset in self.tensors:
            out.text(name)
            out.number("<I", len(shape))
            for size in shape:
                out.number("<Q", size)
            out.number("<I", kind)
            out.number("<Q", offset)
        data = bytearray(b"".join(out.parts))
        for _ in range(0 if random is None else random.randint(1, 2)):
            assert random is not None
            place, form = random.choice(out.numbers)
            most = (1 << 8 * struct.calcsize(form)) - 1
            odd = random.choice((*(int(n) for n in ODD_NUMBERS if n == n and abs(n) < 1e19), random.randrange(1 << 16)))
            struct.pack_into(form, data, place, odd & most)
        return bytes(data) + bytes(-len(data) % gguf.GGUF_DEFAULT_ALIGNMENT + self.data_bytes)

    def add_tensor(self, name: str, shape: Sequence[int], kind: int) -> None:
        """Append a tensor of zeros; `shape` as torch writes it."""
        elements, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)]
        size = 1
        for count in shape:
            size *= count
        self.tensors.append((name, list(reversed(shape)), kind, self.data_bytes))
        nbytes = size // elements * block_bytes
        self.data_bytes += nbytes + -nbytes % gguf.GGUF_DEFAULT_ALIGNMENT


class _GgufWriter:
    """Bytes so far, and where among them numbers lie that say how long something is, or of which type."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.numbers: list[tuple[int, str]] = []
        self._size = 0

    def add(self, data: bytes) -> None:
        self.parts.append(data)
        self._size += len(data)

    def number(self, form: str, value: int) -> None:
        self.numbers.append((self._size, form))
        self.add(struct.pack(form, value))

    def text(self, text: str | bytes) -> None:
        data = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
        self.number("<Q", len(data))
        self.add(data)

    def value(self, kind: int, value: Any) -> None:
        if kind == STRING:
            self.text(value)
        elif kind == ARRAY:
            of, items = value
            self.number("<I", of)
            self.number("<Q", len(items))
            if of in GGUF_SCALARS:
                self.add(struct.pack(f"<{len(items)}{GGUF_SCALARS[of][1]}", *items))
            else:
                for item in items:
                    self.value(of, item)
        elif kind in GGUF_SCALARS:
            self.add(struct.pack(GGUF_SCALARS[kind], value))
        else:
            self.add(bytes(8))


def odd_gguf_value(random: Random) -> GgufValue:
    """A value of any type of the format, or of none."""
    texts = [text for text in ODD_TEXTS if len(text) < 10_000]
    choices: tuple[GgufValue, ...] = (
        (4, random.choice((0, 1, 2, 3, 1000, (1 << 31) - 1, 1 << 31, (1 << 32) - 1))),
        (5, random.choice((-1, -(1 << 31), 0, 7))),
        (10, random.choice((0, 1 << 31, 1 << 40, 1 << 63, (1 << 64) - 1))),
        (11, random.choice((-1, -(1 << 63), (1 << 63) - 1))),
        (6, random.choice((0.0, -1.0, float("nan"), float("inf"), 1e-38, 3e38))),
        (12, random.choice((0.5, 1e300, -1e300, float("nan"), 5e-324))),
        (7, random.random() < 0.5),
        (STRING, random.choice((*texts, b"\xff\xfe", b"\xc3"))),
        (ARRAY, (4, random.choice(([], [0], [1] * 50, list(range(100_000)))))),
        (ARRAY, (STRING, random.choice(([], ["a"], ["a"] * 400, texts)))),
        (ARRAY, (6, [float("nan")] * 50)),
        (ARRAY, (ARRAY, [(4, [1])])),
        (ARRAY, (77, [])),
        (random.choice((13, 99, (1 << 32) - 1)), None),
    )
    return random.choice(choices)


def mutate_gguf(random: Random, file: GgufFile, prefix: str) -> tuple[GgufFile, list[str]]:
    """A copy with one to three changes of the metadata whose keys begin with `prefix`, and their names."""
    metadata, names = list(file.metadata), []
    for _ in range(random.randint(1, 3)):
        places = [place for place, (key, _) in enumerate(metadata) if key.startswith(prefix)]
        if not places:
            break
        place = random.choice(places)
        key, (kind, value) = metadata[place]
        what = random.choice(("replace", "replace", "drop", "again", "items", "rename", "text"))
        names.append(f"{what} {key}")
        if what == "drop":
            del metadata[place]
        elif what == "again":
            metadata.append((key, odd_gguf_value(random)))
        elif what == "rename":
            metadata[place] = (odd_text(random, key), (kind, value))
        elif what == "items" and kind == ARRAY and value[1] and value[0] != ARRAY:
            metadata[place] = (key, (ARRAY, (value[0], _odd_items(random, value[0], value[1]))))
        elif what == "text" and isinstance(value, str):
            metadata[place] = (key, (STRING, odd_text(random, value)))
        else:
            metadata[place] = (key, odd_gguf_value(random))
            names[-1] += f" by {repr(metadata[place][1])[:60]}"
    return GgufFile(metadata, list(file.tensors), file.data_bytes), names


def _odd_items(random: Random, kind: int, items: Sequence[Any]) -> list[Any]:
    """A list of the same type that is shorter, longer, in another order, or has an odd item."""
    changed = list(items)
    place = random.randrange(len(changed))
    what = random.randrange(5)
    if what == 0:
        return changed[:place]
    if what == 1:
        return changed + changed
    if what == 2:
        random.shuffle(changed)
    elif what == 3:
        changed[place] = changed[random.randrange(len(changed))]
    else:
        odd = {STRING: [text for text in ODD_TEXTS if len(text) < 10_000], 6: [float("nan"), -1e30, float("inf")]}
        changed[place] = random.choice(odd.get(kind, [0, 1, 2, 5, 6, 100]))
    return changed


def mutate_gguf_tensors(random: Random, file: GgufFile) -> tuple[GgufFile, list[str]]:
    """A copy with one or two changes of the table of tensors, and their names."""
    tensors, names = list(file.tensors), []
    for _ in range(random.randint(1, 2)):
        place = random.randrange(len(tensors))
        name, shape, kind, offset = tensors[place]
        what = random.choice(("drop", "again", "name", "shape", "rank", "kind", "offset"))
        names.append(f"{what} {name[:40]}")
        if what == "drop" and len(tensors) > 1:
            del tensors[place]
        elif what == "again":
            tensors.append(random.choice(tensors))
        elif what == "name":
            tensors[place] = (random.choice((odd_text(random, name), random.choice(tensors)[0])), shape, kind, offset)
        elif what == "shape":
            sizes = (0, 1, 31, 33, 64, 1 << 20, 1 << 31, 1 << 32, 1 << 62, 1 << 63, (1 << 64) - 1)
            shape = [random.choice(sizes) if random.random() < 0.5 else size for size in shape]
            tensors[place] = (name, shape, kind, offset)
        elif what == "rank":
            shape = random.choice(([], [*shape, 1], [*shape, *shape], [1] * 9, shape[:1], list(reversed(shape))))
            tensors[place] = (name, shape, kind, offset)
        elif what == "kind":
            tensors[place] = (name, shape, random.choice((0, 1, 2, 3, 8, 12, 14, 16, 26, 30, 41, 99)), offset)
        else:
            moved = random.choice((0, offset + 1, offset + 32, 1 << 31, 1 << 63, (1 << 64) - 32, (1 << 64) - 1))
            tensors[place] = (name, shape, kind, moved % (1 << 64))  # one that is moved twice may be past the end
    return GgufFile(list(file.metadata), tensors, file.data_bytes), names


def _byte_level() -> list[tuple[str, GgufValue]]:
    """The tokenizer of the other tests."""
    vocabulary = json.loads(byte_level_tokenizer().backend_tokenizer.to_str())["model"]
    tokens = sorted(vocabulary["vocab"], key=vocabulary["vocab"].get)
    merges = [" ".join(merge) for merge in vocabulary["merges"]]
    types = [3 if token.startswith("<|") else 1 for token in tokens]
    return [
        ("tokenizer.ggml.model", (STRING, "gpt2")), ("tokenizer.ggml.pre", (STRING, "gpt-2")),
        ("tokenizer.ggml.tokens", (ARRAY, (STRING, tokens))), ("tokenizer.ggml.token_type", (ARRAY, (5, types))),
        ("tokenizer.ggml.merges", (ARRAY, (STRING, merges))), ("tokenizer.ggml.add_bos_token", (7, False)),
        ("tokenizer.ggml.bos_token_id", (4, 0)), ("tokenizer.ggml.eos_token_id", (4, 1)),
        ("tokenizer.ggml.eot_token_id", (4, 1)), ("tokenizer.chat_template", (STRING, TEMPLATE)),
    ]  # fmt: skip


def _sentencepiece() -> list[tuple[str, GgufValue]]:
    """Bytes, a few pieces and control tokens."""
    controls, pieces = ["<unk>", "<s>", "</s>"], ["\u2581", "\u2581the", "th", "e", "t", "h", "\u2581t", "o"]
    tokens = [*controls, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    types = [2, 3, 3, *[6] * 256, *[1] * len(pieces)]
    scores = [0.0] * 259 + [-float(place) for place in range(len(pieces))]
    return [
        ("tokenizer.ggml.model", (STRING, "llama")), ("tokenizer.ggml.pre", (STRING, "default")),
        ("tokenizer.ggml.tokens", (ARRAY, (STRING, tokens))), ("tokenizer.ggml.token_type", (ARRAY, (5, types))),
        ("tokenizer.ggml.scores", (ARRAY, (6, scores))), ("tokenizer.ggml.add_bos_token", (7, True)),
        ("tokenizer.ggml.add_space_prefix", (7, True)), ("tokenizer.ggml.bos_token_id", (4, 1)),
        ("tokenizer.ggml.eos_token_id", (4, 2)), ("tokenizer.ggml.unknown_token_id", (4, 0)),
        ("tokenizer.ggml.padding_token_id", (4, 0)), ("tokenizer.chat_template", (STRING, TEMPLATE)),
    ]  # fmt: skip


def small_gguf(arch: str, *, sentencepiece: bool = False) -> GgufFile:
    """A model of one layer, with a tokenizer of one of the two kinds."""
    tokenizer = _sentencepiece() if sentencepiece else _byte_level()
    tokens = dict(tokenizer)["tokenizer.ggml.tokens"][1][1]
    sizes = {"context_length": 128, "embedding_length": 32, "block_count": 1, "feed_forward_length": 64,
             "attention.head_count": 4, "attention.head_count_kv": 2, "vocab_size": len(tokens)}  # fmt: skip
    file = GgufFile([("general.architecture", (STRING, arch)), ("general.alignment", (4, 32))], [], 0)
    file.metadata += [(f"{arch}.{name}", (4, size)) for name, size in sizes.items()]
    file.metadata += [
        (f"{arch}.attention.layer_norm_rms_epsilon", (6, 1e-5)), (f"{arch}.rope.freq_base", (6, 1e4)),
        (f"{arch}.rope.scaling.type", (STRING, "yarn")), (f"{arch}.rope.scaling.factor", (6, 2.0)),
        (f"{arch}.rope.scaling.original_context_length", (4, 64)), (f"{arch}.rope.dimension_count", (4, 8)),
        (f"{arch}.attention.sliding_window", (4, 0)), (f"{arch}.expert_count", (4, 0)), ("split.count", (2, 0)),
        *tokenizer,
    ]  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd": (len(tokens), 32), "output_norm": (32,), "blk.0.attn_norm": (32,), "blk.0.ffn_norm": (32,),
        "blk.0.attn_q": (32, 32), "blk.0.attn_k": (16, 32), "blk.0.attn_v": (16, 32), "blk.0.attn_output": (32, 32),
        "blk.0.ffn_gate": (64, 32), "blk.0.ffn_up": (64, 32), "blk.0.ffn_down": (32, 64),
    }  # fmt: skip
    for name, shape in shapes.items():
        file.add_tensor(f"{name}.weight", shape, FLOAT32 if len(shape) == 1 else Q8_0)
        if arch == "qwen2" and name.endswith(("_q", "_k", "_v")):
            file.add_tensor(f"{name}.bias", shape[:1], FLOAT32)
    return file
