"""The repository's shape: who may import whom, which packages exist, and nothing that belongs to one machine only."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).resolve().parents[1]
RUNTIME = ROOT / "offload_runtime"
KERNELS = "offload_runtime_kernels"
PROFILES = "offload_runtime_profiles"

# What each module may import besides itself, `config` and `errors`, which are free to all. A folder is one module.
MAY_IMPORT: dict[str, set[str]] = {
    "config": set(),
    "errors": set(),
    "importing": set(),
    "memory": set(),
    "trace": set(),
    "hardware": {PROFILES, "memory"},
    "copy": {"memory", "trace", KERNELS},
    "sampling": {KERNELS},
    "weights": {"importing", "memory"},
    "model": {KERNELS},
    "kv": {"copy", "memory", KERNELS},
    "planner": {"hardware"},
    "runners": {"copy", "model", "kv", "sampling", "trace", KERNELS},
    "speculation": {"sampling", "runners", "model"},  # of the model only the plain data of a pass: windows and rows
    "engine": {
        "copy", "kv", "hardware", "memory", "model", "planner", "runners", "sampling", "speculation", "trace",
        "weights", KERNELS,
    },
    "verify": {"engine", "kv", "model", "runners", "sampling", "speculation"},
    "cli": {"engine", "hardware", "importing", "planner", "verify", "__init__"},  # of the package itself the version
    "__init__": {"engine"},
    "__main__": {"cli"},
    KERNELS: set(),
    PROFILES: set(),
}  # fmt: skip
FREE_TO_ALL = {"config", "errors"}
WITHOUT_PROJECT_IMPORTS = {"errors", KERNELS, PROFILES}


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
    for node in ast.walk(ast.parse(source)):
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
        ("memory/arena.py", "from offload_runtime import planner", {"planner"}),
        ("sampling.py", "def late():\n    from . import runners", {"runners"}),
        ("weights/loader.py", "from ..runners import ModelRunner", {"runners"}),
        ("weights/loader.py", "from . import layout\nfrom .checkpoint import Shard", set()),
        ("weights/loader.py", "from offload_runtime.memory import HostArena", set()),
        ("errors.py", "from offload_runtime.config import GB", {"config"}),
        ("memory/arena.py", "from offload_runtime_kernels.swiglu import swiglu", {KERNELS}),
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


# Absolute paths of somebody's home, scratch or mount; not /proc, /usr or /tmp, which are everybody's.
ONES_OWN_PATH = re.compile(r"(?<![\w.~/:])/(?:home|root|Users|mnt|media|scratch|work|workspace)/[\w.]")
TEXT_SUFFIXES = {".py", ".md", ".toml", ".json", ".yml", ".yaml", ".sh", ".txt", ".cfg"}
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


def test_paths_of_one_machine_are_recognised() -> None:
    for folder in ("home", "root", "mnt", "work"):
        for line in (f"open('/{folder}/x')", f"see /{folder}/x", f"--out=/{folder}/x.json"):
            assert ONES_OWN_PATH.search(line)
    for line in ("https://host/home/x", "offload_runtime/home/x", "/proc/cpuinfo", "left/work/right"):
        assert not ONES_OWN_PATH.search(line)
