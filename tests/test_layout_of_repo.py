"""The repository's shape: who may import whom, which packages exist, and nothing that belongs to one machine only."""

import ast
import re
import sys
from collections.abc import Iterable, Iterator
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

# What each module may import besides itself, and those that are free to all. A folder is one module.
MAY_IMPORT: dict[str, set[str]] = {
    "core": set(),
    "config": set(),
    "params": set(),
    "options": set(),
    "sizes": set(),
    "files": set(),
    "errors": set(),
    "fields": set(),
    "trace": set(),
    "stream": {"trace", KERNELS},  # for small tensors that go up and down by a kernel
    "hardware": {PROFILES, "stream", KERNELS},  # for whose products the library has the bits
    "grammar": {"grammar_process", "stream"},
    "grammar_process": set(),
    "sampling": {"grammar", "stream", KERNELS},
    "models": {"stream", KERNELS},  # what everything else orders and adds up
    "weights": {"stream", "models", KERNELS},
    "cache": {"stream", "models", KERNELS},
    "plan": {"stream", "hardware", "cache", "models", "runners", "sampling", "speculation", "weights", KERNELS},
    "runners": {"stream", "grammar", "models", "cache", "sampling", "trace", KERNELS},
    "speculation": {"grammar", "cache", "stream", "models", "sampling", "runners", "trace", KERNELS},
    "hosts": {"cache", "hardware", "models", "runners", "stream", "weights"},
    "engine": {
        "stream", "grammar", "cache", "hardware", "hosts", "models", "plan", "runners", "sampling", "speculation",
        "trace", "weights", KERNELS,
    },
    "verify": {"engine", "cache", "models", "runners", "sampling", "speculation"},
    "server": {"engine", "grammar", "__init__"},  # of itself the version
    "cli": {"engine", "hardware", "hosts", "plan", "server", "verify", "weights", "__init__"},
    "__init__": {"engine"},
    "__main__": {"cli"},
    KERNELS: set(),
    PROFILES: set(),
}  # fmt: skip
FREE_TO_ALL = {"config", "core", "errors", "fields", "files", "options", "params", "sizes"}
FOLDERS = ("offload_runtime", "kernels", "profiles")
WITHOUT_PROJECT_IMPORTS = {"errors", KERNELS, PROFILES}


@cache
def _nodes(path: Path) -> tuple[ast.AST, ...]:
    """All nodes of a source."""
    return tuple(ast.walk(ast.parse(path.read_text())))


def _module_of(path: Path) -> str:
    """The row of the table that a file belongs to."""
    if not path.is_relative_to(RUNTIME):
        return PROFILES if path.is_relative_to(ROOT / "profiles") else KERNELS
    return path.relative_to(RUNTIME).parts[0].removesuffix(".py")


def _names(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """What is imported, by dotted names: `from offload_runtime import stream` names the module behind the import."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@cache
def _file_of(name: str) -> Path | None:
    """The file that a dotted name, or what it is in, stands for; None for anything that is not ours."""
    for dotted in (name, name.rpartition(".")[0]):
        for base in (ROOT, ROOT / "kernels"):
            whole = base.joinpath(*dotted.replace(PROFILES, "profiles").split("."))
            for path in (whole / "__init__.py", whole.with_suffix(".py")):
                if dotted and path.is_file() and any(path.is_relative_to(ROOT / folder) for folder in FOLDERS):
                    return path
    return None


def _imported_files(nodes: Iterable[ast.AST]) -> set[Path]:
    return {path for path in map(_file_of, _names(nodes)) if path is not None}


def _sources() -> list[Path]:
    return sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


def test_imports_go_downward_only() -> None:
    unknown = {_module_of(path) for path in _sources()} - set(MAY_IMPORT)
    assert not unknown, f"modules without a row in the table of who may import whom: {sorted(unknown)}"
    wrong: dict[str, set[str]] = {}
    for path in _sources():
        module = _module_of(path)
        allowed = MAY_IMPORT[module] | {module} | (set() if module in WITHOUT_PROJECT_IMPORTS else FREE_TO_ALL)
        wrong[str(path)] = {_module_of(one) for one in _imported_files(_nodes(path))} - allowed
    assert not {path: modules for path, modules in wrong.items() if modules}
    TopologicalSorter(MAY_IMPORT).prepare()  # the table has no cycle


def _outside_functions(tree: ast.AST) -> Iterator[ast.AST]:
    """What Python or a type checker runs when it reads a file: all but what a call does."""
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
            yield from _outside_functions(node)


def test_files_do_not_import_each_other_in_a_circle() -> None:
    graph = {path: _imported_files(_outside_functions(_nodes(path)[0])) for path in RUNTIME.rglob("*.py")}
    assert RUNTIME / "cli/terminal.py" in graph[RUNTIME / "cli/app.py"]
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"each of these imports the one before: {' '.join(map(str, error.args[1]))}")


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


# Imported where they happen to be there.
NOT_REQUIRED = {"triton", "matplotlib", "llguidance"}
DISTRIBUTIONS = {
    "pynvml": "nvidia-ml-py", "tomli_w": "tomli-w", "prometheus_client": "prometheus-client",
    "sse_starlette": "sse-starlette", "markdown_it": "markdown-it-py", "tomllib": "tomli",
}  # fmt: skip  # whose names are not those of what is imported


@pytest.mark.parametrize("extra", ["", "server"])
def test_what_is_imported_is_required(extra: str) -> None:
    """Of all rooms, but that the server has an extra of its own, which nobody else needs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = [*project["dependencies"], *(project["optional-dependencies"][extra] if extra else ())]
    names = {re.split(r"[^\w-]", one, maxsplit=1)[0] for one in required}
    paths = [path for path in RUNTIME.rglob("*.py") if (path.parent.name == "server") == bool(extra)]
    tops = {n.partition(".")[0] for p in paths for n in _names(_nodes(p))} - set(sys.stdlib_module_names) - NOT_REQUIRED
    others = {DISTRIBUTIONS.get(top, top) for top in tops if not top.startswith("offload_runtime")}
    assert not others - names, f"imported, but not among the dependencies: {sorted(others - names)}"


# Absolute paths of somebody's home, scratch or mount; not /proc, /usr or /tmp, which are everybody's.
ONES_OWN_PATH = re.compile(r"(?<![\w.~/:])/(?:home|root|Users|mnt|media|scratch|work|workspace)/[\w.]")
TEXT_SUFFIXES = {".py", ".cpp", ".md", ".toml", ".json", ".yml", ".yaml", ".sh", ".txt", ".cfg"}
NOT_OURS = {"venv", "build", "dist", "__pycache__"}


def _is_ours(path: Path) -> bool:
    """Whether a file belongs to the repository rather than to a tool or an environment that works in it."""
    parts = path.relative_to(ROOT).parts
    hidden = any(part.startswith(".") and part != ".github" for part in parts)
    return not hidden and not NOT_OURS & set(parts) and path.suffix in TEXT_SUFFIXES and path.is_file()


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
