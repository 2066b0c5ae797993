#!/bin/sh
# The wheel in a virtual environment with the distribution's Python, and in one that uv makes.
set -eu

python3 -m venv --system-site-packages /tmp/venv
/tmp/venv/bin/pip install --quiet --no-index --disable-pip-version-check /packages/anyverbs-*.whl
PATH=/tmp/venv/bin:$PATH
sh /cases/use.sh /tmp/venv/bin/anyverbs
python -m anyverbs --version
grep -q "^libc [0-9]" /tmp/venv/lib/python3*/site-packages/anyverbs-*.dist-info/THIRD-PARTY-LICENSES.txt
cat > /tmp/test_it.py << 'END'
import os
import subprocess

import anyverbs
import pytest


def test_lib_dir():
    assert os.path.exists(os.path.join(anyverbs.lib_dir(), "libibverbs.so.1"))


def test_environment(anyverbs_env):
    out = subprocess.run(["ibv_devinfo"], env=anyverbs_env, stdout=subprocess.PIPE, check=True)
    assert b"PORT_ACTIVE" in out.stdout


def test_options():
    with anyverbs.environment("--device", "named0") as env:
        out = subprocess.run(["ibv_devices"], env=env, stdout=subprocess.PIPE, check=True)
    assert b"named0" in out.stdout


def test_run(anyverbs_run):
    assert anyverbs_run(["sh", "-c", "exit 7"]).returncode == 7
    # A text is one word.
    assert b"anyverbs0" in anyverbs_run("ibv_devices", stdout=subprocess.PIPE, check=True).stdout
    with pytest.raises(TypeError):
        anyverbs_run(["ibv_devices"], options="--device other0")
    out = anyverbs_run(["ibv_devices"], options=["--device", "other0"], stdout=subprocess.PIPE)
    assert b"other0" in out.stdout


def test_devices_and_faults(anyverbs_run):
    options = ["--devices", "2", "--faults", "on device anyverbs1: down for 60s after 0s"]
    out = anyverbs_run(["ibv_devinfo"], options=options, stdout=subprocess.PIPE, check=True)
    states = [line.split()[1] for line in out.stdout.splitlines() if b"state:" in line]
    assert states == [b"PORT_ACTIVE", b"PORT_DOWN"]
END
cd /tmp
python -m pytest -q /tmp/test_it.py

# In an environment that uv makes for one command, without a registry.
cat > /tmp/test_plain.py << 'END'
import subprocess


def test_device():
    out = subprocess.run(["ibv_devinfo"], stdout=subprocess.PIPE, check=True)
    assert b"PORT_ACTIVE" in out.stdout
END
/tmp/venv/bin/pip install --quiet --no-index --disable-pip-version-check /packages/uv-*.whl
uvx --quiet --offline --no-index --no-managed-python --from "$(echo /packages/anyverbs-*.whl)" \
    anyverbs run -- /usr/bin/python3 -m pytest -q /tmp/test_plain.py

/tmp/venv/bin/pip uninstall --quiet --yes --disable-pip-version-check anyverbs
[ ! -e /tmp/venv/bin/anyverbs ]
