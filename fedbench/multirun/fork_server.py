"""Imported first by the fork server of a sweep: makes the kernel end it with the command.

The server would end by itself, but only after it has imported and then torn down torch and
Lightning. For those seconds it would keep the output of the command open.
"""

import ctypes
import signal

PR_SET_PDEATHSIG = 1  # from Linux's <sys/prctl.h>; processes forked from this one do not inherit it

ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
