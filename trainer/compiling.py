"""torch.compile for a task's ``forward``, as long as a job runs.

A compiled graph is one node of autograd, so its gradients come all at the end of its backward: too
late to be sent while the rest of backward computes. With several ranks a graph is therefore cut
where DDP closes a bucket, by torch's own ``DDPOptimizer``, and each part is compiled by itself.

With ``reproducible=true`` nothing but the micro-batch may decide what code computes it. So graphs
are cut alike at every world size, and each shape has code of its own: a rank does not use what it
happens to have compiled for another one.
"""

from __future__ import annotations

import importlib
import os
import sys
import sysconfig
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import torch
from torch import nn

from trainer import distributed, stopping
from trainer.config import TrainerConfig
from trainer.lazy_dynamo import load_dynamo
from trainer.messages import listed, reason
from trainer.strategies.bucket_size import TORCHS_FIRST_MB, TORCHS_OWN_MB
from trainer.task import TaskModule

BACKEND = "inductor"

_MIB = 2**20
_MOST_SHAPES = 64  # that have code of their own
_FOLDER = "TORCHINDUCTOR_CACHE_DIR"
_ROOM = 2**20  # bytes that are free where code is written: enough for a small task

Backend = Callable[[torch.fx.GraphModule, list[Any]], Callable[..., Any]]


def prepare_to_compile(config: TrainerConfig) -> None:
    """Load the compiler, if there will be something to compile: once, before ranks are forked.

    Raises:
        ValueError: If it cannot work here.
    """
    if not config.compile:
        return
    if _FOLDER in os.environ:  # else it is where temporary files are
        _check_folder(os.environ[_FOLDER])
    load_dynamo()
    if BACKEND != "inductor":
        return
    importlib.import_module("torch._inductor.compile_fx")
    from torch.utils._triton import has_triton_package

    if distributed.accelerator(config.accelerator) == "cpu":
        _check_cpp()
        from torch._inductor.cpu_vec_isa import pick_vec_isa

        pick_vec_isa()  # tried out in a process of its own, which takes seconds
    elif not has_triton_package():
        raise ValueError(
            "compile=true, but triton is not installed, which writes the code for CUDA; install "
            "it, or set compile=false"
        )


def renew_threads() -> None:
    """In a forked process, have inductor start threads: its pool counts on those of the parent."""
    inductor: Any = sys.modules.get("torch._inductor.async_compile")
    if inductor is not None:
        inductor.AsyncCompile.pool.cache_clear()


@contextmanager
def compiled(task: TaskModule, config: TrainerConfig) -> Iterator[None]:
    """Have every call of ``task`` run compiled code meanwhile, if the options say so.

    Afterwards the task is as it was. Its state has the same names all the time.

    Raises:
        ValueError: If ``reproducible=true`` cannot hold: the task compiles parts of itself, or has
            inputs of too many shapes.
    """
    if config.reproducible:
        _refuse_own(task)
    if not config.compile:
        yield
        return
    dynamo: Any = load_dynamo()
    dynamo.reset()  # what was compiled for other tasks counts against a limit
    settings: dict[str, Any] = {
        "optimize_ddp": False,  # it cuts where DDP is, and only there
        "allow_unspec_int_on_nn_module": True,  # self.run.step is no reason to compile every step
    }
    if config.reproducible:
        settings |= {"recompile_limit": _MOST_SHAPES, "fail_on_recompile_limit_hit": True}
    log, call = TaskModule.log, task._compiled_call_impl
    dynamic = False if config.reproducible else None
    nn.Module.compile(task, backend=_cutting(_backend(config), config), dynamic=dynamic)
    TaskModule.log = dynamo.disable(log)  # type: ignore[method-assign]
    try:
        with (
            dynamo.config.patch(settings),
            _compilers_spared(dynamo.callback.callback_handler),
            warnings.catch_warnings(),
        ):
            # Of compiled convolutions; nobody can do anything about it.
            warnings.filterwarnings("ignore", "Grad strides do not match bucket view strides")
            yield
    except dynamo.exc.FailOnRecompileLimitHit as error:
        raise ValueError(
            f"reproducible=true with compile=true, but forward gets inputs of more than "
            f"{_MOST_SHAPES} shapes (or reads as many numbers, such as self.run.step), and each "
            "takes code of its own. Pad inputs to a few lengths, or set one of the options to false"
        ) from error
    finally:
        TaskModule.log = log  # type: ignore[method-assign]
        task._compiled_call_impl = call


@contextmanager
def _compilers_spared(told: Any) -> Iterator[None]:
    """Keep signals that ask to stop from the C++ compiler, which would die of them.

    Schedulers, ``timeout`` and Ctrl-C send them to all processes of a group. While code is made
    they wait; so the run stops after the step, saved, as at any other time.

    Args:
        told: Dynamo's handler of callbacks; it is told in the thread that compiles, also where
            the code for backward is made in the backward.
    """
    held = ExitStack()
    start = told.register_start_callback(lambda _: held.enter_context(stopping.held_back()))
    end = told.register_end_callback(lambda _: held.close())
    try:
        yield
    finally:
        for known, callback in ((told.start_callbacks, start), (told.end_callbacks, end)):
            if callback in known:  # else `torch.compiler.reset()` was called
                known.remove(callback)


def _backend(config: TrainerConfig) -> Backend:
    if BACKEND != "inductor":
        found: Backend = load_dynamo().lookup_backend(BACKEND)
        return found
    mode = None if config.compile is True else config.compile
    # Random numbers are those of the task as it is: its own would follow from the cuts.
    options = {"fallback_random": True, "deterministic": config.reproducible}
    return torch._TorchCompileInductorWrapper(mode, options, None)  # type: ignore[no-untyped-call]


def _cutting(backend: Backend, config: TrainerConfig) -> Backend:
    """Return a backend that compiles what makes up a bucket of gradients by itself."""
    if distributed.world_size() == 1 and not config.reproducible:
        return backend
    size = config.bucket_cap_mb
    most = size if isinstance(size, float) and not config.reproducible else TORCHS_OWN_MB

    def compile_parts(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        from torch._dynamo.backends.distributed import DDPOptimizer

        if not torch.is_grad_enabled():
            return backend(graph, inputs)
        first = min(most, TORCHS_FIRST_MB)
        cutter = DDPOptimizer(int(most * _MIB), backend, first_bucket_cap=int(first * _MIB))
        return cutter.compile_fn(graph, inputs)

    return compile_parts


def _refuse_own(task: TaskModule) -> None:
    own = [
        name
        for name, module in task.named_modules()
        if module._compiled_call_impl is not None or "_orig_mod" in module._modules
    ]
    if own:
        raise ValueError(
            f"reproducible=true, but the task has compiled {listed(own)} itself, which torch does "
            "otherwise under DDP than on one rank; leave it to compile=true, or set "
            "reproducible=false"
        )


def _check_folder(folder: str) -> None:
    try:
        os.makedirs(folder, exist_ok=True)
        with TemporaryFile(dir=folder) as file:
            file.write(bytes(_ROOM))
    except OSError as error:
        raise ValueError(
            f"compile=true, but torch cannot write the code that it makes to {folder}: "
            f"{reason(error)}; make room there or set {_FOLDER} to another folder, or set "
            "compile=false"
        ) from error


def _check_cpp() -> None:
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    advice = "or set compile=false"
    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        raise ValueError(
            "compile=true, but there is no C++ compiler, which makes the code for the CPU; install "
            f"g++ or clang++, or name one in the environment variable CXX, {advice}"
        ) from error
    headers = Path(sysconfig.get_paths()["include"])
    if not (headers / "Python.h").is_file():
        raise ValueError(
            f"compile=true, but {headers} has no Python.h, which compiled code includes; install "
            f"the package with Python's headers (python3-dev, python3-devel), {advice}"
        )
