#!/bin/sh
# Debian's packages, installed, used, removed, and installed again.
set -eu

architecture=$(dpkg --print-architecture)
# Files that differ from their packages, and all names of files. The loader's cache is made anew each time.
state() {
    dpkg -V
    find /usr /etc /lib /bin ! -name ld.so.cache | sort
}
package() {
    dpkg "$@" > /tmp/log 2>&1 || { cat /tmp/log; exit 1; }
}
# Without the launcher the system's own library is in use, which finds no device.
no_device() {
    if ibv_devinfo > /tmp/out 2>&1; then
        echo "a program found a device without the launcher, $1"
        exit 1
    fi
}
# A launcher that runs a program as it is.
printf '#!/bin/sh\nshift 2\nexec "$@"\n' > /tmp/plain
chmod +x /tmp/plain
before=$(state)
for time in first second; do
    package -i /packages/anyverbs_*_"$architecture".deb
    [ "$(anyverbs lib-dir)" = /usr/lib/anyverbs ]
    grep -q "^libc [0-9]" /usr/share/doc/anyverbs/copyright
    anyverbs licenses | cmp - /usr/share/doc/anyverbs/copyright
    sh /cases/use.sh anyverbs
    no_device "the $time time"

    package -i /packages/anyverbs-libibverbs_*_"$architecture".deb
    sh /cases/use.sh /tmp/plain
    sh /cases/use.sh anyverbs
    # Over itself, as for a new version.
    package -i /packages/anyverbs*_"$architecture".deb
    ibv_devinfo > /tmp/out || { cat /tmp/out; exit 1; }
    # Removed, not purged, and the libraries stay.
    package -r anyverbs-libibverbs
    no_device "after the package was removed"
    package -r anyverbs
    [ "$before" = "$(state)" ] || { echo "the packages left something, or took something along"; exit 1; }
done
package -i /packages/anyverbs*_"$architecture".deb
package -P anyverbs-libibverbs anyverbs
[ "$before" = "$(state)" ] || { echo "the purged packages left something"; exit 1; }
