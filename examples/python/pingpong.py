#!/usr/bin/python3
"""Ping-pong: a message goes there and back, 1000 times.

    pingpong.py           the server, for one client
    pingpong.py HOST      the client
"""
import sys
import time

from pyverbs.cmid import CMID, AddrInfo
from pyverbs.pyverbs_error import PyverbsError
from pyverbs.qp import QPCap, QPInitAttr
import pyverbs.cm_enums as ce
import pyverbs.enums as e

ROUNDS = 1000
SIZE = 64


def create(host):
    """An id of the connection manager, whose connections get such a queue pair."""
    if host:
        info = AddrInfo(dst=host, dst_service="7473", port_space=ce.RDMA_PS_TCP)
    else:
        info = AddrInfo(src_service="7473", port_space=ce.RDMA_PS_TCP, flags=ce.RAI_PASSIVE)
    cap = QPCap(max_send_wr=2, max_recv_wr=2, max_send_sge=1, max_recv_sge=1)
    return CMID(creator=info, qp_init_attr=QPInitAttr(cap=cap))


def finish(completion):
    if completion.status != e.IBV_WC_SUCCESS:
        sys.exit(f"pingpong.py: completion: status {completion.status}")


def main(words):
    if len(words) > 1 or any(word.startswith("-") for word in words):
        print(__doc__, file=sys.stderr)
        sys.exit(2)
    host = words[0] if words else None
    cmid = create(host)
    if not host:
        listener = cmid
        listener.listen()
        print("waiting for a client", flush=True)
        cmid = listener.get_request()

    # The device sends from this memory and receives into it.
    sent = cmid.reg_msgs(SIZE)
    received = cmid.reg_msgs(SIZE)
    sent.write("ping".ljust(SIZE, "."), SIZE)

    # A receive is posted before the message comes.
    cmid.post_recv(received)
    if host:
        cmid.connect()
    else:
        cmid.accept()

    begin = time.monotonic()
    for _ in range(ROUNDS):
        if not host:  # the server answers with what it got
            finish(cmid.get_recv_comp())
            sent.write(received.read(SIZE, 0), SIZE)
            cmid.post_recv(received)
        cmid.post_send(sent)
        finish(cmid.get_send_comp())
        if host:
            finish(cmid.get_recv_comp())
            if received.read(SIZE, 0) != sent.read(SIZE, 0):
                sys.exit("pingpong.py: the answer differs")
            cmid.post_recv(received)
    if host:
        each = (time.monotonic() - begin) / ROUNDS * 1e6
        print(f"{ROUNDS} messages of {SIZE} bytes there and back, {each:.1f} us each")
    cmid.close()


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except PyverbsError as error:
        sys.exit(f"pingpong.py: {error}")
