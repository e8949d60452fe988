"""Imported first by the fork server of a sweep: makes the kernel end it with the command.

The server would end by itself, but only after it has imported and then torn down torch and
Lightning. For those seconds it would keep the output of the command open. Its workers end with it,
from their first moment: an idle worker would wait minutes for work that nobody sends any more.

The garbage collector is off in the server, as the documentation of `gc.freeze` advises: imports are
faster, and workers neither walk through what they all share nor copy it.
"""

import ctypes
import gc
import os
import signal

PR_SET_PDEATHSIG = 1  # from Linux's <sys/prctl.h>; processes forked from this one do not inherit it
SERVER = os.getpid()


def end_with_parent() -> None:
    """Let the kernel kill this process when the thread that forked it ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))


def _begin_worker() -> None:
    """Called in every process that is forked from the server or from a worker."""
    if os.getppid() == SERVER:  # a worker's children may be forked by threads that end early
        gc.enable()
        end_with_parent()
        if os.getppid() != SERVER:  # it has ended meanwhile
            os._exit(1)


def _freeze_imports() -> None:
    if os.getpid() == SERVER:
        gc.freeze()


gc.disable()
end_with_parent()
os.register_at_fork(before=_freeze_imports, after_in_child=_begin_worker)
