"""The room of torch's private interfaces: no other file uses one.

None is looked up when the package is imported, except for the base class `TorchDispatchMode`, and for two that have a
replacement ("at import" below). There are three groups:

- A name of `_INTERFACES` is an attribute of this module, found at its first use, so that later uses cost a read of a
  module's attribute and no call between. Other files read it as `internals.NAME` and don't import the name itself,
  which would look it up at their import. Torch 2.8 to 2.14 have all of these. Without one of them, its first use
  raises RuntimeError, which names the interface and its purpose.
- Attributes and methods of tensors, storages, nodes and operators are called through `operator.attrgetter` and
  `methodcaller`, which add no frame of Python. An object without one raises AttributeError, which names it.
- The functions below need some code around an interface, or have a replacement for it. The last ones in the table
  raise AttributeError or ImportError without it.

| function | interface | where it is missing |
|---|---|---|
| `has_global_module_hooks` | `torch.nn.modules.module._has_any_global_hook` | True: no module runs again |
| `has_global_optimizer_hooks` | `torch.optim.optimizer._global_optimizer_*_hooks` | True: optimizers step as a whole |
| `skipped_by_dynamo` (at import) | `torch._dynamo.eval_frame.skip_code` | `torch.compiler.disable`, which takes as long
  as packing a small tensor |
| `set_guard_hook` | `torch._C._dynamo.eval_frame.set_guard_complete_hook` | only compilations are noticed, not calls |
| `is_recording` | `torch.autograd.profiler._is_profiler_enabled` | True: a span takes ten microseconds |
| `profiling_all_threads` | `torch._C._profiler._ExperimentalConfig` | the timeline shows the calling thread alone |
| `refuse_storage_access`, `allow_storage_access` | `torch._C._*_storage_data_ptr_access_error_msg` (CUDA builds) |
  evicted weights are not protected from reads in C++ |
| `set_allocator` | `torch._C._accelerator_setAllocatorSettings`, after torch 2.8 |
  `torch.cuda.memory._set_allocator_settings` |
| `jit_kernel` | `torch.cuda.jiterator._create_multi_output_jit_fn` | RuntimeError: optimizer states stay in host
  memory |
| `raw_stream` | `torch._C._cuda_getCurrentRawStream` | `torch.cuda.current_stream` |
| `assignment_queries` (at import) | `torch._has_compatible_shallow_copy_type` | `Module.to` reads values |
| `has_stance` | `torch._dynamo.eval_frame._stance` | True: no code is compiled a second time |
| `count_compiled`, `compile_seconds` | `torch._dynamo.utils` | |
| `cuda_graph_functions` | `torch._inductor.cudagraph_trees` | |
| `is_traced`, `with_dispatch_key`, `exclude_dispatch_key` | `torch._C` | |
| `dtype_order` | `torch.utils._foreach_utils._group_tensors_by_device_and_dtype` | |
| `abort_process_groups` | `torch.distributed.distributed_c10d._world` | |
| `collectives_begun` | `torch.distributed.distributed_c10d._world`, `_get_sequence_number_for_group` | |
| `new_storage_info` | `torch.distributed.checkpoint.filesystem._StorageInfo` | |
| `register_state_dict_hook`, `run_node_first` | methods of modules and nodes | |

Read where they are used, and not in this room: fields that torch keeps because pickles contain them, or because a
module, optimizer or scaler has no other way to show them. These are the dictionaries of modules (`_parameters`,
`_buffers`, `_non_persistent_buffers_set`), hooks of modules, tensors and optimizers (`_forward_hooks`,
`_backward_hooks`, `_post_accumulate_grad_hooks`, `_optimizer_step_pre_hooks` and the like), `_compiled_call_impl`, a
scaler's `_scale` and `_per_optimizer_states`, and marks that are searched and may be absent (`_local_tensor` of a
`DTensor`, `_torchdynamo_orig_callable`).
"""

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterable
from importlib import import_module
from operator import attrgetter, methodcaller
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

if TYPE_CHECKING:
    from torch._ops import OperatorBase as OperatorBase
    from torch._ops import OpOverload as OpOverload
    from torch._subclasses import fake_tensor as fake_tensor
    from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
    from torch.distributed._functional_collectives import AsyncCollectiveTensor as AsyncCollectiveTensor
    from torch.nested._internal.nested_tensor import NestedTensor as NestedTensor
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

_Function = TypeVar("_Function", bound=Callable[..., Any])
_Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]
_Context = contextlib.AbstractContextManager[object]

_INTERFACES = {
    # Contexts
    "without_torch_function": ("torch._C.DisableTorchFunctionSubclass", "read offloaded weights as they are"),
    "without_any_torch_function": ("torch._C.DisableTorchFunction", "hide its operators from modes of user code"),
    "with_torch_function": ("torch._C._EnableTorchFunction", "call user code inside of an operator"),
    "without_dispatch": ("torch._C._DisableTorchDispatch", "hide its operators from dispatch modes of user code"),
    "without_dispatch_modes": (
        "torch.utils._python_dispatch._disable_current_modes",
        "detach tensors of user classes without dispatch modes",
    ),
    "without_functorch": ("torch._C._DisableFuncTorch", "copy weights inside of a transform of `torch.func`"),
    "without_transforms": (
        "torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack",
        "apply its autograd functions inside of a transform of `torch.func`",
    ),
    "without_autocast": ("torch._C._DisableAutocast", "run operators again with the casts that they had"),
    "without_autograd": ("torch._C._AutoDispatchBelowAutograd", "run operators again without a graph"),
    "around_dispatch_mode": ("torch._C._RestorePythonTLSSnapshot", "find autocast around an operator"),
    # Modes and hooks of the running thread
    "TorchDispatchMode": ("torch.utils._python_dispatch.TorchDispatchMode", "see the operators of a forward"),
    "innermost_dispatch_mode": (
        "torch.utils._python_dispatch._get_current_dispatch_mode",
        "find dispatch modes of user code around a unit",
    ),
    "push_dispatch_mode": ("torch.utils._python_dispatch._push_mode", "resume its mode after a unit"),
    "pop_dispatch_mode": ("torch.utils._python_dispatch._pop_mode", "pause its mode in a unit"),
    "count_dispatch_modes": ("torch._C._len_torch_dispatch_stack", "find dispatch modes of user code"),
    "count_function_modes": ("torch._C._len_torch_function_stack", "find function modes of user code"),
    "innermost_saved_hooks": (
        "torch._C._autograd._top_saved_tensors_default_hooks",
        "find saved-tensor hooks of user code inside of its own",
    ),
    "set_eval_frame": ("torch._C._dynamo.eval_frame.set_eval_frame", "keep Dynamo out of its hooks"),
    "compile_context": ("torch._guards.CompileContext.try_get", "refuse offloaded weights in compiled functions"),
    "compile_callbacks": ("torch._dynamo.callback.callback_handler", "remove its hooks before Dynamo traces modules"),
    "partitioner": ("torch._functorch.config", "have compiled code save less and recompute more"),
    "autograd_node": ("torch._C._current_autograd_node", "find the node that runs in backward"),
    "graph_task": ("torch._C._current_graph_task_id", "find whether a backward runs"),
    "innermost_transform": ("torch._C._functorch.peek_interpreter_stack", "find transforms of `torch.func`"),
    # Tensors and storages
    "is_transformed": ("torch._C._functorch.is_functorch_wrapped_tensor", "find offloaded weights in transforms"),
    "untransformed": ("torch._C._functorch.get_unwrapped", "find offloaded weights in transforms"),
    "is_wrapper": ("torch.utils._python_dispatch.is_traceable_wrapper_subclass", "save wrapped tensors one by one"),
    "has_storage": ("torch._C._has_storage", "recognize tensors without memory"),
    "storage_use_count": ("torch._C._storage_Use_Count", "find whether user code shares a storage"),
    "may_overlap": ("torch._debug_has_internal_overlap", "copy and restore a tensor of user code"),
    "swap_tensor": ("torch._C._swap_tensor_impl", "load an optimizer state at its first use"),
    "refuse_data_pointer": (
        "torch._C._set_throw_on_mutable_data_ptr",
        "refuse C++ reads of states that are not loaded",
    ),
    "FakeTensor": ("torch._subclasses.fake_tensor.FakeTensor", "recognize traces of Dynamo and dry runs"),
    "fake_tensor": ("torch._subclasses.fake_tensor", "run a training on tensors without memory"),
    "AsyncCollectiveTensor": (
        "torch.distributed._functional_collectives.AsyncCollectiveTensor",
        "recognize results of collectives that still run",
    ),
    "NestedTensor": ("torch.nested._internal.nested_tensor.NestedTensor", "recognize jagged tensors"),
    "BatchNorm": ("torch.nn.modules.batchnorm._BatchNorm", "recognize modules with statistics of batches"),
    "Convolution": ("torch.nn.modules.conv._ConvNd", "recognize modules whose weights autocast casts"),
    "make_wrapper": ("torch.Tensor._make_wrapper_subclass", "stand for an optimizer state that is not loaded"),
    # Operators
    "OpOverload": ("torch._ops.OpOverload", "recognize operators in dispatch modes"),
    "OperatorBase": ("torch._ops.OperatorBase", "name the operator that has run out of memory"),
    "has_kernel": ("torch._C._dispatch_has_kernel", "recognize operators that call others"),
    "has_kernel_for": (
        "torch._C._dispatch_has_kernel_for_dispatch_key",
        "recognize operators that call others",
    ),
    "foreach_norm": ("torch._foreach_norm", "compute norms as `clip_grad_norm_` does, bit for bit"),
    "check_finite_": (
        "torch._amp_foreach_non_finite_check_and_unscale_",
        "check gradients without a temporary of their size",
    ),
    # Containers, as torch's own modules traverse them
    "tree_leaves": ("torch.utils._pytree.tree_leaves", "find tensors in containers of user code"),
    "tree_map_only": ("torch.utils._pytree.tree_map_only", "replace tensors in containers of user code"),
}
"""Name here: the interface, and what the package needs it to do, for the error where it is missing."""

without_torch_function: Callable[[], _Context]
without_any_torch_function: Callable[[], _Context]
with_torch_function: Callable[[], _Context]
without_dispatch: Callable[[], _Context]
without_dispatch_modes: Callable[[], _Context]
without_functorch: Callable[[], _Context]
without_transforms: Callable[[], _Context]
without_autocast: Callable[[], _Context]
without_autograd: Callable[[], _Context]
around_dispatch_mode: Callable[[], _Context]
innermost_dispatch_mode: "Callable[[], TorchDispatchMode | None]"
push_dispatch_mode: "Callable[[TorchDispatchMode], None]"
pop_dispatch_mode: "Callable[[], TorchDispatchMode]"
count_dispatch_modes: Callable[[], int]
count_function_modes: Callable[[], int]
innermost_saved_hooks: Callable[[bool], _Hooks | None]
set_eval_frame: Callable[[Any], Any]
compile_context: Callable[[], object]
compile_callbacks: Any
partitioner: Any
autograd_node: Callable[[], Any]
graph_task: Callable[[], int]
innermost_transform: Callable[[], object]
is_transformed: Callable[[Tensor], bool]
untransformed: Callable[[Tensor], Tensor]
is_wrapper: Callable[[Any], bool]
has_storage: Callable[[Tensor], bool]
storage_use_count: Callable[[int], int]
may_overlap: Callable[[Tensor], int]
swap_tensor: Callable[[Tensor, Tensor], None]
refuse_data_pointer: Callable[[Tensor], None]
make_wrapper: Callable[..., Any]
BatchNorm: type[torch.nn.Module]
Convolution: type[torch.nn.Module]
has_kernel: Callable[[str], bool]
has_kernel_for: Callable[[str, str], bool]
foreach_norm: Callable[..., list[Tensor]]
check_finite_: Callable[[list[Tensor], Tensor, Tensor], None]
tree_leaves: Callable[[Any], list[Any]]
tree_map_only: Callable[[Any, Callable[[Any], Any], Any], Any]

# Attributes of objects, which every version has.
version_of: Callable[[Tensor], int] = attrgetter("_version")
"""Returns the number of changes in place of a tensor and its views, as autograd counts them."""
base_of: Callable[[Tensor], Tensor | None] = attrgetter("_base")
"""Returns the tensor that a tensor is a view of for autograd."""
is_view: Callable[[Tensor], bool] = methodcaller("_is_view")
"""Returns whether a tensor is a view for autograd."""
is_zero_tensor: Callable[[Tensor], bool] = methodcaller("_is_zerotensor")
"""Returns whether a tensor of zeros has no memory, as autograd makes them."""
fix_weakref: Callable[[Tensor], None] = methodcaller("_fix_weakref")
"""Restores the Python object of a tensor that a weak reference has found and C++ alone owns."""
indices_of: Callable[[Tensor], Tensor] = methodcaller("_indices")
values_of: Callable[[Tensor], Tensor] = methodcaller("_values")
"""Return the parts of a sparse tensor, also one that is not coalesced."""
use_count: Callable[[Tensor], int] = methodcaller("_use_count")
"""Returns the references of C++ to a tensor."""
storage_key: Callable[[torch.UntypedStorage], int] = attrgetter("_cdata")
"""Returns the address of a storage's C++ object, which `storage_use_count` needs, and which no other has meanwhile."""
sequence_of: Callable[[Any], int] = methodcaller("_sequence_nr")
"""Returns the number by which autograd orders a node among those that are ready."""
schema_of: Callable[[Any], torch.FunctionSchema] = attrgetter("_schema")
"""Returns the name and the arguments of an operator."""
node_class: Callable[[type[torch.autograd.Function]], type] = attrgetter("_backward_cls")
"""Returns the class of an autograd function's nodes."""

COMPILED_CALLS = os.path.join(os.path.dirname(torch.__file__), "_functorch", "_aot_autograd", "")
"""Folder of the frames that call compiled regions. A torch without it gets its copies one region later."""


def __getattr__(name: str) -> object:
    """Looks up an interface at its first use; later uses find the module's attribute."""
    if name not in _INTERFACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = _find(*_INTERFACES[name])
    return found


def _find(path: str, use: str) -> Any:
    """Returns a private interface.

    Raises:
        RuntimeError: this torch has none of this name.
    """
    try:
        return resolve_name(path)
    except (AttributeError, ImportError) as error:
        raise RuntimeError(
            f"torch {torch.__version__} has no `{path}`, which lightning_ssd needs to {use}. Install a version of "
            "torch with which lightning_ssd was tested: its README names them."
        ) from error


def has_global_module_hooks() -> bool:
    """Returns whether hooks run around the forward or backward of every module; True where torch can't tell."""
    has_any = getattr(torch.nn.modules.module, "_has_any_global_hook", None)
    return has_any is None or bool(has_any())


def has_global_optimizer_hooks() -> bool:
    """Returns whether hooks run around the steps of every optimizer; True where torch can't tell."""
    module = import_module("torch.optim.optimizer")  # `torch.optim` deletes its attribute of this name
    return bool(getattr(module, "_global_optimizer_pre_hooks", True)) or bool(
        getattr(module, "_global_optimizer_post_hooks", True)
    )


def skipped_by_dynamo(function: _Function) -> _Function:
    """Decorates a function that Dynamo must neither compile nor trace. Functions that it calls may be compiled."""
    try:
        from torch._dynamo.eval_frame import skip_code
    except ImportError:
        disabled: _Function = torch.compiler.disable(function, recursive=False)
        return disabled
    skip_code(function.__code__)
    function._torchdynamo_disable = True  # type: ignore[attr-defined]  # for calls from compiled code
    return function


def set_guard_hook(hook: Callable[[bool], bool] | None) -> Callable[[bool], bool] | None:
    """Sets the hook that Dynamo calls when it has checked guards, where it has one, and returns the one before."""
    set_hook = getattr(torch._C._dynamo.eval_frame, "set_guard_complete_hook", None)
    replaced: Callable[[bool], bool] | None = None if set_hook is None else set_hook(hook)
    return replaced


def count_compiled() -> int:
    """Returns a number that grows with each frame that `torch.compile` sees in this process, on any thread.

    Frames of functions with `fullgraph=True`, and of `torch.cond` in eager code, count by their graphs alone. Code of a
    finalizer counts once, if garbage is collected in a compiled call. Trainings that don't compile do not import Dynamo
    for it.
    """
    dynamo: Any = sys.modules.get("torch._dynamo.utils")
    if dynamo is None:
        return 0
    return int(dynamo.counters["frames"]["total"] + dynamo.counters["stats"]["unique_graphs"])


def has_stance() -> bool:
    """Returns whether user code has set a stance (`torch.compiler.set_stance`); True where torch can't tell.

    Under a stance, code that was discarded may not be compiled again.
    """
    stance = getattr(sys.modules.get("torch._dynamo.eval_frame"), "_stance", None)
    return stance is None or bool(stance.stance != "default")


def compile_seconds() -> float:
    """Returns the seconds that `torch.compile` has taken in this process since the last `torch.compiler.reset`."""
    dynamo: Any = sys.modules.get("torch._dynamo.utils")
    return 0.0 if dynamo is None else float(dynamo.calculate_time_spent().get("total_wall_time", 0.0))


def cuda_graph_functions(device: int) -> tuple[int, bool]:
    """Returns the number of functions for which Inductor has CUDA graphs on a device, and whether a forward of one of
    them awaits its backward."""
    trees: Any = sys.modules.get("torch._inductor.cudagraph_trees")
    manager = None if trees is None else trees.get_manager(device, create_if_none_exists=False)
    if manager is None:
        return 0, False
    return len(manager.ids_to_funcs), bool(manager.running_forwards_with_pending_backwards)


is_recording: Callable[[], bool] = functools.partial(getattr, torch.autograd.profiler, "_is_profiler_enabled", True)
"""Returns whether a profiler of torch records; True where torch can't tell."""


def profiling_all_threads() -> Any:
    """Returns the profiler's setting to record all threads; None, this thread alone, where torch has none."""
    config = getattr(torch._C._profiler, "_ExperimentalConfig", None)
    return None if config is None else config(profile_all_threads=True)


def refuse_storage_access(storage: torch.UntypedStorage, message: str) -> None:
    """Makes accesses to a storage raise RuntimeError with `message`, where torch can and can undo it."""
    if hasattr(torch._C, "_clear_storage_data_ptr_access_error_msg"):
        torch._C._set_storage_data_ptr_access_error_msg(storage._cdata, message)


def allow_storage_access(storage: torch.UntypedStorage) -> None:
    """Undoes `refuse_storage_access`."""
    allow: Callable[[int], None] | None = getattr(torch._C, "_clear_storage_data_ptr_access_error_msg", None)
    if allow is not None:
        allow(storage._cdata)


def set_allocator(settings: str) -> None:
    """Sets all settings of the CUDA allocator, in the format of `PYTORCH_ALLOC_CONF`."""
    # Versions that have the first name deprecate the second one.
    change = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    (torch.cuda.memory._set_allocator_settings if change is None else change)(settings)


JitKernel = Callable[..., tuple[Tensor, ...]]
"""A kernel of `jit_kernel`: called with tensors of one shape, and with its numbers by name."""


def jit_kernel(code: str, outputs: int, numbers: Iterable[str]) -> JitKernel:
    """Returns a CUDA kernel that computes tensors element by element, compiled at its first call.

    Args:
        code: a function template of C++; its parameters are tensors, numbers, and the outputs by reference.

    Raises:
        RuntimeError: this version of torch makes none.
    """
    make = getattr(getattr(torch.cuda, "jiterator", None), "_create_multi_output_jit_fn", None)
    if make is None:
        raise RuntimeError("this version of torch has no jiterator")
    kernel: JitKernel = make(code, outputs, **dict.fromkeys(numbers, 0.0))
    return kernel


def raw_stream(device: int) -> int:
    """Returns the address of the current stream of a CUDA device."""
    find = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return int(torch.cuda.current_stream(device).cuda_stream if find is None else find(device))


def assignment_queries() -> tuple[Callable[..., Any], ...]:
    """Returns the function by which `nn.Module.to` finds whether it may assign `.data`, where torch has it."""
    query: Callable[..., Any] | None = getattr(torch, "_has_compatible_shallow_copy_type", None)
    return () if query is None else (query,)


def is_traced() -> bool:
    """Returns whether operators are traced to a graph, as by `make_fx`, also inside of `torch.cond` and the like."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None


def with_dispatch_key(name: str) -> _Context:
    """Returns a context in which operators have the kernels of a dispatch key, which an outer context excludes."""
    key: torch._C.DispatchKey = getattr(torch._C.DispatchKey, name)
    included = torch._C._dispatch_tls_local_include_set().add(key)
    excluded = torch._C._dispatch_tls_local_exclude_set().remove(key)
    context: _Context = torch._C._ForceDispatchKeyGuard(included, excluded)
    return context


def exclude_dispatch_key(name: str, excluded: bool) -> None:
    """Excludes the kernels of a dispatch key on this thread, or includes them again."""
    torch._C._dispatch_tls_set_dispatch_key_excluded(getattr(torch._C.DispatchKey, name), excluded)


def register_state_dict_hook(module: torch.nn.Module, hook: Callable[..., Any]) -> RemovableHandle:
    """Registers a hook that changes the state dict of a module, which the public method refuses to replace."""
    handle: RemovableHandle = module._register_state_dict_hook(hook)
    return handle


def run_node_first(node: Any) -> None:
    """Makes autograd run a node before all others that are ready, as it does with those that accumulate gradients."""
    node._set_sequence_nr(2**64 - 1)


def dtype_order(tensors: list[Tensor | None]) -> list[int]:
    """Returns the order of tensors of one device in which `clip_grad_norm_` combines their norms: dtype by dtype."""
    from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

    groups = _group_tensors_by_device_and_dtype([tensors], with_indices=True)
    return [index for _, indices in groups.values() for index in indices]


def abort_process_groups() -> None:
    """Ends the collectives of all process groups with errors, later ones too. Gloo's groups ignore it."""
    from torch.distributed import distributed_c10d

    groups = sorted(distributed_c10d._world.pg_names.items(), key=lambda item: item[1], reverse=True)
    for group, _ in groups:
        group.abort()


def new_storage_info(file: str, offset: int, nbytes: int) -> Any:
    """Returns the place of a tensor in a file of `torch.distributed.checkpoint`."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(file, offset, nbytes)


def collectives_begun() -> list[int]:
    """Returns the number of collectives of each process group so far; an empty list without torch.distributed."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return []
    from torch.distributed.distributed_c10d import _world

    count: Callable[[Any], int] = methodcaller("_get_sequence_number_for_group")
    return [count(group) for group in _world.pg_map]
