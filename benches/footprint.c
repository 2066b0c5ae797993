/* What the device costs a process. Prints lines "name value".
 * footprint memory: engine_kib, qp_bytes: the idle engine, and a connected RC queue pair.
 * footprint idle: idle_cpu_percent: of the busier of two processes that are connected and have nothing to say. */
#include "setup.h"

#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

enum { QPS = 1000, IDLE_SECONDS = 8 };

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

/* One of two processes, each of which sends the other one message. */
static double idle(int socket)
{
	struct ibv_context *context = open_device();
	struct ibv_pd *pd = ibv_alloc_pd(context);
	struct ibv_cq *cq = ibv_create_cq(context, 2 * DEPTH, NULL, NULL, 0);
	uint64_t words[2] = {0};
	union ibv_gid gid;
	uint32_t peer;
	char ready = 0;

	if (!pd || !cq || ibv_query_gid(context, 1, 0, &gid))
		fail("PD, CQ or GID");
	struct ibv_mr *mr = ibv_reg_mr(pd, words, sizeof(words), IBV_ACCESS_LOCAL_WRITE);
	if (!mr)
		fail("ibv_reg_mr");
	struct ibv_qp *qp = create_rc(pd, cq);
	to_peer(socket, &qp->qp_num, sizeof(qp->qp_num));
	from_peer(socket, &peer, sizeof(peer));
	connect_rc(qp, peer, &gid);

	struct ibv_sge in = {.addr = (uintptr_t)&words[0], .length = 8, .lkey = mr->lkey};
	struct ibv_sge out = {.addr = (uintptr_t)&words[1], .length = 8, .lkey = mr->lkey};
	struct ibv_recv_wr recv_wr = {.sg_list = &in, .num_sge = 1}, *bad_recv;
	struct ibv_send_wr send_wr = {
		.sg_list = &out, .num_sge = 1, .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SIGNALED,
	}, *bad_send;
	if (ibv_post_recv(qp, &recv_wr, &bad_recv))
		fail("ibv_post_recv");
	to_peer(socket, &ready, 1);
	from_peer(socket, &ready, 1);
	if (ibv_post_send(qp, &send_wr, &bad_send))
		fail("ibv_post_send");
	complete(cq, 2);
	to_peer(socket, &ready, 1);
	from_peer(socket, &ready, 1);

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
	if (argc != 2 || strcmp(argv[1], "idle")) {
		fprintf(stderr, "usage: footprint memory|idle\n");
		return 2;
	}
	int sockets[2], status;
	if (socketpair(AF_UNIX, SOCK_STREAM, 0, sockets))
		fail("socketpair");
	pid_t child = fork();
	if (child < 0)
		fail("fork");
	close(sockets[child == 0]);
	double percent = idle(sockets[child != 0]), other;
	if (child == 0) {
		to_peer(sockets[0], &percent, sizeof(percent));
		return 0;
	}
	from_peer(sockets[1], &other, sizeof(other));
	if (waitpid(child, &status, 0) != child || status != 0)
		fail("the other process");
	printf("idle_cpu_percent %.4f\n", percent > other ? percent : other);
	return 0;
}
