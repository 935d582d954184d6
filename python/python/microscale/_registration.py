"""Registering functions as operators of PyTorch."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextvars import ContextVar
from functools import wraps
from typing import Any, TypeVar, cast

import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])

#: Whether a fake kernel is running, for which shapes are enough.
SHAPES_ONLY: ContextVar[bool] = ContextVar("SHAPES_ONLY", default=False)


def _with_needed(function: Callable[..., Any], count: int) -> Callable[..., Any]:
    """Returns the same function with a signature whose first `count` arguments are needed."""

    def kernel(*args: Any, **options: Any) -> Any:
        return function(*args, **options)

    signature = inspect.signature(function, eval_str=True)
    parameters = list(signature.parameters.values())
    needed = [each.replace(default=each.empty) for each in parameters[:count]]
    kernel.__signature__ = signature.replace(parameters=needed + parameters[count:])  # type: ignore[attr-defined]
    return kernel


def operator(mutates_args: tuple[str, ...] = ()) -> Callable[[_Function], _Function]:
    """Registers a function as an operator of PyTorch by its name, and for its fake kernel too."""

    def register(function: _Function) -> _Function:
        parameters = inspect.signature(function).parameters
        names, defaults, kernel = list(parameters), {}, cast(Callable[..., Any], function)
        if mutates_args:
            # PyTorch 2.11 leaves out arguments that equal their defaults, and fails if one of them is
            # changed. So these have no defaults for PyTorch, and `call` fills them in.
            count = 1 + max(map(names.index, mutates_args))
            needed = [each for each in parameters.values() if each.name in names[:count]]
            defaults = {each.name: each.default for each in needed if each.default is not each.empty}
            kernel = _with_needed(function, count)
        registered = torch.library.custom_op(f"microscale::{function.__name__}", kernel, mutates_args=mutates_args)

        def fake(*args: Any, **options: Any) -> Any:
            token = SHAPES_ONLY.set(True)
            try:
                return function(*args, **options)
            finally:
                SHAPES_ONLY.reset(token)

        registered.register_fake(fake)

        @wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            after = names[len(args) :]
            filled = {name: value for name, value in defaults.items() if name in after and name not in options}
            return registered(*args, **filled, **options)

        return cast(_Function, call)

    return register
