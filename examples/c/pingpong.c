/* Ping-pong: a message goes there and back, 1000 times.
 *
 *   cc -o pingpong pingpong.c -libverbs -lrdmacm
 *   pingpong                 the server, for one client
 *   pingpong HOST            the client
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <rdma/rdma_cma.h>
#include <rdma/rdma_verbs.h>

enum { ROUNDS = 1000, SIZE = 64 };

static void check(int failed, const char *what)
{
	if (failed) {
		perror(what);
		exit(1);
	}
}

/* Addresses, and the queue pair that connections on them get. */
static struct rdma_cm_id *create(const char *host, struct rdma_addrinfo **info)
{
	struct rdma_addrinfo hints = { .ai_port_space = RDMA_PS_TCP };
	if (!host)
		hints.ai_flags = RAI_PASSIVE;
	check(rdma_getaddrinfo(host, "7471", &hints, info), "rdma_getaddrinfo");

	struct ibv_qp_init_attr attr = {
		.cap = { .max_send_wr = 2, .max_recv_wr = 2, .max_send_sge = 1, .max_recv_sge = 1 },
		.sq_sig_all = 1, /* every send makes a completion */
	};
	struct rdma_cm_id *id;
	check(rdma_create_ep(&id, *info, NULL, &attr), "rdma_create_ep");
	return id;
}

static void wait_for(int (*completion)(struct rdma_cm_id *, struct ibv_wc *), struct rdma_cm_id *id)
{
	struct ibv_wc wc;
	check(completion(id, &wc) < 0, "completion");
	if (wc.status != IBV_WC_SUCCESS) {
		fprintf(stderr, "completion: %s\n", ibv_wc_status_str(wc.status));
		exit(1);
	}
}

int main(int argc, char **argv)
{
	if (argc > 2 || (argc == 2 && argv[1][0] == '-'))
		return fprintf(stderr, "usage: pingpong [HOST]\n"), 2;
	const char *host = argc > 1 ? argv[1] : NULL;
	struct rdma_addrinfo *info;
	struct rdma_cm_id *listener = NULL, *id = create(host, &info);
	if (!host) {
		listener = id;
		check(rdma_listen(listener, 0), "rdma_listen");
		printf("waiting for a client\n");
		fflush(stdout);
		check(rdma_get_request(listener, &id), "rdma_get_request");
	}

	/* The device sends from this memory and receives into it. */
	char sent[SIZE] = "ping", received[SIZE];
	struct ibv_mr *send_mr = rdma_reg_msgs(id, sent, SIZE);
	struct ibv_mr *recv_mr = rdma_reg_msgs(id, received, SIZE);
	check(!send_mr || !recv_mr, "rdma_reg_msgs");

	/* A receive is posted before the message comes. */
	check(rdma_post_recv(id, NULL, received, SIZE, recv_mr), "rdma_post_recv");
	check(host ? rdma_connect(id, NULL) : rdma_accept(id, NULL), "connect");

	struct timespec begin, end;
	clock_gettime(CLOCK_MONOTONIC, &begin);
	for (int round = 0; round < ROUNDS; round++) {
		if (!host) { /* the server answers with what it got */
			wait_for(rdma_get_recv_comp, id);
			memcpy(sent, received, SIZE);
			check(rdma_post_recv(id, NULL, received, SIZE, recv_mr), "rdma_post_recv");
		}
		check(rdma_post_send(id, NULL, sent, SIZE, send_mr, 0), "rdma_post_send");
		wait_for(rdma_get_send_comp, id);
		if (host) {
			wait_for(rdma_get_recv_comp, id);
			if (memcmp(sent, received, SIZE) != 0)
				return fprintf(stderr, "the answer differs\n"), 1;
			check(rdma_post_recv(id, NULL, received, SIZE, recv_mr), "rdma_post_recv");
		}
	}
	clock_gettime(CLOCK_MONOTONIC, &end);
	double us = (end.tv_sec - begin.tv_sec) * 1e6 + (end.tv_nsec - begin.tv_nsec) / 1e3;
	printf("%d messages of %d bytes there and back, %.1f us each\n", ROUNDS, SIZE, us / ROUNDS);

	rdma_disconnect(id);
	rdma_dereg_mr(send_mr);
	rdma_dereg_mr(recv_mr);
	rdma_destroy_ep(id);
	if (listener)
		rdma_destroy_ep(listener);
	rdma_freeaddrinfo(info);
	return 0;
}
