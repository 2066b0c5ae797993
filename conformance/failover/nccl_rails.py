"""NCCL's transport `net_ib` over two merged devices, of which one fails. There is no GPU.

    nccl_rails.py failover   NCCL_IB_RESILIENCY_PORT_FAILOVER: NCCL goes on with the other device
    nccl_rails.py recovery   and NCCL_IB_RESILIENCY_PORT_RECOVERY: it takes the device again when its port is up, so that the other one may
                       fail after that
    nccl_rails.py error      without them: NCCL returns the error, in time and with its cause
"""
import os
import sys

from rails import INJECTED, OWN_RULE, PYTHON, Program, bring_up, down, take_down


def main():
    mode = sys.argv[1]
    assert mode in ("failover", "recovery", "error")
    net = os.path.join(os.path.dirname(sys.argv[0]), "nccl_net.py")
    variables = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET", "NCCL_SOCKET_IFNAME": "lo",
                 "NCCL_IB_TIMEOUT": "14", "NCCL_IB_RETRY_CNT": "3",
                 "NCCL_IB_RESILIENCY_PORT_FAILOVER": str(int(mode != "error")),
                 "NCCL_IB_RESILIENCY_PORT_RECOVERY": str(int(mode == "recovery"))}
    options = ["--persona", "mlx5", "--devices", "2"]
    receiver = Program("receiver", [PYTHON, net, "receiver"], options, **variables)
    sender = Program("sender", [PYTHON, net, "sender"], options, **variables)
    sender.goes_on("message ")
    sender.says("NET/IB : Using [0]mlx5_0:1/RoCE [1]mlx5_1:1/RoCE")
    take_down(sender.number(), "mlx5_1")
    sender.says("at 127.0.0.2 failed with status 12 (IBV_WC_RETRY_EXC_ERR): " + OWN_RULE.format(down("mlx5_1")))
    if mode == "error":
        sender.says("status=IBV_WC_RETRY_EXC_ERR(12)", f"vendor_err={INJECTED}", "of NCCL returns 6")
        assert sender.ends() == 1
        print("a device was lost, and NCCL returned ncclRemoteError with the cause")
        return
    sender.says("Device 1 marked as failed")
    sender.goes_on("message ")
    if mode == "recovery":
        bring_up(sender.number())
        for side in sender, receiver:
            side.says("Device 1 has been recovered")
        take_down(sender.number(), "mlx5_0")
        sender.says("Device 0 marked as failed")
        sender.goes_on("message ")
    sender.goes_on("message ")
    open("enough", "w", encoding="ascii").close()
    assert (sender.ends(), receiver.ends()) == (0, 0), "both end well"
    sender.says("messages, all right")
    receiver.says("messages, all right")
    if mode == "failover":
        print("a device was lost, and NCCL went on with the other one: the data is right")
    else:
        print("a device was lost and came back, then the other one was lost, and NCCL went on: the data is right")


main()
