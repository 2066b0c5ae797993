"""Fixtures for pytest."""

import os
import subprocess

import pytest

import anyverbs


@pytest.fixture(scope="session")
def anyverbs_env():
    """The environment of a process on the device, for ``subprocess.Popen(..., env=anyverbs_env)``."""
    with anyverbs.environment() as environment:
        yield environment


@pytest.fixture
def anyverbs_run():
    """A function like ``subprocess.run`` that runs a program on the device.

    ``options`` are those of ``anyverbs run``: ``anyverbs_run(["ibv_devinfo"], options=["--device", "mlx5_0"])``.
    """

    def run(program, options=(), **keywords):
        if isinstance(program, (str, bytes, os.PathLike)):
            # As for ``subprocess.run``.
            program = [program]
        return subprocess.run(anyverbs.command(*program, options=options), **keywords)

    return run
