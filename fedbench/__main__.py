"""python -m fedbench: compose the configuration and run it."""

from __future__ import annotations

import os
import sys
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from fedbench.config import RunConfig, register_schema
from fedbench.default_settings import origin_of
from fedbench.errors import UserError, print_error
from fedbench.report.console import announce_start
from fedbench.report.run_events import relayed
from fedbench.results.origin import title
from fedbench.results.provenance import announce_command
from fedbench.results.settings import flat


@hydra.main(config_path="pkg://fedbench.conf", config_name="config", version_base="1.3")
def compose_and_run(composed: DictConfig) -> None:
    alone = HydraConfig.get().mode == RunMode.RUN
    with relayed(None if alone else HydraConfig.get().job.num):
        try:
            config = RunConfig.from_hydra(composed)
            origin = origin_of(config, HydraConfig.get())
            if alone:
                announce_start(f"{title(flat(asdict(config)), origin)}  starting")
            from fedbench.single_run import run

            run(config, origin)
        except Exception as error:
            _report(error)


def _report(error: Exception) -> None:
    """Print the error and exit, unless the run belongs to a sweep: then the other runs go on."""
    print_error(error)
    if not HydraConfig.initialized() or HydraConfig.get().mode == RunMode.RUN:
        sys.exit(1)


def end_sweep() -> None:
    """Stop showing a sweep that an exception has ended."""
    callback = sys.modules.get("fedbench.multirun.hydra_callback")
    if callback is not None:
        callback.SweepCallback.close()


def main() -> None:
    register_schema()
    announce_command(sys.argv)
    os.environ["HYDRA_FULL_ERROR"] = "1"  # or Hydra prints user errors itself, in many lines
    try:
        compose_and_run()
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenProcessPool:
        from fedbench.multirun.hydra_callback import SweepCallback

        error = UserError(
            "a process of the sweep was killed, perhaps because memory ran out; "
            "the same command resumes the runs, hydra.launcher.n_jobs=1 needs less memory"
        )
        SweepCallback.fail(error)
        _report(error)
    except ValueError as error:  # Hydra raises it for a few user errors, such as `defense=null`
        _report(UserError(f"{error}, in {' '.join(sys.argv[1:])}"))
    except Exception as error:
        _report(error)
    finally:
        end_sweep()


if __name__ == "__main__":
    main()
