"""A draft for any checkpoint: its copy with noise on the weights, which often guesses like the original.

    python tools/noisy_draft.py CHECKPOINT DIRECTORY --noise 0.05

The noise is seeded: the same copy every time.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import harness
import torch
from safetensors.torch import load_file, save_file

from offload_runtime.errors import CheckpointError
from offload_runtime.weights.convert import atomic_directory


def write_noisy_copy(source: Path, directory: Path, *, noise: float = 0.05, seed: int = 0) -> Path:
    """Copy a safetensors checkpoint, multiplying each weight by 1 + `noise` times a Gaussian number; all or nothing.

    Args:
        source: Directory of the checkpoint.
        directory: A new directory for the copy.
        noise: Relative standard deviation; 0.05 leaves about 0.85 of the probability in common (SmolLM2-135M).
        seed: Of the noise.

    Returns:
        `directory`.

    Raises:
        CheckpointError: `source` is no directory.
        OptionError: `directory` is there already.
        StorageError: It cannot be written.
    """
    if not source.is_dir():
        raise CheckpointError(f"{source} is no directory: name one with safetensors")
    files = [path for path in sorted(source.iterdir()) if path.is_file()]
    with atomic_directory(directory, sum(path.stat().st_size for path in files)) as partial:
        _write_files(files, partial, noise, torch.Generator().manual_seed(seed))
    return directory


def _write_files(files: list[Path], directory: Path, noise: float, generator: torch.Generator) -> None:
    """Copy the files of a checkpoint, its weights with noise."""
    for path in files:
        if path.suffix != ".safetensors":
            shutil.copyfile(path, directory / path.name)
            continue
        noisy = {}
        for name, weight in sorted(load_file(path).items()):
            factor = 1 + noise * torch.randn(weight.shape, generator=generator)
            noisy[name] = (weight.float() * factor).to(weight.dtype)
        save_file(noisy, directory / path.name, metadata={"format": "pt"})


@harness.one_line_errors
def main() -> int:
    """Write one copy; returns the exit code: 2 for what the user can mend."""
    parser = harness.make_parser(__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--noise", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    print(write_noisy_copy(arguments.source, arguments.directory, noise=arguments.noise, seed=arguments.seed))
    return 0


if __name__ == "__main__":
    sys.exit(main())
