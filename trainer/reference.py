"""Writes the reference page of the configuration: ``python -m trainer.reference``."""

from __future__ import annotations

from typing import Any, get_type_hints

from trainer.config import CheckpointConfig, TrainerConfig
from trainer.finding.options import FindLRConfig, FindMicroBatchSizeConfig
from trainer.hydra.composition import MODES
from trainer.migration import RENAMED
from trainer.options import allowed, option_fields, show
from trainer.planning.options import PlanConfig

INTRODUCTION = """\
# Configuration

<!-- Made by `python -m trainer.reference > docs/configuration.md`; edit trainer/config.py. -->

The same names work in Python, `Trainer(devices=2, checkpoint={"keep": 5})`, in a config file and
on the command line, `trainer.devices=2 trainer.checkpoint.keep=5`. A name or value that is not
allowed is an error that says what was probably meant.

## A config

```yaml
defaults:
  - trainer: default   # all options below, default callbacks and loggers, the keys of `run`
  - _self_
task: {_target_: my_project.tasks.Classifier, width: 64}
data: {_target_: my_project.data.Digits}
trainer: {devices: 2, max_epochs: 10}
test: true
```

| key | default | meaning |
|---|---|---|
| `task`, `data` | required, `null` | what is trained and on what: nodes with a `_target_` |
| `trainer` | | the options below |
| `callbacks`, `logger` | the default ones | name -> node with a `_target_`. `null` as a node \
switches one off (`callbacks.progress=null`), `callbacks=none` all of them; \
`callbacks=early_stopping` adds one, `callbacks=[one,other]` several |
| `mode` | `fit` | {modes} |
| `plan`, `find_lr`, `find_micro_batch_size` | | the options of these modes, below |
| `test` | `false` | after fit, test the best weights |
| `ckpt_path` | `null` | the weights to validate, test or predict with: `best`, `last` (of \
`trainer.run_dir`), a path or a url |
| `predictions_dir` | `null` | with `mode=predict`: a folder for one file per micro-batch; \
null: all predictions are gathered into `predictions.pt` in the run's folder |
| `optimized_metric` | `null` | the metric that a sweeper gets, or a list of them |

Keys of your own may stand beside these (`width: 64`, used as `${width}`). One that looks like a
slip, such as `max_epochs` outside of `trainer`, is an error unless something refers to it. The
[command line](hydra.md) goes from here to presets and sweeps.

The folder of a run is `trainer.run_dir`, else `outputs/<date>/<time>`; with `--multirun` every job
gets a folder below `hydra.sweep.dir`. Every rank uses rank 0's. The config is kept there in
`.hydra/`.
"""


def reference() -> str:
    """Return the page, in Markdown."""
    modes = ", ".join(f"`{mode}`" for mode in MODES)
    lines = [INTRODUCTION.replace("{modes}", modes), "## Options: `trainer.*`", ""]
    lines += _table(TrainerConfig, "")
    lines += ["", "## Checkpoints: `trainer.checkpoint.*`", ""]
    lines += _table(CheckpointConfig, "checkpoint.")
    lines += ["", "## Planning: `plan.*`", ""]
    lines += ["Options of `mode=plan`, and by the same names of `Trainer.plan`.", ""]
    lines += _table(PlanConfig, "")
    lines += ["", "## Finding a learning rate: `find_lr.*`", ""]
    lines += ["Options of `mode=find_lr`, and by the same names of `Trainer.find_lr`.", ""]
    lines += _table(FindLRConfig, "")
    lines += ["", "## Finding a micro-batch: `find_micro_batch_size.*`", ""]
    lines += ["Likewise of `mode=find_micro_batch_size`."]
    lines += ["", *_table(FindMicroBatchSizeConfig, "")]
    lines += ["", "## Names from other trainers", ""]
    lines += [
        "Lightning, Accelerate, the Hugging Face Trainer and torchrun call these otherwise.",
        "",
    ]
    lines += ["| there | here |", "|---|---|"]
    lines += [f"| `{theirs}` | `{ours}` |" for theirs, ours in sorted(RENAMED.items())]
    return "\n".join(lines) + "\n"


def _table(config: Any, prefix: str) -> list[str]:
    hints = get_type_hints(config)
    rows = ["| option | default | allowed | meaning |", "|---|---|---|---|"]
    for name, spec in option_fields(config).items():
        if name == "checkpoint":
            continue
        values = "`ddp` or a mapping" if hints[name] is Any else allowed(spec, hints[name])
        default = show(getattr(config(), name)).strip("'")
        rows.append(f"| `{prefix}{name}` | `{default}` | {values} | {spec.metadata['doc']} |")
    return rows


if __name__ == "__main__":
    print(reference(), end="")
