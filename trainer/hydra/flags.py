"""The flags of a program, read before Hydra reads them."""

from __future__ import annotations

import sys
from argparse import Namespace

from trainer.hydra.command_line import GROUPS
from trainer.hydra.help import program


def read_arguments() -> Namespace:
    """Return the parsed command line; in ``sys.argv`` it stands as Hydra can read it.

    That is flags after overrides, because Hydra takes overrides in one piece only.

    Raises:
        ValueError: For an override that is written like a flag.
    """
    from hydra._internal.utils import get_args_parser

    parser = get_args_parser()
    args, unknown = parser.parse_known_intermixed_args()
    for flag in unknown:
        if "." in flag.partition("=")[0] or "=" in flag:
            key, _, value = flag.lstrip("-").partition("=")
            bare = f"{key}={value or '...'}"
            raise ValueError(f"{flag}: what belongs to the config has no dashes; write {bare}")
    if unknown:
        parser.error(f"there is no flag {' '.join(unknown)}; see --hydra-help")
    flags = sys.argv[1:]
    for override in args.overrides:
        flags.remove(override)
    nothing = [f"{group}=none" for group in GROUPS]  # at the end, it drops the project's own, too
    args.overrides = [f"+{each}" if each in nothing else each for each in args.overrides]
    sys.argv[1:] = [*args.overrides, *flags]
    return args


def check_flags(args: Namespace) -> None:
    """Refuse flags that do not go together, for which Hydra shows a traceback.

    Raises:
        ValueError: Saying what to do instead.
    """
    commands = [name for name in ("run", "multirun", "cfg", "info") if getattr(args, name)]
    if len(commands) > 1:
        raise ValueError(f"--{' and --'.join(commands)}: only one of them at a time")
    if args.resolve and not (args.cfg or args.help):
        raise ValueError("--resolve shows the config with all values filled in: add --cfg job")
    called = program()
    if args.shell_completion and "install" in str(args.overrides) and " -m " in called:
        raise ValueError(
            f"a shell completes the arguments of a command, and not of {called}; give the project "
            'one in its pyproject.toml, [project.scripts] name = "package.module:main", install '
            'it, and use: eval "$(name -sc install=bash)"'
        )
