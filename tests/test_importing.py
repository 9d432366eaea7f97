"""Imports without collections in between, which come back whatever happens."""

from __future__ import annotations

import gc

import pytest

from offload_runtime.importing import no_collections


def test_collections_come_back_whatever_happens() -> None:
    with no_collections():
        assert not gc.isenabled()
        with no_collections():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(KeyboardInterrupt), no_collections():
        raise KeyboardInterrupt
    assert gc.isenabled()


def test_a_program_without_collections_stays_without() -> None:
    gc.disable()
    try:
        with no_collections():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
