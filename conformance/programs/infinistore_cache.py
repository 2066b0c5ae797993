"""InfiniStore's server and a client of it: 64 blocks of 64 KiB are stored and fetched by RDMA, and compared.

    infinistore_cache.py server|client DIRECTORY
"""
import asyncio
import ctypes
import os
import subprocess
import sys
import time

BLOCK = 64 << 10
BLOCKS = 64
PORT = 22345
# Its server shields itself from the kernel's OOM killer, and ends where it may not, as in most containers.
SERVER = "import infinistore.server as server; server.prevent_oom = lambda: None; server.main()"


def check(is_right, wrong):
    if not is_right:
        raise RuntimeError(wrong)


def server(done):
    command = [sys.executable, "-c", SERVER, "--dev-name", "anyverbs0", "--link-type", "Ethernet",
               "--prealloc-size", "1", "--service-port", str(PORT), "--host", "127.0.0.1"]
    process = subprocess.Popen(command)
    for _ in range(900):
        if os.path.exists(done):
            break
        check(process.poll() is None, f"the server ended with {process.returncode}")
        time.sleep(0.1)
    process.terminate()
    process.wait()
    check(os.path.exists(done), "the client did not end in time")


def client(done):
    import infinistore

    config = infinistore.ClientConfig(
        host_addr="127.0.0.1", service_port=PORT, connection_type=infinistore.TYPE_RDMA,
        dev_name="anyverbs0", link_type="Ethernet")
    size = BLOCK * BLOCKS
    stored, fetched = ctypes.create_string_buffer(size), ctypes.create_string_buffer(size)
    stored[:] = b"".join(bytes([number]) * BLOCK for number in range(BLOCKS))
    connection = infinistore.InfinityConnection(config)
    for attempt in range(300):
        try:
            connection.connect()
            break
        except Exception:  # the package has no other type for "nobody listens yet"
            if attempt == 299:
                raise
            time.sleep(0.1)
    for memory in stored, fetched:
        check(connection.register_mr(ctypes.addressof(memory), size) >= 0, "register_mr failed")
    blocks = [(f"key{number}", number * BLOCK) for number in range(BLOCKS)]

    async def there_and_back():
        await connection.rdma_write_cache_async(blocks, BLOCK, ctypes.addressof(stored))
        await connection.rdma_read_cache_async(blocks, BLOCK, ctypes.addressof(fetched))

    asyncio.run(there_and_back())
    check(fetched.raw == stored.raw, "what is fetched differs from what was stored")
    open(done, "w").close()
    print(f"{BLOCKS} blocks of {BLOCK} bytes stored and fetched")
    connection.close()


def main():
    role, directory = sys.argv[1:]
    {"server": server, "client": client}[role](os.path.join(directory, "done"))


main()
