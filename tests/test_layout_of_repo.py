"""The repository's shape: who may import whom, which packages exist, and nothing that belongs to one machine only."""

from __future__ import annotations

import ast
import io
import keyword
import re
import sys
import tokenize
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

pytestmark = pytest.mark.no_cover  # sources are read, not run

ROOT = Path(__file__).resolve().parents[1]
RUNTIME = ROOT / "offload_runtime"
KERNELS = "offload_runtime_kernels"
PROFILES = "offload_runtime_profiles"

# What each module may import besides itself, and the three that are free to all. A folder is one module.
MAY_IMPORT: dict[str, set[str]] = {
    "config": set(),
    "params": set(),
    "errors": set(),
    "memory": {KERNELS},  # for small tensors that go up and down by a kernel
    "trace": set(),
    "hardware": {PROFILES, "memory", KERNELS},  # for whose products the library has the bits
    "copy": {"memory", "trace", KERNELS},
    "grammar": {"memory"},
    "penalties": {"memory"},
    "sampling": {"grammar", "memory", "penalties", KERNELS},
    "weights": {"memory", KERNELS},
    "model": {"kv", "memory", "weights", KERNELS},  # of the caches only what a layer needs of one
    "kv": {"copy", "memory", KERNELS},
    "plan": {"copy", "hardware", "kv", "memory", "model", "runners", "sampling", "weights", KERNELS},
    "runners": {"copy", "grammar", "memory", "model", "kv", "sampling", "trace", KERNELS},
    "speculation": {"grammar", "memory", "sampling", "runners", "model", "trace"},  # of the model only windows and rows
    "engine": {
        "copy", "grammar", "kv", "hardware", "memory", "model", "plan", "runners", "sampling", "speculation", "trace",
        "weights", KERNELS,
    },
    "verify": {"engine", "kv", "model", "runners", "sampling", "speculation"},
    "server": {"engine", "grammar"},
    "cli": {"engine", "hardware", "plan", "server", "verify", "__init__"},  # of the package itself the version
    "__init__": {"engine"},
    "__main__": {"cli"},
    KERNELS: set(),
    PROFILES: set(),
}  # fmt: skip
FREE_TO_ALL = {"config", "errors", "params"}
WITHOUT_PROJECT_IMPORTS = {"errors", KERNELS, PROFILES}


@cache
def _parsed(source: str) -> ast.Module:
    """Syntax of a source, which several tests look at and none changes."""
    return ast.parse(source)


@cache
def _nodes(source: str) -> tuple[ast.AST, ...]:
    """All of its nodes."""
    return tuple(ast.walk(_parsed(source)))


def _module_of(path: Path) -> str:
    """The row of the table that a file belongs to."""
    if not path.is_relative_to(RUNTIME):
        return PROFILES if path.is_relative_to(ROOT / "profiles") else KERNELS
    return path.relative_to(RUNTIME).parts[0].removesuffix(".py")


def _imported_modules(source: str, package: tuple[str, ...]) -> set[str]:
    """Rows of the table that a file imports.

    Args:
        source: Python source.
        package: Dotted package the file is in, which relative imports start from.
    """
    names: list[str] = []
    for node in _nodes(source):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join((*above, *([node.module] if node.module else [])))
            # `from offload_runtime import memory` names the module only behind the import.
            names += [f"{base}.{alias.name}" for alias in node.names]
    modules = set()
    for name in names:
        top, _, rest = name.partition(".")
        if top in (KERNELS, PROFILES):
            modules.add(top)
        elif top == "offload_runtime":
            head = rest.partition(".")[0]
            is_module = (RUNTIME / head).is_dir() or (RUNTIME / f"{head}.py").is_file()
            modules.add(head if head and is_module else "__init__")
    return modules


def _source_files() -> list[Path]:
    folders = (RUNTIME, ROOT / "kernels", ROOT / "profiles")
    return sorted(path for folder in folders for path in folder.rglob("*.py"))


def _violations(path: Path, source: str) -> set[str]:
    module = _module_of(path)
    package = path.parent.relative_to(ROOT / "kernels" if module == KERNELS else ROOT).parts
    free = set() if module in WITHOUT_PROJECT_IMPORTS else FREE_TO_ALL
    return _imported_modules(source, package) - MAY_IMPORT[module] - free - {module}


def test_imports_go_downward_only() -> None:
    files = _source_files()
    unknown = {_module_of(path) for path in files} - set(MAY_IMPORT)
    assert not unknown, f"modules without a row in the table of who may import whom: {sorted(unknown)}"
    wrong = {str(path.relative_to(ROOT)): sorted(_violations(path, path.read_text())) for path in files}
    assert not {path: modules for path, modules in wrong.items() if modules}


@pytest.mark.parametrize(
    ("path", "line", "found"),
    [
        ("memory.py", "from offload_runtime.engine.load_model import build", {"engine"}),
        ("memory/arena.py", "import offload_runtime.cli", {"cli"}),
        ("memory/arena.py", "from offload_runtime import plan", {"plan"}),
        ("sampling.py", "def late():\n    from . import runners", {"runners"}),
        ("weights/loader.py", "from ..runners import ModelRunner", {"runners"}),
        ("weights/loader.py", "from . import layout\nfrom .checkpoint import CheckpointSource", set()),
        ("weights/loader.py", "from offload_runtime.memory import HostArena", set()),
        ("errors.py", "from offload_runtime.config import GB", {"config"}),
        ("trace.py", "from offload_runtime_kernels.swiglu import swiglu", {KERNELS}),
        ("../kernels/offload_runtime_kernels/swiglu.py", "from offload_runtime.errors import X", {"errors"}),
        ("../kernels/offload_runtime_kernels/swiglu.py", "from offload_runtime_kernels._jit import jit", set()),
    ],
)
def test_the_reader_of_imports_sees_each_kind(path: str, line: str, found: set[str]) -> None:
    assert _violations((RUNTIME / path).resolve(), line) == found


def test_the_table_has_no_cycle() -> None:
    below = dict(MAY_IMPORT)
    while below:
        leaves = {module for module, allowed in below.items() if not allowed & set(below)}
        assert leaves, f"these may import each other in a circle: {sorted(below)}"
        below = {module: allowed for module, allowed in below.items() if module not in leaves}


def _file_of(name: str) -> str | None:
    """The file of the runtime that a dotted name stands for, from its root; None for anything else."""
    base = ROOT.joinpath(*name.split("."))
    files = [path for path in (base / "__init__.py", base.with_suffix(".py")) if path.is_file()]
    return files[0].relative_to(RUNTIME).as_posix() if files and files[0].is_relative_to(RUNTIME) else None


def _outside_functions(tree: ast.AST) -> Iterator[ast.AST]:
    """What Python or a type checker runs when it reads a file: all but what a call does."""
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
            yield from _outside_functions(node)


def _imported_files(source: str) -> set[str]:
    """Files of the runtime that a source imports where it is read, for types only or not."""
    names: list[str] = []
    for node in _outside_functions(_parsed(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    found = {_file_of(name) or _file_of(name.rpartition(".")[0]) for name in names}
    return {file for file in found if file is not None}


def test_files_do_not_import_each_other_in_a_circle() -> None:
    files = {path.relative_to(RUNTIME).as_posix(): path for path in RUNTIME.rglob("*.py")}
    graph = {name: _imported_files(path.read_text()) for name, path in files.items()}
    assert "cli/terminal.py" in graph["cli/app.py"]
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"each of these imports the one before: {' '.join(error.args[1])}")


def test_imports_between_files_are_seen_but_for_those_of_calls() -> None:
    source = (
        "from typing import TYPE_CHECKING\nimport offload_runtime.errors\n"
        "if TYPE_CHECKING:\n    from offload_runtime.cli import app, terminal\n    from offload_runtime import plan\n"
        "def late():\n    from offload_runtime import sampling\n"
    )
    assert _imported_files(source) == {"errors.py", "cli/app.py", "cli/terminal.py", "plan/__init__.py"}


def test_kernels_is_not_a_package() -> None:
    # transformers imports a package `kernels` when it finds one, and breaks on one that is not PyPI's.
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert [path.name for path in (ROOT / "kernels").iterdir() if path.name != "__pycache__"] == [KERNELS]


def _declared_packages() -> tuple[set[str], dict[str, str]]:
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    return set(setuptools["packages"]), setuptools["package-dir"]


def test_declared_packages_are_the_packages_there_are() -> None:
    declared, directories = _declared_packages()
    for name in declared:
        folder = ROOT / directories.get(name, name.replace(".", "/"))
        assert (folder / "__init__.py").is_file(), f"{name} is declared in pyproject.toml but {folder} is no package"
    found = {".".join(path.parent.relative_to(ROOT).parts) for path in RUNTIME.rglob("*.py")}
    assert found == {name for name in declared if name.split(".")[0] == "offload_runtime"}


def test_data_files_of_packages_exist() -> None:
    assert (RUNTIME / "py.typed").is_file()


# A file is a whole concept: whoever has less to say says it where it is used.
LEAST_CODE_LINES = 40
SMALL_BUT_WHOLE = {
    "errors.py": "the exceptions, which every room may import",
    "model/decoder.py": "a layer, whole",
    "weights/encodings/coded_bf16.py": "one encoding",
    "weights/encodings/gguf_rows.py": "one family of encodings",
}


def _documentation_lines(source: str) -> set[int]:
    lines: set[int] = set()
    for node in _nodes(source):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            lines |= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return lines


@cache
def _tokens(source: str) -> list[tokenize.TokenInfo]:
    """What is code: no blank lines, no comments, no indentation."""
    layout = {
        tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER,
    }  # fmt: skip
    return [token for token in tokenize.generate_tokens(io.StringIO(source).readline) if token.type not in layout]


def _code_lines(source: str) -> int:
    lines = {line for token in _tokens(source) for line in range(token.start[0], token.end[0] + 1)}
    return len(lines - _documentation_lines(source))


def test_lines_of_code_are_counted_without_texts() -> None:
    source = '"""About\nit."""\n\n# why\nx = (\n    1\n)\n\n\ndef f():\n    """It."""\n    return """a\nb"""\n'
    assert _code_lines(source) == 6


def test_no_file_is_only_a_fragment() -> None:
    files = {path.relative_to(RUNTIME).as_posix(): path for path in RUNTIME.rglob("*.py")}
    small = {
        name for name, path in files.items()
        if not path.name.startswith("__") and _code_lines(path.read_text()) < LEAST_CODE_LINES
    }  # fmt: skip
    assert small <= set(SMALL_BUT_WHOLE), "too small for a file of their own"


# Words that had to be learnt before the code could be read, and what the field says.
PRIVATE_WORDS = {
    "learnt": "controller", "foreseen": "prior", "roundtimes": "latency_model", "gains": "acceptance_model",
    "round": "step", "play": "step", "playing": "generate", "played": "StepResult", "text": "Sequence",
    "turn": "DraftRequest", "middle": "retrieval verifier", "few_rows": "fused_layer", "drafttexts": "draft KV state",
    "lend": "borrow_workspace", "lender": "borrow_workspace", "lent": "borrowed", "forth": "h2d", "back": "d2h",
    "reach_tokens": "max_tokens_with_draft", "making_plans": "request", "placing": "memory",
    "goodness_of_fit": "distribution", "transcripts": "replay", "families": "draft_modes", "thrifty": "cost_aware",
    "beside": "extra_nodes", "told": "metadata", "known": "inputs", "said": "outputs", "old_objects": "",
}  # fmt: skip
# Plain as a function of Python, a parameter or an attribute; private as the name of a class.
ONLY_AS_A_CLASS = {"round", "text", "turn", "gains"}
NOT_OURS_TO_NAME = {"text"}  # of rich


def _private_words(source: str) -> set[str]:
    """Names of the source, without underscores before them, that are words of `PRIVATE_WORDS`."""
    names = {token.string.strip("_") for token in _tokens(source) if token.type == tokenize.NAME}
    return {
        name for name in names - set(keyword.kwlist)
        if name.lower() in PRIVATE_WORDS and (name.lower() not in ONLY_AS_A_CLASS or name[0].isupper())
    }  # fmt: skip


# Imported where they happen to be there.
NOT_REQUIRED = {"triton", "matplotlib", "llguidance"}
DISTRIBUTIONS = {
    "pynvml": "nvidia-ml-py", "tomli_w": "tomli-w", "prometheus_client": "prometheus-client",
    "sse_starlette": "sse-starlette", "markdown_it": "markdown-it-py",
}  # fmt: skip  # whose names are not those of what is imported


@pytest.mark.parametrize("extra", ["", "server"])
def test_what_is_imported_is_required(extra: str) -> None:
    """Of all rooms, but that the server has an extra of its own, which nobody else needs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = [*project["dependencies"], *(project["optional-dependencies"][extra] if extra else ())]
    names = {re.split(r"[^\w-]", one, maxsplit=1)[0] for one in required}
    paths = [path for path in RUNTIME.rglob("*.py") if (path.parent.name == "server") == bool(extra)]
    nodes = [node for path in paths for node in _nodes(path.read_text())]
    imported = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom) and not node.level}
    tops = {name.partition(".")[0] for name in imported} - set(sys.stdlib_module_names) - NOT_REQUIRED
    others = {DISTRIBUTIONS.get(top, top) for top in tops if not top.startswith("offload_runtime")}
    assert not others - names, f"imported, but not among the dependencies: {sorted(others - names)}"


def test_private_words_are_found() -> None:
    source = "def f(turn, told):  # forth\n    return _Turn(round(turn), turn.known, 'back', _lend)\n"
    assert _private_words(source) == {"told", "Turn", "known", "lend"}


def test_names_are_the_fields_plain_english() -> None:
    found = {
        f"{path.relative_to(RUNTIME)}: {name}"
        for path in RUNTIME.rglob("*.py")
        for name in _private_words(path.read_text())
        if name.lower() not in NOT_OURS_TO_NAME
    }
    assert not found, f"see PRIVATE_WORDS for what to say instead: {sorted(found)}"


# Absolute paths of somebody's home, scratch or mount; not /proc, /usr or /tmp, which are everybody's.
ONES_OWN_PATH = re.compile(r"(?<![\w.~/:])/(?:home|root|Users|mnt|media|scratch|work|workspace)/[\w.]")
TEXT_SUFFIXES = {".py", ".md", ".toml", ".json", ".yml", ".yaml", ".sh", ".txt", ".cfg"}
NOT_OURS = {"venv", "build", "dist", "__pycache__"}


def _is_ours(path: Path) -> bool:
    """Whether a file belongs to the repository rather than to a tool or an environment that works in it."""
    parts = path.relative_to(ROOT).parts
    hidden = any(part.startswith(".") and part != ".github" for part in parts)
    return not hidden and not NOT_OURS & set(parts) and path.suffix in TEXT_SUFFIXES and path.is_file()


# What other libraries name so and yet have to be asked for; of a named tuple it is public.
PRIVATE_OF_OTHERS = {"_C", "_exit", "_from_config", "_replace", "_sleep", "_tokenizer"}


def _private_names(source: str) -> set[str]:
    """Private attributes that are not a test's own, and private names of our packages that are imported."""
    names: list[str] = []
    for node in _nodes(source):
        if isinstance(node, ast.Attribute):
            own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            names += [] if own else [node.attr]
        elif isinstance(node, ast.Import | ast.ImportFrom):
            of = getattr(node, "module", None) or ""
            paths = [f"{of}.{alias.name}".lstrip(".") for alias in node.names]
            names += [name for path in paths if path.startswith("offload_runtime") for name in path.split(".")]
    return {name for name in names if re.match("_[a-zA-Z]", name)} - PRIVATE_OF_OTHERS


def test_tests_go_through_doors() -> None:
    found = {str(path.relative_to(ROOT)): _private_names(path.read_text()) for path in (ROOT / "tests").rglob("*.py")}
    assert not {path: names for path, names in found.items() if names}


def test_private_names_are_found() -> None:
    assert _private_names("from offload_runtime.trace import _WAY_OUT\nimport offload_runtime_kernels._jit") == {
        "_WAY_OUT", "_jit",
    }  # fmt: skip
    assert _private_names("cache._ring[0] = self._own.__class__\nself.cache._rows") == {"_ring", "_rows"}
    assert not _private_names("from _pytest import x\nfrom tests import _y\nself._z = torch.cuda._sleep")


# Whose insides belong to themselves: the packages, and the modules of `tools/`, which tests import by their own names.
OUR_MODULES = {
    "offload_runtime", KERNELS,
    *(path.stem for folder in ("tools", "tools/peers") for path in (ROOT / folder).iterdir()),
}  # fmt: skip


def _imported_names(source: str) -> dict[str, str]:
    """The dotted name of everything of `OUR_MODULES` that a source imports, by what it is called there."""
    found: dict[str, str] = {}
    for node in _nodes(source):
        if isinstance(node, ast.Import):
            found |= {alias.asname or alias.name.split(".")[0]: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return {name: path for name, path in found.items() if path.split(".")[0] in OUR_MODULES}


def _patched(source: str) -> set[str]:
    """What of our modules and classes a source replaces: by pytest, by `mock` or by hand, of a name or an object."""
    imported, targets = _imported_names(source), list[ast.expr]()
    for node in _nodes(source):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            targets.append(node.value)
        elif isinstance(node, ast.Call) and node.args:
            called = ast.unparse(node.func).split(".")
            if called[-1] in ("setattr", "delattr") or "patch" in called[-2:]:
                targets.append(node.args[0])
    found = set()
    for target in targets:
        if isinstance(target, ast.Constant) and isinstance(target.value, str):
            found |= {target.value} if target.value.split(".")[0] in OUR_MODULES else set()
            continue
        whole, root = ast.unparse(target), target
        while isinstance(root, ast.Attribute):
            root = root.value
        found |= {whole} if isinstance(root, ast.Name) and root.id in imported else set()
    return found


def test_tests_replace_nothing_inside_a_room() -> None:
    found = {str(path.relative_to(ROOT)): _patched(path.read_text()) for path in (ROOT / "tests").rglob("*.py")}
    assert not {path: names for path, names in found.items() if names}, "hand it in, or provoke it from outside"


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("from offload_runtime.engine import load as own\nmonkeypatch.setattr(own, 'find_plan', f)", {"own"}),
        ("from offload_runtime.runners import DeviceWindow\npatch.setattr(DeviceWindow, 'read', f)", {"DeviceWindow"}),
        ("from offload_runtime import sampling\nmp.setattr(sampling.noise_ops, 'x', f)", {"sampling.noise_ops"}),
        ("import offload_runtime_kernels.attention_cpu as a\nmonkeypatch.delattr(a, 'x')", {"a"}),
        ("import offload_runtime.plan\nsetattr(offload_runtime.plan, 'x', 1)", {"offload_runtime.plan"}),
        ("import compare\ncompare.run_system = f", {"compare"}),
        ("from sweeping import family\ndel family.x", {"family"}),
        ("monkeypatch.setattr('offload_runtime.memory.arena.PAGE', 1)", {"offload_runtime.memory.arena.PAGE"}),
        ("from unittest import mock\nmock.patch('compare.draw')", {"compare.draw"}),
        ("from unittest.mock import patch\nfrom models import x\npatch.object(x, 'y')", {"x"}),
        ("import os, psutil\nfrom offload_runtime.engine import Runtime\npatch.setattr(os, 'fsync', f)\n"
         "runtime = Runtime()\npatch.setattr(runtime.parts.target.runner, 'verify', f)\nruntime.parts = f", set()),
    ],
)  # fmt: skip
def test_what_is_replaced_inside_a_room_is_found(line: str, found: set[str]) -> None:
    assert _patched(line) == found


# What starts a process, by module; of `os` these alone.
STARTS_PROCESSES = {"subprocess", "multiprocessing", "pty"}
OF_OS = {"fork", "forkpty", "popen", "posix_spawn", "posix_spawnp", "system"}
LEFT_OUT_BY_DEFAULT = re.compile(r"mark\.(slow|gpu)\b")
Definition = ast.FunctionDef | ast.ClassDef


def _names_used(node: ast.AST) -> set[str]:
    """Names that a definition speaks of: variables, attributes, its parameters, which may be fixtures."""
    names: set[str] = set()
    for part in ast.walk(node):
        if isinstance(part, ast.Name):
            names.add(part.id)
        elif isinstance(part, ast.Attribute):
            names.add(f"os.{part.attr}" if isinstance(part.value, ast.Name) and part.value.id == "os" else part.attr)
        elif isinstance(part, ast.arg):
            names.add(part.arg)
    return names


def _tests_that_start_processes(sources: Mapping[str, str]) -> list[str]:
    """Tests that run by default and start a process, themselves or through what they call of the tests' own.

    Args:
        sources: Source by dotted name, such as `tests.helpers.mutants`; what `tests.conftest` has is everybody's.
    """
    trees = {name: _parsed(source) for name, source in sources.items()}
    used = {
        (name, node.name): _names_used(node)
        for name, tree in trees.items()
        for node in tree.body
        if isinstance(node, Definition)
    }
    starters = {name: STARTS_PROCESSES | {f"os.{call}" for call in OF_OS} for name in trees}
    before = -1
    while before != (before := sum(map(len, starters.values()))):
        for name, tree in trees.items():
            starters[name] |= starters.get("tests.conftest", set())
            for node in tree.body:
                if isinstance(node, ast.ImportFrom):
                    of = STARTS_PROCESSES if node.module in STARTS_PROCESSES else starters.get(node.module or "", set())
                    everything = node.module in STARTS_PROCESSES
                    bound = {one.asname or one.name for one in node.names if everything or one.name in of}
                    starters[name] |= bound
                elif isinstance(node, Definition) and used[name, node.name] & starters[name]:
                    starters[name].add(node.name)
    found = []
    for name, tree in trees.items():
        marks = [node for node in tree.body if isinstance(node, ast.Assign) and "pytestmark" in ast.unparse(node)]
        if not any(LEFT_OUT_BY_DEFAULT.search(ast.unparse(node)) for node in marks):
            found += [f"{name}: {test.name}" for test in _default_tests(tree) if _names_used(test) & starters[name]]
    return found


def _default_tests(tree: ast.Module | ast.ClassDef) -> Iterator[ast.FunctionDef]:
    """Tests of a file or a class that neither `slow` nor `gpu` leaves out."""
    for node in tree.body:
        if isinstance(node, Definition) and not any(
            LEFT_OUT_BY_DEFAULT.search(ast.unparse(decorator)) for decorator in node.decorator_list
        ):
            if isinstance(node, ast.ClassDef):
                yield from _default_tests(node)
            elif node.name.startswith("test_"):
                yield node


def test_at_most_three_tests_of_the_default_run_start_a_process() -> None:
    files = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in (ROOT / "tests").rglob("*.py")
    }  # fmt: skip
    found = _tests_that_start_processes({name: path.read_text() for name, path in files.items()})
    assert len(found) <= 3, f"a process takes seconds to start: mark all but three of these slow: {found}"


def test_processes_that_tests_start_are_found() -> None:
    helper = "import os\ndef child():\n    os.fork()\nclass Shell:\n    def start(self): child()\n"
    sources = {
        "tests.helpers.shell": helper,
        "tests.conftest": "import pty\ndef terminal():\n    pty.openpty()\n",
        "tests.test_a": "import subprocess\ndef test_own():\n    subprocess.run([])\n"
        "def test_none(target):\n    len('')\n"
        "@pytest.mark.slow\n@pytest.mark.parametrize('x', [1])\ndef test_slow(x):\n    subprocess.run([])\n",
        "tests.test_b": "from tests.helpers.shell import Shell as S\nfrom subprocess import run as start\n"
        "class TestIt:\n    def test_helped(self): S().start()\n    def test_fixture(self, terminal): ...\n"
        "def test_bound():\n    start([])\n",
        "tests.test_c": "import os\npytestmark = [pytest.mark.slow]\ndef test_slow_file():\n    os.fork()\n",
    }
    assert _tests_that_start_processes(sources) == [
        "tests.test_a: test_own", "tests.test_b: test_helped", "tests.test_b: test_fixture", "tests.test_b: test_bound",
    ]  # fmt: skip


def test_no_file_names_a_path_of_one_machine() -> None:
    files = [path for path in ROOT.rglob("*") if _is_ours(path)]
    assert Path(__file__).resolve() in files
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in files
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), start=1)
        if ONES_OWN_PATH.search(line)
    ]
    assert not found, "\n".join(found)


def test_paths_of_one_machine_are_recognised() -> None:
    for folder in ("home", "root", "mnt", "work"):
        for line in (f"open('/{folder}/x')", f"see /{folder}/x", f"--out=/{folder}/x.json"):
            assert ONES_OWN_PATH.search(line)
    for line in ("https://host/home/x", "offload_runtime/home/x", "/proc/cpuinfo", "left/work/right"):
        assert not ONES_OWN_PATH.search(line)
