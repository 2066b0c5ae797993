"""Two NIXL agents in two processes: WRITEs of 1 MiB by UCX, compared.

    nixl_agents.py target|initiator DIRECTORY
"""
import ctypes
import os
import sys
import time

from nixl_cu12._api import nixl_agent, nixl_agent_config

SIZE = 1 << 20
ROUNDS = 20


def check(is_right, wrong):
    if not is_right:
        raise RuntimeError(wrong)


def main():
    role, directory = sys.argv[1:]
    memory = ctypes.create_string_buffer(SIZE)
    address = ctypes.addressof(memory)
    agent = nixl_agent(role, nixl_agent_config(backends=["UCX"]))
    registered = agent.register_memory([(address, SIZE, 0, "")], "DRAM")
    told, done = os.path.join(directory, "told"), os.path.join(directory, "done")
    mine = agent.get_xfer_descs([(address, SIZE, 0)], "DRAM")
    if role == "target":
        with open(told + ".new", "wb") as file:
            metadata = agent.get_agent_metadata()
            file.write(len(metadata).to_bytes(4, "big") + metadata + agent.get_serialized_descs(mine))
        os.rename(told + ".new", told)
        wait_for(lambda: any(b"done" in messages for messages in agent.get_new_notifs().values()))
        check(memory.raw == pattern(ROUNDS - 1), "the last WRITE is not in memory")
        print("the target has the last WRITE")
        open(done, "w").close()
    else:
        wait_for(lambda: os.path.exists(told))
        with open(told, "rb") as file:
            data = file.read()
        end = 4 + int.from_bytes(data[:4], "big")
        peer = agent.add_remote_agent(data[4:end])
        theirs = agent.deserialize_descs(data[end:])
        for number in range(ROUNDS):
            memory[:] = pattern(number)
            note = b"done" if number == ROUNDS - 1 else b"more"
            request = agent.initialize_xfer("WRITE", mine, theirs, peer, note)
            state = agent.transfer(request)
            while state == "PROC":
                state = agent.check_xfer_state(request)
            check(state == "DONE", f"the WRITE ended in state {state}")
            agent.release_xfer_handle(request)
        wait_for(lambda: os.path.exists(done))
        agent.remove_remote_agent(peer)
        print(f"{ROUNDS} WRITEs of {SIZE} bytes")
    agent.deregister_memory(registered)


def pattern(number):
    return bytes((number + 7 * i) & 0xFF for i in range(256)) * (SIZE // 256)


def wait_for(condition):
    for _ in range(6000):
        if condition():
            return
        time.sleep(0.01)
    sys.exit("nothing came in a minute")


main()
