"""The command line: `fedbench` or `python -m fedbench`, a subcommand or settings to run."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from importlib import import_module

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from fedbench import __version__
from fedbench.collector import fast_imports
from fedbench.command_line import COMMANDS, hydra_arguments, split
from fedbench.config import RunConfig, register_schema
from fedbench.default_settings import origin_of
from fedbench.display.console import announce_start
from fedbench.display.run_events import relayed
from fedbench.errors import UserError, print_error
from fedbench.multirun import resources
from fedbench.multirun.parent_watch import exit_with_parent
from fedbench.results.origin import title
from fedbench.results.provenance import announce_command
from fedbench.results.settings import flat
from fedbench.termination import leave, termination_handled


@hydra.main(config_path="pkg://fedbench.conf", config_name="config", version_base="1.3")
def compose_and_run(composed: DictConfig) -> None:
    alone = HydraConfig.get().mode == RunMode.RUN
    if resources.in_sweep():
        exit_with_parent(resources.command_of_sweep())
    with relayed(None if alone else HydraConfig.get().job.num):
        try:
            config = RunConfig.from_hydra(composed)
            origin = origin_of(config, HydraConfig.get())
            if alone:
                announce_start(f"{title(flat(asdict(config)), origin)}  starting")
            with fast_imports():
                from fedbench.single_run import run  # imports torch, which takes seconds

            run(config, origin)
        except Exception as error:
            print_error(error, brief=not alone)  # a traceback would bury the other runs
            if alone:  # otherwise the other runs go on
                sys.exit(1)


def end_sweep() -> None:
    """Stop showing a sweep that an exception has ended."""
    callback = sys.modules.get("fedbench.multirun.hydra_callback")
    if callback is not None:
        callback.SweepCallback.close()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a subcommand, or settings."""
    words = [*(sys.argv[1:] if arguments is None else arguments)]
    command = words.pop(0) if words and words[0] in COMMANDS else "run"
    if command == "run":
        return run_command(words)
    module, _ = COMMANDS[command]
    sys.exit(import_module(module).main(words))


def run_command(words: list[str]) -> None:
    register_schema()
    announce_command(sys.argv)
    os.environ["HYDRA_FULL_ERROR"] = "1"  # or Hydra prints user errors itself, in many lines
    with termination_handled():
        try:
            try:
                _help_or_run(words)
            finally:
                end_sweep()
        except KeyboardInterrupt as stop:
            leave(stop)
        except ValueError as error:  # Hydra raises it for some user errors, such as `defense=null`
            print_error(UserError(f"{error}, in {' '.join(words)}"))
        except Exception as error:
            print_error(error)
        else:
            return
        sys.exit(1)


def _help_or_run(words: list[str]) -> None:
    options, settings = split(words)
    if "--version" in options:
        print(f"fedbench {__version__}")
    elif {"--help", "-h"} & {*options}:
        from fedbench.help_text import help_text

        print(help_text(settings))
    else:
        sys.argv[1:] = hydra_arguments(words)
        try:
            compose_and_run()
        except (BrokenProcessPool, EOFError, ConnectionError) as error:
            from fedbench.multirun.hydra_callback import SweepCallback

            if SweepCallback.workers is None:
                raise
            # The first if a worker has died, the others if the server that starts workers has.
            reason = UserError(
                "a process of the sweep was killed, perhaps because memory ran out; "
                "the same command resumes the runs, hydra.launcher.n_jobs=1 needs less memory"
            )
            SweepCallback.fail(reason)
            raise reason from error


if __name__ == "__main__":
    main()
