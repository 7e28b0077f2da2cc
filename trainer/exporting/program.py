"""What a task computes for a batch, followed by ``torch.export``."""

from __future__ import annotations

import inspect
import logging
import re
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from keyword import iskeyword
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from trainer.messages import listed

if TYPE_CHECKING:
    from torch.export import ExportedProgram

_BATCH = "batch"  # the name of the first dimension
_REASON_LINES = 3  # of torch's own words
_ADVICE = ("For ", "consider ", "Caused by", "If you", "Suggested fixes", "Unable to find")
_TORCH = Path(torch.__file__).parent


class Inputs:
    """The tensors of a batch, by name.

    Attributes:
        names: Of those that the program takes, in their order.
        example: All tensors of the first batch.
        free: Of each name, the dimensions of any size.
        fixed: What is no tensor in the first batch.
    """

    def __init__(
        self, batches: Sequence[Any], sizes: Sequence[int], dynamic: Mapping[str, Sequence[int]]
    ) -> None:
        """Look at what there is.

        Args:
            batches: At least one, all of one structure.
            sizes: The samples in each.
            dynamic: Dimensions of any size, by name.

        Raises:
            ValueError: If a batch is of no use.
        """
        if sizes[0] < 2:
            raise ValueError(
                "the first batch needs at least two samples: torch.export takes a size of one for "
                "a constant"
            )
        flat = [_leaves(batch) for batch in batches]
        if any(one.keys() != flat[0].keys() for one in flat):
            raise ValueError(
                "the batches have not the same entries: "
                + " and ".join(sorted({listed(one) for one in flat}))
            )
        self._structure = pytree.tree_structure(batches[0], is_leaf=_is_leaf)
        self._leaves = flat[0]
        # Copies: torch takes a tensor that stands twice in the batch for one input.
        self.example = {n: leaf.clone() for n, leaf in flat[0].items() if isinstance(leaf, Tensor)}
        self.fixed = {n: leaf for n, leaf in flat[0].items() if not isinstance(leaf, Tensor)}
        self.names = list(self.example)
        self.free = {
            name: self._free(name, [one[name] for one in flat], sizes, dynamic.get(name, ()))
            for name in self.names
        }
        if unknown := dynamic.keys() - set(self.names):
            raise ValueError(
                f"there is no tensor {listed(sorted(unknown))} in the batch; there are: "
                f"{listed(self.names)}"
            )

    def of(self, batch: Any) -> tuple[Tensor, ...]:
        """Return what the program takes of ``batch``."""
        leaves = _leaves(batch)
        return tuple(leaves[name] for name in self.names)

    def batch(self, tensors: Sequence[Tensor]) -> Any:
        """Return the batch of these ``tensors``; the rest of it is that of the first batch."""
        leaves = self._leaves | dict(zip(self.names, tensors, strict=True))
        return pytree.tree_unflatten(list(leaves.values()), self._structure)

    def kind(self, name: str) -> str:
        """Return type and shape of an input, in words."""
        return kind(self.example[name], self.free[name])

    def dimensions(self) -> tuple[dict[int, Any], ...]:
        """Return the dimensions of any size, as ``torch.export`` takes them."""
        dim = torch.export.Dim
        batch = dim(_BATCH)
        return tuple(
            {i: batch if word == _BATCH else dim.DYNAMIC for i, word in self.free[name].items()}
            for name in self.names
        )

    def _free(
        self, name: str, leaves: Sequence[Tensor], sizes: Sequence[int], wanted: Sequence[int]
    ) -> dict[int, str]:
        ranks = {leaf.dim() for leaf in leaves}
        if len(ranks) > 1 or any(not 0 <= i < leaves[0].dim() for i in wanted):
            raise ValueError(
                f"{name} has {' or '.join(map(str, sorted(ranks)))} dimensions; a program is for "
                "one number of them, and dynamic counts them from 0"
            )
        found: dict[int, str] = {}
        for i in range(leaves[0].dim()):
            shown = [leaf.shape[i] for leaf in leaves]
            if i == 0 and shown == list(sizes):
                found[i] = _BATCH
            elif i in wanted or len(set(shown)) > 1:
                found[i] = f"{name}_{i}"
        return found


def check_parts(batch: Any) -> None:
    """Refuse a batch with parts that torch cannot follow.

    Raises:
        ValueError: Naming the part.
    """
    for name, leaf in _leaves(batch).items():
        if not isinstance(leaf, Tensor | bool | int | float | str | None) and not _is_leaf(leaf):
            raise ValueError(
                f"the batch holds a {type(leaf).__name__} ({name}), which torch.export cannot take "
                "apart; give tensors in dicts, lists and tuples"
            )


class _Program(nn.Module):
    """Takes tensors by position, which torch names after the parameters of ``forward``."""

    def __init__(self, task: nn.Module, compute: Callable[[Any], Any], inputs: Inputs) -> None:
        super().__init__()
        self.task = task  # for its weights

        def forward(*tensors: Tensor) -> Any:
            return compute(inputs.batch(tensors))

        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameters = [inspect.Parameter(name, kind) for name in inputs.names]
        forward.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        self.forward = forward


def follow(
    task: nn.Module, compute: Callable[[Any], Any], inputs: Inputs, what: str
) -> ExportedProgram:
    """Return the program that does what ``compute`` does, for tensors that ``inputs`` names.

    Raises:
        ValueError: If torch cannot follow it.
    """
    tensors = tuple(inputs.example[name] for name in inputs.names)
    try:
        with quiet():
            program = torch.export.export(
                _Program(task, compute, inputs), tensors, dynamic_shapes=inputs.dimensions()
            )
    except Exception as error:  # torch has many kinds, and the task's own code runs in there
        raise ValueError(f"{what} cannot be exported: {_why(error)}") from error
    return program


def unused(program: ExportedProgram, names: Sequence[str]) -> list[str]:
    """Return the inputs on which nothing depends."""
    used = {node.name for node in program.graph.nodes if node.op == "placeholder" and node.users}
    places = dict(zip(names, program.graph_signature.user_inputs, strict=True))
    return [name for name in names if places[name] not in used]


def symbols(program: ExportedProgram, inputs: Inputs) -> dict[str, str]:
    """Return what to call the sizes that torch has named in a program."""
    found: dict[str, str] = {}
    nodes = {node.name: node for node in program.graph.nodes}
    for name, place in zip(inputs.names, program.graph_signature.user_inputs, strict=True):
        for i, word in inputs.free[name].items():
            found.setdefault(str(nodes[place].meta["val"].shape[i]), word)
    return found


def output_kinds(
    program: ExportedProgram, outputs: Sequence[str], sizes: Mapping[str, str]
) -> dict[str, str]:
    """Return type and shape of each output, in words.

    Args:
        program: What computes them.
        outputs: Their names.
        sizes: What `symbols` returned.
    """
    nodes = {node.name: node for node in program.graph.nodes}
    found = {}
    for name, place in zip(outputs, program.graph_signature.user_outputs, strict=True):
        value = nodes[place].meta["val"]
        free = {i: renamed(str(size), sizes) for i, size in enumerate(value.shape)}
        found[name] = kind(value, free)
    return found


def renamed(size: str, sizes: Mapping[str, str]) -> str:
    """Return an expression for a size, such as ``s12 - 1``, in our words."""
    return re.sub(r"[a-z]\w*", lambda word: sizes.get(word[0], word[0]), size)


def named_outputs(outputs: Any, taken: Sequence[str], what: str) -> dict[str, Tensor]:
    """Return the tensors in what a task computes, by name.

    Args:
        outputs: What it computes.
        taken: Names that inputs have.
        what: For messages.

    Raises:
        ValueError: If there is anything but tensors.
    """
    found = _leaves(outputs, root="output")
    for name, leaf in found.items():
        if not isinstance(leaf, Tensor):
            raise ValueError(
                f"{what} returns a {type(leaf).__name__} ({name}); a program returns tensors, in "
                "dicts, lists and tuples"
            )
    return {f"output_{name}" if name in taken else name: leaf for name, leaf in found.items()}


def kind(tensor: Tensor, free: Mapping[int, str]) -> str:
    """Return type and shape in words: ``float32 (batch, 3)``."""
    sizes = ", ".join(str(free.get(i, size)) for i, size in enumerate(tensor.shape))
    return f"{str(tensor.dtype).removeprefix('torch.')} ({sizes})"


@contextmanager
def quiet() -> Iterator[None]:
    """Keep torch from printing what it does, and graphs of what it could not do."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


def _leaves(tree: Any, root: str = "input") -> dict[str, Any]:
    """Return what is in a tree, by names that are identifiers."""
    found: dict[str, Any] = {}
    for path, leaf in pytree.tree_flatten_with_path(tree, is_leaf=_is_leaf)[0]:
        name = "_".join(re.sub(r"\W", "_", str(_key(key))) for key in path)
        if not name or name[0].isdigit():
            name = f"{root}_{name}" if name else root
        while name in found or iskeyword(name) or name == "self":
            name += "_"
        found[name] = leaf
    return found


def _is_leaf(part: Any) -> bool:
    """Whether a part of a batch stays whole: a text for each sample, such as names of files."""
    return isinstance(part, list) and bool(part) and all(isinstance(e, str) for e in part)


def _key(key: Any) -> Any:
    """Return the index, the key or the field that leads to a part of a tree."""
    return next(getattr(key, kind) for kind in ("idx", "key", "name") if hasattr(key, kind))


def _why(error: Exception) -> str:
    """Return what torch says, without its advice for debugging it, and of which line of whom."""
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    text = str(error).partition("\n\nThe error above occurred")[0]
    told = [line.strip(" -") for line in text.splitlines() if line.strip()]
    told = [line for line in told if not line.startswith(_ADVICE)][:_REASON_LINES]
    reason = f"torch.export: {type(error).__name__}: {' '.join(told)}"
    if isinstance(error, GuardOnDataDependentSymNode):
        reason = f"a branch, or a number of Python, depends on values in the batch ({reason})"
    theirs = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not Path(frame.filename).is_relative_to(_TORCH) and not _is_ours(frame.filename)
    ]
    if theirs:
        reason += f"; at {theirs[-1].filename}:{theirs[-1].lineno}: {theirs[-1].line}"
    return reason


def _is_ours(file: str) -> bool:
    return Path(file).is_relative_to(Path(__file__).parents[1])
