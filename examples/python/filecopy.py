#!/usr/bin/python3
"""Copies a file to another machine, with a progress bar.

    filecopy.py give FILE            offers the file to one client
    filecopy.py take HOST COPY       fetches it

The client READs the file out of the memory of the other process, which does nothing meanwhile.
"""
import errno
import hashlib
import os
import signal
import struct
import sys

from pyverbs.cmid import CMID, AddrInfo
from pyverbs.pyverbs_error import PyverbsError, PyverbsRDMAError
from pyverbs.qp import QPCap, QPInitAttr
import pyverbs.cm_enums as ce
import pyverbs.enums as e

PIECE = 1 << 20
# What the giver says of its file: address, key, length, digest.
OFFER = struct.Struct("!QIQ32s")
DONE = b"done"


def create(**address):
    cap = QPCap(max_send_wr=4, max_recv_wr=4, max_send_sge=1, max_recv_sge=1)
    info = AddrInfo(port_space=ce.RDMA_PS_TCP, **address)
    return CMID(creator=info, qp_init_attr=QPInitAttr(cap=cap))


def finish(completion):
    if completion.status != e.IBV_WC_SUCCESS:
        sys.exit(f"filecopy.py: completion: status {completion.status}")


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


def give(name):
    with open(name, "rb") as file:
        data = file.read()
    listener = create(src_service="7474", flags=ce.RAI_PASSIVE)
    listener.listen()
    print("waiting for a client", flush=True)
    cmid = listener.get_request()
    # Registered so that the peer may READ it.
    memory = cmid.reg_read(max(len(data), 1))
    memory.write(data, len(data))
    offer = OFFER.pack(memory.buf, memory.rkey, len(data), hashlib.sha256(data).digest())
    message = cmid.reg_msgs(OFFER.size)
    message.write(offer, OFFER.size)
    answer = cmid.reg_msgs(len(DONE))
    cmid.post_recv(answer)
    cmid.accept()
    cmid.post_send(message)
    finish(cmid.get_send_comp())
    # The memory stays registered until the client has all of it.
    finish(parted(cmid, message))
    cmid.close()


def take(host, name):
    cmid = create(dst=host, dst_service="7474")
    message = cmid.reg_msgs(OFFER.size)
    cmid.post_recv(message)
    cmid.connect()
    finish(cmid.get_recv_comp())
    address, rkey, length, digest = OFFER.unpack(message.read(OFFER.size, 0))

    piece = cmid.reg_msgs(PIECE)
    found = hashlib.sha256()
    with open(name, "wb", buffering=0) as copy:
        try:
            for begin in range(0, length, PIECE):
                size = min(PIECE, length - begin)
                cmid.post_read(piece, size, address + begin, rkey)
                finish(cmid.get_send_comp())
                data = piece.read(size, 0)
                found.update(data)
                if copy.write(data) != size:
                    sys.exit(f"filecopy.py: {name}: a short write")
                show(begin + size, length)
            if found.digest() != digest:
                sys.exit("filecopy.py: the copy differs from the file")
        except BaseException:
            # A part is no copy.
            if os.path.isfile(name):
                os.remove(name)
            raise
    print()
    done = cmid.reg_msgs(len(DONE))
    done.write(DONE, len(DONE))
    cmid.post_send(done)
    finish(cmid.get_send_comp())
    print(f"{name}: {length} bytes")
    cmid.close()


def show(done, length):
    width = 40
    filled = width * done // length
    bar = "#" * filled + "-" * (width - filled)
    print(f"\r[{bar}] {100 * done // length:3} %", end="", flush=True)


def main(words):
    if len(words) == 2 and words[0] == "give":
        give(words[1])
    elif len(words) == 3 and words[0] == "take":
        take(words[1], words[2])
    else:
        print(__doc__, file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    signal.signal(signal.SIGALRM, lambda *_: None)  # for `parted`: it ends a call that waits
    try:
        main(sys.argv[1:])
    except (PyverbsError, OSError) as error:
        sys.exit(f"filecopy.py: {error}")
