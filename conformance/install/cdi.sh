#!/bin/sh
# The description for container engines, applied as an engine applies it to a root where nothing is installed.
set -eu

cd /tmp
tar xzf /packages/anyverbs-*-linux-gnu.tar.gz
anyverbs-*-linux-gnu/install.sh --prefix /opt/anyverbs > /dev/null
/opt/anyverbs/bin/anyverbs cdi --output /etc/cdi/anyverbs.json
/opt/anyverbs/bin/anyverbs cdi | cmp - /etc/cdi/anyverbs.json

# The directory in place of a file. Nothing is left beside it.
if /opt/anyverbs/bin/anyverbs cdi --output /etc/cdi 2> /tmp/out; then
    echo "a directory was taken as a file"
    exit 1
fi
grep -q "name a file in it" /tmp/out || { cat /tmp/out; exit 1; }
[ ! -e /etc/cdi.new ]

mkdir /container
mount --bind / /container
mount -t tmpfs tmpfs /container/opt
mount -t tmpfs -o mode=1777 tmpfs /container/tmp
mount -t proc proc /container/proc
mount --bind /cases /container/cases
cat > /tmp/engine.py << 'END'
"""Runs a program in /container with a device: engine.py SPECIFICATION DEVICE PROGRAM..."""
import json
import os
import subprocess
import sys

specification = json.load(open(sys.argv[1]))
kind, name = sys.argv[2].split("=")
assert specification["kind"] == kind
(device,) = [device for device in specification["devices"] if device["name"] == name]
edits = device["containerEdits"]
assert set(edits) == {"env", "mounts"}, edits
for mount in edits["mounts"]:
    source, place = mount["hostPath"], "/container" + mount["containerPath"]
    if os.path.ismount(place):
        continue
    if os.path.isdir(source):
        os.makedirs(place, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(place), exist_ok=True)
        open(place, "a").close()
    options = ",".join(option for option in mount["options"] if option != "bind")
    subprocess.run(["mount", "--bind", source, place], check=True)
    subprocess.run(["mount", "-o", "remount,bind," + options, place], check=True)
# The search path of an ordinary image.
env = dict(os.environ, PATH="/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
env.update(variable.split("=", 1) for variable in edits["env"])
sys.exit(subprocess.run(["chroot", "/container"] + sys.argv[3:], env=env).returncode)
END
engine() {
    python3 /tmp/engine.py /etc/cdi/anyverbs.json anyverbs/rdma=anyverbs0 "$@"
}
if chroot /container ibv_devinfo > /tmp/out 2>&1; then
    echo "a container without the device has one"
    exit 1
fi
as_user="setpriv --reuid 12345 --regid 12345 --clear-groups"
for user in "" "$as_user"; do
    engine $user ibv_devinfo > /tmp/out || { cat /tmp/out; exit 1; }
    grep -q PORT_ACTIVE /tmp/out
    engine $user sh /cases/use.sh anyverbs
    [ "$(engine $user anyverbs run -- ls /sys/class/infiniband)" = anyverbs0 ]
done
if engine touch /usr/local/lib/anyverbs/new 2> /tmp/out; then
    echo "the container can write into the libraries"
    exit 1
fi

# The command as one file keeps its libraries where only its user can read them.
if message=$(/packages/anyverbs-*-linux-gnu cdi 2>&1); then
    echo "it gives containers a directory that they cannot read"
    exit 1
fi
case $message in
    *"other users cannot read"*"--lib-dir"*) ;;
    *) echo "$message"; exit 1 ;;
esac
