"""Triton's interpreter without what it does over and over: more than half of the time of a kernel's test."""

from types import SimpleNamespace
from typing import Any

import triton.language as tl
from triton.language import core, semantic
from triton.runtime import interpreter

_PATCH, _UNWRAP, _NUMPY_TYPE = "_patch_lang", "_unwrap_if_constexpr", "_get_np_dtype"


def replace_language_once_a_launch() -> None:
    """Let kernels find the interpreter's functions in Triton's language from when they are launched until they end.

    The interpreter puts them there at every call of a function within a kernel too, `tl.zeros` and `tl.sum` among
    them, and looks through all of the language for that: 4 ms each, where they are in their places already.
    """
    replace: Any = getattr(interpreter, _PATCH, None)
    replaced: set[int] = set()  # ids of modules, since the launch began

    def replace_once(function: Any) -> Any:
        modules = {id(value) for value in function.__globals__.values() if value is tl or value is tl.core}
        if modules <= replaced:
            return SimpleNamespace(restore=lambda: None)
        scope = replace(function)
        if scope is not None and not replaced:
            restore = scope.restore

            def restore_all() -> None:
                replaced.clear()
                restore()

            scope.restore = restore_all
        if scope is not None:
            replaced.update(modules)
        return scope

    if replace is not None:
        setattr(interpreter, _PATCH, replace_once)


def remember_types() -> None:
    """Let the interpreter make the shape of a block, and find the numpy type of its elements, once and not per tensor.

    Both took two fifths of a kernel's time: each operation makes a few tensors, whose shapes were lists of constants
    that were made, checked and compared element by element.
    """
    made_block, made_tensor = core.block_type.__init__, core.tensor.__init__
    of_blocks: dict[tuple[int, ...], dict[str, Any]] = {}
    of_tensors: dict[int, dict[str, Any]] = {}  # by ids of the shapes that `of_blocks` keeps

    def make_block(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(size.value if type(size) is core.constexpr else size for size in shape)
        if sizes not in of_blocks:
            made_block(self, element_ty, shape)
            of_blocks[sizes] = {"shape": self.shape, "numel": self.numel}
        vars(self).update(of_blocks[sizes], element_ty=element_ty, name=f"<{sizes}, {element_ty}>")

    def make_tensor(self: Any, handle: Any, type: Any) -> None:
        shape = id(type.shape) if type.is_block() else 0
        if shape not in of_tensors:
            made_tensor(self, handle, type)
            of_tensors[shape] = {"shape": self.shape, "numel": self.numel}
        vars(self).update(of_tensors[shape], handle=handle, type=type, dtype=type.scalar)

    core.block_type.__init__, core.tensor.__init__ = make_block, make_tensor
    broadcast: Any = semantic.TritonSemantic.broadcast_impl_value

    def broadcast_unless_alike(self: Any, lhs: Any, rhs: Any) -> Any:
        if lhs.type.is_block() and rhs.type.is_block() and lhs.type.shape is rhs.type.shape:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    semantic.TritonSemantic.broadcast_impl_value = broadcast_unless_alike
    unwrap: Any = getattr(core, _UNWRAP)

    def unwrap_at_once(value: Any) -> Any:
        kind = type(value)
        return value.value if kind is core.constexpr else value if kind in (int, core.tensor) else unwrap(value)

    setattr(core, _UNWRAP, unwrap_at_once)
    numpy_type: Any = getattr(interpreter, _NUMPY_TYPE)
    by_name: dict[str, Any] = {}

    def remembered_type(of: Any) -> Any:
        name = of.scalar.name
        if name not in by_name:
            by_name[name] = numpy_type(of)
        return by_name[name]

    setattr(interpreter, _NUMPY_TYPE, remembered_type)
