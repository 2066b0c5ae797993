"""Mooncake's transfer engine between two processes over four devices: WRITEs and READs of 1 MiB, compared, until a file
`enough` is there.

    mooncake_rounds.py server|client
"""
import ctypes
import json
import os
import sys
import time

from mooncake.engine import TransferEngine

SIZE = 1 << 20
DEVICES = "anyverbs0,anyverbs1,anyverbs2,anyverbs3"


def main():
    server = sys.argv[1] == "server"
    engine = TransferEngine()
    name = "127.0.0.1:12345" if server else "127.0.0.1:12346"
    assert engine.initialize(name, "P2PHANDSHAKE", "rdma", DEVICES) == 0, "initialize"
    memory = ctypes.create_string_buffer(SIZE)
    address = ctypes.addressof(memory)
    assert engine.register_memory(address, SIZE) == 0, "register_memory"
    if server:
        write("told", {"address": address, "port": engine.get_rpc_port()})
        rounds = read("done")["rounds"]
        assert memory.raw == pattern(rounds - 1), "the last WRITE is in memory"
        print("the server has the last WRITE")
    else:
        peer = read("told")
        to = f"127.0.0.1:{peer['port']}"
        number = 0
        while not os.path.exists("enough"):
            memory[:] = pattern(number)
            assert engine.transfer_sync_write(to, address, peer["address"], SIZE) == 0, "WRITE"
            memory[:] = bytes(SIZE)
            assert engine.transfer_sync_read(to, address, peer["address"], SIZE) == 0, "READ"
            assert memory.raw == pattern(number), "a READ gives what the WRITE wrote"
            number += 1
            print(f"round {number}", flush=True)
        write("done", {"rounds": number})
        print("every byte is right")
    sys.stdout.flush()
    # Without the destructors of the engine, which wait for its threads.
    os._exit(0)


def pattern(number):
    return bytes((number + 7 * i) & 0xFF for i in range(256)) * (SIZE // 256)


def write(name, value):
    with open(name + ".new", "w", encoding="ascii") as file:
        json.dump(value, file)
    os.rename(name + ".new", name)


def read(name):
    """Waits for the file. The launcher's script ends this process when it has taken too long."""
    while not os.path.exists(name):
        time.sleep(0.05)
    with open(name, encoding="ascii") as file:
        return json.load(file)


main()
