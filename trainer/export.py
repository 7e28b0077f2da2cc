"""From a trained task to a file that runs without it: ``python -m trainer.export``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainer.checkpoint.files import replace_file
from trainer.checkpoint.finding import find
from trainer.checkpoint.manifest import CONFIG, verified
from trainer.checkpoint.weights import load_task, read_torch
from trainer.data import draws
from trainer.data.batches import evaluation_batches
from trainer.data.loading import LoaderOptions, open_source
from trainer.data.module import DataModule, prepare
from trainer.data.plan import GlobalBatchPlan
from trainer.evaluation import evaluating
from trainer.exporting.formats import Written, as_onnx, as_pt2
from trainer.exporting.program import (
    Inputs,
    check_parts,
    follow,
    kind,
    named_outputs,
    output_kinds,
    symbols,
    unused,
)
from trainer.instantiate import build_node
from trainer.seeding import OwnStream
from trainer.task import TaskModule
from trainer.trees import rows

_FORMATS = {".onnx": as_onnx, ".pt2": as_pt2}
_METHODS = ("predict", "forward", "eval_forward")
_EXAMPLE, _CHECKED = 4, (3, 1)  # samples in a batch
_SPLITS = ("predict", "test", "val", "train")
# How far an output may be off, as a share of its largest value.
_TOLERANCES = {torch.float64: 1e-7, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 1e-1}


@dataclass(frozen=True)
class ExportReport:
    """What was exported, and how it was checked.

    Attributes:
        path: The file.
        what: The class and the method that it computes.
        inputs: By name, in order: type and shape of each tensor that it takes.
        outputs: Likewise of what it returns.
        unused: The tensors of the batch that it does not need, and so does not take.
        fixed: What is no tensor in the batch, with the value that the program was made with.
        checked_by: What has computed the program.
        differences: By the number of samples in a batch: the largest difference from what the task
            itself computes, as a share of the largest value.
    """

    path: Path
    what: str
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    unused: Sequence[str]
    fixed: Mapping[str, Any]
    checked_by: str
    differences: Mapping[int, float]

    def __str__(self) -> str:
        """Return it in lines."""
        size = f"{self.path.stat().st_size / 1e6:.2f} MB" if self.path.exists() else "removed"
        lines = [f"{self.path}: {self.what}, {size}"]
        lines += [f"  input    {name}: {kind}" for name, kind in self.inputs.items()]
        lines += [f"  output   {name}: {kind}" for name, kind in self.outputs.items()]
        if self.unused:
            lines.append(f"  without  {', '.join(self.unused)}: nothing depends on it")
        lines += [f"  fixed    {name}={value!r}" for name, value in self.fixed.items()]
        worst = max(self.differences.values())
        same = "equal" if worst == 0 else f"off by {worst:.0e} of the largest value at most"
        sizes = ", ".join(map(str, self.differences))
        lines.append(f"  checked  by {self.checked_by}, batches of {sizes} samples: {same}")
        return "\n".join(lines)


def export(
    task: TaskModule,
    path: str | os.PathLike[str],
    *batches: Any,
    method: str = "predict",
    dynamic: Mapping[str, Sequence[int]] | None = None,
) -> ExportReport:
    """Write what ``task`` computes for a batch of any size, as ONNX or for ``torch.export.load``.

    The program takes those tensors of a batch on which the result depends, in their order. Their
    names are the keys of a dict or the fields of a named tuple; of a tuple ``input_0`` and so on.
    Before it is written, it is compared with the task on every batch.

    Args:
        task: With its weights, on the CPU. It is run in eval mode, and not changed.
        path: A new file: ``.onnx`` or ``.pt2``.
        batches: One batch of at least two samples, with which torch follows the computation, and
            others to compare on; of a single one, parts are taken for that.
        method: ``predict``, ``forward`` or ``eval_forward``.
        dynamic: For names of inputs, the dimensions of any size beside the first one. A dimension
            in which the batches differ is one in any case.

    Raises:
        ValueError: If torch cannot follow the computation, with its reason; if that draws random
            numbers; if the program computes something else than the task.
    """
    path = _new_file(path)
    if method not in _METHODS:
        raise ValueError(f"method={method} is not allowed; it must be one of {', '.join(_METHODS)}")
    _check_task(task)
    compute, what = getattr(task, method), f"{type(task).__name__}.{method}"
    if not batches:
        raise ValueError("export needs a batch to follow: export(task, path, batch)")
    for batch in batches:
        check_parts(batch)
    if len(batches) == 1:
        (whole,) = batches
        size = task.batch_size(whole)
        batches = (whole, *(rows(whole, size, 0, n) for n in _CHECKED if n < size))
    sizes = [task.batch_size(batch) for batch in batches]
    with evaluating(task, "predict", None):
        with OwnStream(0):
            draws.watch()
            computed = [_computed(compute, batch, what) for batch in batches]
            draws_numbers = draws.anything_drawn()
        if draws_numbers:
            raise ValueError(
                f"{what} draws random numbers, and a program would draw others; compute without "
                "them where self.training is False"
            )
        inputs = Inputs(batches, sizes, dynamic or {})
        program = follow(task, compute, inputs, what)
        needless = unused(program, inputs.names)
        if len(needless) == len(inputs.names):
            raise ValueError(f"{what} returns the same for every batch; there is nothing to export")
        if needless:
            inputs.names = [name for name in inputs.names if name not in needless]
            program = follow(task, compute, inputs, what)
        expected = [named_outputs(outputs, inputs.names, what) for outputs in computed]
        words = symbols(program, inputs)
        written = _FORMATS[path.suffix](program, inputs.names, list(expected[0]), words)
        differences = {
            size: _difference(written, inputs.of(batch), of_task, f"{what} for {size} samples")
            for batch, of_task, size in zip(batches, expected, sizes, strict=True)
        }
    replace_file(path, lambda file: file.write(written.content))
    return ExportReport(
        path=path,
        what=what,
        inputs={name: inputs.kind(name) for name in inputs.names},
        outputs=output_kinds(program, list(expected[0]), words),
        unused=needless,
        fixed=inputs.fixed,
        checked_by=written.by,
        differences=differences,
    )


def example_batches(task: TaskModule, data: DataModule) -> list[Any]:
    """Return small batches of 4, 3 and 1 samples of the data to predict for.

    If there is none, of the test, validation or training data.

    Raises:
        ValueError: If there is no data at all.
    """
    prepare(data)
    options = LoaderOptions(0, pin_memory=False, seed=0, count=task.batch_size, reproducible=False)
    for split in _SPLITS:
        found = getattr(data, f"{split}_dataset")()
        if isinstance(found, Mapping):
            found = next(iter(found.values()), None)
        if found is None:
            continue
        source = open_source(found, data.collate_fn, split)
        batches = []
        for size in (_EXAMPLE, *_CHECKED):
            loaded = evaluation_batches(source, GlobalBatchPlan(size, size), options, limit=1)
            batches += [micro.batch for micro in loaded.epoch(0)][:1]
            loaded.close()
        return batches
    raise ValueError(f"{type(data).__name__} has no data to take a batch from; give one by --batch")


def main(arguments: list[str] | None = None) -> None:
    """Run the command line program."""
    parser = argparse.ArgumentParser(
        prog="python -m trainer.export",
        description="Write what the task of a checkpoint predicts as a program for batches of any "
        "size: ONNX, or a file for torch.export.load. It is compared with the task first. The "
        "config of the checkpoint says how to build the task and the data, so this runs its code.",
    )
    parser.add_argument("checkpoint", help="a checkpoint, or the folder of a run: its best one")
    parser.add_argument("out", help="the file to write: model.onnx or model.pt2")
    parser.add_argument("--method", default="predict", choices=_METHODS)
    parser.add_argument(
        "--batch",
        type=Path,
        metavar="FILE",
        help="a batch that torch.save has written, to make the program with; without it the first "
        "samples of the config's data: predict, else test, val, train",
    )
    parser.add_argument(
        "--dynamic",
        action="append",
        default=[],
        metavar="INPUT:DIMENSION",
        help="a dimension of any size beside the first one, such as text:1; may be given several "
        "times",
    )
    given = parser.parse_args(arguments)
    try:
        _new_file(given.out)
        dynamic = _parsed(given.dynamic)
        checkpoint = find("", given.checkpoint)
        task = load_task(checkpoint)
        _check_task(task)
        if given.batch is None:
            batches = example_batches(task, _data_of(checkpoint))
        else:
            batches = [read_torch(given.batch)]
        print(export(task, given.out, *batches, method=given.method, dynamic=dynamic))
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")


def _new_file(path: str | os.PathLike[str]) -> Path:
    path = Path(path)
    if path.suffix not in _FORMATS:
        raise ValueError(f"{path} must end in {' or '.join(_FORMATS)}, which says what to write")
    if path.exists():
        raise ValueError(f"{path} is there already; give another name, or remove it")
    if not path.parent.is_dir():
        raise ValueError(f"there is no folder {path.parent}; make it, or give another one")
    return path


def _check_task(task: nn.Module) -> None:
    if not isinstance(task, TaskModule):
        raise ValueError(
            f"{type(task).__name__} is no trainer.TaskModule; for other modules there are "
            "torch.onnx.export and torch.export.export, and to_onnx of a LightningModule"
        )
    tensors = [*task.parameters(), *task.buffers()]
    if elsewhere := [tensor.device for tensor in tensors if tensor.device.type != "cpu"]:
        raise ValueError(f"the task is on {elsewhere[0]}; export works on the CPU: task.cpu()")


def _data_of(checkpoint: Path) -> DataModule:
    from omegaconf import OmegaConf

    node = OmegaConf.select(OmegaConf.load(verified(checkpoint, CONFIG)), "data")
    if node is None or "_target_" not in node:
        raise ValueError(
            f"the config of {checkpoint} has no data._target_ to take a batch from; give one by "
            "--batch"
        )
    data = build_node(node, "data")
    if not isinstance(data, DataModule):
        raise ValueError(
            f"data is a {type(data).__name__} and no trainer.DataModule, from which a batch could "
            "be taken; give one by --batch"
        )
    return data


def _computed(compute: Callable[[Any], Any], batch: Any, what: str) -> Any:
    try:
        return compute(batch)
    except Exception as error:
        raise ValueError(
            f"{what} itself fails on the batch: {type(error).__name__}: {error}"
        ) from error


def _parsed(dimensions: Sequence[str]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for text in dimensions:
        name, _, number = text.rpartition(":")
        if not name or not number.isdigit():
            raise ValueError(f"--dynamic {text} must be a name and a number, such as text:1")
        found.setdefault(name, []).append(int(number))
    return found


def _difference(
    written: Written, tensors: Sequence[Tensor], expected: Mapping[str, Tensor], where: str
) -> float:
    """Return how far the program's outputs are from the task's.

    Raises:
        ValueError: If that is too far.
    """
    causes = (
        "; usual causes: a number of Python that follows from the batch and is fixed in the "
        "program, random numbers from elsewhere than torch, a state that the task changes"
    )
    try:
        outputs = written.run(tensors)
    except Exception as error:  # each program has its own kinds
        first = str(error).strip().partition("\n")[0]
        raise ValueError(f"the program does not compute {where}: {first}{causes}") from error
    worst = 0.0
    for (name, own), found in zip(expected.items(), outputs, strict=True):
        if found.shape != own.shape or found.dtype != own.dtype:
            raise ValueError(
                f"the program returns another {name} than {where}: {kind(found, {})} instead of "
                f"{kind(own, {})}{causes}"
            )
        off = _off(found, own)
        if off > _TOLERANCES.get(own.dtype, 0):
            raise ValueError(
                f"the program returns another {name} than {where}: off by {off:.0e} of the largest "
                f"value{causes}"
            )
        worst = max(worst, off)
    return worst


def _off(found: Tensor, own: Tensor) -> float:
    if torch.equal(found, own):
        return 0.0
    wide, expected = found.to(torch.float64), own.to(torch.float64)
    if not torch.equal(wide.isfinite(), expected.isfinite()):
        return float("inf")
    scale = expected.nan_to_num(0, 0, 0).abs().max().clamp(min=1e-300)
    return float((wide - expected).nan_to_num(0, 0, 0).abs().max() / scale)


if __name__ == "__main__":
    main()
