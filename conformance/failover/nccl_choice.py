"""The GID and the place on the PCI bus that NCCL's transport `net_ib` takes for two devices, which it merges. No device fails here.

    nccl_choice.py mlx5|irdma|bnxt|ionic|mana    the persona of the devices

The GIDs are those that the listings in the personas' files call usable. NCCL's own choice between NICs goes by GPUs, and there is none.
"""
import os
import re
import sys

from rails import PYTHON, Program

GIDS = {"mlx5": 3, "irdma": 1, "bnxt": 3, "ionic": 1, "mana": 1}


def main():
    persona = sys.argv[1]
    net = os.path.join(os.path.dirname(sys.argv[0]), "nccl_net.py")
    variables = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET", "NCCL_SOCKET_IFNAME": "lo"}
    options = ["--persona", persona, "--devices", "2"]
    receiver = Program("receiver", [PYTHON, net, "receiver"], options, **variables)
    sender = Program("sender", [PYTHON, net, "sender"], options, **variables)
    sender.goes_on("message ")
    open("enough", "w", encoding="ascii").close()
    assert (sender.ends(), receiver.ends()) == (0, 0), "both end well"
    said = sender.output()
    # The lowest bytes of the address, in the order of the network.
    chosen = re.findall(r"IbDev (\d) Port 1 qp_num \d+ mtu \d GID (\d+) \(0/([0-9A-F]+)\)", said)
    wanted = [(str(at), str(GIDS[persona]), f"{at + 1}00007FFFFF0000") for at in range(2)]
    assert chosen == wanted, f"{chosen}, not {wanted}"
    places = re.findall(r"pciPath=/sys/devices/pcia17b:00/a17b:00:0(\d).0/a17b:0(\d):00.0 ", said)
    assert places == [("1", "1"), ("2", "2")], places
    print(f"GID {GIDS[persona]} of both devices, each behind its bridge of PCI")


main()
