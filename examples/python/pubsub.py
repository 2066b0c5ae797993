#!/usr/bin/python3
"""Publish and subscribe: datagrams to a multicast group reach every subscriber.

    pubsub.py sub GROUP COUNT       prints so many messages
    pubsub.py pub GROUP TEXT ...    sends one message for each text

GROUP is an address such as 239.7.4.1. Datagrams are not acknowledged: a subscriber that is slow or late misses some.
"""
import socket
import sys

from pyverbs.addr import AH
from pyverbs.cmid import CMID, AddrInfo, CMEvent, CMEventChannel, UDParam
from pyverbs.pyverbs_error import PyverbsError
from pyverbs.qp import QPCap, QPInitAttr
import pyverbs.cm_enums as ce
import pyverbs.enums as e

SIZE = 256
GRH = 40
DEPTH = 16


def expect(channel, wanted):
    """The next event of the connection manager, which must be this one."""
    event = CMEvent(channel)
    if event.event_type != wanted:
        sys.exit(f"pubsub.py: {event.event_str().decode()}")
    return event


def finish(completion):
    if completion.status != e.IBV_WC_SUCCESS:
        sys.exit(f"pubsub.py: completion: status {completion.status}")
    return completion


def address(name):
    return AddrInfo(src=name, port_space=ce.RDMA_PS_UDP, flags=ce.RAI_PASSIVE)


def own_towards(group):
    """Our address on the interface to which the route to the group leads. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route:
        route.connect((group, 1))
        return route.getsockname()[0]


def join(group):
    """An id that is in the group at this address, and how its members are reached."""
    channel = CMEventChannel()
    cmid = CMID(creator=channel, port_space=ce.RDMA_PS_UDP)
    cmid.bind_addr(address(own_towards(group)))
    cmid.resolve_addr(AddrInfo(dst=group, port_space=ce.RDMA_PS_UDP))
    expect(channel, ce.RDMA_CM_EVENT_ADDR_RESOLVED).ack_cm_event()
    cap = QPCap(max_send_wr=DEPTH, max_recv_wr=DEPTH, max_send_sge=1, max_recv_sge=1)
    cmid.create_qp(QPInitAttr(qp_type=e.IBV_QPT_UD, cap=cap, sq_sig_all=1))
    cmid.join_multicast(addr=address(group))
    event = expect(channel, ce.RDMA_CM_EVENT_MULTICAST_JOIN)
    members = UDParam(event)
    event.ack_cm_event()
    return cmid, members


def leave(cmid, group):
    cmid.leave_multicast(address(group))
    cmid.close()


def publish(group, texts):
    cmid, members = join(group)
    handle = AH(cmid.pd, attr=members.ah_attr)
    memory = cmid.reg_msgs(SIZE)
    for text in texts:
        message = text.encode()[:SIZE]
        memory.write(message, len(message))
        cmid.post_ud_send(memory, handle, rqpn=members.qp_num, length=len(message))
        finish(cmid.get_send_comp())
    handle.close()
    leave(cmid, group)


def subscribe(group, count):
    cmid, _ = join(group)
    # A datagram arrives with room for its headers before it. Receives are used in the order in which they were posted.
    places = [cmid.reg_msgs(GRH + SIZE) for _ in range(DEPTH)]
    for place in places:
        cmid.post_recv(place)
    print(f"subscribed to {group}", flush=True)
    for number in range(count):
        completion = finish(cmid.get_recv_comp())
        place = places[number % DEPTH]
        print(place.read(completion.byte_len - GRH, GRH).decode(errors="replace"), flush=True)
        cmid.post_recv(place)
    leave(cmid, group)


def main(words):
    if len(words) == 3 and words[0] == "sub" and words[2].isdecimal() and int(words[2]) > 0:
        subscribe(words[1], int(words[2]))
    elif len(words) > 2 and words[0] == "pub":
        publish(words[1], words[2:])
    else:
        print(__doc__, file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (PyverbsError, OSError) as error:
        sys.exit(f"pubsub.py: {error}")
