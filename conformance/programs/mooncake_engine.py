"""Mooncake's transfer engine between two processes: WRITEs and READs of 1 MiB, compared.

    mooncake_engine.py server|client DIRECTORY
"""
import ctypes
import json
import os
import sys
import time

from mooncake.engine import TransferEngine

SIZE = 1 << 20
ROUNDS = 20


def check(is_right, wrong):
    if not is_right:
        raise RuntimeError(wrong)


def main():
    role, directory = sys.argv[1:]
    server = role == "server"
    engine = TransferEngine()
    name = "127.0.0.1:12345" if server else "127.0.0.1:12346"
    check(engine.initialize(name, "P2PHANDSHAKE", "rdma", "anyverbs0") == 0, "initialize failed")
    memory = ctypes.create_string_buffer(SIZE)
    address = ctypes.addressof(memory)
    check(engine.register_memory(address, SIZE) == 0, "register_memory failed")
    told, done = os.path.join(directory, "told"), os.path.join(directory, "done")
    if server:
        with open(told + ".new", "w") as file:
            json.dump({"address": address, "port": engine.get_rpc_port()}, file)
        os.rename(told + ".new", told)
        wait_for(done)
        check(memory.raw == pattern(ROUNDS - 1), "the last WRITE is not in memory")
        print("the server has the last WRITE")
    else:
        wait_for(told)
        with open(told) as file:
            peer = json.load(file)
        to = f"127.0.0.1:{peer['port']}"
        for number in range(ROUNDS):
            memory[:] = pattern(number)
            check(engine.transfer_sync_write(to, address, peer["address"], SIZE) == 0, "the WRITE failed")
            memory[:] = bytes(SIZE)
            check(engine.transfer_sync_read(to, address, peer["address"], SIZE) == 0, "the READ failed")
            check(memory.raw == pattern(number), "a READ does not give what the WRITE wrote")
        open(done, "w").close()
        print(f"{ROUNDS} WRITEs and READs of {SIZE} bytes")
    sys.stdout.flush()
    # Without the destructors of the engine, which wait for its threads.
    os._exit(0)


def pattern(number):
    return bytes((number + 7 * i) & 0xFF for i in range(256)) * (SIZE // 256)


def wait_for(name):
    for _ in range(600):
        if os.path.exists(name):
            return
        time.sleep(0.1)
    sys.exit(f"{name} did not come in a minute")


main()
