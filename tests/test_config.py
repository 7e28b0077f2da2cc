"""Every option: types, limits, pairs, spellings, foreign names, and the page made from them."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from trainer import migration
from trainer.config import CheckpointConfig, TrainerConfig, option_names
from trainer.options import option_fields
from trainer.reference import reference

ROOT = Path(__file__).resolve().parents[1]


def refusal(**options: Any) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the callers look at the message
        TrainerConfig.from_options(options)
    return str(caught.value)


def test_the_defaults_are_those_of_the_reference() -> None:
    config = TrainerConfig()
    assert (config.devices, config.num_nodes, config.seed, config.precision) == (1, 1, 0, "fp32")
    assert config.global_batch_size is None  # so that a DataLoader of the user's can say it
    assert config.checkpoint == CheckpointConfig(None, 1, 3, None, "min", True)


def test_what_it_returns_builds_it_again() -> None:
    config = TrainerConfig.from_options(
        {"precision": 16, "checkpoint": {"keep": 1}, "timeout_s": 3}
    )
    assert TrainerConfig.from_options(asdict(config)) == config


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({"precision": 32}, "fp32"),
        ({"precision": "32"}, "fp32"),
        ({"precision": "32-true"}, "fp32"),
        ({"precision": "bf16-mixed"}, "bf16"),
        ({"precision": 16}, "fp16"),
        ({"precision": "16-mixed"}, "fp16"),
        ({"devices": "auto"}, "auto"),
        ({"timeout_s": 60}, 60.0),
        ({"pin_memory": True}, True),
        ({"run_dir": Path("a") / "b"}, "a/b"),
        ({"resume": Path("a")}, "a"),
        ({"init_from": Path("a")}, "a"),
        ({"accept_changes": ("model", "data"), "resume": "auto"}, ["model", "data"]),
        ({"strategy": {"_target_": "my.Strategy"}}, {"_target_": "my.Strategy"}),
        ({"comm_hook": "bf16"}, "bf16"),
    ],
)
def test_accepted(given: dict[str, Any], kept: Any) -> None:
    value = getattr(TrainerConfig.from_options(given), next(iter(given)))
    assert value == kept
    assert type(value) is type(kept)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"devices": "four"}, "devices='four' is not allowed; it must be a whole number of at"),
        ({"devices": True}, "devices=true is true or false; it must be a whole number"),
        ({"devices": 0}, "devices=0 is not allowed"),
        ({"devices": -1}, "devices=auto for all devices"),
        ({"devices": [0, 1]}, "devices=2, and choose which ones with CUDA_VISIBLE_DEVICES"),
        ({"max_epochs": "1e3"}, "max_epochs='1e3' is a string; it must be a whole number"),
        ({"max_epochs": -1}, "max_epochs=null for no limit"),
        ({"max_steps": 1e3}, "max_steps=1000.0 is a floating-point number"),
        ({"max_steps": True}, "max_steps=true is true or false"),
        ({"shuffle": 1}, "shuffle=1 is a whole number; it must be true or false"),
        ({"shuffle": None}, "shuffle=null is null (None)"),
        ({"gradient_clip_norm": 0}, "gradient_clip_norm=0 is not allowed"),
        ({"gradient_clip_norm": float("nan")}, "gradient_clip_norm=nan is not allowed"),
        ({"timeout_s": float("inf")}, "it must be a number above 0 and at most 100000000"),
        ({"start_timeout_s": 1e9}, "it must be a number above 0 and at most 100000000 or null"),
        ({"num_workers": -1}, "num_workers=-1 is not allowed; it must be a whole number of at lea"),
        ({"pin_memory": "yes"}, "it must be true, false or auto"),
        ({"precision": "64-true"}, "it must be fp32, bf16 or fp16"),
        ({"precision": True}, "precision=true is true or false"),
        ({"comm_hook": "topk"}, "powersgd, powersgd+fp16, powersgd+bf16 or null"),
        ({"accelerator": "gpu"}, "set accelerator=cuda"),
        ({"limit_val_batches": 0.1}, "limit_val_batches=10 say"),
        ({"fast_dev_run": 3}, "limit_train_batches=3 and limit_val_batches=3"),
        ({"resume": True}, "set resume=auto"),
        ({"accept_changes": "data", "resume": "a"}, "set accept_changes=[data]"),
        ({"accept_changes": ["lr"], "resume": "a"}, "must be a list of model, optimizer, schedule"),
        ({"accept_changes": ["data"]}, "accept_changes=[data] without resume has no effect"),
        ({"checkpoint": 3}, "checkpoint=3 is a whole number; it must be a mapping of every_n_step"),
        ({"checkpoint": {"keep": 0}}, "checkpoint.keep=0 is not allowed"),
        ({"checkpoint": {"keep": -1}}, "checkpoint.keep=null to keep all"),
        ({"checkpoint": {"mode": "biggest"}}, "it must be min or max"),
        ({"comm_hook": "powerSGD"}, "powersgd+bf16 or null; did you mean comm_hook=powersgd?"),
        ({"comm_hook": "power_sgd"}, "did you mean comm_hook=powersgd?"),
        ({"comm_hook": "powersgd-bf16"}, "did you mean comm_hook=powersgd+bf16?"),
        ({"comm_hook": "None"}, "set comm_hook=null"),
        ({"bucket_cap_mb": "Auto"}, "did you mean bucket_cap_mb=auto?"),
        ({"profile": "Startup"}, "did you mean profile=startup?"),
        ({"statistics": "gradient"}, "did you mean statistics=[gradients]?"),
        ({"compile": "reduce_overhead"}, "did you mean compile=reduce-overhead?"),
        ({"compile": "default"}, "set compile=true"),
        ({"precision": "bfloat16"}, "set precision=bf16"),
        ({"checkpoint": {"mode": "MAX"}}, "did you mean checkpoint.mode=max?"),
        ({"accept_changes": ["Model", "optimiser"]}, "did you mean accept_changes=[model,op"),
        ({"strategy": "fsdp"}, "this version has strategy=ddp"),
        ({"strategy": "auto"}, "set strategy=ddp"),
        ({"strategy": "ddp_spawn"}, "chosen by launcher"),
        (
            {"strategy": "ddp_find_unused_parameters_true"},
            "set strategy=ddp and find_unused_parameters=true",
        ),
        (
            {"static_graph": True, "find_unused_parameters": True},
            "that every step uses every parameter",
        ),
        ({"sync_batchnorm": True, "accelerator": "cpu"}, "works on CUDA only"),
    ],
)
def test_refused(given: dict[str, Any], words: str) -> None:
    assert words in refusal(**given)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"devcies": 4}, "did you mean devices?"),
        ({"Devices": 4}, "did you mean devices?"),
        ({"keep": 4}, "did you mean checkpoint.keep?"),
        ({"checkpoint": {"kep": 4}}, "'checkpoint.kep'; did you mean checkpoint.keep?"),
        ({"zzz": 4}, "the options are: devices, num_nodes,"),
        (
            {"accumulate_grad_batches": 4, "devices": 2},
            "micro_batch_size=16 (global_batch_size 128",
        ),
        (
            {
                "gradient_accumulation_steps": 3,
                "devices": 2,
                "num_nodes": 2,
                "global_batch_size": 60,
            },
            "micro_batch_size=5 (global_batch_size 60 / (3 x world size 4))",
        ),
        ({"accumulate_grad_batches": 4, "devices": "auto"}, "global_batch_size / (4 x world size)"),
        ({"per_device_train_batch_size": 32, "devices": 4}, "set global_batch_size=128 (32 x"),
        (
            {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "devices": 2},
            "set global_batch_size=32 and micro_batch_size=8",
        ),
        ({"per_device_eval_batch_size": 16}, "set eval_batch_size=16"),
        ({"gradient_clip_val": 0.5}, "set gradient_clip_norm=0.5"),
        ({"max_grad_norm": 0.5}, "set gradient_clip_norm=0.5"),
        ({"val_check_interval": 100}, "set validate_every_n_steps=100"),
        ({"val_check_interval": 0.25}, "validate_every_n_steps to 0.25 of the steps in an epoch"),
        ({"check_val_every_n_epoch": 2}, "set validate_every_n_epochs=2"),
        ({"default_root_dir": "runs"}, "set run_dir='runs'"),
        ({"num_train_epochs": 3}, "set max_epochs=3"),
        ({"num_processes": 4}, "set devices=4"),
        ({"mixed_precision": "bf16"}, "set precision='bf16'"),
        ({"bf16": True}, "set precision=bf16"),
        ({"fp16": False}, "set precision=fp32"),
        ({"deterministic": True}, "set reproducible=true, and micro_batch_size, which it needs"),
        ({"deterministic": True, "micro_batch_size": 4}, "set reproducible=true"),
        ({"full_determinism": False}, "leave it out"),
        ({"enable_progress_bar": False}, "callbacks.progress=null"),
        ({"save_total_limit": 2}, "set checkpoint.keep=2"),
        ({"checkpoint": {"save_top_k": 2}}, "set checkpoint.keep=2"),
        ({"greater_is_better": True}, "set checkpoint.mode=max"),
        ({"use_cpu": True}, "set accelerator=cpu"),
        ({"limit_predict_batches": 2}, "pass it a shorter one"),
        ({"profiler": "simple"}, "set profile=10-14"),
        ({"auto_lr_find": True}, "run mode=find_lr"),
    ],
)
def test_an_unknown_name_leads_to_ours(given: dict[str, Any], words: str) -> None:
    message = refusal(**given)
    assert message.startswith("there is no option ")
    assert words in message


def test_the_foreign_names_lead_to_options_that_exist() -> None:
    names = option_names()
    assert set(migration.RENAMED.values()) <= set(names)
    foreign = {*migration.RENAMED, *migration.CONVERTED, *migration.WITHOUT}
    assert not foreign & set(names)
    assert len(foreign) == sum(
        map(len, (migration.RENAMED, migration.CONVERTED, migration.WITHOUT))
    ), "a name is explained twice"


def test_a_value_of_the_wrong_type_never_passes_for_any_option() -> None:
    for name in set(option_fields(TrainerConfig)) - {"strategy", "checkpoint"}:
        assert f"{name}=" in refusal(**{name: object()})
    for name in option_fields(CheckpointConfig):
        assert f"checkpoint.{name}=" in refusal(checkpoint={name: object()})


@pytest.mark.parametrize(
    "given",
    [{"precision": "fp64"}, {"comm_hook": "topk"}, {"accept_changes": ["model", "lr"]}],
)
def test_what_is_no_spelling_of_a_value_is_not_guessed_at(given: dict[str, Any]) -> None:
    assert "did you mean" not in refusal(**given)


def test_other_words_lead_to_values_that_are_allowed() -> None:
    for name, words in migration.VALUES.items():
        for word, ours in words.items():
            assert f"set {name}={ours}" in refusal(**{name: word})
            TrainerConfig.from_options({name: {"null": None, "true": True}.get(ours, ours)})


def test_limits() -> None:
    for options in ({"max_epochs": 1}, {"max_steps": 1}, {"fast_dev_run": True}):
        TrainerConfig.from_options(options).check_limits()
    with pytest.raises(ValueError, match="neither max_epochs nor max_steps"):
        TrainerConfig().check_limits()


def test_the_reference_page_is_up_to_date() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text()
    assert page == reference(), "run: python -m trainer.reference > docs/configuration.md"
    for name in option_names():
        assert f"`{name}`" in page
