/*
 * A few messages between two processes, for `cargo xtask bench --instructions`, which counts the instructions of each
 * call by single steps. After the warm-up it says "ready" and waits for a byte. The calls that count are marked.
 *
 *   messages send|list|write|bulk|read [QUEUE_PAIRS [PROCESSES]]
 *   messages own-send|own-write|own-read
 *   messages threads send|write|read
 *
 * With "own-" the queue pair is connected to itself, and there is no other process.
 * The program may have more queue pairs, connected to themselves, and more processes that it is connected to. These are idle.
 * With "threads" two threads do that by turns, each with its own process.
 */
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "setup.h"

enum { WARM_UP = 3000, BETWEEN = 40, COUNTED = 24, LIST = 16, ROOM = 64 << 10, OTHERS = 63 };

#define OWN "own-"
#define ONE_CQ "one-cq"

/* The marks. In the rounds that count, a breakpoint hands the call to whoever counts, who knows where it ends. */
enum call { NONE, POST_SEND, POLL_RECV, POST_RECV, POLL_SEND };
static _Thread_local enum call counted = -1;
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

static struct ibv_context *context;
static _Thread_local struct ibv_cq *send_cq, *recv_cq;
static _Thread_local struct ibv_qp *qp;
static _Thread_local struct ibv_mr *mr;
static _Thread_local char *memory;

/* Another process, and the pipes from it and to it. */
struct peer {
	int in, out;
	struct end end;
};

/* The queue pair is connected to itself. */
static int is_own(const struct peer *peer)
{
	return peer->in < 0;
}

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

static void set_up(const char *what, struct peer *peer)
{
	struct ibv_pd *pd = ibv_alloc_pd(context);
	memory = aligned_alloc(ROOM, ROOM);
	send_cq = ibv_create_cq(context, 256, NULL, NULL, 0);
	recv_cq = strcmp(what, ONE_CQ) ? ibv_create_cq(context, 256, NULL, NULL, 0) : send_cq;
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
	if (is_own(peer)) {
		peer->end = own;
		/* Apart from the data. */
		peer->end.addr += ROOM / 2;
		connect_rc(qp, own.qpn, &own.gid);
		for (int i = 0; i < 96; i++) post_recv();
		return;
	}
	if (write(peer->out, &own, sizeof own) != sizeof own) fail("write");
	if (read(peer->in, &peer->end, sizeof own) != sizeof own) fail("read");
	connect_rc(qp, peer->end.qpn, &peer->end.gid);
	for (int i = 0; i < 96; i++) post_recv();
	/* Both are ready to receive. */
	char byte = 0;
	if (write(peer->out, &byte, 1) != 1 || read(peer->in, &byte, 1) != 1) fail("ready");
}

/* Queue pairs that are connected to themselves. */
static void set_up_idle(int n)
{
	if (!n) return;
	struct ibv_pd *pd = ibv_alloc_pd(context);
	struct ibv_cq *cq = ibv_create_cq(context, 256, NULL, NULL, 0);
	union ibv_gid gid;
	if (!pd || !cq || ibv_query_gid(context, 1, 0, &gid)) fail("objects");
	for (int i = 0; i < n; i++) {
		struct ibv_qp *idle = create_rc(pd, cq);
		connect_rc(idle, idle->qp_num, &gid);
	}
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

/* As ping_pong, where both completions of a round come to one queue. */
static void ping_pong_one_cq(const struct end *peer, int first, long n)
{
	for (long i = 0; i < n; i++) {
		if (first) post(peer, IBV_WR_SEND, 2, 1);
		/* The other side's send of the last round completes with this receive. */
		for (int found = !first && !i; found < 2;) found += poll(recv_cq, POLL_RECV, 2);
		post_recv();
		if (!first) post(peer, IBV_WR_SEND, 2, 1);
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

static void one_sided(const struct end *peer, enum ibv_wr_opcode opcode, uint32_t bytes, long n)
{
	for (long i = 0; i < n; i++) {
		post(peer, opcode, bytes, 1);
		poll(send_cq, POLL_SEND, 1);
	}
}

static void run(const char *what, const struct end *peer, int measured, long n)
{
	if (!strncmp(what, OWN, strlen(OWN))) what += strlen(OWN);
	if (!strcmp(what, "send")) ping_pong(peer, measured, n);
	else if (!strcmp(what, ONE_CQ)) ping_pong_one_cq(peer, measured, n);
	else if (!strcmp(what, "list")) measured ? send_lists(peer, n) : take_lists(n);
	else if (!measured) return;
	else if (!strcmp(what, "read")) one_sided(peer, IBV_WR_RDMA_READ, 2, n);
	else one_sided(peer, IBV_WR_RDMA_WRITE, !strcmp(what, "bulk") ? ROOM : 2, n);
}

/* Starts a process that does the other side's part for so many rounds. Before the device is opened. */
static struct peer start(const char *what, long rounds)
{
	int to_peer[2], to_us[2];
	if (!strncmp(what, OWN, strlen(OWN))) return (struct peer){.in = -1, .out = -1};
	if (pipe(to_peer) || pipe(to_us)) fail("pipe");
	struct peer peer;
	pid_t pid = fork();
	if (pid < 0) fail("fork");
	peer.in = pid ? to_us[0] : to_peer[0];
	peer.out = pid ? to_peer[1] : to_us[1];
	close(pid ? to_us[1] : to_peer[1]);
	close(pid ? to_peer[0] : to_us[0]);
	if (pid) return peer;
	/* It ends with the main thread, which has forked. */
	if (prctl(PR_SET_PDEATHSIG, SIGKILL)) fail("prctl");
	context = open_device();
	set_up(what, &peer);
	run(what, &peer.end, 0, rounds);
	for (;;) pause();
}

/* Rounds of which one counts, for each call. */
static void count(const char *what, const struct end *peer)
{
	for (enum call call = POST_SEND; call <= POLL_SEND; call++) {
		run(what, peer, 1, BETWEEN);
		counted = call;
		run(what, peer, 1, 1);
		counted = -1;
	}
}

static void ready(void)
{
	puts("ready");
	fflush(stdout);
	getchar();
}

/* A thread, and its turn to count. */
struct side {
	const char *what;
	struct peer peer;
	sem_t turn, done;
};

__attribute__((noreturn)) static void *by_turns(void *of)
{
	struct side *side = of;
	set_up(side->what, &side->peer);
	run(side->what, &side->peer.end, 1, WARM_UP);
	for (int i = 0; i < COUNTED; i++) {
		sem_post(&side->done);
		sem_wait(&side->turn);
		count(side->what, &side->peer.end);
	}
	sem_post(&side->done);
	for (;;) pause();
}

static void two_threads(const char *what, long rounds)
{
	static struct side sides[2];
	pthread_t thread;
	for (int i = 0; i < 2; i++) sides[i] = (struct side){.what = what, .peer = start(what, rounds)};
	context = open_device();
	for (int i = 0; i < 2; i++) {
		sem_init(&sides[i].turn, 0, 0);
		sem_init(&sides[i].done, 0, 0);
		if (pthread_create(&thread, NULL, by_turns, &sides[i])) fail("pthread_create");
	}
	for (int i = 0; i < 2; i++) sem_wait(&sides[i].done);
	ready();
	for (int n = 0; n < COUNTED; n++)
		for (int i = 0; i < 2; i++) {
			sem_post(&sides[i].turn);
			sem_wait(&sides[i].done);
		}
}

static void one_thread(const char *what, int idle, int others, long rounds)
{
	static struct peer peers[OTHERS];
	struct peer peer = start(what, rounds);
	for (int i = 0; i < others; i++) peers[i] = start("send", WARM_UP);
	context = open_device();
	set_up_idle(idle);
	for (int i = 0; i < others; i++) {
		set_up("send", &peers[i]);
		run("send", &peers[i].end, 1, WARM_UP);
	}
	set_up(what, &peer);
	run(what, &peer.end, 1, WARM_UP);
	ready();
	for (int i = 0; i < COUNTED; i++) count(what, &peer.end);
}

int main(int argc, char **argv)
{
	if (argc < 2) fail("no case");
	int has_threads = argc == 3 && !strcmp(argv[1], "threads");
	int idle = argc > 2 ? atoi(argv[2]) : 0, others = argc > 3 ? atoi(argv[3]) : 0;
	if (idle < 0 || others < 0 || others > OTHERS)
		fail("QUEUE_PAIRS or PROCESSES");
	/* Of each call, and the one that is counted. */
	long rounds = WARM_UP + 4 * COUNTED * (BETWEEN + 1);
	if (has_threads) two_threads(argv[2], rounds);
	else one_thread(argv[1], idle, others, rounds);
	/* The end: nothing more counts. */
	counted = NONE;
	count_from(NONE);
	return 0;
}
