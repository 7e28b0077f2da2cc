"""From a Hydra config to a run: `hydra_main` for the command line, `run` for what it says."""

from __future__ import annotations

import functools
import gc
import inspect
import os
import select
import signal
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from trainer import startup
from trainer.checkpoint import manifest
from trainer.checkpoint.finding import find
from trainer.diagnosis.failures import shown
from trainer.hydra.command_line import Place, check_command_line
from trainer.hydra.composition import HYDRA_VERSION, OWN_OPTIONS, check_config, register_configs
from trainer.hydra.flags import check_flags, read_arguments
from trainer.hydra.help import help_page
from trainer.instantiate import build_node
from trainer.launching.launcher import speaks_for_all
from trainer.run_dir import folder_of
from trainer.urls import is_url
from trainer.verify.report import VerifyReport

if TYPE_CHECKING:
    from omegaconf import DictConfig


def hydra_main(
    config_path: str, config_name: str
) -> Callable[[Callable[[DictConfig], Any]], Callable[..., Any]]:
    """Make a function that takes a config into a command line program.

    The config's defaults list names ``trainer: default``, which brings every option of the
    Trainer, the default callbacks and loggers, and the keys that `run` reads.

    Args:
        config_path: The folder of configs, relative to the file that defines the function.
        config_name: The config to use, without ``.yaml``.

    Returns:
        A decorator. The decorated function composes the config from the command line, makes one
        output folder for all ranks and calls the function. A mistake in the config ends the
        program with one message, exit code 1 and no folder; Ctrl-C with exit code 130. Called with
        a config, it just passes it on.
    """

    def decorate(main: Callable[[DictConfig], Any]) -> Callable[..., Any]:
        folder = str((Path(inspect.getfile(main)).resolve().parent / config_path).resolve())

        @functools.wraps(main)
        def program(cfg: DictConfig | None = None) -> Any:
            if cfg is not None:
                return main(cfg)
            try:
                _run_program(main, folder, config_name)
            except KeyboardInterrupt:
                _end_interrupted()

        return program

    return decorate


def run(cfg: DictConfig | dict[str, Any]) -> Any:
    """Do what a config says.

    Args:
        cfg: The keys are ``task`` and ``data`` (nodes with a ``_target_``), ``trainer`` (options),
            ``callbacks`` and ``logger`` (name -> node), ``mode`` (fit, validate, test, predict,
            verify, plan, find_lr or find_micro_batch_size), the options of the last three below
            keys of their names, ``test`` (after fit, test the best weights), ``ckpt_path`` (the
            weights to validate, test or predict with: ``best``, ``last`` or a path),
            ``predictions_dir`` (the ``output_dir`` of `Trainer.predict`) and ``optimized_metric``.

    Returns:
        The metric that ``optimized_metric`` names, for sweepers; where there is none, what the mode
        returns: a `FitResult`, the metrics, a report (of verify, plan, find_lr, ...) or the
        predictions (also written to ``predictions.pt`` in the run's folder; with
        ``predictions_dir`` only there, and that is returned). None on
        ranks other than 0.

    Raises:
        ValueError: For a mistake in the config.
    """
    from omegaconf import DictConfig, OmegaConf

    from trainer.api import Trainer

    startup.note("compose")
    cfg = OmegaConf.create(cfg) if isinstance(cfg, dict) else cfg
    assert isinstance(cfg, DictConfig)
    options = check_config(cfg)
    options["run_dir"] = _run_dir(options)
    trainer = Trainer(
        callbacks=_nodes(cfg, "callbacks"), logger=_nodes(cfg, "logger"), **options
    )  # before data and task: it seeds
    plain: Any = OmegaConf.to_container(cfg, resolve=True)
    trainer.run_config = {**plain, **trainer.run_config}  # what load_task builds a task from
    data = build_node(cfg.get("data"), "data")
    startup.note("data")
    task = build_node(cfg.task, "task")
    startup.note("task")

    mode, ckpt_path = cfg.get("mode", "fit"), cfg.get("ckpt_path")
    if mode == "verify":
        return _show(trainer.verify(task, data))
    if mode in OWN_OPTIONS:
        report = getattr(trainer, mode)(task, data, **(plain.get(mode) or {}))
        if report is not None:
            print(report, flush=True)
        return report
    if mode != "fit" and speaks_for_all(options):
        ckpt_path = _find_weights(ckpt_path, options["run_dir"])
    if mode == "predict":
        output_dir = cfg.get("predictions_dir")
        predictions = trainer.predict(task, data, ckpt_path=ckpt_path, output_dir=output_dir)
        return _keep(predictions, options["run_dir"], output_dir)
    if mode == "fit":
        result: Any = trainer.fit(task, data, test_best=cfg.get("test", False))
        metrics = None if result is None else result.metrics
    else:
        result = metrics = getattr(trainer, mode)(task, data, ckpt_path=ckpt_path)
        _print_metrics(metrics)
    wanted = cfg.get("optimized_metric")
    if wanted is None or metrics is None:
        return result
    names = [wanted] if isinstance(wanted, str) else list(wanted)
    for name in names:
        if name not in metrics:
            if mode != "fit":  # a recipe's metric for sweeps may be one of another split
                return result
            raise ValueError(
                f"optimized_metric={name} was not measured; there are: {', '.join(sorted(metrics))}"
            )
    return metrics[wanted] if isinstance(wanted, str) else [metrics[name] for name in names]


def _run_program(main: Callable[[DictConfig], Any], folder: str, config_name: str) -> None:
    startup.note("program")
    # To take all modules apart at the end would cost this process half a second.
    gc.freeze()
    import hydra
    from omegaconf import OmegaConf

    # The order it asks about is fixed by version_base below: a config comes after its defaults.
    warnings.filterwarnings("ignore", message=".*Defaults list is missing `_self_`")
    try:
        args = read_arguments()
        place = Place(
            str(Path(folder) / (args.config_path or "")),
            args.config_name or config_name,
            args.config_dir,
        )
        shows = args.help or args.hydra_help or args.info or args.shell_completion
        check_flags(args)
        joins = False
        if not (shows or args.experimental_rerun):
            joins = check_command_line(place, args.overrides, args.multirun)
    except ValueError as mistake:
        if _is_first():
            print(f"error: {mistake}", file=sys.stderr)
        sys.exit(1)
    if shows or args.cfg:  # `| head` ends this as it ends any program that only prints
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    if joins:
        own = ["hydra.run.dir=.", "hydra.output_subdir=null", "hydra/job_logging=stdout"]
        sys.argv[1:] = [*args.overrides, *own, *sys.argv[1 + len(args.overrides) :]]
    register_configs()
    OmegaConf.register_new_resolver(
        "trainer_help", lambda *, _root_: help_page(main, _root_), replace=True
    )
    hydra.main(version_base=HYDRA_VERSION, config_path=folder, config_name=config_name)(
        _job(main)
    )()


def _job(main: Callable[[DictConfig], Any]) -> Callable[[DictConfig], Any]:
    """Wrap ``main`` so that its failure is printed once, without the frames of Hydra."""

    @functools.wraps(main)
    def job(cfg: DictConfig) -> Any:
        from hydra.core.hydra_config import HydraConfig
        from hydra.types import RunMode

        swept = HydraConfig.get().mode == RunMode.MULTIRUN
        try:
            return main(cfg)
        except KeyboardInterrupt:
            can_go_on = cfg.get("mode", "fit") == "fit"
            _end_interrupted(_run_dir(cfg.get("trainer") or {}) if can_go_on else None)
        except Exception as error:
            if isinstance(error, BrokenPipeError) and _is_unheard():
                _end_unheard()
            if swept:  # a sweeper may want to go on
                from trainer.hydra.sweeps import fail_job

                raise fail_job(error) from None
            print(shown(error), end="", file=sys.stderr)
            sys.exit(1)

    return job


def _end_interrupted(run_dir: str | None = None) -> NoReturn:
    """End as after Ctrl-C; say how to go on with the run in ``run_dir``, if it has a checkpoint."""
    if _is_first():
        found = run_dir is not None and manifest.step_folders(folder_of(run_dir) / manifest.FOLDER)
        go_on = f"to go on: trainer.run_dir={run_dir} trainer.resume=auto"
        if run_dir is not None and not found:
            go_on = "there is no checkpoint yet to go on from"
        print("interrupted" + (f"; {go_on}" if run_dir is not None else ""), file=sys.stderr)
    sys.exit(130)


def _is_unheard() -> bool:
    """Whether nobody reads any more what this program prints, as after ``| head``."""
    output = select.poll()
    output.register(1, 0)
    return any(event & select.POLLERR for _, event in output.poll(0))


def _end_unheard() -> NoReturn:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for what is still to be printed
    print(
        "error: ended, because whoever read the output has closed it (| head?); write it into a "
        "file instead: > log.txt",
        file=sys.stderr,
    )
    sys.exit(1)


def _is_first() -> bool:
    """Whether this process speaks for all that a launcher started."""
    try:
        return speaks_for_all({})
    except ValueError:  # nobody knows
        return True


def _find_weights(ckpt_path: str | None, run_dir: str | None) -> Path | None:
    """Return the checkpoint that ``ckpt_path`` means, and print which weights are used."""
    if ckpt_path is None:
        print("weights: as the task is built (no ckpt_path)", flush=True)
        return None
    path = find(run_dir or ".", ckpt_path)
    step = f", step {manifest.read_manifest(path)['step']}" if path.is_dir() else ""
    print(f"weights: {path}{step}", flush=True)
    return path


def _nodes(cfg: DictConfig, key: str) -> Any:
    """Return the nodes of callbacks or loggers as plain values, for the Trainer to build."""
    from omegaconf import OmegaConf

    value = cfg.get(key)
    if value is None:
        return False if key in cfg else None
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def _run_dir(options: Mapping[str, Any]) -> str | None:
    """Return the given folder or url, else Hydra's folder; None if this rank has neither."""
    from hydra.core.hydra_config import HydraConfig

    given = options.get("run_dir")
    if not HydraConfig.initialized():
        return given
    hydra = HydraConfig.get()
    if is_url(given):
        return given
    return str(hydra.runtime.output_dir) if speaks_for_all(options) else None


def _keep(predictions: Any, run_dir: str | None, output_dir: str | None) -> Any:
    """Write the predictions into the run's folder, unless they are in files; print where."""
    if predictions is None or not _is_first():
        return predictions
    path: str | Path | None = output_dir
    if path is None and run_dir is not None:
        import torch

        path = folder_of(run_dir) / "predictions.pt"
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(predictions, path)
    if path is not None:
        print(f"predictions: {path}", flush=True)
    return predictions


def _show(report: VerifyReport) -> VerifyReport:
    """Print the report; on the command line, end with exit code 1 if a check failed."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    print(report, flush=True)
    if HydraConfig.initialized() and not report.passed:
        if HydraConfig.get().mode == RunMode.RUN:
            sys.exit(1)
        from trainer.hydra.sweeps import JobFailed

        raise JobFailed("the verification did not pass")
    return report


def _print_metrics(metrics: Mapping[str, float] | None) -> None:
    if metrics:
        width = max(map(len, metrics))
        for name, value in metrics.items():
            print(f"{name:<{width}}  {value:.6g}")
