"""A complete RDMA device in user space: runs programs of libibverbs and librdmacm without hardware.

The command ``anyverbs`` does the work; this module finds it. ``anyverbs run -- pytest`` gives the device to a whole
test run. :func:`environment` gives it to processes that a Python program starts.
"""

import contextlib
import json
import os
import subprocess
import sys

__all__ = ["command", "environment", "executable", "lib_dir", "main"]

_TELL = "import json, os, sys; print(json.dumps(dict(os.environ)), flush=True); sys.stdin.read()"


def executable():
    """The path of the command."""
    return os.path.join(os.path.dirname(os.path.abspath(__file__)), "bin", "anyverbs")


def lib_dir():
    """The directory with libibverbs.so.1 and librdmacm.so.1."""
    out = subprocess.run([executable(), "lib-dir"], stdout=subprocess.PIPE, check=True)
    return os.fsdecode(out.stdout).rstrip("\n")


def command(*program, options=()):
    """The command line that runs ``program`` on the device; ``options`` are those of ``anyverbs run``."""
    if isinstance(options, (str, bytes)):
        raise TypeError("options is a text: expected a list, such as ['--devices', '2']")
    return [executable(), "run"] + list(options) + ["--"] + list(program)


@contextlib.contextmanager
def environment(*options):
    """The environment of a process on the device, while the context lasts; ``options`` are those of ``anyverbs run``.

    A process that is started with it finds the device. The process that asks for it does not.
    """
    keeper = subprocess.Popen(
        command(sys.executable, "-c", _TELL, options=options),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        told = keeper.stdout.readline()
        if not told:
            raise RuntimeError("anyverbs ended with status {}".format(keeper.wait()))
        yield json.loads(told.decode())
    finally:
        keeper.stdin.close()
        keeper.stdout.close()
        keeper.wait()


def main():
    """The command ``anyverbs`` in place of this process."""
    os.execv(executable(), ["anyverbs"] + sys.argv[1:])
