"""Every private or unstable name of torch that the package uses, for all supported versions."""

import functools
import inspect
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import FunctionType, SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad
from torch.fx import traceback
from torch.utils import checkpoint

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store as Store
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs

Function = TypeVar("Function", bound=Callable[..., Any])
Kind = TypeVar("Kind", bound=type)

_included_keys = torch._C._dispatch_tls_local_include_set
_innermost_transform = torch._C._functorch.peek_interpreter_stack
_compiled_functions: dict[tuple[Any, ...], Callable[..., None]] = {}
"""By function and layout; as loaded kernels, they are never cleared."""
_unknown_captures = itertools.count(1)
_shapes_config = cast(Any, torch.fx.experimental._config)
PIPELINE_STAGE = "torch.distributed.pipelining.stage"
FSDP1 = "torch.distributed.fsdp.fully_sharded_data_parallel"
DDP = "torch.nn.parallel.distributed"
"""The modules of classes that run a model, and look for tensors in what it returns."""
_BACKEND_SELECT = torch._C.DispatchKeySet(torch._C.DispatchKey.BackendSelect)
_BATCHING = torch._C._dispatch_key_parse("VmapMode")
_NO_DISPATCH_MODE = {
    keys.raw_repr()
    for keys in (
        _BACKEND_SELECT,
        _BACKEND_SELECT.add(torch._C.DispatchKey.ADInplaceOrView),
    )
}


def import_behind(first: str, name: str) -> None:
    """Import the module `name` as soon as somebody has imported the module `first`."""
    if first in sys.modules:
        import_module(name)
        return
    finder: Any = SimpleNamespace()

    def find(module: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if module != first:
            return None
        sys.meta_path.remove(finder)
        spec = find_spec(first)
        loader: Any = spec and spec.loader
        load = loader.exec_module

        def load_and_import(module: Any) -> None:
            load(module)
            import_module(name)

        loader.exec_module = load_and_import
        return spec

    finder.find_spec = find
    sys.meta_path.insert(0, finder)


def address_of(x: Tensor) -> int:
    """Return where x is in memory; 0 if it has none of its own, but wraps a tensor that has."""
    return x.data_ptr() if torch._C._has_storage(x) else 0


def has_dispatch_mode() -> bool:
    """Whether a mode, tracer, transform or fake tensor mode of torch watches operators now."""
    return forward_ad._current_level >= 0 or _included_keys().raw_repr() not in _NO_DISPATCH_MODE


def has_function_mode() -> bool:
    """Whether a mode of torch watches the functions that are called now."""
    return torch._C._is_torch_function_mode_enabled()


def computes_tangents() -> bool:
    """Whether operators called here compute tangents, beside their results."""
    return forward_ad._current_level >= 0 and torch._C._is_fwd_grad_enabled()


def is_transformed() -> bool:
    """Whether forward-mode differentiation or a transform of `torch.func` is active.

    Graph compilers, which trace transforms themselves, do not count.
    """
    if _innermost_transform() is None and forward_ad._current_level < 0:
        return False
    return not torch.compiler.is_dynamo_compiling()


def is_batched_backward() -> bool:
    """Whether autograd batches the upstream gradients of a backward, `is_grads_batched`."""
    return bool(_included_keys().has(_BATCHING))


def is_dtensor(x: Any) -> "TypeIs[DTensor]":
    """Whether x is a distributed tensor; no other program imports what they need."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def shares_memory(a: Tensor, b: Tensor) -> bool:
    """Whether a and b are views of one storage; also for tensors of a graph compiler."""
    return cast(bool, cast(Any, torch._C)._is_alias_of(a, b))


def resolve_process_group(name: str) -> dist.ProcessGroup:
    """Return the process group called `name`.

    Raises:
        ValueError: if this rank is in no such group.
    """
    from torch._C._distributed_c10d import _resolve_process_group

    try:
        return _resolve_process_group(cast(Any, name))  # torch expects its NewType of str
    except (LookupError, RuntimeError, ValueError) as error:
        raise ValueError(
            f"group: got {name!r}, expected the name of a process group that this rank is in"
        ) from error


def constant_in_graphs(function: Function) -> Function:
    """Have torch.compile call `function` while it traces, with constants, for a constant."""
    # as torch.compiler.assume_constant_result does, which imports all of the compiler
    vars(function)["_dynamo_marked_constant"] = True
    return function


@constant_in_graphs
def place_in_group(name: str) -> tuple[int, int]:
    """Return the number of this rank in the process group called `name`, and how many there are.

    They are constants of a compiled graph.

    Raises:
        ValueError: if this rank is in no such group.
    """
    group = resolve_process_group(name)
    return group.rank(), group.size()


def is_fake_group(group: dist.ProcessGroup) -> bool:
    """Whether `group` is of torch's backend "fake", which pretends that there are other ranks."""
    from torch._C._distributed_c10d import FakeProcessGroup

    return isinstance(group._get_backend(group._device_types[0]), FakeProcessGroup)


def group_timeout(group: dist.ProcessGroup) -> timedelta:
    """Return how long collectives of `group` wait for its ranks."""
    backend = group._get_backend(group._device_types[0])
    # a wrapper, under TORCH_DISTRIBUTED_DEBUG=DETAIL, has no options before torch 2.11
    return getattr(backend, "wrapped_pg", backend).options._timeout


def all_gather(x: Tensor, ranks: int, group: str) -> Tensor:
    """Return the x (...) of every rank as (R, ...); a graph compiler can trace it."""
    ops = torch.ops._c10d_functional
    rows = ops.all_gather_into_tensor(x.contiguous(), ranks, group)
    return cast(Tensor, ops.wait_tensor(rows).view(ranks, *x.shape))


def all_reduce_(x: Tensor, group: str) -> Tensor:
    """Replace x by its sum over the ranks; a graph compiler can trace it."""
    ops = torch.ops._c10d_functional
    return cast(Tensor, ops.wait_tensor(ops.all_reduce_(x, "sum", group)))


def reduce_scatter(x: Tensor, ranks: int, group: str) -> Tensor:
    """Return this rank's rows (N / R, ...) of the sum of x (N, ...); a compiler can trace it."""
    ops = torch.ops._c10d_functional
    return cast(Tensor, ops.wait_tensor(ops.reduce_scatter_tensor(x, "sum", ranks, group)))


def register_node(cls: Kind) -> Kind:
    """Let torch find the tensors of an object, as FSDP and DDP do in outputs.

    `cls` has the methods `tensors`, which returns them, and `with_tensors`, of as many others.
    """
    from torch.utils import _pytree

    _pytree.register_pytree_node(
        cls, lambda x: (x.tensors(), x), lambda tensors, x: x.with_tensors(*tensors)
    )
    return cls


def check_at_run_time(condition: Any, message: str) -> None:
    """Have a traced graph raise RuntimeError with `message` unless `condition`, a SymBool."""
    torch._check(condition, message.__str__)


def apply_function(function: type[torch.autograd.Function], *arguments: Any) -> tuple[Any, ...]:
    """Return `function.apply` of its arguments, all by position.

    Torch binds them to the names of its parameters first, which takes CPU time.
    """
    if torch.compiler.is_compiling():
        result: tuple[Any, ...] = function.apply(*arguments)
        return result
    run: Callable[..., tuple[Any, ...]] = cast(Any, super(torch.autograd.Function, function)).apply
    return run(*torch._functorch.utils.unwrap_dead_wrappers(arguments))


def is_in_autograd_function() -> bool:
    """Whether the forward of a `torch.autograd.Function` in Python is running, without a trace."""
    apply: Any = torch.autograd.Function.apply
    return _is_running(apply.__func__)


def is_in_reentrant_checkpoint() -> bool:
    """Whether an activation checkpoint with use_reentrant=True runs its forward."""
    return _is_running(checkpoint.CheckpointFunction.forward)


def is_in_backward() -> bool:
    """Whether autograd computes gradients in this thread now."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def checkpoint_returned_rows() -> bool:
    """Whether a reentrant activation checkpoint that returned more than scalars runs again.

    Those of torch, DeepSpeed and Megatron are functions of autograd whose context has the forward
    as `run_function`.  The gradients of what it returned are arguments of its backward.
    """
    frame = inspect.currentframe() if is_in_backward() else None
    while frame is not None:
        if frame.f_code.co_name == "backward" and hasattr(
            frame.f_locals.get("ctx"), "run_function"
        ):
            given = [x for name in ("args", "grads") for x in frame.f_locals.get(name, ())]
            return any(isinstance(x, Tensor) and x.ndim > 0 for x in given)
        frame = frame.f_back
    return False


def _is_running(function: Any) -> bool:
    frame = None if torch.compiler.is_compiling() else inspect.currentframe()
    while frame is not None and frame.f_code is not function.__code__:
        frame = frame.f_back
    return frame is not None


def running_objects(module: str) -> Iterator[Any]:
    """Yield the objects whose methods `module` defines and that run now, the innermost first.

    `module` is part of what trains on several ranks: without a process group there are none.
    """
    if module not in sys.modules or not (dist.is_available() and dist.is_initialized()):
        return
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == module and "self" in frame.f_locals:
            yield frame.f_locals["self"]
        frame = frame.f_back


def may_recompute() -> bool:
    """Whether the forward of a function may run again for its backward, or what it saves may move.

    Activation checkpointing does the former, eagerly by hooks, in graphs by marks, offloading the
    latter.
    """
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        return True
    return traceback.get_current_meta().get("recompute") is not None


def capture_id() -> int | None:
    """Return a number of the CUDA graph capture that the current stream is in, None if in none.

    Without the runtime's bindings every call in a capture returns another number.
    """
    if not torch.cuda.is_initialized() or not torch.cuda.is_current_stream_capturing():
        return None
    try:
        from cuda.bindings import runtime  # type: ignore[import-untyped]
    except ImportError:
        return -next(_unknown_captures)

    _, _, number, *_ = runtime.cudaStreamGetCaptureInfo(torch.cuda.current_stream().cuda_stream)
    return int(number)


def has_triton() -> bool:
    """Whether torch.compile can build GPU kernels."""
    from torch.utils._triton import has_triton

    return has_triton()


def compile_pointwise(function: Callable[..., None]) -> Callable[..., None]:
    """Return `function`, which writes to its arguments, as one kernel for any number of rows.

    It works on elements, or reduces rows.  The first dimension of each tensor is compiled as a
    symbol, the others as constants.  Tensors of the same layout meet the same kernel whatever else
    was compiled before, for equal bits, with one exception: if the first ones begin behind their
    storage's start, or are views, their kernel serves only such, and one that is compiled later for
    others takes its place.
    """
    # while FX traces real tensors, which it cannot do with compiled functions, they run uncompiled
    settings = {"error_on_nested_fx_trace": False}

    @functools.wraps(function)
    def run(*arguments: Tensor | None) -> None:
        for x in arguments:
            for dim in range(1, 0 if x is None else x.ndim):
                torch._dynamo.mark_static(x, dim)
        # sizes and offsets that are equal by chance would be compiled as one number
        no_chance = _shapes_config.patch(use_duck_shape=False)
        with torch._dynamo.config.patch(settings), no_chance, torch.no_grad():
            _compiled(function, _layout(arguments))(*_apart(arguments))

    return run


def _apart(arguments: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return the tensors as ones that share no storage with tensors of other dtypes.

    The compiler takes views of a storage that is written for one tensor, which has one dtype.
    """
    given = [x for x in arguments if x is not None]

    def clashes(x: Tensor) -> bool:
        return any(x.dtype != y.dtype and shares_memory(x, y) for y in given)

    pack = cast(Any, torch.utils.dlpack)
    return [
        pack.from_dlpack(pack.to_dlpack(x)) if x is not None and clashes(x) else x
        for x in arguments
    ]


def _layout(arguments: Sequence[Tensor | None]) -> tuple[Any, ...]:
    """Return what is constant in a compiled function: all but rows, pitches and offsets."""

    def of(x: Tensor) -> tuple[Any, ...]:
        steps = x.stride()
        dense = [steps[dim] == steps[dim + 1] * x.shape[dim + 1] for dim in range(x.ndim - 1)]
        return x.dtype, x.requires_grad, x.shape[1:], *dense

    return (*(None if x is None else of(x) for x in arguments),)


def _compiled(function: Callable[..., None], layout: tuple[Any, ...]) -> Callable[..., None]:
    """Return `function` compiled for arguments of one layout."""
    found = _compiled_functions.get((function, layout))
    if found is not None:
        return found
    # a code object of its own: of the forms of one, the compiler takes whichever fits
    code = cast(FunctionType, function).__code__.replace()
    own = FunctionType(code, function.__globals__, function.__name__, function.__defaults__)
    # an autotuned kernel could sum in another order in the next process
    made = torch.compile(own, dynamic=True, options={"triton.autotune_pointwise": False})
    return _compiled_functions.setdefault((function, layout), made)


@constant_in_graphs
def autocast_is_available(device_type: str) -> bool:
    """Whether torch has autocast for devices of this type."""
    return torch.amp.is_autocast_available(device_type)
