/* Time of a message one way, and bytes a second, between ranks 0 and 1 of MPI, from 1 byte to 4 MiB.
 *
 *     mpicc -O2 -o mpi_sizes mpi_sizes.c
 *
 * For each size, rounds that are not timed compare every byte of every message first. The figures are the
 * best of several series. mpi_sizes.sh builds and runs it. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LARGEST = 4 << 20, WINDOW = 32, COMPARED = 5 };

/* WINDOW messages lie one after another, as far as they fit; larger ones share places. */
enum { PLACES = 4 * LARGEST };

static const size_t sizes[] = {1, 64, 1024, 4096, 16384, 65536, 262144, 1 << 20, LARGEST};
static char *sent, *received;
static int rank;

static char *place(char *memory, int number, size_t size)
{
	return memory + (size_t)number % (PLACES / size) * size;
}

static unsigned char byte_at(int from, int round, int number, size_t offset)
{
	return (unsigned char)(offset * 7 + offset / 251 + (size_t)(31 * from + 13 * round + 5 * number));
}

static void fill(char *memory, int round, int number, size_t size)
{
	for (size_t i = 0; i < size; i++)
		memory[i] = (char)byte_at(rank, round, number, i);
}

static void compare(const char *memory, int round, int number, size_t size)
{
	for (size_t i = 0; i < size; i++) {
		if ((unsigned char)memory[i] != byte_at(!rank, round, number, i)) {
			fprintf(stderr, "rank %d: byte %zu of message %d of %zu bytes is wrong\n", rank, i, number, size);
			MPI_Abort(MPI_COMM_WORLD, 1);
		}
	}
}

/* One message there and one back. */
static void ping_pong(size_t size)
{
	for (int turn = 0; turn < 2; turn++) {
		if (turn == rank)
			MPI_Send(sent, (int)size, MPI_BYTE, !rank, 1, MPI_COMM_WORLD);
		else
			MPI_Recv(received, (int)size, MPI_BYTE, !rank, 1, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
	}
}

/* A window of messages from rank 0 to rank 1, and a short one back. */
static void stream(size_t size, int window)
{
	MPI_Request requests[WINDOW];
	char word = 0;

	for (int i = 0; i < window; i++) {
		if (rank == 0)
			MPI_Isend(place(sent, i, size), (int)size, MPI_BYTE, 1, 2, MPI_COMM_WORLD, &requests[i]);
		else
			MPI_Irecv(place(received, i, size), (int)size, MPI_BYTE, 0, 2, MPI_COMM_WORLD, &requests[i]);
	}
	MPI_Waitall(window, requests, MPI_STATUSES_IGNORE);
	if (rank == 0)
		MPI_Recv(&word, 1, MPI_BYTE, 1, 3, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
	else
		MPI_Send(&word, 1, MPI_BYTE, 0, 3, MPI_COMM_WORLD);
}

static void stream_window(size_t size)
{
	stream(size, WINDOW);
}

/* The shortest time that `rounds` rounds take in many series: others may use the processors meanwhile. */
static double best_time(void (*round)(size_t), size_t size, int rounds)
{
	int all = size <= 8192 ? 100 : size <= 262144 ? 30 : 10;
	double best = 0;

	for (int series = 0; series < all; series++) {
		MPI_Barrier(MPI_COMM_WORLD);
		double begin = MPI_Wtime();
		for (int i = 0; i < rounds; i++)
			round(size);
		double time = MPI_Wtime() - begin;
		if (series == 0 || time < best)
			best = time;
	}
	return best;
}

static double latency(size_t size)
{
	int rounds = size <= 8192 ? 20 : size <= 262144 ? 5 : 2;

	for (int round = 0; round < COMPARED; round++) {
		fill(sent, round, 0, size);
		memset(received, 0, size);
		ping_pong(size);
		compare(received, round, 0, size);
	}
	return best_time(ping_pong, size, rounds) / rounds / 2;
}

static double bandwidth(size_t size)
{
	int rounds = size <= 8192 ? 4 : 1;
	int apart = PLACES / size < WINDOW ? (int)(PLACES / size) : WINDOW;

	for (int round = 0; round < COMPARED; round++) {
		for (int i = 0; i < apart; i++) {
			fill(place(sent, i, size), round, i, size);
			memset(place(received, i, size), 0, size);
		}
		stream(size, apart);
		for (int i = 0; i < apart && rank == 1; i++)
			compare(place(received, i, size), round, i, size);
	}
	return (double)size * WINDOW * rounds / best_time(stream_window, size, rounds);
}

int main(int argc, char **argv)
{
	int ranks;

	MPI_Init(&argc, &argv);
	MPI_Comm_rank(MPI_COMM_WORLD, &rank);
	MPI_Comm_size(MPI_COMM_WORLD, &ranks);
	sent = malloc(PLACES);
	received = malloc(PLACES);
	if (ranks != 2 || !sent || !received) {
		fprintf(stderr, "two ranks and 32 MiB each are needed\n");
		MPI_Abort(MPI_COMM_WORLD, 1);
	}
	if (rank == 0)
		printf("%10s %12s %12s\n", "bytes", "us one way", "MB/s");
	for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
		size_t size = sizes[i];
		double seconds = latency(size), bytes = bandwidth(size);

		if (rank == 0) {
			printf("%10zu %12.2f %12.1f\n", size, seconds * 1e6, bytes / 1e6);
			fflush(stdout);
		}
	}
	if (rank == 0)
		printf("every compared byte is right\n");
	MPI_Finalize();
	return 0;
}
