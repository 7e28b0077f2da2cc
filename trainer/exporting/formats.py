"""The files that a program can be kept in, and who runs them."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from trainer.exporting.program import quiet, renamed

if TYPE_CHECKING:
    from torch.export import ExportedProgram


class Written(NamedTuple):
    """A program in a file.

    Attributes:
        content: Of the file.
        run: Computes its outputs, in order.
        by: Who does.
    """

    content: bytes
    run: Callable[[Sequence[Tensor]], list[Tensor]]
    by: str


def as_pt2(
    program: ExportedProgram,
    inputs: Sequence[str],
    outputs: Sequence[str],
    sizes: Mapping[str, str],
) -> Written:
    """Return the file that ``torch.export.load`` reads."""
    file = io.BytesIO()
    with quiet():
        torch.export.save(program, file)
        file.seek(0)
        module = torch.export.load(file).module()

    def run(tensors: Sequence[Tensor]) -> list[Tensor]:
        found: list[Tensor] = pytree.tree_leaves(module(*tensors))
        return found

    return Written(file.getvalue(), run, f"torch {torch.__version__}")


def as_onnx(
    program: ExportedProgram,
    inputs: Sequence[str],
    outputs: Sequence[str],
    sizes: Mapping[str, str],
) -> Written:
    """Return an ONNX file.

    Args:
        program: What to write.
        inputs: Their names, in order.
        outputs: Likewise.
        sizes: What to call the sizes that torch has named.

    Raises:
        ValueError: If a package is missing, or an operation has no counterpart there.
    """
    try:
        with quiet():
            onnx: Any = torch.onnx.export(
                program,
                dynamo=True,
                verbose=False,
                input_names=list(inputs),
                output_names=list(outputs),
            )
            proto = onnx.model_proto
            for value in (*proto.graph.input, *proto.graph.output, *proto.graph.value_info):
                for dim in value.type.tensor_type.shape.dim:
                    if dim.dim_param:
                        dim.dim_param = renamed(dim.dim_param, sizes)
            content = proto.SerializeToString()
    except ModuleNotFoundError as error:
        raise ValueError(
            f"ONNX needs the package {error.name}: pip install onnx onnxscript onnxruntime"
        ) from error
    except torch.onnx.OnnxExporterError as error:
        raise ValueError(f"torch.onnx cannot translate the program: {_reason(error)}") from error
    try:
        import onnxruntime
    except ModuleNotFoundError:
        module = program.module()
        return Written(
            content,
            lambda tensors: pytree.tree_leaves(module(*tensors)),
            f"torch {torch.__version__} before it was translated, as there is no onnxruntime",
        )
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors
    session = onnxruntime.InferenceSession(content, options, ["CPUExecutionProvider"])
    for value in (*session.get_inputs(), *session.get_outputs()):
        if value.type == "tensor(bfloat16)":
            raise ValueError(
                f"{value.name} is bfloat16, which NumPy and so onnxruntime in Python do not know; "
                "let the task take and return another type (.float())"
            )

    def run(tensors: Sequence[Tensor]) -> list[Tensor]:
        given = {name: tensor.numpy() for name, tensor in zip(inputs, tensors, strict=True)}
        return [torch.from_numpy(found) for found in session.run(list(outputs), given)]

    return Written(content, run, f"onnxruntime {onnxruntime.__version__}")


def _reason(error: BaseException) -> str:
    """Return what torch.onnx says at the root of ``error``, and at which operation."""
    at = re.search(r"target=(\S+)\]", str(error.__cause__))
    while error.__cause__ is not None:
        error = error.__cause__
    first = next((line for line in str(error).splitlines() if line.strip()), repr(error))
    return f"{first} (at {at[1]})" if at else first
