#!/usr/bin/env python3
"""Check the ICRC of every RoCEv2 packet in classic pcap files of Ethernet frames, and count opcodes by sender.

    icrc_check.py [--json] FILE...

Shares no code with the device: an ICRC that both get wrong in the same way is still found here. Exit status 1 if an
ICRC is wrong or a frame is cut short.
"""
import collections
import ipaddress
import json
import struct
import sys
import zlib

ROCE_PORT = 4791
ETHERTYPE_IPV4, ETHERTYPE_IPV6 = 0x0800, 0x86DD
UDP = 17
BTH_LEN, ICRC_LEN = 12, 4


def frames(path):
    """Number (from 1, as in Wireshark), bytes and whether all of the frame was captured."""
    with open(path, "rb") as file:
        header = file.read(24)
        order = {b"\xd4\xc3\xb2\xa1": "<", b"\xa1\xb2\xc3\xd4": ">", b"\x4d\x3c\xb2\xa1": "<", b"\xa1\xb2\x3c\x4d": ">"}
        if len(header) != 24 or header[:4] not in order:
            sys.exit(f"{path}: not a classic pcap file")
        order = order[header[:4]]
        if struct.unpack_from(order + "I", header, 20)[0] & 0xFFFF != 1:
            sys.exit(f"{path}: not Ethernet")
        number = 0
        while record := file.read(16):
            number += 1
            if len(record) != 16:
                sys.exit(f"{path}: cut short in frame {number}")
            captured, length = struct.unpack_from(order + "II", record, 8)
            frame = file.read(captured)
            yield number, frame, len(frame) == length


def packet(frame):
    """Sender, IP packet without padding and offset of the UDP header; None if this is not RoCEv2."""
    if len(frame) < 14:
        return None
    ethertype, = struct.unpack_from(">H", frame, 12)
    ip = frame[14:]
    if ethertype == ETHERTYPE_IPV4 and len(ip) >= 20 and ip[9] == UDP:
        udp, length = (ip[0] & 15) * 4, struct.unpack_from(">H", ip, 2)[0]
        sender = ipaddress.IPv4Address(ip[12:16])
    elif ethertype == ETHERTYPE_IPV6 and len(ip) >= 40 and ip[6] == UDP:
        udp, length = 40, 40 + struct.unpack_from(">H", ip, 4)[0]
        sender = ipaddress.IPv6Address(ip[8:24])
    else:
        return None
    ip = ip[:length]
    if len(ip) < udp + 8 or struct.unpack_from(">H", ip, udp + 2)[0] != ROCE_PORT:
        return None
    return str(sender), ip, udp


def icrc(ip, udp):
    """The ICRC that the packet should have: CRC-32 over 8 bytes of ones, then all but the ICRC, what routers change masked to ones."""
    masked = bytearray(ip[:-ICRC_LEN])
    if ip[0] >> 4 == 4:
        masked[1] = 0xFF  # type of service
        masked[8] = 0xFF  # time to live
        masked[10:12] = b"\xff\xff"  # header checksum
    else:
        masked[0] |= 0x0F  # traffic class and flow label
        masked[1:4] = b"\xff\xff\xff"
        masked[7] = 0xFF  # hop limit
    masked[udp + 6:udp + 8] = b"\xff\xff"  # UDP checksum
    masked[udp + 8 + 4] = 0xFF  # FECN, BECN and reserved
    return zlib.crc32(b"\xff" * 8 + masked)


def check(path):
    senders = collections.defaultdict(lambda: {"packets": 0, "opcodes": collections.Counter()})
    wrong, short = [], []
    for number, frame, whole in frames(path):
        found = packet(frame)
        if not found:
            continue
        sender, ip, udp = found
        if not whole or len(ip) < udp + 8 + BTH_LEN + ICRC_LEN:
            short.append(number)
            continue
        senders[sender]["packets"] += 1
        senders[sender]["opcodes"][ip[udp + 8]] += 1
        if icrc(ip, udp) != struct.unpack_from("<I", ip, len(ip) - ICRC_LEN)[0]:
            wrong.append(number)
    return {"file": path, "senders": senders, "wrong": wrong, "short": short}


def main(arguments):
    as_json = "--json" in arguments
    paths = [argument for argument in arguments if argument != "--json"]
    if not paths:
        sys.exit(__doc__.strip())
    results = [check(path) for path in paths]
    if as_json:
        print(json.dumps(results))
    else:
        for result in results:
            packets = sum(sender["packets"] for sender in result["senders"].values())
            print(f"{result['file']}: {packets} packets, {len(result['wrong'])} wrong, {len(result['short'])} short")
            for name, sender in sorted(result["senders"].items()):
                opcodes = ", ".join(f"{opcode:02x}: {count}" for opcode, count in sorted(sender["opcodes"].items()))
                print(f"  {name}: {opcodes}")
            for what in ("wrong", "short"):
                if result[what]:
                    print(f"  {what}: frames {' '.join(map(str, result[what][:20]))}")
    return any(result["wrong"] or result["short"] for result in results)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
