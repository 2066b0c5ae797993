#!/bin/sh
# Debian's packages, installed, used and removed.
set -eu

architecture=$(dpkg --print-architecture)
# Files that differ from their packages, and all names of files. The loader's cache is made anew each time.
state() {
    dpkg -V
    find /usr /etc /lib /bin ! -name ld.so.cache | sort
}
before=$(state)
dpkg -i /packages/anyverbs_*_"$architecture".deb > /tmp/log || { cat /tmp/log; exit 1; }
[ "$(anyverbs lib-dir)" = /usr/lib/anyverbs ]
sh /cases/use.sh anyverbs
# Without the launcher the system's own library is in use, which finds no device.
if ibv_devinfo > /tmp/out 2>&1; then
    echo "a program found a device without the launcher"
    exit 1
fi

dpkg -i /packages/anyverbs-libibverbs_*_"$architecture".deb > /tmp/log || { cat /tmp/log; exit 1; }
ibv_devinfo > /tmp/out || { cat /tmp/out; exit 1; }
grep -q PORT_ACTIVE /tmp/out
dpkg -P anyverbs-libibverbs anyverbs > /tmp/log || { cat /tmp/log; exit 1; }
if ibv_devinfo > /tmp/out 2>&1; then
    echo "the device stayed after the package was removed"
    exit 1
fi
after=$(state)
[ "$before" = "$after" ] || { echo "the packages left something, or took something along"; exit 1; }
