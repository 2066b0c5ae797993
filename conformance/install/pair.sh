# Defines `pair SERVER CLIENT`: runs a server, and its client until that reaches it. Their output lies in $out.
out=$(mktemp -d)

pair() {
    server=$1 client=$2
    $server > "$out/server" 2>&1 &
    pid=$!
    tries=0
    until $client > "$out/client" 2>&1; do
        tries=$((tries + 1))
        if [ $tries -ge 100 ] || ! kill -0 $pid 2> "$out/alive"; then
            echo "failed: $client"
            cat "$out/server" "$out/client"
            exit 1
        fi
        sleep 0.1
    done
    wait $pid || { echo "failed: $server"; cat "$out/server"; exit 1; }
}
