#!/usr/bin/python3
"""Remote procedure calls: a client sends numbers, the server answers with their sums.

    rpc.py serve CALLS           answers so many calls of one client
    rpc.py call HOST A,B,... ... calls once for each list
"""
import struct
import sys

from pyverbs.cmid import CMID, AddrInfo
from pyverbs.pyverbs_error import PyverbsError
from pyverbs.qp import QPCap, QPInitAttr
import pyverbs.cm_enums as ce
import pyverbs.enums as e

# What travels is in network byte order. A reply names its request, so that several could be under way.
REQUEST = struct.Struct("!II")  # id and count; as many numbers follow
REPLY = struct.Struct("!IQ")  # id and sum
MOST = 30
SIZE = REQUEST.size + 4 * MOST


def create(**address):
    """An id of the connection manager, whose connections get such a queue pair."""
    cap = QPCap(max_send_wr=4, max_recv_wr=4, max_send_sge=1, max_recv_sge=1)
    info = AddrInfo(port_space=ce.RDMA_PS_TCP, **address)
    return CMID(creator=info, qp_init_attr=QPInitAttr(cap=cap))


def finish(completion):
    """Tells how many bytes came."""
    if completion.status != e.IBV_WC_SUCCESS:
        sys.exit(f"rpc.py: completion: status {completion.status}")
    return completion.byte_len


def send(cmid, memory, message):
    memory.write(message, len(message))
    cmid.post_send(memory, length=len(message))
    finish(cmid.get_send_comp())


def receive(cmid, memory):
    return memory.read(finish(cmid.get_recv_comp()), 0)


def unpack(request):
    """The request's id and numbers. A peer's message is data: look before you believe."""
    if len(request) < REQUEST.size:
        sys.exit(f"rpc.py: a request of {len(request)} bytes")
    number, count = REQUEST.unpack_from(request)
    if count > MOST or len(request) != REQUEST.size + 4 * count:
        sys.exit(f"rpc.py: a request of {len(request)} bytes with {count} numbers")
    return number, struct.unpack_from(f"!{count}I", request, REQUEST.size)


def serve(calls):
    listener = create(src_service="7479", flags=ce.RAI_PASSIVE)
    listener.listen()
    print("waiting for calls", flush=True)
    cmid = listener.get_request()
    incoming, outgoing = cmid.reg_msgs(SIZE), cmid.reg_msgs(SIZE)
    cmid.post_recv(incoming)
    cmid.accept()
    for _ in range(calls):
        number, numbers = unpack(receive(cmid, incoming))
        # The next request may come as soon as the reply is there.
        cmid.post_recv(incoming)
        send(cmid, outgoing, REPLY.pack(number, sum(numbers)))
    cmid.close()


def call(host, lists):
    cmid = create(dst=host, dst_service="7479")
    incoming, outgoing = cmid.reg_msgs(SIZE), cmid.reg_msgs(SIZE)
    cmid.connect()
    for number, numbers in enumerate(lists):
        cmid.post_recv(incoming)
        send(cmid, outgoing, REQUEST.pack(number, len(numbers)) + struct.pack(f"!{len(numbers)}I", *numbers))
        reply = receive(cmid, incoming)
        if len(reply) != REPLY.size or REPLY.unpack(reply)[0] != number:
            sys.exit("rpc.py: not a reply to this request")
        print(f"sum({','.join(map(str, numbers))}) = {REPLY.unpack(reply)[1]}")
    cmid.close()


def numbers_of(text):
    """The numbers of `A,B,...`, each of which fits 32 bits."""
    numbers = [int(word) for word in text.split(",")]
    if len(numbers) > MOST or not all(0 <= number < 1 << 32 for number in numbers):
        raise ValueError(text)
    return numbers


def main(words):
    try:
        if len(words) == 2 and words[0] == "serve" and int(words[1]) > 0:
            todo = serve, int(words[1])
        elif len(words) > 2 and words[0] == "call":
            todo = call, words[1], [numbers_of(word) for word in words[2:]]
        else:
            raise ValueError(words)
    except ValueError:
        print(__doc__, file=sys.stderr)
        sys.exit(2)
    try:
        todo[0](*todo[1:])
    except PyverbsError as error:
        sys.exit(f"rpc.py: {error}")


if __name__ == "__main__":
    main(sys.argv[1:])
