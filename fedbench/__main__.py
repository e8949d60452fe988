"""python -m fedbench: compose, run, and nothing else."""

from __future__ import annotations

import os
import sys
import traceback
from concurrent.futures.process import BrokenProcessPool

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from fedbench.config import RunConfig, register_schema
from fedbench.errors import UserError, one_line


@hydra.main(config_path="pkg://fedbench.conf", config_name="config", version_base="1.3")
def compose_and_run(composed: DictConfig) -> None:
    from fedbench.run import run

    try:
        run(RunConfig.from_hydra(composed))
    except Exception as error:
        _tell(error)


def _tell(error: Exception) -> None:
    """A user's mistake is told in one line; anything else is a bug and keeps its traceback.

    A run that fails ends the program with an error, but in a sweep the other runs go on.
    """
    line = one_line(error)
    if line is None or os.environ.get("FEDBENCH_TRACEBACK") == "1":
        traceback.print_exception(error)
    else:
        print(line, file=sys.stderr, flush=True)
    if not HydraConfig.initialized() or HydraConfig.get().mode == RunMode.RUN:
        sys.exit(1)


def main() -> None:
    register_schema()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # else Hydra tells mistakes itself, in many lines
    try:
        compose_and_run()
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenProcessPool:
        from fedbench.sweep.callback import SweepCallback

        error = UserError(
            "a process of the sweep was killed, perhaps for want of memory: "
            "hydra.launcher.n_jobs=1 takes less; the same command resumes the runs"
        )
        SweepCallback.fail(error)
        _tell(error)
    except ValueError as error:  # so Hydra tells a few mistakes, such as `defense=null`
        _tell(UserError(f"{error}, in {' '.join(sys.argv[1:])}"))
    except Exception as error:
        _tell(error)


if __name__ == "__main__":
    main()
