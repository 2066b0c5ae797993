#!/bin/sh
# The step of the action: puts `anyverbs` on the PATH of later steps and, if asked, the device into their environment.
set -eu

fail() {
    echo "::error::anyverbs: $1"
    exit 1
}

bin=$RUNNER_TEMP/anyverbs/bin
mkdir -p "$bin"
# Under a new name first: an earlier step of the job may have exported a device, whose launcher still runs.
fresh=$bin/anyverbs.new
if [ -n "$ANYVERBS_SETUP_FILE" ]; then
    cp "$ANYVERBS_SETUP_FILE" "$fresh" || fail "cannot copy the file $ANYVERBS_SETUP_FILE"
else
    name=anyverbs-$ANYVERBS_SETUP_VERSION-$(uname -m)-linux-gnu
    url=https://github.com/anyverbs/anyverbs/releases/download/v$ANYVERBS_SETUP_VERSION/$name
    curl --fail --silent --show-error --location --retry 3 --output "$fresh" "$url" ||
        fail "cannot download $url"
fi
chmod +x "$fresh"
"$fresh" --version || fail "the command does not run on this runner"
mv "$fresh" "$bin/anyverbs"
echo "$bin" >> "$GITHUB_PATH"
echo "ANYVERBS_DEVICE=$ANYVERBS_SETUP_DEVICE" >> "$GITHUB_ENV"
export ANYVERBS_DEVICE="$ANYVERBS_SETUP_DEVICE"
"$bin/anyverbs" devices

case $ANYVERBS_SETUP_EXPORT in
    true) ;;
    false) exit 0 ;;
    *) fail "export is true or false, not $ANYVERBS_SETUP_EXPORT" ;;
esac
# The view of /sys, which hides devices of the runner's own, is there for as long as this launcher runs. The runner ends it with the job.
out=$RUNNER_TEMP/anyverbs/environment
rm -f "$out"
nohup "$bin/anyverbs" run -- sh -c '
    for name in LD_LIBRARY_PATH LD_PRELOAD ANYVERBS_VIEW; do
        eval "echo $name=\$$name"
    done > "$0.new"
    mv "$0.new" "$0"
    exec sleep infinity' "$out" > "$RUNNER_TEMP/anyverbs/log" 2>&1 < /dev/null &
launcher=$!
while [ ! -e "$out" ]; do
    if ! kill -0 $launcher 2> /dev/null; then
        cat "$RUNNER_TEMP/anyverbs/log"
        fail "the device cannot be exported"
    fi
    sleep 0.1
done
cat "$out" >> "$GITHUB_ENV"
