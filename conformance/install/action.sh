#!/bin/sh
# The GitHub action: its steps run as a runner would run them, and then those of a workflow.
set -eu

out=$(mktemp -d)
cat > "$out/runner.py" << 'END'
"""Runs the steps of a composite action: runner.py ACTION NAME=INPUT..., and then the command on standard input."""
import os
import re
import subprocess
import sys

action, given = sys.argv[1], dict(word.split("=", 1) for word in sys.argv[2:])
lines = open(os.path.join(action, "action.yml")).read().splitlines()
inputs, step, section, name = {}, {"env": {}}, None, None
for line in lines:
    indent, text = len(line) - len(line.lstrip()), line.strip()
    key, _, value = text.partition(":")
    value = value.strip().strip('"') if not value.strip().startswith("sh ") else value.strip()
    if indent == 0:
        section = key
    elif section == "inputs" and indent == 2:
        name = key
    elif section == "inputs" and key == "default":
        inputs[name] = value
    elif section == "runs" and indent == 8:
        step["env"][key] = value
    elif section == "runs" and key in ("run", "shell"):
        step[key] = value
assert set(given) <= set(inputs), (given, inputs)
inputs.update(given)
temp = os.environ["RUNNER_TEMP"]
files = {name: os.path.join(temp, name) for name in ("GITHUB_ENV", "GITHUB_PATH")}
for path in files.values():
    open(path, "w").close()
fill = lambda text: re.sub(r"\$\{\{ inputs\.(\w+) \}\}", lambda found: inputs[found.group(1)], text)
env = dict(os.environ, GITHUB_ACTION_PATH=action, **files)
env.update((name, fill(text)) for name, text in step["env"].items())
done = subprocess.run([step["shell"], "-e", "-c", step["run"]], env=env)
if done.returncode:
    sys.exit(done.returncode)
later = dict(os.environ)
for line in open(files["GITHUB_ENV"]):
    name, value = line.rstrip("\n").split("=", 1)
    later[name] = value
for line in open(files["GITHUB_PATH"]):
    later["PATH"] = line.rstrip("\n") + ":" + later["PATH"]
sys.exit(subprocess.run(["sh", "-e", "-c", sys.stdin.read()], env=later).returncode)
END
runner() {
    RUNNER_TEMP=$(mktemp -d) python3 "$out/runner.py" /packages/action "$@"
}
# Runs steps that must fail, and say why to the user of the action.
refused() {
    said=$1
    shift
    if runner "$@" < /dev/null > "$out/said" 2>&1; then
        echo "it was taken: $*"
        exit 1
    fi
    grep -q "^::error::anyverbs: $said" "$out/said" || { cat "$out/said"; exit 1; }
}
file=$(echo /packages/anyverbs-*-linux-gnu)
# A runner with a device of its own, as hosted ones have it, which verbs cannot use.
mkdir -p /sys/class/infiniband/mana_0/ports/1 /sys/class/infiniband_verbs/uverbs0
echo mana_0 > /sys/class/infiniband_verbs/uverbs0/ibdev

runner "file=$file" << 'END'
sh /cases/use.sh anyverbs
[ "$(anyverbs run -- ls /sys/class/infiniband)" = anyverbs0 ]
# Nothing else of the job changes.
if ibv_devinfo > /dev/null 2>&1; then
    echo "a program found the device without the launcher"
    exit 1
fi
END
runner "file=$file" export=true device=named0 << 'END'
ibv_devinfo -d named0 | grep -q PORT_ACTIVE
[ "$(ls /sys/class/infiniband)" = named0 ]
END
# Twice in one job: the second runs with the first's environment, while the first's launcher runs.
cat > "$out/second" << 'END'
ibv_devinfo -d second0 | grep -q PORT_ACTIVE
[ "$(ls /sys/class/infiniband)" = second0 ]
END
export out file
runner "file=$file" export=true device=first0 << 'END'
[ "$(ls /sys/class/infiniband)" = first0 ]
python3 "$out/runner.py" /packages/action "file=$file" export=true device=second0 < "$out/second"
END
refused "export is true or false, not perhaps" "file=$file" export=perhaps
refused "cannot copy the file /nonexistent" file=/nonexistent
echo text > "$out/text"
refused "the command does not run on this runner" "file=$out/text"
