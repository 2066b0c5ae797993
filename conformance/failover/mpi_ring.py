"""Ranks of MPI that send 4 MiB to the next one and compare what they get, until a file `enough` is there."""
import os

from mpi4py import MPI

SIZE = 4 << 20


def main():
    world = MPI.COMM_WORLD
    rank, size = world.Get_rank(), world.Get_size()
    with open(f"rank{rank}.pid", "w", encoding="ascii") as file:
        file.write(str(os.getpid()))
    mine, theirs = bytearray(SIZE), bytearray(SIZE)
    number, enough = 0, False
    while not enough:
        enough = world.bcast(os.path.exists("enough") if rank == 0 else None)
        mine[:] = pattern(rank, number)
        before = (rank - 1) % size
        world.Sendrecv(mine, (rank + 1) % size, recvbuf=theirs, source=before)
        assert theirs == pattern(before, number), f"what rank {rank} gets in round {number} is what was sent"
        number += 1
        if rank == 0 and number % 10 == 0:
            print(f"round {number}", flush=True)
    print(f"rank {rank}: every byte is right", flush=True)


def pattern(rank, number):
    return bytes((91 * rank + number + 7 * i) & 0xFF for i in range(256)) * (SIZE // 256)


main()
