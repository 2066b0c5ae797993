/* What the device costs a process. Prints lines "name value".
 * footprint memory: engine_kib, qp_bytes: the idle engine, and a connected RC queue pair.
 * footprint idle: idle_cpu_percent: of the busier of two processes that are connected and have nothing to say.
 * footprint rails: rails_cpu_percent: the same with RAILS queue pairs on each device of each process. */
#include "setup.h"

#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

enum { QPS = 1000, RAILS = 64, DEVICES = 64, IDLE_SECONDS = 8 };

static void memory(void)
{
	static struct ibv_qp *qps[QPS];
	union ibv_gid gid;
	long before = resident_kib();
	struct ibv_context *context = open_device();

	printf("engine_kib %ld\n", resident_kib() - before);

	if (ibv_query_gid(context, 1, 0, &gid))
		fail("ibv_query_gid");
	struct ibv_pd *pd = ibv_alloc_pd(context);
	struct ibv_cq *cq = ibv_create_cq(context, 1024, NULL, NULL, 0);
	if (!pd || !cq)
		fail("PD or CQ");

	/* The first pair pays for what all share. */
	struct ibv_qp *first = create_rc(pd, cq), *second = create_rc(pd, cq);
	connect_rc(first, second->qp_num, &gid);
	connect_rc(second, first->qp_num, &gid);
	before = resident_kib();
	for (int i = 0; i < QPS; i++)
		qps[i] = create_rc(pd, cq);
	for (int i = 0; i < QPS; i++)
		connect_rc(qps[i], qps[i ^ 1]->qp_num, &gid);
	printf("qp_bytes %ld\n", (resident_kib() - before) * 1024 / QPS);
}

static void to_peer(int socket, const void *bytes, size_t len)
{
	if (write(socket, bytes, len) != (ssize_t)len)
		fail("write");
}

static void from_peer(int socket, void *bytes, size_t len)
{
	if (recv(socket, bytes, len, MSG_WAITALL) != (ssize_t)len)
		fail("the other process");
}

/* A device, and its queue pairs. */
struct rail {
	struct ibv_cq *cq;
	struct ibv_mr *mr;
	struct ibv_qp *qps[RAILS];
};

/* The same, as the other process names it. */
struct address {
	union ibv_gid gid;
	uint32_t numbers[RAILS];
};

static uint64_t words[2];

static void make(struct ibv_device *device, int each, struct rail *rail, struct address *address)
{
	struct ibv_context *context = ibv_open_device(device);
	struct ibv_pd *pd = context ? ibv_alloc_pd(context) : NULL;

	if (!pd || ibv_query_gid(context, 1, 0, &address->gid))
		fail("device, PD or GID");
	rail->cq = ibv_create_cq(context, 2 * DEPTH * each, NULL, NULL, 0);
	rail->mr = ibv_reg_mr(pd, words, sizeof(words), IBV_ACCESS_LOCAL_WRITE);
	if (!rail->cq || !rail->mr)
		fail("CQ or MR");
	for (int i = 0; i < each; i++) {
		rail->qps[i] = create_rc(pd, rail->cq);
		address->numbers[i] = rail->qps[i]->qp_num;
	}
}

static void connect_rail(struct rail *rail, const struct address *peer, int each)
{
	struct ibv_sge in = {.addr = (uintptr_t)&words[0], .length = 8, .lkey = rail->mr->lkey};
	struct ibv_recv_wr wr = {.sg_list = &in, .num_sge = 1}, *bad;

	for (int i = 0; i < each; i++) {
		connect_rc(rail->qps[i], peer->numbers[i], &peer->gid);
		if (ibv_post_recv(rail->qps[i], &wr, &bad))
			fail("ibv_post_recv");
	}
}

static void send_once(struct rail *rail, int each)
{
	struct ibv_sge out = {.addr = (uintptr_t)&words[1], .length = 8, .lkey = rail->mr->lkey};
	struct ibv_send_wr wr = {
		.sg_list = &out, .num_sge = 1, .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SIGNALED,
	}, *bad;

	for (int i = 0; i < each; i++)
		if (ibv_post_send(rail->qps[i], &wr, &bad))
			fail("ibv_post_send");
}

static void meet(int socket)
{
	char ready = 0;

	to_peer(socket, &ready, 1);
	from_peer(socket, &ready, 1);
}

/* One of two processes, each of which sends the other one message by each of its queue pairs: so many on each of so many devices,
 * or of all. */
static double idle(int socket, int each, int most)
{
	static struct rail rails[DEVICES];
	static struct address own[DEVICES], peers[DEVICES];
	int count;
	struct ibv_device **list = ibv_get_device_list(&count);

	if (!list || count < 1 || count > DEVICES)
		fail("ibv_get_device_list");
	if (count > most)
		count = most;
	for (int i = 0; i < count; i++)
		make(list[i], each, &rails[i], &own[i]);
	to_peer(socket, own, count * sizeof(*own));
	from_peer(socket, peers, count * sizeof(*peers));
	for (int i = 0; i < count; i++)
		connect_rail(&rails[i], &peers[i], each);
	meet(socket);
	for (int i = 0; i < count; i++)
		send_once(&rails[i], each);
	for (int i = 0; i < count; i++)
		complete(rails[i].cq, 2 * each);
	meet(socket);

	double cpu = cpu_seconds();
	sleep(IDLE_SECONDS);
	return (cpu_seconds() - cpu) * 100 / IDLE_SECONDS;
}

int main(int argc, char **argv)
{
	if (argc == 2 && !strcmp(argv[1], "memory")) {
		memory();
		return 0;
	}
	int has_rails = argc == 2 && !strcmp(argv[1], "rails");
	if (argc != 2 || (!has_rails && strcmp(argv[1], "idle"))) {
		fprintf(stderr, "usage: footprint memory|idle|rails\n");
		return 2;
	}
	int sockets[2], status;
	if (socketpair(AF_UNIX, SOCK_STREAM, 0, sockets))
		fail("socketpair");
	pid_t child = fork();
	if (child < 0)
		fail("fork");
	close(sockets[child == 0]);
	double percent = idle(sockets[child != 0], has_rails ? RAILS : 1, has_rails ? DEVICES : 1), other;
	if (child == 0) {
		to_peer(sockets[0], &percent, sizeof(percent));
		return 0;
	}
	from_peer(sockets[1], &other, sizeof(other));
	if (waitpid(child, &status, 0) != child || status != 0)
		fail("the other process");
	printf("%s_cpu_percent %.4f\n", argv[1], percent > other ? percent : other);
	return 0;
}
