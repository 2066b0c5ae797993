"""The GID of each device, and the NICs of a NUMA node, that Mooncake's transfer engine chooses by itself.

    mooncake_choice.py mlx5|irdma|bnxt|ionic|mana|rxe    the GID, on two devices of this persona
    mooncake_choice.py numa                              the NICs, of two devices on different NUMA nodes

The GIDs are those that the listings in the personas' files call usable. ANYVERBS may say where the command is, and PYTHON which Python has
Mooncake. It needs an empty folder to run in.
"""
import json
import os
import re
import subprocess
import sys

ANYVERBS = os.environ.get("ANYVERBS", "anyverbs")
PYTHON = os.environ.get("PYTHON", sys.executable)
GIDS = {"mlx5": 3, "irdma": 1, "bnxt": 3, "ionic": 1, "mana": 1, "rxe": 1}
NIC = """device = "nic0"
vendor_id = 1
vendor_part_id = 2
fw_ver = "3.4"
rate = 100
[gids]
types = ["RoCE v1", "RoCE v2"]
link_local = true
[pci]
vendor = 5
device = 6
class = 0x020000
driver = "own"
speed = 160
width = 16
numa_nodes = [1, 0]
"""
# It begins as programs do that name no device, and prints what it found.
CHOOSE = """
import os
from mooncake.engine import TransferEngine
engine = TransferEngine()
assert engine.initialize("127.0.0.1:12345", "P2PHANDSHAKE", "rdma", "") == 0
print("topology", " ".join(engine.get_local_topology().split()), flush=True)
os._exit(0)
"""


def choose(persona):
    """Mooncake's log and its topology."""
    said = subprocess.run([ANYVERBS, "run", "--persona", persona, "--devices", "2", "--", PYTHON, "-c", CHOOSE],
                          env={**os.environ, "GLOG_logtostderr": "1"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          text=True, timeout=100, check=False)
    assert said.returncode == 0, said.stdout
    topology = re.search("^topology (.*)$", said.stdout, re.MULTILINE)
    assert topology, said.stdout
    return said.stdout, json.loads(topology[1])


def main():
    case = sys.argv[1]
    if case == "numa":
        with open("nic.toml", "w", encoding="ascii") as file:
            file.write(NIC)
        _, topology = choose("nic.toml")
        # The host has node 0. Its memory goes by the second NIC, and by the first one if that fails.
        assert topology["cpu:0"] == [["nic1"], ["nic0"]], topology
        print("memory of node 0 goes by the NIC of node 0, and by the other one if that fails")
        return
    log, topology = choose(case)
    found = {(device, int(index)) for index, device in re.findall(r"Find best gid index: (\d+) on (\S+)/1 ", log)}
    devices = {device for device, _ in found}
    assert len(devices) == 2 and found == {(device, GIDS[case]) for device in devices}, (found, log)
    assert sorted(name for names in topology["cpu:0"] for name in names) == sorted(devices), topology
    print(f"GID {GIDS[case]} of " + " and ".join(sorted(devices)))


if os.listdir("."):
    sys.exit("run this in an empty folder")
main()
