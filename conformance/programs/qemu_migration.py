"""Moves the guest of qemu_migration.S from one QEMU to another by RDMA, and compares their memories.

    qemu_migration.py SOURCE.sock TARGET.sock ADDRESS PIN FOLDER

PIN is `pin-all` or `no-pin`. The target stays stopped after the move, so both QEMUs have the memory of the same moment.
It must be the same in every byte, and have what the guest wrote. Then the target runs, and its counter must move.
"""
import json
import os
import socket
import struct
import sys
import time

PAGE = 4096
COUNTER = 0x9000
PATTERN = 0x5A17C3E9
CHANGED, CHANGED_END = 0x1000000, 0x1100000
LOW_END, HIGH, FILLED, MEMORY = 0xA0000, 0x100000, 0x6000000, 128 << 20


def check(is_right, wrong):
    if not is_right:
        sys.exit(wrong)


class Qemu:
    """The monitor of a QEMU."""

    def __init__(self, path):
        self.name = os.path.basename(path)
        wait_for(lambda: os.path.exists(path), 30, f"{path} is not there")
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(120)
        self.socket.connect(path)
        self.file = self.socket.makefile("rw", encoding="utf-8")
        self.file.readline()
        self("qmp_capabilities")

    def __call__(self, command, **arguments):
        json.dump({"execute": command, "arguments": arguments}, self.file)
        self.file.write("\n")
        self.file.flush()
        for line in self.file:
            answer = json.loads(line)
            if "error" in answer:
                sys.exit(f"{self.name}: {command}: {answer['error']['desc']}")
            if "return" in answer:
                return answer["return"]
        sys.exit(f"{self.name} ended during {command}")

    def memory(self, begin, end, folder):
        path = os.path.join(folder, self.name + ".memory")
        self("pmemsave", val=begin, size=end - begin, filename=path)
        with open(path, "rb") as file:
            return file.read()

    def counter(self, folder):
        return struct.unpack("<I", self.memory(COUNTER, COUNTER + 4, folder))[0]


def wait_for(condition, seconds, wrong):
    end = time.monotonic() + seconds
    while not condition():
        check(time.monotonic() < end, wrong)
        time.sleep(0.05)


def filled(memory, count):
    """What the guest wrote from HIGH to FILLED, when its counter is `count`."""
    words = struct.unpack(f"<{(FILLED - HIGH) // 4}I", memory[:FILLED - HIGH])
    for number, word in enumerate(words):
        address = HIGH + 4 * number
        wanted = [address ^ PATTERN]
        if CHANGED <= address < CHANGED_END and address % PAGE == 0:
            # The guest may be amid its pages: those that it has not reached have the count before.
            wanted = [count, count - 1]
        check(word in wanted, f"the word at {address:#x} is {word:#x}")


def main():
    source_path, target_path, address, pin, folder = sys.argv[1:]
    check(pin in ("pin-all", "no-pin"), "pin-all or no-pin?")
    source, target = Qemu(source_path), Qemu(target_path)
    wait_for(lambda: source.counter(folder) > 2, 120, "the guest does not count")
    for qemu in source, target:
        # Both processors of a small machine may be busy, so the last round gets time.
        qemu("migrate-set-parameters", **{"downtime-limit": 2000})
        qemu("migrate-set-capabilities", capabilities=[{"capability": "rdma-pin-all", "state": pin == "pin-all"}])
    uri = f"rdma:{address}:4444"
    target("migrate-incoming", uri=uri)
    source("migrate", uri=uri)

    def is_over():
        info = source("query-migrate")
        check(info.get("status") != "failed", f"the migration failed: {info}")
        return info.get("status") == "completed"

    end = time.monotonic() + 300
    while not is_over():
        check(time.monotonic() < end, f"the migration does not end: {source('query-migrate')}")
        time.sleep(0.05)
    wait_for(lambda: target("query-status")["status"] != "inmigrate", 60, "the target does not end the migration")
    for qemu, status in (source, "postmigrate"), (target, "prelaunch"):
        found = qemu("query-status")["status"]
        check(found in (status, "paused"), f"{qemu.name} is {found}")
    for begin, end in (0, LOW_END), (HIGH, MEMORY):
        before, after = source.memory(begin, end, folder), target.memory(begin, end, folder)
        check(before == after, f"the memory from {begin:#x} differs")
    count = target.counter(folder)
    filled(after, count)
    target("cont")
    wait_for(lambda: target.counter(folder) > count, 60, "the guest does not count after the move")
    info = source("query-migrate")
    ram = info["ram"]
    print(f"{pin}: the guest goes on from count {count}; {ram['transferred'] >> 20} MiB in {info['total-time']} ms, "
          f"{ram['dirty-sync-count']} rounds, stopped for {info['downtime']} ms")


main()
