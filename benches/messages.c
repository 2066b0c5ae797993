/*
 * A few messages between two processes, for `cargo xtask bench --instructions`, which counts the instructions of each
 * call by single steps. After the warm-up it says "ready" and waits for a byte. The calls that count are marked.
 *
 *   messages send|list|write|read
 */
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "setup.h"

enum { WARM_UP = 3000, BETWEEN = 40, COUNTED = 24, LIST = 16, ROOM = 4096 };

/* The marks. In the rounds that count, a breakpoint hands the call to whoever counts, who knows where it ends. */
enum call { NONE, POST_SEND, POLL_RECV, POST_RECV, POLL_SEND };
static enum call counted = -1;
__attribute__((noinline)) void count_from(enum call call)
{
	if (call == counted)
		__asm__ volatile("int3" : : "D"(call));
}

__attribute__((noinline)) void count_to(void)
{
	__asm__ volatile("");
}

struct end {
	uint32_t qpn, rkey;
	uint64_t addr;
	union ibv_gid gid;
};

static struct ibv_cq *send_cq, *recv_cq;
static struct ibv_qp *qp;
static struct ibv_mr *mr;
static _Alignas(4096) char memory[ROOM];

static void post_recv(void)
{
	struct ibv_sge sge = {(uintptr_t)memory + 1024, 64, mr->lkey};
	struct ibv_recv_wr wr = {.wr_id = 1, .sg_list = &sge, .num_sge = 1}, *bad;
	count_from(POST_RECV);
	int rc = ibv_post_recv(qp, &wr, &bad);
	count_to();
	if (rc) fail("post_recv");
}

/* One call that finds something counts; empty ones do not. */
static int poll(struct ibv_cq *cq, enum call call, int most)
{
	struct ibv_wc wc[LIST];
	for (;;) {
		count_from(call);
		int n = ibv_poll_cq(cq, most, wc);
		if (n) count_to();
		for (int i = 0; i < n; i++)
			if (wc[i].status) fail(ibv_wc_status_str(wc[i].status));
		if (n < 0) fail("poll_cq");
		if (n) return n;
	}
}

static void post(const struct end *peer, enum ibv_wr_opcode opcode, uint32_t bytes, int list)
{
	struct ibv_sge sge = {(uintptr_t)memory, bytes, mr->lkey};
	struct ibv_send_wr wr[LIST] = {0}, *bad;
	for (int i = 0; i < list; i++) {
		wr[i].wr_id = 2;
		wr[i].next = i + 1 < list ? &wr[i + 1] : NULL;
		wr[i].sg_list = &sge;
		wr[i].num_sge = 1;
		wr[i].opcode = opcode;
		wr[i].send_flags = i + 1 < list ? 0 : IBV_SEND_SIGNALED;
		wr[i].wr.rdma.remote_addr = peer->addr;
		wr[i].wr.rdma.rkey = peer->rkey;
	}
	count_from(POST_SEND);
	int rc = ibv_post_send(qp, wr, &bad);
	count_to();
	if (rc) fail("post_send");
}

static void set_up(int in, int out, struct end *peer)
{
	struct ibv_context *context = open_device();
	struct ibv_pd *pd = ibv_alloc_pd(context);
	send_cq = ibv_create_cq(context, 256, NULL, NULL, 0);
	recv_cq = ibv_create_cq(context, 256, NULL, NULL, 0);
	mr = ibv_reg_mr(pd, memory, ROOM,
					IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ);
	struct ibv_qp_init_attr init = {.send_cq = send_cq,
									.recv_cq = recv_cq,
									.qp_type = IBV_QPT_RC,
									.cap = {128, 128, 1, 1, 0}};
	qp = ibv_create_qp(pd, &init);
	if (!send_cq || !recv_cq || !mr || !qp) fail("objects");
	struct end own = {qp->qp_num, mr->rkey, (uintptr_t)memory, {{0}}};
	if (ibv_query_gid(context, 1, 0, &own.gid)) fail("query_gid");
	if (write(out, &own, sizeof own) != sizeof own) fail("write");
	if (read(in, peer, sizeof *peer) != sizeof *peer) fail("read");
	connect_rc(qp, peer->qpn, &peer->gid);
	for (int i = 0; i < 96; i++) post_recv();
	/* Both are ready to receive. */
	char byte = 0;
	if (write(out, &byte, 1) != 1 || read(in, &byte, 1) != 1) fail("ready");
}

/* A message to and fro, `n` times. */
static void ping_pong(const struct end *peer, int first, long n)
{
	for (long i = 0; i < n; i++) {
		if (first) post(peer, IBV_WR_SEND, 2, 1);
		poll(recv_cq, POLL_RECV, 1);
		post_recv();
		if (!first) post(peer, IBV_WR_SEND, 2, 1);
		poll(send_cq, POLL_SEND, 1);
	}
}

/* Lists of requests; the other side takes them. */
static void send_lists(const struct end *peer, long n)
{
	for (long i = 0; i < n; i++) {
		post(peer, IBV_WR_SEND, 8, LIST);
		poll(send_cq, POLL_SEND, LIST);
	}
}

static void take_lists(long n)
{
	for (long taken = 0; taken < n * LIST;) {
		int k = poll(recv_cq, POLL_RECV, LIST);
		for (int i = 0; i < k; i++) post_recv();
		taken += k;
	}
}

static void one_sided(const struct end *peer, enum ibv_wr_opcode opcode, long n)
{
	for (long i = 0; i < n; i++) {
		post(peer, opcode, 2, 1);
		poll(send_cq, POLL_SEND, 1);
	}
}

static void run(const char *what, const struct end *peer, int measured, long n)
{
	if (!strcmp(what, "send")) ping_pong(peer, measured, n);
	else if (!strcmp(what, "list")) measured ? send_lists(peer, n) : take_lists(n);
	else if (!measured) return;
	else one_sided(peer, !strcmp(what, "write") ? IBV_WR_RDMA_WRITE : IBV_WR_RDMA_READ, n);
}

int main(int argc, char **argv)
{
	if (argc != 2) fail("usage: messages send|list|write|read");
	int to_peer[2], to_us[2];
	if (pipe(to_peer) || pipe(to_us)) fail("pipe");
	struct end peer;
	pid_t child = fork();
	if (child < 0) fail("fork");
	if (!child) {
		set_up(to_peer[0], to_us[1], &peer);
		run(argv[1], &peer, 0, WARM_UP + 4 * COUNTED * (BETWEEN + 1));
		char byte;
		close(to_peer[1]);
		/* Until the other side has ended. */
		while (read(to_peer[0], &byte, 1) > 0) {
		}
		_exit(0);
	}
	set_up(to_us[0], to_peer[1], &peer);
	run(argv[1], &peer, 1, WARM_UP);
	puts("ready");
	fflush(stdout);
	getchar();
	for (enum call call = POST_SEND; call <= POLL_SEND; call++)
		for (int i = 0; i < COUNTED; i++) {
			run(argv[1], &peer, 1, BETWEEN);
			counted = call;
			run(argv[1], &peer, 1, 1);
			counted = -1;
		}
	/* The end: nothing more counts. */
	counted = NONE;
	count_from(NONE);
	kill(child, SIGKILL);
	waitpid(child, NULL, 0);
	return 0;
}
