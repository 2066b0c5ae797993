"""Prometheus' node_exporter, unmodified, reads the counters of two devices.

    node_exporter.py mlx5    with this persona, whose board and firmware it shows as well

It is written in Go and makes system calls without libc, so the view of `anyverbs run` does not reach it. `anyverbs sysfs` keeps a tree
that any program reads. The script lets programs talk, fetches the page of metrics from the loopback, and compares each value
with the file in that tree. It also sees that below `anyverbs run` node_exporter shows the host's own devices alone, as docs/limits.md says.

ANYVERBS may say where the command is. It needs Debian's prometheus-node-exporter, perftest, and an empty folder to run in.
"""
import atexit
import os
import re
import subprocess
import sys
import time
import urllib.request

ANYVERBS = os.environ.get("ANYVERBS", "anyverbs")
EXPORTER = "prometheus-node-exporter"
OPTIONS = ["--collector.disable-defaults", "--collector.infiniband"]
DEVICES = ["mlx5_0", "mlx5_1"]
LIMIT = 60
# Messages of each client, all to the first device of the server.
COUNT, SIZE = 1000, 65536

# Each metric of a port, its file, and the factor.
PORT = {
    "port_data_transmitted_bytes_total": ("counters/port_xmit_data", 4),
    "port_data_received_bytes_total": ("counters/port_rcv_data", 4),
    "port_packets_transmitted_total": ("counters/port_xmit_packets", 1),
    "port_packets_received_total": ("counters/port_rcv_packets", 1),
    "port_errors_received_total": ("counters/port_rcv_errors", 1),
    "port_discards_transmitted_total": ("counters/port_xmit_discards", 1),
    "symbol_error_total": ("counters/symbol_error", 1),
    "state_id": ("state", 1),
    "physical_state_id": ("phys_state", 1),
    "rate_bytes_per_second": ("rate", 1e9 / 8),
}

assert sys.argv[1:] == ["mlx5"], "the persona?"
os.environ.update(ANYVERBS_PERSONA="mlx5", ANYVERBS_DEVICES="2")
started = []


def start(name, *words):
    with open(name + ".out", "wb") as output:
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
    started.append(process)
    return process


def stop():
    for process in started:
        process.terminate()
    for process in started:
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()


def wait_for(condition, what):
    end = time.monotonic() + LIMIT
    while True:
        found = condition()
        if found:
            return found
        assert time.monotonic() < end, f"in {LIMIT} s there was not: {what}"
        time.sleep(0.05)


def fetch(port):
    """The metrics of InfiniBand devices: each name and its labels, with the value."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as page:
            text = page.read().decode()
    except OSError:
        return None
    found = re.findall(r'^node_infiniband_(\w+)\{(.*)\} (\S+)$', text, re.MULTILINE)
    assert 'node_scrape_collector_success{collector="infiniband"}' in text, text[-2000:]
    return {(name, labels): float(value) for name, labels, value in found}


def of_tree(device, file):
    """The number at the beginning of a file."""
    with open(f"tree/sys/class/infiniband/{device}/ports/1/{file}", encoding="ascii") as text:
        return float(re.match(r"[\d.]+", text.read())[0])


def counters():
    return {(device, name): of_tree(device, file) * factor for device in DEVICES for name, (file, factor) in PORT.items()}


def exporter(name, port, *words):
    start(name, *words, EXPORTER, *OPTIONS, f"--web.listen-address=127.0.0.1:{port}",
          *([] if words else ["--path.sysfs=tree/sys"]))
    return wait_for(lambda: fetch(port), f"metrics on port {port}") if not words else wait_for(
        lambda: fetch(port) is not None, f"a page on port {port}")


def talk(device):
    """A client on a device writes to the server's first one."""
    server = start("server", ANYVERBS, "run", "--", "ib_write_bw", "-d", DEVICES[0], "-s", str(SIZE), "-n", str(COUNT))
    wait_for(lambda: ":4853 " in open("/proc/net/tcp", encoding="ascii").read() + open("/proc/net/tcp6", encoding="ascii").read(),
             "a server that listens at port 18515")
    client = start("client", ANYVERBS, "run", "--", "ib_write_bw", "-d", device, "-s", str(SIZE), "-n", str(COUNT), "127.0.0.1")
    for name, process in (("client", client), ("server", server)):
        assert process.wait(LIMIT) == 0, open(name + ".out", encoding="utf-8").read()
    started.remove(server)
    started.remove(client)


def main():
    tree = start("sysfs", ANYVERBS, "sysfs", "tree")
    wait_for(lambda: os.path.exists("tree/sys/class/infiniband/mlx5_1/ports/1/counters/port_xmit_data"), "the tree of two devices")
    before = exporter("exporter", 19100)
    assert {labels for name, labels in before if name == "state_id"} == {f'device="{d}",port="1"' for d in DEVICES}, before
    info = [labels for name, labels in before if name == "info"]
    assert all('board_id="MT_0000000436"' in labels and 'firmware_version="22.38.1900"' in labels for labels in info), info
    assert len(info) == 2, info

    # One client of each device, so that their counters differ.
    talk(DEVICES[0])
    talk(DEVICES[1])
    sent = COUNT * SIZE
    wait_for(lambda: of_tree(DEVICES[1], "counters/port_xmit_data") * 4 >= sent, "bytes of the second device in the tree")

    def same():
        """What one page and the tree say, if that is still the same after the page."""
        tree = counters()
        page = fetch(19100)
        return (tree, page) if counters() == tree else None
    tree_says, page = wait_for(same, "counters that stand still")
    for (device, name), value in tree_says.items():
        shown = page[(name, f'device="{device}",port="1"')]
        assert shown == value, f"{device} {name}: the page says {shown}, and the tree {value}"
    grown = {d: page[("port_data_transmitted_bytes_total", f'device="{d}",port="1"')] for d in DEVICES}
    assert grown[DEVICES[1]] >= sent and grown[DEVICES[0]] >= sent, grown
    assert page[("state_id", 'device="mlx5_0",port="1"')] == 4
    assert page[("rate_bytes_per_second", 'device="mlx5_0",port="1"')] == 12.5e9
    assert tree.poll() is None, "the tree is kept"

    # The view does not reach it: there is the host's own, which has none of these devices.
    exporter("viewed", 19101, ANYVERBS, "run", "--")
    assert not any(device in labels for _, labels in fetch(19101) for device in DEVICES), "the view reaches it: say so in docs/top.md"
    print(f"{len(tree_says)} metrics of two devices are those of the tree, and {int(grown[DEVICES[1]])} bytes of the second one are in them")


if os.listdir("."):
    sys.exit("run this in an empty folder")
atexit.register(stop)
main()
