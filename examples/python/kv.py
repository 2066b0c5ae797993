#!/usr/bin/python3
"""A key-value store whose clients look values up by one-sided READs. The server does nothing for a lookup.

    kv.py serve CLIENTS KEY=VALUE ...    ends after so many clients
    kv.py get HOST KEY ...
"""
import errno
import signal
import struct
import sys
import zlib

from pyverbs.cmid import CMID, AddrInfo
from pyverbs.pyverbs_error import PyverbsError, PyverbsRDMAError
from pyverbs.qp import QPCap, QPInitAttr
import pyverbs.cm_enums as ce
import pyverbs.enums as e

# The table is an array of slots. A key's hash says where the search for it begins; the search ends at an empty slot.
SLOTS = 1024
# A checksum of the rest, lengths of key and value, and both. An empty slot is zero.
SLOT = struct.Struct("!IBB122s")
# What the server says of its table: address and key.
OFFER = struct.Struct("!QI")
DONE, NONE = b"done", b"(none)"
# READs of a slot that is being written.
TRIES = 1000


def create(**address):
    """An id of the connection manager, whose connections get such a queue pair."""
    cap = QPCap(max_send_wr=4, max_recv_wr=4, max_send_sge=1, max_recv_sge=1)
    info = AddrInfo(port_space=ce.RDMA_PS_TCP, **address)
    return CMID(creator=info, qp_init_attr=QPInitAttr(cap=cap))


def finish(completion):
    if completion.status != e.IBV_WC_SUCCESS:
        sys.exit(f"kv.py: completion: status {completion.status}")


def parted(cmid, memory):
    """Waits for the client's last message. Every few seconds a WRITE of no bytes, which fails then, tells whether it has died."""
    while True:
        signal.setitimer(signal.ITIMER_REAL, 2, 2)
        try:
            return cmid.get_recv_comp()
        except PyverbsRDMAError as error:
            if error.error_code != errno.EINTR:
                raise
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        cmid.post_write(memory, 0, 0, 0)
        completion = cmid.get_send_comp()
        if completion.status != e.IBV_WC_SUCCESS:
            return completion


def search(key):
    """Where the slots lie in which a key may be, in this order."""
    begin = zlib.crc32(key)
    return ((begin + step) % SLOTS * SLOT.size for step in range(SLOTS))


def pack(key, value):
    rest = SLOT.pack(0, len(key), len(value), key + value)[4:]
    return struct.pack("!I", zlib.crc32(rest) or 1) + rest


def serve(clients, pairs):
    table = bytearray(SLOTS * SLOT.size)
    for key, value in pairs:
        at = next((at for at in search(key) if not any(table[at:at + SLOT.size])), None)
        if at is None:
            sys.exit("kv.py: the table is full")
        table[at:at + SLOT.size] = pack(key, value)
    listener = create(src_service="7480", flags=ce.RAI_PASSIVE)
    listener.listen()
    print(f"serving {len(pairs)} keys", flush=True)
    for _ in range(clients):
        cmid = listener.get_request()
        # Registered so that the peer may READ it.
        memory = cmid.reg_read(len(table))
        memory.write(bytes(table), len(table))
        offer, done = cmid.reg_msgs(OFFER.size), cmid.reg_msgs(len(DONE))
        offer.write(OFFER.pack(memory.buf, memory.rkey), OFFER.size)
        cmid.post_recv(done)
        cmid.accept()
        cmid.post_send(offer)
        finish(cmid.get_send_comp())
        # The client says when it is done. Meanwhile there is nothing to do.
        if parted(cmid, offer).status != e.IBV_WC_SUCCESS:
            print("kv.py: a client has died", file=sys.stderr)
        cmid.close()


def get(host, keys):
    cmid = create(dst=host, dst_service="7480")
    offer, slot, done = (cmid.reg_msgs(size) for size in (OFFER.size, SLOT.size, len(DONE)))
    cmid.post_recv(offer)
    cmid.connect()
    finish(cmid.get_recv_comp())
    address, rkey = OFFER.unpack(offer.read(OFFER.size, 0))

    def read(at):
        """Key and value of a slot."""
        for _ in range(TRIES):
            cmid.post_read(slot, SLOT.size, address + at, rkey)
            finish(cmid.get_send_comp())
            data = slot.read(SLOT.size, 0)
            checksum, key, value, text = SLOT.unpack(data)
            if checksum in (0, zlib.crc32(data[4:]) or 1):
                return (text[:key], text[key:key + value]) if checksum else (None, NONE)
        sys.exit("kv.py: the checksum of a slot stays wrong")

    for key in keys:
        for at in search(key):
            found, value = read(at)
            if found in (key, None):
                break
        else:
            value = NONE
        print(f"{key.decode()} = {value.decode(errors='replace')}")
    done.write(DONE, len(DONE))
    cmid.post_send(done)
    finish(cmid.get_send_comp())
    cmid.close()


def main(words):
    pairs = [word.encode().split(b"=", 1) for word in words[2:]]
    clients = int(words[1]) if len(words) > 1 and words[1].isdecimal() else 0
    if pairs and words[0] == "serve" and clients > 0 and all(len(pair) == 2 for pair in pairs):
        if any(len(key) + len(value) > 122 for key, value in pairs):
            sys.exit("kv.py: key and value are longer than a slot")
        serve(clients, pairs)
    elif pairs and words[0] == "get":
        get(words[1], [word.encode() for word in words[2:]])
    else:
        print(__doc__, file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    signal.signal(signal.SIGALRM, lambda *_: None)  # for `parted`: it ends a call that waits
    try:
        main(sys.argv[1:])
    except PyverbsError as error:
        sys.exit(f"kv.py: {error}")
