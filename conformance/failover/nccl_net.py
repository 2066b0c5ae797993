"""NCCL's own transport `net_ib` between two processes, without a GPU: messages of 1 MiB over two merged devices, compared.

    nccl_net.py receiver|sender

The functions are those of `ncclNetIb`, the table in libnccl.so.2 through which NCCL itself calls its transport. It is no
exported symbol; the library's symbol table has it. The interface is that of NCCL's network plugins, version 12.
"""
import ctypes
import importlib.util
import os
import subprocess
import sys
import time
from ctypes import POINTER, addressof, c_char_p, c_int, c_size_t, c_uint64, c_void_p

SIZE = 1 << 20
TAG = 7
HOST = 1
VERSION = 23203
# The members of the table, in their order.
MEMBERS = ("name init devices getProperties listen connect accept regMr regMrDmaBuf deregMr isend irecv iflush test closeSend "
           "closeRecv closeListen getDeviceMr irecvConsumed makeVDevice finalize setNetAttr").split()
LOGGER = "_Z12ncclDebugLog17ncclDebugLogLevelmPKciS1_z"


class Devices(ctypes.Structure):
    _fields_ = [("count", c_int), ("devices", c_int * 8)]


class Net:
    def __init__(self, path):
        library = ctypes.CDLL(path)
        version = c_int()
        library.ncclGetVersion(ctypes.byref(version))
        assert version.value == VERSION, f"this program knows NCCL {VERSION}, not {version.value}"
        wanted = {"ncclNetIb", "ncclGetVersion", LOGGER}
        lines = subprocess.run(["nm", path], capture_output=True, text=True, check=True).stdout.splitlines()
        symbols = {line.split()[-1]: int(line.split()[0], 16) for line in lines if line.split()[-1] in wanted}
        base = ctypes.cast(library.ncclGetVersion, c_void_p).value - symbols["ncclGetVersion"]
        self.table = ctypes.cast(base + symbols["ncclNetIb"], POINTER(c_void_p))
        assert ctypes.cast(self.table[0], c_char_p).value == b"IB"
        self.logger = base + symbols[LOGGER]

    def __getattr__(self, member):
        function = self.table[MEMBERS.index(member)]

        def call(*arguments):
            kinds = [c_void_p if value is None or isinstance(value, (int, c_void_p)) else type(value) for value in arguments]
            result = ctypes.CFUNCTYPE(c_int, *kinds)(function)(*arguments)
            if result:
                sys.exit(f"{member} of NCCL returns {result}")

        return call

    def open(self):
        """Merges the first two devices into one."""
        self.context, self.traffic_class = c_void_p(), c_int(-1)
        self.init(addressof(self.context), c_uint64(1), addressof(self.traffic_class), self.logger, None)
        count = c_int()
        self.devices(addressof(count))
        assert count.value == 2, count.value
        merged, both = c_int(), Devices(2)
        both.devices[1] = 1
        self.makeVDevice(addressof(merged), addressof(both))
        return merged

    def finish(self, request):
        done, sizes = c_int(), (c_int * 8)()
        while not done.value:
            self.test(request, addressof(done), addressof(sizes))
            os.sched_yield()
        return sizes[0]


def again(call):
    """Repeats a call until it gives an object."""
    made = c_void_p()
    while not made.value:
        call(addressof(made))
        os.sched_yield()
    return made


def main():
    role = sys.argv[1]
    [package] = importlib.util.find_spec("nvidia.nccl").submodule_search_locations
    net = Net(os.path.join(package, "lib/libnccl.so.2"))
    device = net.open()
    memory = ctypes.create_string_buffer(SIZE)
    at = addressof(memory)
    key = c_void_p()
    handle = ctypes.create_string_buffer(128)
    number = 0
    if role == "receiver":
        listener = c_void_p()
        net.listen(net.context, device, addressof(handle), addressof(listener))
        with open("handle.new", "wb") as file:
            file.write(handle.raw)
        os.rename("handle.new", "handle")
        comm = again(lambda made: net.accept(listener, made, None))
        net.regMr(comm, at, c_size_t(SIZE), c_int(HOST), addressof(key))
        data, sizes = (c_void_p * 1)(at), (c_size_t * 1)(SIZE)
        tags, keys, hints = (c_int * 1)(TAG), (c_void_p * 1)(key.value), (c_void_p * 1)()
        while True:
            lists = [addressof(part) for part in (data, sizes, tags, keys, hints)]
            request = again(lambda made: net.irecv(comm, c_int(1), *lists, made))
            got = net.finish(request)
            assert got == SIZE, got
            last = memory.raw[0]
            assert memory.raw[1:] == pattern(number)[1:], f"message {number} is not what was sent"
            number += 1
            progress(number)
            if last:
                break
    else:
        while not os.path.exists("handle"):
            time.sleep(0.01)
        with open("handle", "rb") as file:
            handle.raw = file.read()
        comm = again(lambda made: net.connect(net.context, device, addressof(handle), made, None))
        net.regMr(comm, at, c_size_t(SIZE), c_int(HOST), addressof(key))
        enough = False
        while not enough:
            enough = os.path.exists("enough")
            memory[:] = bytes([enough]) + pattern(number)[1:]
            request = again(lambda made: net.isend(comm, at, c_size_t(SIZE), c_int(TAG), key, None, made))
            net.finish(request)
            number += 1
            progress(number)
    print(f"{number} messages, all right", flush=True)
    # Without the library's destructors.
    os._exit(0)


def progress(number):
    if number % 10 == 0:
        print(f"message {number}", flush=True)


def pattern(number):
    return bytes((number + 7 * i) & 0xFF for i in range(256)) * (SIZE // 256)


main()
