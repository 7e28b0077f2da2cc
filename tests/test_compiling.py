"""torch.compile under DDP: that compiled code runs, gives the same, and is cut for DDP to overlap.

Most tests compile with a stand-in for inductor: torch's ``aot_eager``, which traces and cuts
graphs as inductor does, and then runs them as they are.
"""

import io
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import support
import torch
import torch._dynamo
from functorch.compile import make_boxed_func
from safetensors.torch import load_file
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd

from trainer import TaskModule, compiling, stopping

# Of torch's compiler. It hides the first, which does not help where warnings are errors.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated"),
]

EPOCHS, WIDTH = 2, 400  # float64: two cuts at DDP's first bucket of 1 MiB

ran: list[str] = []  # what compiled code did in this process, in order


@torch._dynamo.register_backend(name="noting")
def compile_and_note(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
    """Compile as aot_eager does, and note in ``ran`` whatever is compiled and runs."""

    def noting(what: str) -> Callable[..., Any]:
        def compiler(part: torch.fx.GraphModule, inputs: list[Any]) -> Any:
            ran.append(f"compile {what}")

            def run(*arguments: Any) -> Any:
                ran.append(what)
                return part(*arguments)

            return make_boxed_func(run)

        return compiler

    compilers = {f"{what}_compiler": noting(what) for what in ("fw", "bw", "inference")}
    return aot_autograd(**compilers)(graph, inputs)


@contextmanager
def compiled_by_noting() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiling, "BACKEND", "noting")
        yield
    torch._dynamo.reset()


class Net(support.Regression):
    """Four layers, two of them of a bucket each; it logs from forward and draws."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__(lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9))
        hidden = (nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width), nn.Dropout(0.2))
        self.net = nn.Sequential(nn.Linear(3, width), *hidden, nn.Linear(width, 1)).double()
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for parameter in self.parameters():
                values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.copy_(values / width**0.5)

    def forward(self, batch: Any) -> Tensor:
        outputs: Tensor = self.net(batch[0]).squeeze(1)
        self.log("mean", outputs.mean())
        return outputs

    def on_epoch_start(self) -> None:
        ran.append("epoch")


def fit(task: TaskModule, run_dir: Path, **options: Any) -> dict[str, float]:
    """Train on three global batches an epoch, the last of which is smaller; and validate."""
    data = {"train": support.samples(22), "val": support.samples(8)}
    sizes = {"global_batch_size": 8, "micro_batch_size": 4, "max_epochs": EPOCHS}
    found = support.fit(task, run_dir, **data, **{**sizes, **options})
    return support.measured(found.metrics)


def compare(folder: str) -> dict[str, Any]:
    """Train as it is and compiled, on the ranks that are there."""
    found: dict[str, Any] = {}
    exact = {"reproducible": True, "validate_every_n_epochs": None}
    for name, options in {
        "eager": {},
        "compiled": {"compile": True},
        "reproducible": {**exact, "compile": True},
    }.items():
        ran.clear()
        task = Net()
        for parameter in task.net.parameters():
            parameter.register_post_accumulate_grad_hook(lambda _: ran.append("gradient"))
        metrics = fit(task, Path(folder, name), **options)
        found[name] = (support.weights(task), metrics, list(ran))
    return found


def backward(noted: list[str]) -> list[str]:
    """Return what happened in the first backward pass."""
    events = [event for event in noted if not event.startswith("compile")]
    start = events.index("bw")
    return events[start : events.index("fw", start)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What one rank alone found, and each of two."""
    folder = str(tmp_path_factory.mktemp("runs"))
    with compiled_by_noting():
        return [compare(f"{folder}/1"), *support.on_ranks(2, compare, f"{folder}/2")]


def test_compiled_code_gives_the_same_on_any_number_of_ranks(runs: list[dict[str, Any]]) -> None:
    expected, metrics, noted = runs[0]["eager"]
    assert set(noted) == {"epoch", "gradient"}
    for found in runs:
        for weights, values, noted in (found["compiled"], found["reproducible"]):
            support.assert_same(weights, expected)
            assert values == pytest.approx({name: metrics[name] for name in values}, rel=1e-9)
            assert {"fw", "bw"} <= set(noted)
        assert "inference" in found["compiled"][2]
        support.assert_equal_bits(found["reproducible"][:2], runs[0]["reproducible"][:2])


def test_graphs_are_cut_so_that_gradients_can_leave_during_backward(
    runs: list[dict[str, Any]],
) -> None:
    alone, of_two, _ = (backward(found["compiled"][2]) for found in runs)
    assert alone.count("bw") == 1
    assert of_two.count("bw") == 2
    assert of_two[1] == "gradient", "those of the last layers come before the others begin"
    exact = [backward(found["reproducible"][2]) for found in runs]
    assert exact == [of_two] * 3, "where the world size must change nothing, cuts are alike"


def test_nothing_is_compiled_again_once_every_kind_of_batch_was_seen(
    runs: list[dict[str, Any]],
) -> None:
    for found in runs:
        noted = found["compiled"][2]
        parts = backward(noted).count("bw")
        assert 0 < noted.count("compile fw") <= 2 * parts  # micro-batches of 4, and one of 2
        last_epoch = noted[len(noted) - noted[::-1].index("epoch") :]
        assert "fw" in last_epoch
        assert not [event for event in last_epoch if event.startswith("compile")]


def test_the_task_is_as_it_was_and_its_files_have_plain_names(tmp_path: Path) -> None:
    task, log = Net(8), TaskModule.log
    with compiled_by_noting():
        fit(task, tmp_path, compile=True, max_steps=2)
        assert "bw" in ran
        ran.clear()
        support.fit(task, tmp_path / "again", train=support.samples(8), max_steps=1)
        task(support.samples(4).tensors)
    assert set(ran) == {"epoch"}
    assert TaskModule.log is log
    found = load_file(tmp_path / "checkpoints" / "last" / "model.safetensors")
    assert set(found) == set(Net(8).state_dict())
    resumed, straight = Net(8), Net(8)
    fit(resumed, tmp_path, resume="auto", max_steps=4)
    fit(straight, tmp_path / "straight", max_steps=4)
    support.assert_same(resumed, straight)


def test_many_fits_in_one_process_all_run_compiled_code(tmp_path: Path) -> None:
    data = support.samples(8)
    with compiled_by_noting(), torch._dynamo.config.patch(recompile_limit=1):
        for width in (3, 4):
            ran.clear()
            support.fit(Net(width), tmp_path / str(width), train=data, max_steps=1, compile=True)
            assert "bw" in ran


class Rising(Net):
    """What it does depends on the step."""

    def forward(self, batch: Any) -> Tensor:
        outputs: Tensor = self.net(batch[0]).squeeze(1)
        return outputs * (1 + self.run.step)


def test_the_step_may_be_read_without_compiling_every_step(tmp_path: Path) -> None:
    eager, compiled = Rising(4), Rising(4)
    options = {"train": support.samples(40), "global_batch_size": 8, "max_epochs": 1}
    support.fit(eager, tmp_path / "eager", **options)
    ran.clear()
    with compiled_by_noting():
        support.fit(compiled, tmp_path / "compiled", **options, compile=True)
    support.assert_same(compiled, eager)
    assert (ran.count("compile fw"), ran.count("fw")) == (2, 5)


def test_reproducible_refuses_what_would_follow_from_what_was_compiled_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"reproducible": True, "max_steps": 3, "compile": True}
    monkeypatch.setattr(compiling, "_MOST_SHAPES", 1)
    with compiled_by_noting(), pytest.raises(ValueError, match="more than 1 shapes"):
        fit(Net(4), tmp_path, **options)
    task = Net(4)
    task.net.compile()
    with pytest.raises(ValueError, match="compiled net itself"):
        fit(task, tmp_path, **{**options, "compile": False})
    with pytest.raises(ValueError, match="compile=max-autotune"):
        fit(task, tmp_path, **{**options, "compile": "max-autotune"})


def test_what_the_compiler_lacks_is_said_before_ranks_are_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch._inductor.config as inductor

    with monkeypatch.context() as patch:
        patch.setattr(compiling.sysconfig, "get_paths", lambda: {"include": "/nowhere"})
        with pytest.raises(ValueError, match=r"/nowhere has no Python\.h"):
            fit(Net(4), tmp_path, compile=True)
    missing = inductor.patch({"cpp.cxx": ("/no/compiler",)})
    with missing, pytest.raises(ValueError, match=r"no C\+\+ compiler"):
        fit(Net(4), tmp_path, compile=True)
    assert not list(tmp_path.iterdir())


def test_a_folder_for_code_that_cannot_be_written_is_said_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    for folder, reason in {tmp_path / "file": "File exists", Path("/proc/none"): "No such"}.items():
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
        words = (
            f"cannot write the code that it makes to {folder}: {reason}.*TORCHINDUCTOR_CACHE_DIR"
        )
        with pytest.raises(ValueError, match=words):
            fit(Net(4), tmp_path / "run", compile=True)
    monkeypatch.setattr(compiling, "TemporaryFile", lambda dir: io.FileIO("/dev/full", "w"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    with pytest.raises(ValueError, match="No space left on device; make room there"):
        fit(Net(4), tmp_path / "run", compile=True)


def test_a_signal_to_the_compiler_too_lets_the_run_stop_as_usual(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes: list[int] = []

    def compile_struck(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        # What a compiler is: a process that ends by itself, if it may.
        with subprocess.Popen(["sleep", "0.1"]) as compiler:
            os.kill(os.getpid(), signal.SIGTERM)
            compiler.terminate()
        codes.append(compiler.returncode)
        return compile_and_note(graph, inputs)

    torch._dynamo.register_backend(compile_struck, name="struck")
    monkeypatch.setattr(compiling, "BACKEND", "struck")
    with pytest.raises(SystemExit) as stopped:
        fit(Net(4), tmp_path, compile=True)
    assert stopped.value.code == 143
    assert set(codes) == {0}
    assert (tmp_path / "checkpoints" / "step-00000001").is_dir()
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()) & set(stopping.STOP_SIGNALS)
    torch._dynamo.reset()


def test_inductor_draws_the_same_numbers(tmp_path: Path) -> None:
    import torch._inductor.config as inductor

    eager, compiled = support.Regression(), support.Regression()
    for task in (eager, compiled):
        task.net[1] = nn.Dropout(0.2)
    options: dict[str, Any] = {"max_steps": 1, "validate_every_n_epochs": None}
    options["start_timeout_s"] = 200
    metrics = fit(eager, tmp_path / "eager", **options)
    # Both cost seconds, and only save time in longer runs.
    with inductor.patch({"cpp.vec_isa_ok": False, "cpp_cache_precompile_headers": False}):
        found = fit(compiled, tmp_path / "compiled", **options, compile=True)
    assert found == pytest.approx(metrics)
    support.assert_same(compiled, eager)
    assert torch._dynamo.utils.counters["inductor"]


def use_compiling_threads() -> int:
    from torch._inductor.async_compile import AsyncCompile

    found: int = AsyncCompile.pool().submit(os.getpid).result(timeout=10)
    return found


def test_ranks_compile_although_their_parent_has() -> None:
    import torch._inductor.config as inductor

    with inductor.patch(compile_threads=2):
        assert use_compiling_threads() == os.getpid()
        assert len({os.getpid(), *support.on_ranks(2, use_compiling_threads)}) == 3
